"""Where a run stands in Lightning's loops, and how another run starts there.

Lightning describes in a checkpoint how far its loops have got at the moment of the save, and guesses from these numbers what is
left to do. That is right for a save at the end of a batch and at few other moments: a window of accumulated gradients is not
saved, a validation that is due is left out after some saves and counted as run after others, and an epoch may end twice or
never. A :class:`ResumePoint` says instead what comes next, and makes Lightning's loops do just that.

Everything that touches Lightning's private state is in this module (Lightning 2.6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.evaluation_loop import RestartStage as EvaluationStage
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.training_epoch_loop import RestartStage

from lightning_pack.energon.fields import shown

Next = Literal["epoch", "batch", "validation", "epoch_end"]


class SaveRefusedError(ValueError):
    """A checkpoint that could not be continued exactly, and is not written."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """What a run does next.

    Args:
        next: begin an ``"epoch"``; train a ``"batch"``; run ``"validation"`` if it is due after the last batch, and then what
            is due after that; or end the epoch, ``"epoch_end"``.
        epoch: epochs completed.
        batch: batches of this epoch trained.
        total_batches: batches trained in all epochs.
        stepped: Lightning's count of batches with an optimizer step, the step that loggers see.
        last: whether the loader has no more batches in this epoch.
    """

    next: Next
    epoch: int
    batch: int
    total_batches: int
    stepped: int
    last: bool = False

    def __post_init__(self) -> None:
        whole = [f.name for f in fields(self) if f.name not in ("next", "last")]
        if (
            type(self.next) is not str
            or self.next not in get_args(Next)
            or not isinstance(self.last, bool)
            or any(type(getattr(self, name)) is not int or not 0 <= getattr(self, name) < 2**63 for name in whole)
        ):
            # Read from a checkpoint they may be anything, of any size.
            words = ", ".join(f"{f.name}={shown(getattr(self, f.name))}" for f in fields(self))
            raise ValueError(f"{words} is no place to go on from")

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ResumePoint:
        """The point that :meth:`to_plain` was called on.

        Raises:
            ValueError: if it is none.
        """
        names = {f.name for f in fields(cls)}
        if type(plain) is not dict or set(plain) != names:
            raise ValueError(f"{shown(plain)} does not hold {', '.join(sorted(names))}")
        return cls(**plain)

    @classmethod
    def between_epochs(cls, trainer: pl.Trainer) -> ResumePoint:
        """Before the next epoch."""
        fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        return cls(
            next="epoch",
            epoch=_numbers(fit.epoch_progress.current).processed,
            batch=0,
            total_batches=_numbers(loop.batch_progress.total).processed,
            stepped=loop._batches_that_stepped,
        )

    @classmethod
    def before_batch(cls, trainer: pl.Trainer) -> ResumePoint:
        """Before the batch that has just begun; before the epoch, if it is its first."""
        fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        batch = loop.batch_progress.current.ready - 1
        return cls(
            next="batch" if batch else "epoch",
            epoch=_numbers(fit.epoch_progress.current).processed,
            batch=batch,
            total_batches=loop.batch_progress.total.ready - 1,
            stepped=loop._batches_that_stepped,
        )

    @classmethod
    def after_batch(cls, trainer: pl.Trainer) -> ResumePoint:
        """After the batch that has just been trained, which completed an optimizer step."""
        fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        return cls(
            next="validation",
            epoch=_numbers(fit.epoch_progress.current).processed,
            batch=loop.batch_progress.current.ready,
            total_batches=loop.batch_progress.total.ready,
            stepped=loop._batches_that_stepped,
            last=loop._num_ready_batches_reached(),
        )

    def validated(self) -> ResumePoint:
        """The same place with validation run, or found not to be due."""
        if self.next != "validation":
            return self
        return replace(self, next="epoch_end") if self.last else replace(self, next="batch", stepped=self.stepped + 1)

    def write(self, loops: dict[str, Any]) -> None:
        """Put the point into Lightning's state of a fit loop, in place, as if everything that began had been completed.

        Args:
            loops: ``checkpoint["loops"]["fit_loop"]``.
        """
        epochs = loops["epoch_progress"]
        ahead = epochs["current"]["processed"] - self.epoch
        done = epochs["total"]["processed"] - ahead
        begun = 0 if self.next == "epoch" else 1
        for numbers, completed in ((epochs["total"], done), (epochs["current"], self.epoch)):
            numbers.update(ready=completed + begun, started=completed + begun, processed=completed, completed=completed)
        batches = loops["epoch_loop.batch_progress"]
        for numbers, completed in ((batches["total"], self.total_batches), (batches["current"], self.batch)):
            numbers.update(dict.fromkeys(numbers, completed))
        batches["is_last_batch"] = self.last
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = self.stepped
        for name, progress in loops.items():
            if name.startswith("epoch_loop.") and name not in ("epoch_loop.batch_progress", "epoch_loop.state_dict"):
                _complete(progress)

    def begin(self, trainer: pl.Trainer) -> bool:
        """Make Lightning's loops, restored from :meth:`write`, go on here. Called in ``on_train_start``.

        Returns:
            Whether a validation comes before the next batch.
        """
        fit = trainer.fit_loop
        loop, val_loop = fit.epoch_loop, fit.epoch_loop.val_loop
        for each in (fit, loop, val_loop):
            each.reset_restart_stage()
        # FitLoop's own setter would change the value.
        _Loop.restarting.fset(fit, self.next != "epoch")  # type: ignore[attr-defined]
        if self.next == "epoch":
            return False
        fit._restart_stage = "restarted_mid_epoch"
        fetcher = fit._data_fetcher
        assert fetcher is not None
        if fetcher.length is not None:
            # Another limit_train_batches may hold now.
            loop.batch_progress.is_last_batch = loop.batch_progress.current.ready >= fetcher.length
        validates = self.next == "validation" and loop._should_check_val_fx(fetcher)
        point = (
            self
            if self.next != "validation" or validates
            else replace(self, last=loop._num_ready_batches_reached()).validated()
        )
        if point.next == "batch":
            # Lightning adds one on its way to the next batch.
            loop._batches_that_stepped = point.stepped - (not loop._should_accumulate())
            return False
        loop._restart_stage = RestartStage.RESTARTED_ON_LAST
        if validates:
            val_loop._restart_stage = EvaluationStage.RESTARTED_MID_EVALUATION
            val_loop.batch_progress.reset_on_run()
        else:
            # Nothing is left of the epoch but its end.
            val_loop._has_run = True
            loop._batches_that_stepped = point.stepped + 1
        return validates


def end_restart(trainer: pl.Trainer) -> None:
    """Forget that the epoch was entered again; Lightning does not where no batch was left of it. Called when the epoch ends."""
    loop = trainer.fit_loop.epoch_loop
    loop.on_iteration_done()
    loop.val_loop.on_iteration_done()
    loop.val_loop._has_run = False


def _numbers(tracker: Any) -> Any:
    # Lightning's annotations promise less than its trackers of batches and epochs hold.
    return tracker


def _complete(progress: dict[str, Any]) -> None:
    """Drop what began and was not completed, in Lightning's numbers of some progress."""
    if "completed" not in progress:
        for inner in progress.values():
            if isinstance(inner, dict):
                _complete(inner)
        return
    progress.update(dict.fromkeys(progress, progress["completed"]))


def is_trained(trainer: pl.Trainer) -> bool:
    """Whether the batch in hand has been trained, not just begun, nor skipped by the module's ``on_train_batch_start``."""
    batch = _numbers(trainer.fit_loop.epoch_loop.batch_progress.current)
    return bool(batch.ready == batch.started == batch.processed)


class RewindingCallback(Callback):
    """A callback that makes checkpoints tell of the last completed optimizer step."""

    #: Whether gradients wait for the optimizer step, so that a checkpoint tells of an earlier batch than the last one.
    in_window: bool = False


def in_window(trainer: pl.Trainer) -> bool | None:
    """Whether a checkpoint saved now tells of the beginning of the window; None where nothing rewinds checkpoints."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RewindingCallback):
            return callback.in_window
    return None
