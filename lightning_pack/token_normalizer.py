"""TokenNormalizer: gradients per target token in loops that optimize manually."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_pack.collated.row import packed_row
from lightning_pack.row import PackedBatch
from lightning_pack.target_window import LossKind, TargetWindow, refuse_strategy, refuse_unaveraged


class TokenNormalizer:
    """Gradients per target token in a LightningModule that optimizes manually.

    Exact over data-parallel ranks, over as many backward passes as there are between two steps, and before clipping::

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.normalizer = TokenNormalizer(self)

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            loss = self.model(**batch).loss
            self.manual_backward(self.normalizer.scale(loss, batch))
            if (batch_idx + 1) % 4 == 0:
                self.normalizer.normalize(optimizer)
                self.clip_gradients(optimizer, gradient_clip_val=1.0)
                optimizer.step()
                optimizer.zero_grad()

    The callbacks of such a run are ``PackedAttention(token_normalization=False)``. A loss counts for every optimizer of the
    module unless :meth:`scale` is told which; each optimizer is normalized by the tokens of its own backward passes. Where a
    gradient scaler is at work (``precision="16-mixed"``), Lightning unscales inside ``optimizer.step()``: to clip, call
    :meth:`normalize` and then ``clip_gradients`` in the module's ``on_before_optimizer_step``.

    Args:
        module: in whose ``training_step`` the methods are called.
        loss: what :meth:`scale` is given: the ``"mean"`` over the target tokens of its batch, or their ``"sum"``.
    """

    def __init__(self, module: LightningModule, *, loss: LossKind = "mean") -> None:
        self._module = module
        self._loss = TargetWindow(loss=loss).loss
        self._windows: dict[Optimizer, TargetWindow] = {}
        #: Optimizers that were normalized since their last backward pass.
        self._normalized: set[Optimizer] = set()

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module has no fit, and no optimizers of one.
        return {**vars(self), "_windows": {}, "_normalized": set()}

    def scale(
        self,
        loss: Tensor,
        batch: PackedBatch | Any,
        *,
        optimizers: Sequence[Optimizer | LightningOptimizer] | None = None,
    ) -> Tensor:
        """The loss for ``manual_backward``, ``[]``; what is given is not changed, so it may be logged.

        Target tokens count once the backward pass has run.

        Args:
            loss: one number that has a gradient, float32 or wider to be exact.
            batch: the row that it is of, or the batch that PackedAttention has packed.
            optimizers: whose gradients it is for; None means all of the module.

        Raises:
            ValueError: for a module that does not optimize manually, a strategy under which gradients would not be exact,
                other batches, and a loss without a gradient.
        """
        self._follow()
        if (row := packed_row(batch)) is None:
            raise ValueError(
                f"TokenNormalizer.scale got a {type(batch).__name__}, which does not tell its target tokens: give the "
                "PackedBatch that the loss is of"
            )
        if not loss.requires_grad:
            raise ValueError(
                "the loss given to TokenNormalizer.scale has no gradient: give the loss itself, not a detached copy, and leave "
                "some parameter trainable"
            )
        chosen = list(self._windows) if optimizers is None else [self._known(optimizer) for optimizer in optimizers]
        if not chosen:
            raise ValueError("TokenNormalizer.scale(optimizers=[]): a loss for no optimizer; name those it is for")
        targets = row.loss_mask.sum()
        scaled = loss * self._windows[chosen[0]].factor(targets)
        scaled.register_hook(partial(self._count, chosen, targets))
        return scaled

    def normalize(self, optimizer: Optimizer | LightningOptimizer) -> None:
        """Divide the gradients of ``optimizer`` by the target tokens of its backward passes since it was last normalized.

        To be called before gradients are clipped and before ``optimizer.step()``, on all ranks.

        Raises:
            ValueError: if no scaled loss was sent backward since then, and for an optimizer that the module does not have.
        """
        self._follow()
        known = self._known(optimizer)
        window, name = self._windows[known], type(known).__name__
        if known in self._normalized:
            raise ValueError(
                f"the gradients of {name} are normalized already, and no loss was sent backward since: call normalize once "
                "before each optimizer.step()"
            )
        if window.targets is None:
            raise ValueError(
                f"no scaled loss was sent backward for {name}, so there is nothing to normalize: call "
                "manual_backward(normalizer.scale(loss, batch)) first"
            )
        window.normalize(known, self._module.trainer)
        window.targets = None
        self._normalized.add(known)

    def _follow(self) -> None:
        """Have a window for each optimizer of the running fit."""
        module = self._module
        if module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} optimizes automatically, where TokenNormalizedGradients does all of this "
                "(PackedAttention adds it): leave TokenNormalizer out, or set self.automatic_optimization = False"
            )
        trainer = module.trainer
        if list(self._windows) == trainer.optimizers:
            return
        refuse_strategy(trainer.strategy, way_out="or train without TokenNormalizer")
        refuse_unaveraged(module, trainer.strategy, way_out="or train without TokenNormalizer")
        # Every fit has optimizers of its own. Gradients of one that ended within a window are gone with it.
        self._windows, self._normalized = {}, set()
        for optimizer in trainer.optimizers:
            self._windows[optimizer] = window = TargetWindow(loss=self._loss)
            window.fit_scale(trainer)
            # Afterwards, because a module may normalize in on_before_optimizer_step, which runs inside the step.
            optimizer.register_step_post_hook(self._check_step)

    def _known(self, optimizer: Optimizer | LightningOptimizer) -> Optimizer:
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if plain not in self._windows:
            raise ValueError(
                f"this {type(plain).__name__} is not an optimizer of {type(self._module).__name__}: give one that "
                "self.optimizers() returns"
            )
        return plain

    def _count(self, optimizers: list[Optimizer], targets: Tensor, gradient: Tensor) -> None:
        for optimizer in optimizers:
            self._windows[optimizer].add(targets)
            self._normalized.discard(optimizer)

    def _check_step(self, optimizer: Optimizer, *_: Any) -> None:
        window = self._windows.get(optimizer)
        if window is not None and window.targets is not None:
            raise ValueError(
                f"{type(optimizer).__name__} made a step with gradients that were not normalized by target tokens: call "
                "normalizer.normalize(optimizer) after the last manual_backward and before clipping and optimizer.step(); "
                "start again from the weights before this step"
            )
