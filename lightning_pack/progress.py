"""TrainingProgress: what a rank has trained on, as one entry of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_pack import agreement
from lightning_pack.accumulation import Window, tell_short_window, why_not_to_save
from lightning_pack.interrupt import HeldInterrupt
from lightning_pack.resume import COUNTS, ResumeError
from lightning_pack.rewind import ResumePoint, RewindingCallback, SaveRefusedError, end_restart, is_trained
from lightning_pack.snapshots import go_on_drawing, optimizer_version, persistent_buffers, random_state
from lightning_pack.tracked import ProgressLoader

Loader = TypeVar("Loader", bound=ProgressLoader)


class TrainingProgress(RewindingCallback, Generic[Loader]):
    """Tells the loader which batches were trained, and keeps count; a datamodule puts it first among the callbacks.

    A checkpoint holds no gradients. So whenever it is saved, it tells of the last completed optimizer step: batches, counts,
    random state and Lightning's loops are those of that moment, and a run that is resumed trains the batches since again, with
    the same dropout. This holds for a save in any hook, on an exception and on a signal that becomes one. A save inside
    the optimizer's own step, where weights are changed in part, raises :class:`~lightning_pack.rewind.SaveRefusedError`; Ctrl-C
    waits there until the batch has ended.

    Not taken back, because only their owner could: buffers of the module that change in a forward pass (a warning says so),
    metrics and other state that a module or another callback keeps, random numbers of numpy and Python, the update of a
    ReduceLROnPlateau that Lightning makes after the save.

    Args:
        loader: the stream of this rank.
        check_restored: called before the first batch; raises if a position should have been restored and was not.
    """

    def __init__(self, loader: Loader, *, check_restored: Callable[[], None] = lambda: None) -> None:
        self.loader = loader
        self._check_restored = check_restored
        #: Rows, sources and real tokens trained on by this rank, and sources left out, since the run began.
        self.counts = dict.fromkeys(COUNTS, 0)
        self.agreement = agreement.Agreement(seconds=agreement.SECONDS_TO_ANSWER)
        #: The random state to go on with, from a checkpoint.
        self._random: dict[str, Any] | None = None
        #: Where to go on, from a checkpoint, until training begins.
        self._restored: ResumePoint | None = None
        self._trainer: pl.Trainer | None = None
        self._running = False
        self._window: Window | None = None
        self._batch_begun = False
        #: The last step boundary, from its batch on until the epoch has ended.
        self._boundary: ResumePoint | None = None
        self._boundary_random: dict[str, Any] | None = None
        #: An epoch that was cut short by max_steps goes on there in a longer run.
        self._cut: ResumePoint | None = None
        self._weights: int | None = None
        self._buffers: list[tuple[str, Tensor]] = []
        self._exception: BaseException | None = None
        self._interrupt = HeldInterrupt()
        loader.before_fetch = self._interrupt.release

    @property
    def in_window(self) -> bool:  # type: ignore[override]
        """Whether gradients wait for the optimizer step."""
        return self._window is not None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Prepare for ranks that fail alone."""
        self._trainer, self._running, self._exception = trainer, False, None
        trainer.strategy.barrier("agreement")
        self.agreement.open()

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let Lightning's loops start where the position does."""
        if self._running:
            # Restored within a fit, by a search: Lightning's loops go on as they are.
            self._restored = None
        if self._restored is not None:
            self._restored.write(checkpoint["loops"]["fit_loop"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin where the checkpoint stands, or at the start of an epoch."""
        self._check_restored()
        if self._window is not None:
            # Left by an exception: the same trainer fits again, and its loader gives the batches of the window again.
            self.counts = self._window.counts
        self._window = self._boundary = self._cut = self._weights = None
        self._running, self._batch_begun = True, False
        self._stop_after_last_pass(trainer)
        self._buffers = persistent_buffers(pl_module)
        point, self._restored = self._restored, None
        if point is None:
            return
        if trainer.fit_loop._data_fetcher is not None:
            # A batch may have been prefetched before the position was restored.
            iter(trainer.fit_loop._data_fetcher)
        if point.begin(trainer):
            # Validation may draw random numbers before any hook is called.
            self._continue_random(pl_module)
        if point.next != "epoch":
            self._boundary, self._boundary_random = point, self._random or random_state()
            if not point.last and point.next != "epoch_end":
                tell_short_window(trainer, batch=point.batch)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A new epoch."""
        self._boundary = self._cut = None
        self._continue_random(pl_module)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Note the step boundary before the first batch of a window, and draw the random numbers of a stopped run."""
        self._interrupt.release()
        self._continue_random(pl_module)
        self._batch_begun = True
        if self._window is None:
            self._window = Window.of(trainer, counts=self.counts, buffers=self._buffers)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note the weights, to know later whether the optimizer has begun to change them, and let nobody interrupt it."""
        if self._weights is None:
            self._weights = optimizer_version(trainer)
        self._interrupt.hold()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Count a batch."""
        self._catch_up(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The batch before has ended for every callback."""
        self._interrupt.release()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validation is not repeated by a run that is resumed from here."""
        if self._boundary is not None and not trainer.sanity_checking:
            self._boundary = self._boundary.validated()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The epoch is over, or max_steps are reached within it."""
        end_restart(trainer)
        boundary, self._boundary = self._boundary, None
        if boundary is not None and not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            self._cut = boundary.validated()
        if self._window is not None:
            # The module has skipped the rest of the epoch: Lightning drops the gradients of the window.
            self._step_done()
        self._stop_after_last_pass(trainer)
        epochs, most = trainer.current_epoch + 1, trainer.max_epochs
        if self.loader.finished and most is not None and epochs < most:
            rank_zero_info(f"The passes over the data that epochs asks for are over: training ends before max_epochs={most}.")
        self._interrupt.release()

    def _stop_after_last_pass(self, trainer: pl.Trainer) -> None:
        if self.loader.finished:
            trainer.should_stop = True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """From now on another rank may not answer."""
        self._interrupt.drop()
        self._exception = exception

    def state_dict(self) -> dict[str, Any]:
        """Nothing, the datamodule saves the state. But this is the first that Lightning asks of all that are saved.

        Raises:
            SaveRefusedError: if a run has failed and other ranks do not answer; nobody must wait for them for ever.
        """
        if self._trainer is not None:
            self._catch_up(self._trainer)
        if self._exception is not None and not self.agreement.reached():
            self._refuse(
                f"another rank does not answer, so no checkpoint can be saved after {type(self._exception).__name__}: "
                f"{self._exception}. Resume from an older one"
            )
        return {}

    def count_batch(self) -> None:
        """Count the oldest batch that was fetched, as a step of its own."""
        self._count()
        self.loader.commit()

    def _count(self) -> None:
        for name, more in zip(COUNTS, (1, *self.loader.trained()), strict=True):
            self.counts[name] += more

    def _catch_up(self, trainer: pl.Trainer) -> None:
        """Count the batch in hand if it is trained; a callback before this one may save in on_train_batch_end."""
        if not self._batch_begun or not is_trained(trainer):
            return
        self._batch_begun = False
        self._count()
        if not trainer.fit_loop._should_accumulate():
            self._boundary, self._boundary_random = ResumePoint.after_batch(trainer), random_state()
            self._step_done()

    def _step_done(self) -> None:
        self.loader.commit()
        self._window = self._weights = None

    def _continue_random(self, pl_module: pl.LightningModule) -> None:
        if self._random is not None:
            go_on_drawing(self._random, device=pl_module.device)
            self._random = None

    def state(self, trainer: pl.Trainer | None = None) -> dict[str, Any]:
        """The position, the counts, torch's random state and the place in Lightning's loops, as plain containers.

        Raises:
            SaveRefusedError: if weights and position do not belong together at this moment.
        """
        point, counts = self._restored, self.counts
        # Before its first step a resumed run still stands where its checkpoint does.
        random = self._random or random_state()
        if trainer is not None:
            self._catch_up(trainer)
            counts = self.counts
            self._check(trainer)
            if self._window is not None:
                point, counts, random = self._window.point, self._window.counts, self._window.random
            elif self._restored is None:
                point = self._point(trainer)
                if point.next == "validation" and trainer.validating:
                    random = self._boundary_random or random
        plain = None if point is None else point.to_plain()
        return {"loader": self.loader.state(), "counts": dict(counts), "random": random, "point": plain}

    def _point(self, trainer: pl.Trainer) -> ResumePoint:
        if self._boundary is None:
            return self._cut or ResumePoint.between_epochs(trainer)
        if trainer.fit_loop.epoch_loop._batches_that_stepped > self._boundary.stepped:
            # Lightning has left the batch behind: a validation that was due has been run.
            return self._boundary.validated()
        return self._boundary

    def _check(self, trainer: pl.Trainer) -> None:
        weights = None if self._window is None else self._weights
        why = why_not_to_save(trainer, restoring=self._restored is not None, running=self._running, weights=weights)
        if why is not None:
            self._refuse(why)
        if self._window is not None:
            self._window.tell_changed_buffers()

    def _refuse(self, why: str) -> None:
        if self._exception is not None:
            # Lightning will not come to end the workers.
            self.loader.stop()
            assert self._trainer is not None
            self._trainer.fit_loop.epoch_loop.val_loop.teardown()
        raise SaveRefusedError(why)

    def start_over(self, point: ResumePoint | None) -> None:
        """Go to the beginning of the data; whatever else a checkpoint restores goes on, from ``point`` in Lightning's loops."""
        self.loader.restore(None)
        self.counts = dict.fromkeys(COUNTS, 0)
        self._restored = point
        self._random = self._window = self._boundary = self._cut = None

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a state of :meth:`state`.

        Raises:
            ResumeError: if the state names no place to go on from.
        """
        point = state.get("point")
        try:
            self._restored = None if point is None else ResumePoint.from_plain(point)
        except ValueError as e:
            raise ResumeError(f"the checkpoint's place in the training loop is damaged: {e}. Resume from another one") from e
        self.loader.restore(state["loader"])
        self.counts = dict(state["counts"])
        self._random = state["random"]
        self._window = self._boundary = self._cut = None
