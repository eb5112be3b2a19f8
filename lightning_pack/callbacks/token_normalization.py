"""TokenNormalizedGradients: every target token weighs the same, wherever it was packed.

With micro-batches of different numbers of target tokens, the mean of their mean losses is not the mean loss: a token in a short
batch weighs more. Here the gradient of an optimizer step is the gradient of

    sum of the losses of all target tokens / number of target tokens

over all micro-batches of the accumulation window and all data-parallel ranks. Lightning divides a loss by
``accumulate_grad_batches`` and averages gradients over ranks; with n targets in a micro-batch, N in the window on all ranks, W
ranks and A micro-batches to a window, each loss is multiplied by ``n / C`` before its backward and the gradients by
``A * W * C / N`` before clipping. A window that is cut short needs no other formula, since Lightning still divides by A.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    XLAStrategy,
)
from torch import Tensor
from torch.optim import Optimizer

from lightning_pack.collated.row import packed_row

#: C of the formula: keeps scaled losses near 1, so float16 gradients stay in range. A power of two changes no digit.
_SCALE = 4096.0
_OFF = "or switch this off with PackedAttention(token_normalization=False)"


class TokenNormalizedGradients(Callback):
    """Gradients per target token, exact over accumulation and data-parallel ranks, and before clipping.

    Costs one all-reduce of one number per optimizer step and no device sync.

    Args:
        loss: what ``training_step`` returns: ``"mean"`` over the target tokens of its batch (what transformers models return),
            or their ``"sum"``.

    Raises:
        ValueError: before the first step, for manual optimization, for a strategy under which this would not be exact, and for
            batches that do not tell their target tokens.
    """

    def __init__(self, *, loss: Literal["mean", "sum"] = "mean") -> None:
        if loss not in ("mean", "sum"):
            raise ValueError(f"loss={loss!r} is not 'mean' or 'sum': say what training_step returns over its target tokens")
        self.loss = loss
        #: Target tokens of the current micro-batch, and of the window up to now on this rank; int64 on the device.
        self._batch: Tensor | None = None
        self._window: Tensor | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what would not be exact."""
        strategy = trainer.strategy
        name = type(strategy).__name__
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"{type(pl_module).__name__} optimizes manually, so its gradients are clipped before they could be normalized "
                f"by target tokens: use automatic optimization, {_OFF}"
            )
        if strategy.handles_gradient_accumulation:
            raise ValueError(
                f"{name} accumulates gradients inside its engine, where they cannot be normalized by target tokens: use "
                f"DDPStrategy or ModelParallelStrategy, {_OFF}"
            )
        known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy)
        if not known or isinstance(strategy, DeepSpeedStrategy | XLAStrategy):
            raise ValueError(
                f"{name}: gradients per target token are known to be exact with a single device, DDPStrategy and "
                f"ModelParallelStrategy only: use one of these, {_OFF}"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start with an empty window: gradients of a window that was cut by a checkpoint are gone as well."""
        self._batch = self._window = None

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
        self._window = None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Turn the mean loss of the batch into a sum, in place; what is logged is not changed."""
        if self._batch is None:
            raise RuntimeError(
                "a backward without a training batch: TokenNormalizedGradients needs Lightning's own training loop"
            )
        with torch.no_grad():
            self._window = self._batch if self._window is None else self._window + self._batch
        loss.mul_(self._batch / _SCALE if self.loss == "mean" else 1.0 / _SCALE)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Divide the gradients by the target tokens of the window on all data-parallel ranks."""
        total = torch.zeros((), dtype=torch.int64, device=pl_module.device) if self._window is None else self._window.clone()
        group, ranks = _data_parallel(trainer)
        if ranks > 1:
            dist.all_reduce(total, group=group)
        gradients = [
            _local(parameter.grad)
            for options in optimizer.param_groups
            for parameter in options["params"]
            if parameter.grad is not None
        ]
        if not gradients:
            return
        # Without any target in the window every gradient is zero, and stays so.
        total = total.clamp(min=1).to(torch.float32 if total.device.type == "mps" else torch.float64)
        torch._foreach_mul_(gradients, trainer.accumulate_grad_batches * ranks * _SCALE / total)


def _data_parallel(trainer: Trainer) -> tuple[dist.ProcessGroup | None, int]:
    strategy = trainer.strategy
    if isinstance(strategy, ModelParallelStrategy):
        mesh = strategy.device_mesh["data_parallel"]
        return mesh.get_group(), mesh.size()
    return None, trainer.world_size


def _local(gradient: Tensor) -> Tensor:
    # The shard of a distributed gradient, in the storage of the gradient itself.
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient
