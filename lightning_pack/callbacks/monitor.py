"""PackingMonitor: what packing does to a run, in the logger, the progress bar and a table at the end.

Counting stays on the device; ranks are reduced and numbers read back only at the trainer's logging interval, when a checkpoint
is written, and at the end of a pass.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, distributed

from lightning_pack.callbacks.summary import Examples, add_examples, merge_examples, print_summary
from lightning_pack.metrics import COUNTERS, PackingMetrics, PackingStats
from lightning_pack.policy import PackingPolicy
from lightning_pack.rewind import in_window, is_trained
from lightning_pack.row import PackedBatch

_STATE_VERSION = 1


class LeftOutWarning(UserWarning):
    """A source of the training data is not trained on, or not to its end."""


class PackingMonitor(Callback):
    """Logs and sums up how well rows are filled, and what was left out.

    At the trainer's logging interval, through the module's ``log``:

    * of the steps since the last logging: ``packing/fill`` (progress bar too), ``packing/alignment_padding``,
      ``packing/tail_padding`` (fractions of all slots), ``packing/sources_per_pack``, ``packing/real_tokens_per_second``,
      ``packing/target_tokens_per_second``;
    * since the run began, resumed parts included: ``packing/real_tokens_seen``, ``packing/sources_seen``,
      ``packing/packs_seen``, ``packing/left_out/<reason>`` (sources, for reasons that occurred).

    After an evaluation: ``packing/val_fill``, ``packing/test_fill`` and so on. These are never mixed into the training counts,
    and the sanity check counts nowhere. All numbers are sums over data-parallel ranks. Rates leave out validation and the first
    step of the process. The first source that training leaves out gives a :class:`LeftOutWarning`, once per fit.

    Args:
        policy: what the rows were packed with. None takes the datamodule's ``packing``; where there is none either, a row's
            slots are its physical width.
        summary: whether rank 0 prints a table at the end of fit, validate and test.
    """

    def __init__(self, *, policy: PackingPolicy | None = None, summary: bool = True) -> None:
        self.policy = policy
        self.summary = summary
        self._trainer: Trainer | None = None
        self._train = PackingMetrics()
        # Global counts of what earlier processes trained on, and of everything at the last logging.
        self._base = self._logged = [0] * len(COUNTERS)
        self._evaluation = PackingMetrics()
        self._results: dict[str, PackingStats] = {}
        self._examples: dict[str, Examples] = {}
        self._told_left_out = self._told_other_batch = False
        # Counts at the last step boundary, while batches after it wait for their optimizer step; and a batch that is trained
        # but not counted yet. A checkpoint of that moment may tell of either.
        self._boundary: Tensor | None = None
        self._uncounted: Any = None
        self._window: tuple[float, Tensor] | None = None
        self._paused = 0.0
        self._pause_began = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start counting from nothing for a new trainer; a trainer that fits again goes on."""
        counter = self._new_metrics(trainer)
        if trainer is self._trainer:
            # Another datamodule may have come with this fit; what was counted stays.
            counter.counts = self._train.counts if self._boundary is None else self._boundary
        else:
            self._trainer = trainer
            self._base = self._logged = [0] * len(COUNTERS)
            self._examples, self._results = {}, {}
        self._train, self._boundary, self._uncounted = counter, None, None

    def _new_metrics(self, trainer: Trainer) -> PackingMetrics:
        datamodule = getattr(trainer, "datamodule", None)
        policy = self.policy or getattr(datamodule, "packing", None)
        if not isinstance(policy, PackingPolicy):
            return PackingMetrics()
        return PackingMetrics(policy, packs_per_batch=getattr(datamodule, "packs_per_batch", 1))

    def _count(self, metrics: PackingMetrics, stage: str, batch: Any) -> bool:
        if not isinstance(batch, PackedBatch):
            if not self._told_other_batch:
                self._told_other_batch = True
                rank_zero_warn(
                    f"PackingMonitor counts batches of type PackedBatch only and ignores this {type(batch).__name__} "
                    f"of the {stage} data: give the trainer packed batches, or remove the monitor"
                )
            return False
        if not batch.source_keys:
            # A blank row, which keeps ranks in step.
            return False
        metrics.update(batch)
        add_examples(self._examples.setdefault(stage, {}), batch.left_out)
        return True

    def _sum_over_ranks(self, counts: Tensor) -> list[int]:
        """Global counts as numbers; a collective, and the only place that waits for the device."""
        if self._trainer is None:
            return counts.tolist()
        counts = self._trainer.strategy.reduce(counts.clone(), reduce_op="sum")
        parallel = getattr(getattr(self._trainer, "datamodule", None), "parallel", None)
        # All devices that share one copy of the model get, and count, the same batches.
        copies = 1 if parallel is None or self._trainer.world_size == 1 else parallel.model_parallel_size
        return [number // copies for number in counts.tolist()]

    def _total(self, new: list[int]) -> list[int]:
        return [old + more for old, more in zip(self._base, new, strict=True)]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the warnings of this fit."""
        self._told_left_out = self._told_other_batch = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the counts to the module's device, and start no clock before the first step is done."""
        self._train.to(pl_module.device)
        self._window = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the counts of the last step boundary."""
        if self._boundary is None:
            self._boundary = self._train.counts.clone()
        self._uncounted = batch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a batch that was trained on, and log at the trainer's interval."""
        self._uncounted = None
        if not trainer.fit_loop._should_accumulate():
            self._boundary = None
        if self._count(self._train, "train", batch) and batch.left_out and not self._told_left_out:
            self._told_left_out = True
            gone = batch.left_out[0]
            what = "is cut at its end" if gone.reason == "truncated" else f"is left out of training ({gone.reason})"
            self._warn_left_out(f"source {gone.key!r} {what}: {gone.tokens} tokens are not trained on")
        if _logs_now(trainer, pl_module):
            self._log(pl_module)
        elif self._window is None:
            self._restart_clock()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No step goes over the end of an epoch."""
        self._boundary = self._uncounted = None

    def _log(self, pl_module: LightningModule) -> None:
        started = self._window
        since = torch.zeros_like(self._train.counts) if started is None else self._train.counts - started[1]
        numbers = self._sum_over_ranks(torch.cat([self._train.counts, since]))
        total = self._total(numbers[: len(COUNTERS)])
        timed = PackingStats.of(numbers[len(COUNTERS) :])
        stats = PackingStats.of(total)
        recent = PackingStats.of([now - then for now, then in zip(total, self._logged, strict=True)])
        self._logged = total
        values = recent.ratios()
        if started is not None:
            seconds = time.perf_counter() - started[0] - self._paused
            values["real_tokens_per_second"] = timed.real_tokens / seconds
            values["target_tokens_per_second"] = timed.target_tokens / seconds
        for name in ("real_tokens", "sources", "packs"):
            values[f"{name}_seen"] = getattr(stats, name)
        values.update({f"left_out/{reason}": number for reason, number in stats.left_out.items()})
        _log_values(pl_module, values, on_step=True, on_epoch=False)
        if stats.left_out and not self._told_left_out:
            self._told_left_out = True
            self._warn_left_out(f"{sum(stats.left_out.values())} sources are left out of training so far")
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._window, self._paused = (time.perf_counter(), self._train.counts.clone()), 0.0

    def _warn_left_out(self, what: str) -> None:
        more = "the table at the end counts them all with examples; " if self.summary else ""
        rank_zero_warn(f"{what} ({more}packing/left_out/* in the logger follows them)", category=LeftOutWarning)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what was trained on, and the last validation beside it."""
        self._results["train"] = PackingStats.of(self._total(self._sum_over_ranks(self._train.counts)))
        self._print(trainer, [stage for stage in ("train", "validation") if stage in self._results])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count this pass on its own, and stop the clock of training."""
        self._pause_began = time.perf_counter()
        self._start_evaluation(trainer, pl_module, "validation")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count this pass on its own."""
        self._start_evaluation(trainer, pl_module, "test")

    def _start_evaluation(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._evaluation = self._new_metrics(trainer).to(pl_module.device)
        self._examples[stage] = {}

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Count a batch, unless this is the sanity check."""
        if not trainer.sanity_checking:
            self._count(self._evaluation, "validation", batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Count a batch."""
        self._count(self._evaluation, "test", batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log ``packing/val_*``."""
        if not trainer.sanity_checking:
            self._log_evaluation(pl_module, "validation", "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log ``packing/test_*``."""
        self._log_evaluation(pl_module, "test", "test")

    def _log_evaluation(self, pl_module: LightningModule, stage: str, prefix: str) -> None:
        stats = self._results[stage] = PackingStats.of(self._sum_over_ranks(self._evaluation.counts))
        values = {f"{prefix}_{name}": value for name, value in stats.ratios().items()}
        _log_values(pl_module, values, on_step=False, on_epoch=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the clock of training go on; print the table where validation is all there is."""
        self._paused += time.perf_counter() - self._pause_began
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._print(trainer, ["validation"])

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table."""
        self._print(trainer, ["test"])

    def _print(self, trainer: Trainer, stages: list[str]) -> None:
        if not self.summary:
            return
        gathered = [self._examples]
        if distributed.is_available() and distributed.is_initialized():
            gathered = [{} for _ in range(distributed.get_world_size())]
            distributed.all_gather_object(gathered, self._examples)
        if trainer.is_global_zero:
            examples = {stage: merge_examples(rank.get(stage, {}) for rank in gathered) for stage in stages}
            print_summary({stage: self._results[stage] for stage in stages}, examples)

    def state_dict(self) -> dict[str, Any]:
        """Global counts as plain numbers. A collective: Lightning calls it on every rank and writes what rank 0 returns.

        They are those of the position in the data, where the datamodule takes that back to the last optimizer step.
        """
        trainer, counts, logs = self._trainer, self._train.counts, False
        rewound = None if trainer is None else in_window(trainer)
        if rewound and self._boundary is not None:
            counts = self._boundary
        elif trainer is not None and rewound is False and isinstance(self._uncounted, PackedBatch) and is_trained(trainer):
            # Another callback saves in on_train_batch_end, before this one has counted.
            counter = self._new_metrics(trainer).to(counts.device)
            counter.update(self._uncounted)
            counts, logs = counts + counter.counts, _logs_now(trainer, trainer.lightning_module)
        total = self._total(self._sum_over_ranks(counts))
        return {
            "version": _STATE_VERSION,
            "total": dict(zip(COUNTERS, total, strict=True)),
            "logged": dict(zip(COUNTERS, total if logs else self._logged, strict=True)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from a checkpoint; one that is only evaluated changes nothing."""
        if self._trainer is not None and self._trainer.state.fn != TrainerFn.FITTING:
            return
        if state_dict.get("version") != _STATE_VERSION:
            raise ValueError(
                f"the checkpoint holds PackingMonitor state of version {state_dict.get('version')}, this package reads version "
                f"{_STATE_VERSION}: resume with the release that wrote it, or without the monitor"
            )
        self._base = _numbers(state_dict["total"])
        self._logged = _numbers(state_dict["logged"])
        self._train.reset()


def _numbers(named: Mapping[str, int]) -> list[int]:
    return [int(named.get(name, 0)) for name in COUNTERS]


def _logs_now(trainer: Trainer, pl_module: LightningModule) -> bool:
    # Lightning's own rule, less its exception for should_stop, which one rank may see before the others do.
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    if not interval or (pl_module.automatic_optimization and trainer.fit_loop._should_accumulate()):
        return False
    return (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % interval == 0


def _log_values(pl_module: LightningModule, values: Mapping[str, float], *, on_step: bool, on_epoch: bool) -> None:
    # The values are the same on all ranks already, but Lightning warns of an epoch's value without sync_dist. float64 keeps
    # token counts exact beyond 2**24; MPS has none.
    dtype = torch.float32 if pl_module.device.type == "mps" else torch.float64
    for name, value in values.items():
        tensor = torch.tensor(value, dtype=dtype, device=pl_module.device)
        bar = name.endswith("fill")
        pl_module.log(
            f"packing/{name}", tensor, prog_bar=bar, on_step=on_step, on_epoch=on_epoch, batch_size=1, sync_dist=on_epoch
        )
