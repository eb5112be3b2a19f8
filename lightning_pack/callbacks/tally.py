"""The counts of training over ranks and resumes, as a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_pack.callbacks.history import History, Stretch
from lightning_pack.callbacks.totals import Totals
from lightning_pack.callbacks.work import RankWork
from lightning_pack.metrics import COUNTERS, COUNTS, PackingMetrics
from lightning_pack.rewind import in_window, is_trained
from lightning_pack.row import PackedBatch

STATE_VERSION = 2


def sum_over_ranks(trainer: Trainer | None, counts: Tensor, *, evaluation: bool = False) -> list[int]:
    """Global counts as numbers, of training or of an evaluation; a collective that waits for the device."""
    if trainer is None:
        return counts.tolist()
    counts = trainer.strategy.reduce(counts.clone(), reduce_op="sum")
    copies = sharing_ranks(trainer, evaluation=evaluation)
    return [number // copies for number in counts.tolist()]


def sharing_ranks(trainer: Trainer | None, *, evaluation: bool) -> int:
    """Ranks, one after the other, that hold one copy of the model: they get, and count, the same batches."""
    parallel = getattr(getattr(trainer, "datamodule", None), "parallel", None)
    if trainer is None or parallel is None or trainer.world_size == 1:
        return 1
    return (parallel.evaluation if evaluation else parallel).model_parallel_size


class Interval(NamedTuple):
    """What a logging tells of."""

    #: Of the run, and since the last logging.
    total: Totals
    recent: Totals
    #: Since the clock began, with the seconds since then; None where it stood still.
    timed: Totals
    seconds: float | None


class TrainingTally:
    """Counts the batches of training on the device; global numbers since the run, the epoch and the last logging began.

    Methods that say so are collectives: all ranks must call them. What was counted before a stop is part of all three, so an
    epoch or an interval between two loggings that a stop cuts in two is one.

    Args:
        trainer: None counts for one rank.
        metrics: of the policy, on the CPU.
    """

    def __init__(self, trainer: Trainer | None, metrics: PackingMetrics) -> None:
        self._trainer = trainer
        self.metrics = metrics
        self._work = RankWork()
        # Of earlier processes, and the imbalance of this one as far as ranks have compared it.
        self._run = self._epoch = Totals()
        self._logged = Totals()
        # What the last logging and those before it told.
        self._history = History()
        # Counts of this process when the epoch began; at the last step boundary, while batches after it wait for their
        # optimizer step; and a batch that is trained but not counted yet. A checkpoint of that moment may tell of either.
        self._epoch_began = torch.zeros(COUNTS, dtype=torch.int64)
        self._boundary: Tensor | None = None
        self._uncounted: Any = None

    @property
    def counts(self) -> Tensor:
        """Of this rank in this process, int64 ``[COUNTS]`` on the device."""
        return self.metrics.counts

    def fit_again(self, metrics: PackingMetrics) -> bool:
        """Go on in another fit of the same trainer, perhaps with another policy, from the last completed step.

        Returns:
            Whether the histograms had to begin anew.
        """
        changed = _policy_of(metrics) != _policy_of(self.metrics)
        kept = self.counts if self._boundary is None else self._boundary
        metrics.counts = kept.clone()
        self.metrics, self._boundary, self._uncounted = metrics, None, None
        # Ranks may have been interrupted at different steps: those that they have not compared are not counted.
        self._work = RankWork(kept.device)
        if changed:
            for counts in (metrics.counts, self._epoch_began):
                counts[len(COUNTERS) :] = 0
            self._forget_histograms()
        return changed

    def _forget_histograms(self) -> None:
        self._run, self._epoch, self._logged = (t.without_histograms() for t in (self._run, self._epoch, self._logged))

    def to(self, device: torch.device) -> None:
        """Move the counts."""
        self.metrics.to(device)
        self._work.to(device)
        self._epoch_began = self._epoch_began.to(device)

    def batch_begins(self, batch: Any, batch_idx: int) -> None:
        """Remember the last step boundary; the first batch of an epoch begins its counts."""
        if batch_idx == 0:
            self._epoch, self._epoch_began = Totals(), self.counts.clone()
        if self._boundary is None:
            self._boundary = self.counts.clone()
        self._uncounted = batch

    def batch_ends(self, batch: PackedBatch | None, *, steps: bool) -> None:
        """Count a batch, unless it is None. A collective after every 256th step without a comparison.

        Args:
            batch: that was trained on.
            steps: whether it completed an optimizer step.
        """
        self._uncounted = None
        if batch is not None:
            self.metrics.update(batch)
            self._work.add(batch)
        if steps:
            self._boundary = None
            self._work.end_step()
            if self._work.full:
                self._compare()

    def epoch_ends(self) -> None:
        """No step goes over the end of an epoch."""
        self._boundary = self._uncounted = None

    def _compare(self) -> None:
        new = Totals(imbalance=self._work.compared(self._gathered))
        self._work.clear()
        self._run, self._epoch = self._run.plus(new), self._epoch.plus(new)

    def _gathered(self, own: Tensor) -> Tensor:
        return own if self._trainer is None else self._trainer.strategy.all_gather(own)

    def _globally(self, *counts: Tensor) -> list[Totals]:
        numbers = sum_over_ranks(self._trainer, torch.cat(counts))
        return [Totals(counts=tuple(numbers[i : i + COUNTS])) for i in range(0, len(numbers), COUNTS)]

    def of_interval(self, since: Tensor | None, *, seconds: Callable[[], float], operations: int | None = None) -> Interval:
        """End an interval between two loggings, and keep it in the history. Collectives.

        Args:
            since: what this process had counted when the clock began; None where it stands still.
            seconds: of the clock; asked after waiting for the device.
            operations: of the model in that time; None where they are not known.
        """
        self._compare()
        now, timed = self._globally(self.counts, self.counts - (self.counts if since is None else since))
        total = self._run.plus(now)
        recent = total.minus(self._logged)
        passed = None if since is None else seconds()
        stretch = Stretch.of(recent)
        if passed is not None:
            nanoseconds = round(passed * 1e9)
            stretch = stretch._replace(nanoseconds=nanoseconds, timed_tokens=Stretch.of(timed).real_tokens)
            if operations is not None:
                stretch = stretch._replace(modelled_nanoseconds=nanoseconds, operations=operations)
        self._logged, self._history = total, self._history.added(stretch)
        return Interval(total, recent, timed, passed)

    def of_epoch(self) -> Totals:
        """Of the present epoch. Collectives."""
        self._compare()
        (now,) = self._globally(self.counts - self._epoch_began)
        return self._epoch.plus(now)

    def of_run(self) -> Totals:
        """Since the run began. Collectives."""
        self._compare()
        (now,) = self._globally(self.counts)
        return self._run.plus(now)

    def of_this_rank(self) -> Totals:
        """What earlier processes counted on all ranks, and this process on this rank. No collective; waits for the device."""
        return self._run.plus(Totals(counts=tuple(self.counts.tolist())))

    @property
    def counted_ahead(self) -> PackedBatch | None:
        """A batch that is not counted yet, but in a checkpoint of this moment: another callback saves before ours ends it."""
        trainer, batch = self._trainer, self._uncounted
        trained = trainer is not None and isinstance(batch, PackedBatch) and in_window(trainer) is False and is_trained(trainer)
        return batch if trained else None

    def state_dict(self, *, logs_now: Callable[[], bool]) -> dict[str, Any]:
        """Of the position in the data, where the datamodule takes that back to the last optimizer step. Collectives.

        Args:
            logs_now: whether the batch in hand is logged, once it is counted.
        """
        trainer, counts, work, logs = self._trainer, self.counts, self._work, False
        ahead = self.counted_ahead
        if trainer is not None and in_window(trainer) and self._boundary is not None:
            counts = self._boundary
        elif ahead is not None:
            counter = PackingMetrics(self.metrics.policy, packs_per_batch=self.metrics.packs_per_batch).to(counts.device)
            work, logs = work.copy(), logs_now()
            counter.update(ahead)
            work.add(ahead)
            work.end_step()
            counts = counts + counter.counts
        new = Totals(imbalance=work.compared(self._gathered))
        run, epoch = (total.plus(new) for total in self._globally(counts, counts - self._epoch_began))
        run, epoch = self._run.plus(run), self._epoch.plus(epoch)
        history = self._history.added(Stretch.of(run.minus(self._logged))) if logs else self._history
        return {
            "version": STATE_VERSION,
            "policy": list(_policy_of(self.metrics)),
            "total": run.to_plain(),
            "epoch": epoch.to_plain(),
            "logged": (run if logs else self._logged).to_plain(),
            "history": history.to_plain(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Count on from the state of :meth:`state_dict`.

        Returns:
            Whether the histograms had to begin anew, because the policy was another one.

        Raises:
            ValueError: for a state of another version, or a damaged one.
        """
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"the checkpoint holds PackingMonitor state of version {state.get('version')}, this package reads version "
                f"{STATE_VERSION}: resume with the release that wrote it, or without the monitor"
            )
        run, epoch, logged = (Totals.from_plain(state[name]) for name in ("total", "epoch", "logged"))
        # Releases before it kept none.
        self._history = History.from_plain(state["history"]) if "history" in state else History.undetailed(logged)
        self._run, self._epoch, self._logged = run, epoch, logged
        self.metrics.reset()
        self._work = RankWork(self.counts.device)
        self._epoch_began = torch.zeros_like(self.counts)
        changed = tuple(state["policy"]) != _policy_of(self.metrics)
        if changed:
            self._forget_histograms()
        return changed


def _policy_of(metrics: PackingMetrics) -> tuple[int | None, int | None]:
    """What the bins of the histograms mean."""
    policy = metrics.policy
    return (None, None) if policy is None else (policy.capacity, policy.buffer_size)
