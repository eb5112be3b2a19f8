"""What a Trainer is told of before it starts: sources that nothing keeps apart, and a fit that nothing ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

# Code of models takes a while to import, and a datamodule is also used without any.
if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BoundariesWarning(UserWarning):
    """Nothing makes a transformers model keep the sources of a packed row apart."""


class EndlessFitWarning(UserWarning):
    """Nothing ends a fit on an endless stream."""


def warn_without_attention(trainer: pl.Trainer) -> None:
    """Warn of a run whose module has transformers models, while no callback PackedAttention hands them the boundaries.

    A model is left alone whose attention is not one of transformers' own: it is taken to read the boundaries itself.

    Args:
        trainer: with its module, after ``configure_model``.
    """
    # Callbacks stand above a datamodule.
    from lightning_pack.callbacks.attention import PackedAttention

    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, PackedAttention) for callback in callbacks):
        return
    module = trainer.lightning_module
    # A Trainer may be shown the data before it has a module.
    if module is None:
        return
    names = dict.fromkeys(type(model).__name__ for model in _models(module) if not _has_own_attention(model))
    if names:
        rank_zero_warn(
            f"no PackedAttention among the Trainer's callbacks: {type(module).__name__} has a transformers model "
            f"({', '.join(names)}), and nobody checks or sees to it that the sources of a packed row do not see each other in "
            "it; nor is its gradient one per target token. Add it: Trainer(callbacks=[PackedAttention()]). If the module hands "
            "the boundaries to its model itself, say so with warnings.filterwarnings('ignore', 'no PackedAttention')",
            category=BoundariesWarning,
        )


def _models(module: pl.LightningModule) -> list[PreTrainedModel]:
    from lightning_pack.attention.inspection import ModelRefusedError, find_models

    try:
        return find_models(module)
    except ModelRefusedError:
        return []


def _has_own_attention(model: PreTrainedModel) -> bool:
    from transformers import AttentionInterface

    function: Any = AttentionInterface().get(model.config.get_text_config()._attn_implementation)
    home = getattr(getattr(function, "func", function), "__module__", None)
    return isinstance(home, str) and home.partition(".")[0] != "transformers"


def warn_endless(trainer: pl.Trainer) -> None:
    """Warn of a fit on an endless stream that nothing in sight ends.

    ``max_epochs=-1`` is Lightning's way to ask for that. Callbacks other than Lightning's are not known to end a run.

    Args:
        trainer: about to fit, its callbacks set up.
    """
    settings: Any = trainer
    timers = [callback for callback in settings.callbacks if isinstance(callback, Timer)]
    # Lightning puts -1 where there is any timer.
    meant = settings.max_epochs == -1 and not timers
    if settings.max_steps != -1 or settings.limit_train_batches != 1.0 or settings.max_epochs == 0 or meant:
        return
    if any(map(_ends_within_an_epoch, timers)) or _stops_early(settings):
        return
    # A Tuner ends the fit after its search.
    if any(getattr(callback, "_early_exit", False) for callback in settings.callbacks):
        return
    rank_zero_warn(
        "nothing ends this fit: the training stream is endless, and so is its first epoch, "
        f"whatever max_epochs={settings.max_epochs} says. Give the Trainer max_steps, limit_train_batches (batches of an "
        "epoch) or max_time, or the datamodule epochs (passes over the data). If it is to run until somebody, or a callback, "
        "stops it, say so with max_epochs=-1",
        category=EndlessFitWarning,
    )


def _ends_within_an_epoch(timer: Timer) -> bool:
    return timer._interval == "step" and timer.time_remaining() is not None


def _stops_early(trainer: Any) -> bool:
    """Whether there is an EarlyStopping, and a validation within the epoch in which it looks."""
    return (
        (getattr(trainer, "_val_check_time_interval", None) is not None or trainer.val_check_interval != 1.0)
        and trainer.check_val_every_n_epoch in (None, 1)
        and trainer.enable_validation
        and any(
            isinstance(callback, EarlyStopping) and not callback._check_on_train_epoch_end for callback in trainer.callbacks
        )
    )
