"""The trainer's logging interval: when it ends, how long it was, and how its numbers are logged."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_pack.callbacks.logged_metrics import When, registered


class IntervalClock:
    """Seconds since the last logging without the pauses, and what had been counted then; stopped until its first restart."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._paused = self._pause_began = 0.0
        self._counts: Tensor | None = None

    @property
    def counts(self) -> Tensor | None:
        """What had been counted when the clock was restarted; None while it is stopped."""
        return self._counts

    def stop(self) -> None:
        """Time nothing until the next restart."""
        self._counts = None

    def restart(self, counts: Tensor) -> None:
        """Begin an interval.

        Args:
            counts: so far; copied.
        """
        self._began, self._paused, self._counts = time.perf_counter(), 0.0, counts.clone()

    def pause(self) -> None:
        """Leave out what follows."""
        self._pause_began = time.perf_counter()

    def go_on(self) -> None:
        """End a pause."""
        self._paused += time.perf_counter() - self._pause_began

    @property
    def seconds(self) -> float:
        """Since the restart, without the pauses."""
        return 0.0 if self._began is None else time.perf_counter() - self._began - self._paused


def logs_now(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Whether the batch in hand ends a logging interval."""
    # Lightning's own rule, less its exception for should_stop, which one rank may see before the others do.
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if not interval or (pl_module.automatic_optimization and trainer.fit_loop._should_accumulate()):
        return False
    return (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % interval == 0


def log_values(pl_module: LightningModule, values: Mapping[str, float], *, when: When) -> None:
    """Log values that are the same on all ranks, by the names of :mod:`lightning_pack.callbacks.logged_metrics`.

    Raises:
        KeyError: for one that is not listed there.
    """
    # Lightning warns of an epoch's value without sync_dist. float64 keeps token counts exact beyond 2**24; MPS has none.
    dtype = torch.float32 if pl_module.device.type == "mps" else torch.float64
    epoch = when is not When.INTERVAL
    for name, value in values.items():
        full = f"packing/{when.value.format(name)}"
        registered(full)
        tensor = torch.tensor(value, dtype=dtype, device=pl_module.device)
        bar = full.endswith("fill")
        pl_module.log(full, tensor, prog_bar=bar, on_step=not epoch, on_epoch=epoch, batch_size=1, sync_dist=epoch)
