"""What a Trainer must not ask of the training rows, and whether its ranks must stay in step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature


def refuse_to_train(trainer: pl.Trainer, *, epochs: int | None) -> None:
    """Check a Trainer that is about to fit.

    Args:
        trainer: with its module.
        epochs: passes over the data; None is an endless stream.

    Raises:
        ValueError: for settings under which rows would be repeated, left out, or trained on without anyone knowing.
    """
    settings: Any = trainer
    if settings.overfit_batches:
        raise ValueError(
            "overfit_batches repeats the same batches every epoch, which a stream cannot: use limit_train_batches, or a "
            "dataset of a few samples"
        )
    if epochs is not None and settings.limit_train_batches != 1.0 and not settings.fast_dev_run:
        raise ValueError(
            f"epochs={epochs} trains on every source of a pass, limit_train_batches={settings.limit_train_batches} ends it "
            "early: set one of the two"
        )
    if epochs is not None and (settings.min_steps is not None or (settings.min_epochs or 0) > epochs):
        raise ValueError(
            f"training ends after epochs={epochs} passes over the data, but min_steps={settings.min_steps} or "
            f"min_epochs={settings.min_epochs} asks for more: leave them out, or raise epochs"
        )
    module = trainer.lightning_module
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"{type(module).__name__}.training_step takes dataloader_iter, so nobody can tell which batches it trained on: "
            "take batch and batch_idx"
        )


def must_stay_in_step(trainer: pl.Trainer | None) -> bool:
    """Whether a forward pass is a collective, because it gathers weights from all ranks."""
    strategy = None if trainer is None else trainer.strategy
    return isinstance(strategy, FSDPStrategy | ModelParallelStrategy | DeepSpeedStrategy)


def refuse_other_namespace(trainer: Any) -> None:
    """Check that a callback's Trainer is one of ``lightning.pytorch``.

    Raises:
        ValueError: for one of ``pytorch_lightning``, whose strategies, callbacks and modules are other classes.
    """
    if any(kind.__module__.partition(".")[0] == "pytorch_lightning" for kind in type(trainer).__mro__):
        raise ValueError(
            "the Trainer comes from 'pytorch_lightning', whose classes are others than those of "
            "'lightning', which lightning_pack uses: write 'import lightning.pytorch as pl' instead of 'import "
            "pytorch_lightning as pl' (the same code under another name), and likewise in 'from pytorch_lightning import ...'"
        )
