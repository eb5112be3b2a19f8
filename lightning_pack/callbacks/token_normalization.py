"""TokenNormalizedGradients: every target token weighs the same, wherever it was packed.

The formula is in :mod:`lightning_pack.target_window`; a window is one of accumulation. One that is cut short needs no other
formula, since Lightning still divides by ``accumulate_grad_batches``. Under context parallelism a micro-batch is what a rank
holds of its row, and the ranks are the context-parallel ones as well.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_pack.collated.row import packed_row
from lightning_pack.target_window import LossKind, TargetWindow, refuse_strategy, refuse_unaveraged

_OFF = "or switch this off with PackedAttention(token_normalization=False)"


class TokenNormalizedGradients(Callback):
    """Gradients per target token, exact over accumulation and data-parallel ranks, and before clipping.

    Costs one all-reduce of one number per optimizer step and no device sync. Modules that optimize manually call a
    :class:`~lightning_pack.token_normalizer.TokenNormalizer` themselves. Callbacks before this one in the trainer's list
    see, or clip, gradients as they are before; where :class:`~.attention.PackedAttention` adds it, there are none.

    Args:
        loss: what ``training_step`` returns: ``"mean"`` over the target tokens of its batch (what transformers models return),
            or their ``"sum"``. A loss in half precision is rounded when it is scaled: return float32, as those models do.

    Raises:
        ValueError: before the first step, for manual optimization, for a strategy under which this would not be exact, and for
            batches that do not tell their target tokens.
    """

    def __init__(self, *, loss: LossKind = "mean") -> None:
        self._window = TargetWindow(loss=loss)
        #: Target tokens of the current micro-batch, int64 on the device.
        self._batch: Tensor | None = None

    @property
    def loss(self) -> LossKind:
        """What ``training_step`` returns over its target tokens."""
        return self._window.loss

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what would not be exact."""
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"{type(pl_module).__name__} optimizes manually, so its gradients are clipped before a callback could "
                "normalize them by target tokens: call lightning_pack.TokenNormalizer in its training_step and set "
                "PackedAttention(token_normalization=False), or use automatic optimization"
            )
        refuse_strategy(trainer.strategy, way_out=_OFF)
        refuse_unaveraged(pl_module, trainer.strategy, way_out=_OFF)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start with an empty window: gradients of a window that was cut by a checkpoint are gone as well."""
        self._batch = self._window.targets = None
        self._window.fit_scale(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the target tokens of the batch on its device."""
        if (row := packed_row(batch)) is None:
            raise ValueError(
                f"TokenNormalizedGradients got a {type(batch).__name__}, which does not tell its target tokens: train on "
                f"PackedBatch, {_OFF}"
            )
        self._batch = row.loss_mask.sum()

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """The window ends where its gradients end."""
        self._window.targets = None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Turn the mean loss of the batch into a sum, in place; what is logged is not changed."""
        if self._batch is None:
            raise RuntimeError(
                "a backward without a training batch: TokenNormalizedGradients needs Lightning's own training loop"
            )
        self._window.add(self._batch)
        loss.mul_(self._window.factor(self._batch))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Divide the gradients by the target tokens of the window on all data-parallel ranks."""
        self._window.normalize(optimizer, trainer, divided_by=trainer.accumulate_grad_batches)
