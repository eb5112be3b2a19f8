"""LoaderProgress: runs on the rows of pack_loader go on where they stopped; the callback holds their position itself."""

from __future__ import annotations

from functools import wraps
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pack.collated.loader import PackLoader
from lightning_pack.collated.slot import LoaderSlot
from lightning_pack.progress import TrainingProgress
from lightning_pack.restore import first_problem, gather, point_of
from lightning_pack.resume import NEW_RUN, ResumeError, different_settings, plain_settings

STATE_VERSION = 1
_HOOK = "train_dataloader"
_RESTART = "pack_loader(..., on_mismatch='restart') keeps weights and optimizer and starts the data over."


class LoaderProgress(TrainingProgress[LoaderSlot]):
    """Like :class:`~lightning_pack.progress.TrainingProgress`, for a :class:`~lightning_pack.collated.loader.PackLoader`.

    It finds the loader where the Trainer is given one, or in what the hook ``train_dataloader`` returns. A single loader, not
    one among several, is what it drives.
    """

    def __init__(self) -> None:
        super().__init__(LoaderSlot(), check_restored=self._refuse_without_position)
        self._fits: pl.Trainer | None = None
        #: What the checkpoint that is resumed holds, until there is a loader to compare it with.
        self._saved: Any = None
        self._went_on = False
        self._told = False
        #: Whether this fit has saved a checkpoint.
        self._saves = False
        #: Whose hook is wrapped, and its own attribute of that name, if it had one.
        self._watched: tuple[Any, Any] | None = None

    # --- finding the loader --------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the loader, or wait for the hook that makes it."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._saved, self._went_on, self._told, self._saves = None, False, False, False
        self._goes_on = trainer is self._fits and trainer.global_step > 0
        self._fits = trainer
        source = trainer.fit_loop._data_source
        if not source.is_module():
            self._take(source.instance)
        elif is_overridden(_HOOK, source.instance):
            self._watch(source.instance)

    @staticmethod
    def may_serve(trainer: pl.Trainer) -> bool:
        """Whether a fit trains on a loader of ours, or on one that is not made yet."""
        source = trainer.fit_loop._data_source
        return is_overridden(_HOOK, source.instance) if source.is_module() else isinstance(source.instance, PackLoader)

    def _watch(self, owner: Any) -> None:
        hook = getattr(owner, _HOOK)

        # Wrapped, so that Lightning still knows whose hook it is.
        @wraps(hook)
        def watching() -> Any:
            loader = hook()
            self._take(loader)
            return loader

        self._watched = owner, vars(owner).get(_HOOK)
        vars(owner)[_HOOK] = watching

    def _unwatch(self) -> None:
        if self._watched is None:
            return
        (owner, before), self._watched = self._watched, None
        vars(owner).pop(_HOOK, None)
        if before is not None:
            vars(owner)[_HOOK] = before

    def _take(self, loader: Any) -> None:
        trainer = self._trainer
        assert trainer is not None
        if not isinstance(loader, PackLoader):
            self.loader.loader = None
            callbacks = trainer.callbacks  # type: ignore[attr-defined]
            if loader is not trainer.fit_loop._data_source.instance and self in callbacks:
                # From a hook, so no one is on his way through the callbacks.
                callbacks.remove(self)
                self._unwatch()
            return
        before = self.loader.loader
        if self._running and before is not None and before is not loader:
            raise ValueError(
                "train_dataloader gives another pack_loader in the middle of a fit (reload_dataloaders_every_n_epochs), so the "
                "position in the data would be lost: make the loader once and return it each time"
            )
        state = None if before is None or not self._goes_on else before.state()
        if before is not loader or not self._goes_on:
            self.loader.put(loader, state=state if loader.stateful else None)
        loader.tracked = True
        if trainer.ckpt_path is not None and self._saved is not None:
            self._go_on()

    @property
    def active(self) -> bool:
        """Whether there is a loader to drive."""
        return self.loader.loader is not None

    # --- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position of every rank; nothing where the loader does not tell its own. Collective."""
        super().state_dict()
        self._saves = True
        loader = self.loader.loader
        if loader is None or not loader.stateful:
            return {}
        ranks = gather(lambda: self.state(self._trainer))
        return {"version": STATE_VERSION, "settings": plain_settings(loader.settings()), "ranks": ranks}

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go to the position, and let Lightning's loops start there."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._saved = checkpoint.get("callbacks", {}).get(self.state_key, {})
        loader = self.loader.loader
        if loader is not None and not loader.stateful and self._saves and _is_untrained(checkpoint):
            # Nobody resumes: Lightning goes back to what this fit saved at its beginning, having tried a learning rate out.
            self._went_on = True
            self.start_over(None)
        elif self.active:
            self._go_on()
        else:
            # The hook that makes the loader is called later.
            self._restored = point_of(self._saved)
        super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def _go_on(self) -> None:
        problem = first_problem(self._problem())
        self._went_on = True
        if problem is None:
            self.restore(self._saved["ranks"][self._rank])
            return
        loader = self.loader.loader
        assert loader is not None
        if loader.on_mismatch == "error":
            raise problem
        rank_zero_warn(
            "on_mismatch='restart': THE DATA STARTS OVER from its beginning, so what was trained on comes again. Weights, "
            f"optimizer and step count go on from the checkpoint. The reason: {problem}"
        )
        self.start_over(point_of(self._saved))

    @property
    def _rank(self) -> int:
        assert self._trainer is not None
        return self._trainer.global_rank

    def _problem(self) -> ValueError | None:
        saved, loader = self._saved, self.loader.loader
        assert loader is not None
        if not loader.stateful:
            return ResumeError(f"{loader.not_stateful}. {NEW_RUN}")
        if not saved:
            return ResumeError(
                "the checkpoint holds no position in the data for pack_loader: it was saved without it, or with a loader that "
                f"does not tell its state. {_RESTART} {NEW_RUN}"
            )
        try:
            if type(saved) is not dict or set(saved) != {"version", "settings", "ranks"} or saved["version"] != STATE_VERSION:
                raise ValueError("it should hold version, settings and ranks of this release")
            lines = different_settings(saved["settings"], plain_settings(loader.settings()))
            if lines:
                return ResumeError(
                    "the run cannot continue exactly, because these settings decide which rows come:\n"
                    + "\n".join(lines)
                    + f"\nSet them back to resume. {_RESTART} {NEW_RUN}"
                )
            mine = saved["ranks"][self._rank]
            if set(mine) != {"loader", "counts", "random", "point"}:
                raise ValueError("an entry of ranks should hold loader, counts, random and point")
        except (TypeError, LookupError, ValueError) as e:
            return ResumeError(f"the position for pack_loader in the checkpoint is damaged: {e}. {_RESTART} {NEW_RUN}")
        return None

    def _refuse_without_position(self) -> None:
        trainer = self._trainer
        if self.active and trainer is not None and trainer.ckpt_path is not None and not self._went_on:
            self._saved = self._saved or {}
            self._go_on()

    # --- hooks that count only with a loader ---------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin where the checkpoint stands, or at the start of an epoch."""
        loader = self.loader.loader
        if loader is None:
            return
        super().on_train_start(trainer, pl_module)
        if not loader.stateful and trainer.checkpoint_callbacks and not self._told:
            self._told = True
            rank_zero_warn(f"checkpoints of this run hold no position in the data: {loader.not_stateful}")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A new epoch."""
        if self.active:
            super().on_train_epoch_start(trainer, pl_module)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Note the step boundary."""
        if self.active:
            super().on_train_batch_start(trainer, pl_module, *args)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Note the weights."""
        if self.active:
            super().on_before_optimizer_step(trainer, pl_module, optimizer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Count a batch."""
        if self.active:
            super().on_train_batch_end(trainer, pl_module, *args)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The epoch is over."""
        if self.active:
            super().on_train_epoch_end(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """From now on another rank may not answer; Lightning calls no teardown."""
        super().on_exception(trainer, pl_module, exception)
        self._unwatch()
        self.loader.let_go()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the reading. The position stays, so that a checkpoint can still be saved."""
        if stage == "fit":
            self._unwatch()
            self.loader.stop()


def _is_untrained(checkpoint: dict[str, Any]) -> bool:
    """Whether a checkpoint was saved before the first batch."""
    progress: Any = checkpoint
    for name in ("loops", "fit_loop", "epoch_loop.batch_progress", "total"):
        progress = progress.get(name, {})
    return bool(progress.get("ready") == 0)
