"""The batches whose gradients wait for the optimizer: what a save in their midst goes back to, and when it is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pack.rewind import ResumePoint
from lightning_pack.snapshots import optimizer_version, random_state


@dataclass(frozen=True, kw_only=True)
class Window:
    """The step boundary before these batches."""

    point: ResumePoint
    #: What was trained on by then.
    counts: dict[str, int]
    #: torch's random state.
    random: dict[str, Any]
    #: Buffers of the module, by name, with the number of changes they had seen.
    buffers: list[tuple[str, Tensor, int]]

    @classmethod
    def of(cls, trainer: pl.Trainer, *, counts: dict[str, int], buffers: list[tuple[str, Tensor]]) -> Window:
        """Opened by the first batch, before its step."""
        return cls(
            point=ResumePoint.before_batch(trainer),
            counts=dict(counts),
            random=random_state(),
            buffers=[(name, buffer, buffer._version) for name, buffer in buffers],
        )

    def tell_changed_buffers(self) -> None:
        """Warn where a save goes back to this boundary and takes buffers along that have gone on."""
        changed = [name for name, buffer, then in self.buffers if buffer._version != then]
        if changed:
            rank_zero_warn(
                f"a checkpoint is saved between optimizer steps: a resumed run trains the batches since the last step again, "
                f"but buffers of the module have seen them already ({', '.join(changed[:3])}). Save at a complete step: let "
                "val_check_interval and other intervals be multiples of accumulate_grad_batches"
            )


def why_not_to_save(trainer: pl.Trainer, *, restoring: bool, running: bool, weights: int | None) -> str | None:
    """Why weights and position do not belong together at this moment, or None if they do.

    Args:
        trainer: that saves.
        restoring: whether a position was restored and has not been gone on from.
        running: whether training has begun.
        weights: :func:`~lightning_pack.snapshots.optimizer_version` before the optimizer began, if it has.
    """
    if restoring and not trainer.fit_loop._loaded_from_state_dict:
        return (
            "the checkpoint that is resumed is not restored in whole yet, so a checkpoint of this moment would be wrong: "
            "save later, or keep the one that is resumed"
        )
    scheduler = trainer.fit_loop.epoch_loop.scheduler_progress.total
    if running and scheduler.ready != scheduler.completed:
        return (
            "a checkpoint is to be saved while the learning rate is being changed, so nobody could tell whether it was: "
            "save in on_train_batch_end instead"
        )
    if weights is not None and weights != optimizer_version(trainer):
        return (
            "a checkpoint is to be saved while the optimizer changes the weights, so they belong neither to the step "
            "before nor to this one: save in on_train_batch_end instead, or resume from an older checkpoint"
        )
    return None


def tell_short_window(trainer: pl.Trainer, *, batch: int) -> None:
    """Lightning counts windows from the beginning of the epoch, in the accumulation of now; warn where that cuts the first.

    Args:
        trainer: that resumes.
        batch: batches of the epoch that are trained on.
    """
    window = trainer.accumulate_grad_batches
    if done := batch % window:
        rank_zero_warn(
            f"the first optimizer step after this resume has {window - done} batches instead of "
            f"accumulate_grad_batches={window}: {batch} batches of the epoch are trained on already, under another "
            "accumulation or number of ranks. Set them back, or resume from a checkpoint whose batch is a multiple of it"
        )
