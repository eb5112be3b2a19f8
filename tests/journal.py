"""A run that keeps a journal of all that happens in it, and callbacks that save checkpoints in every hook.

The journal of a run that was resumed must be the end of the journal of the run that never stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_pack import EnergonPackDataModule, PackedBatch
from lightning_pack.callbacks import PackingMonitor
from tests.training import Options, Recorder, datamodule, digest, trainer


class Journal(Recorder):
    """Writes down every batch, step, validation and end of an epoch, with Lightning's counts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.journal: list[tuple[Any, ...]] = []

    def on_train_epoch_start(self) -> None:
        self.journal.append(("epoch", self.current_epoch))

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        loop = self.trainer.fit_loop.epoch_loop
        counted = (loop.total_batch_idx, loop._batches_that_stepped, self.global_step)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.journal.append(("batch", self.current_epoch, batch_idx, digest(batch), counted, rate))
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.journal.append(("validation", self.global_step, tuple(self.validated[-1])))

    def on_train_epoch_end(self) -> None:
        self.journal.append(("end", self.current_epoch, self.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        each = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": each, "interval": "step"}}


HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)


class Saves(pl.Callback):
    """Saves a checkpoint in the ``number``-th call of a hook (0 is the first), or in every call."""

    def __init__(self, folder: Path, hooks: tuple[str, ...] = HOOKS, *, number: int | None = None, first: bool = False) -> None:
        self.folder, self.number, self.first = folder, number, first
        self.calls: Counter[str] = Counter()
        for hook in hooks:
            setattr(self, hook, self._saver(hook))
        if first:
            then = self.on_fit_start
            self.on_fit_start = lambda *a: (then(*a), self._go_first(a[0]))  # type: ignore[method-assign,assignment]

    def _go_first(self, trainer: pl.Trainer) -> None:
        trainer.callbacks = [self, *(c for c in trainer.callbacks if c is not self)]  # type: ignore[attr-defined]

    def _saver(self, hook: str) -> Callable[..., None]:
        def save(trainer: pl.Trainer, *_: Any) -> None:
            if trainer.sanity_checking:
                return
            number = self.calls[hook]
            self.calls[hook] += 1
            if self.number is None or number == self.number:
                trainer.save_checkpoint(self.folder / f"{hook}{'-first' * self.first}-{number}.ckpt")

        return save


def journal(
    options: Options,
    *callbacks: pl.Callback,
    module: Journal | None = None,
    data: EnergonPackDataModule | None = None,
) -> tuple[Journal, PackingMonitor, pl.Trainer]:
    """Train, from the beginning or from a checkpoint."""
    pl.seed_everything(1, verbose=False)
    run_it = trainer(options)
    monitor = PackingMonitor(summary=False)
    run_it.callbacks[:0] = [*callbacks, monitor]  # type: ignore[attr-defined]
    module = Journal() if module is None else module
    if options.resume:
        # What a new process draws at random has no bearing.
        torch.manual_seed(99)
    run_it.fit(module, datamodule(options) if data is None else data, ckpt_path=options.resume)
    return module, monitor, run_it


def differences(whole: Journal, monitor: PackingMonitor, resumed: Journal, its_monitor: PackingMonitor) -> list[str]:
    """Where a resumed run is not the end of the whole one; empty if it is."""
    found = []
    tail = whole.journal[len(whole.journal) - len(resumed.journal) :]
    if resumed.journal != tail or not resumed.journal:
        wrong = next((pair for pair in zip(resumed.journal, tail, strict=False) if pair[0] != pair[1]), "lengths")
        found.append(f"journal: {wrong} (of {len(resumed.journal)} of {len(whole.journal)} entries)")
    if resumed.weights() != whole.weights():
        found.append("weights")
    states = [each.state_dict() for each in (its_monitor, monitor)]
    for state in states:
        # How long steps took.
        del state["history"]["times"]
        # Of several ranks, which keys come first depends on where a run was stopped.
        state["examples"] = {reason: len(keys) for reason, keys in state["examples"].items()}
    if states[0] != states[1]:
        found.append("monitor")
    return found
