"""PackingMonitor: what packing does to a run, in the logger, the progress bar and a table at the end.

Counting stays on the device; ranks are reduced and numbers read back only at the trainer's logging interval, when a checkpoint
is written, and at the end of a pass.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pack.callbacks.figures import drawn, figures_wanted, log_figure
from lightning_pack.callbacks.interval import IntervalClock, log_values, logs_now
from lightning_pack.callbacks.logged_metrics import When
from lightning_pack.callbacks.summary import (
    Examples,
    add_examples,
    gather_examples,
    print_summary,
    saved_examples,
    summary_html,
)
from lightning_pack.callbacks.tally import TrainingTally, sharing_ranks, sum_over_ranks
from lightning_pack.callbacks.throughput import ModelThroughput, flops_of_module
from lightning_pack.callbacks.totals import Totals
from lightning_pack.callbacks.work import Imbalance
from lightning_pack.collated.row import packed_row
from lightning_pack.flops import ModelFlops
from lightning_pack.metrics import PackingMetrics, PackingStats
from lightning_pack.policy import PackingPolicy
from lightning_pack.row import PackedBatch


class LeftOutWarning(UserWarning):
    """A source of the training data is not trained on, or not to its end."""


class PackingMonitor(Callback):
    """Logs and sums up how well rows are filled, and what was left out.

    :data:`~lightning_pack.callbacks.logged_metrics.METRICS` lists every number with its unit, and so does this folder's README.
    At the trainer's logging interval, through the module's ``log``, of the steps since the last logging:

    * ``packing/fill`` (progress bar too), ``packing/alignment_padding`` and ``packing/tail_padding``, shares of all slots that
      add up to 1, ``packing/overlength`` and ``packing/sources_per_pack``;
    * how long sources waited for their pack (``packing/age_*``), and how many packs a packer that sees all of these sources at
      once would spare at most (``packing/gap_to_bound``; :class:`~lightning_pack.histogram.LengthHistogram`);
    * how unequal the attention work of the ranks is (``packing/rank_imbalance``), tokens and operations per second;
    * since the run began, resumed parts included: ``packing/*_seen`` and ``packing/left_out/<reason>``.

    At the end of an epoch the shares, ages, gap and imbalance of the whole epoch, as ``packing/fill_epoch`` and so on.
    After an evaluation: ``packing/val_fill``, ``packing/test_fill`` and so on. These are never mixed into the training counts,
    and the sanity check counts nowhere. All numbers are of all data-parallel ranks. An interval or an epoch that a stop cuts in
    two is one: what came before the stop is in the checkpoint, the imbalance of its completed steps too. Rates leave out
    validation and the first step of the process. The first source that training leaves out gives a :class:`LeftOutWarning`,
    once per fit.

    Checkpoints hold these counts and their history, a point for each logging until there are 512, then for every two, and so
    on: ``lightning-pack inspect CHECKPOINT --html report.html`` draws them.

    In a notebook it shows what was counted so far.

    Args:
        policy: what the rows were packed with. None takes the datamodule's ``packing``; where there is none either, a row's
            slots are its physical width, and there are no ages and no gap.
        flops: operations of the model, such as ``ModelFlops.of(config)``. None takes those of ``model.config`` of the module.
        summary: whether rank 0 prints a table at the end of fit, validate and test.
        figures: whether rank 0 logs a figure at the end of each epoch of training, as ``packing/figure``: lengths of the
            sources, and where slots and tokens went. TensorBoardLogger, WandbLogger and MLFlowLogger take it; it needs
            matplotlib. A warning tells where one of these is missing.
    """

    def __init__(
        self,
        *,
        policy: PackingPolicy | None = None,
        flops: ModelFlops | None = None,
        summary: bool = True,
        figures: bool = False,
    ) -> None:
        self.policy = policy
        self.flops = flops
        self.summary = summary
        self.figures = figures
        self._draws = False
        self._trainer: Trainer | None = None
        self._tally = TrainingTally(None, PackingMetrics())
        self._evaluation = PackingMetrics()
        self._results: dict[str, PackingStats] = {}
        self._examples: dict[str, Examples] = {}
        # Of the training before a resume.
        self._earlier: Examples = {}
        self._told_left_out = self._told_other_batch = False
        self._clock = IntervalClock()
        self._throughput: ModelThroughput | None = None

    def __repr__(self) -> str:
        told = "; ".join(f"{stage}: {stats.packs:,} packs, fill {stats.fill:.2%}" for stage, stats in self._so_far().items())
        return f"PackingMonitor({told or 'no batch was counted yet'})"

    def _repr_html_(self) -> str:
        world_size = 1 if self._trainer is None else self._trainer.world_size
        where = "" if world_size == 1 or "train" in self._results else f", in training on this one of {world_size} ranks"
        return summary_html(f"PackingMonitor: counted so far{where}", self._so_far(), self._examples)

    def _so_far(self) -> dict[str, PackingStats]:
        """Stage -> what was counted; of a fit that has not ended by this rank alone, for others may not be asked now."""
        train = self._tally.metrics.stats(self._tally.of_this_rank().counts)
        return ({"train": train} if train.packs or train.left_out else {}) | self._results

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start counting from nothing for a new trainer; a trainer that fits again goes on."""
        metrics = self._new_metrics(trainer)
        if trainer is not self._trainer:
            self._trainer, self._tally = trainer, TrainingTally(trainer, metrics)
            self._examples, self._results, self._earlier = {}, {}, {}
        elif trainer.state.fn == TrainerFn.FITTING and self._tally.fit_again(metrics):
            _warn_other_policy()

    def _new_metrics(self, trainer: Trainer) -> PackingMetrics:
        datamodule = getattr(trainer, "datamodule", None)
        policy = self.policy or getattr(datamodule, "packing", None)
        if not isinstance(policy, PackingPolicy):
            return PackingMetrics()
        return PackingMetrics(policy, packs_per_batch=getattr(datamodule, "packs_per_batch", 1))

    def _counted(self, stage: str, batch: Any) -> PackedBatch | None:
        """The row of a batch, if it is one to be counted."""
        row = packed_row(batch)
        if row is None:
            if not self._told_other_batch:
                self._told_other_batch = True
                rank_zero_warn(
                    f"PackingMonitor counts batches of type PackedBatch only and ignores this {type(batch).__name__} "
                    f"of the {stage} data: give the trainer packed batches, or remove the monitor"
                )
            return None
        if not row.source_keys and not row.left_out:
            # A blank row, which keeps ranks in step.
            return None
        add_examples(self._examples.setdefault(stage, {}), row.left_out)
        return row

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the warnings of this fit."""
        self._told_left_out = self._told_other_batch = False
        self._results.pop("train", None)
        self._draws = self.figures and figures_wanted(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the counts to the module's device, and start no clock before the first step is done."""
        self._tally.to(pl_module.device)
        self._clock.stop()
        flops = self.flops or flops_of_module(pl_module)
        self._throughput = None if flops is None else ModelThroughput(trainer, flops, device=pl_module.device)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the counts of the last step boundary."""
        self._tally.batch_begins(packed_row(batch), batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a batch that was trained on, and log at the trainer's interval."""
        counted = self._counted("train", batch)
        self._tally.batch_ends(counted, steps=not trainer.fit_loop._should_accumulate())
        if counted is not None and counted.source_keys and self._throughput is not None:
            self._throughput.add(counted)
        if counted is not None and counted.left_out and not self._told_left_out:
            self._told_left_out = True
            gone = counted.left_out[0]
            what = "is cut at its end" if gone.reason == "truncated" else f"is left out of training ({gone.reason})"
            self._warn_left_out(f"source {gone.key!r} {what}: {gone.tokens} tokens are not trained on")
        if logs_now(trainer, pl_module):
            self._log(pl_module)
        elif self._clock.counts is None:
            self._restart_clock()

    def _restart_clock(self) -> None:
        self._clock.restart(self._tally.counts)
        if self._throughput is not None:
            self._throughput.restart()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log ``packing/*_epoch``."""
        self._tally.epoch_ends()
        totals = self._tally.of_epoch()
        log_values(pl_module, self._ratios(totals), when=When.EPOCH)
        stats = self._tally.metrics.stats(totals.counts)
        if self._draws and trainer.is_global_zero and stats.packs:
            # Lightning logs the numbers of an epoch with the number of its last step.
            step = trainer.fit_loop.epoch_loop._batches_that_stepped - 1
            log_figure(trainer.loggers, drawn(stats, title=f"Packing of epoch {trainer.current_epoch}"), step=step)

    def _ratios(self, totals: Totals) -> dict[str, float]:
        values = self._tally.metrics.stats(totals.counts).ratios()
        return values | ({"rank_imbalance": totals.imbalance.mean} if totals.imbalance.steps else {})

    def _log(self, pl_module: LightningModule) -> None:
        since, throughput = self._clock.counts, self._throughput
        operations = None if since is None or throughput is None else throughput.operations()
        interval = self._tally.of_interval(since, seconds=lambda: self._clock.seconds, operations=operations)
        stats, timed = (self._tally.metrics.stats(totals.counts) for totals in (interval.total, interval.timed))
        values = self._ratios(interval.recent)
        if (seconds := interval.seconds) is not None:
            values["real_tokens_per_second"] = timed.real_tokens / seconds
            values["target_tokens_per_second"] = timed.target_tokens / seconds
            if throughput is not None and operations is not None:
                values |= throughput.rates(operations, seconds=seconds)
        for name in ("real_tokens", "sources", "packs"):
            values[f"{name}_seen"] = getattr(stats, name)
        values.update({f"left_out/{reason}": number for reason, number in stats.left_out.items()})
        log_values(pl_module, values, when=When.INTERVAL)
        if stats.left_out and not self._told_left_out:
            self._told_left_out = True
            self._warn_left_out(f"{sum(stats.left_out.values())} sources are left out of training so far")
        self._restart_clock()

    def _warn_left_out(self, what: str) -> None:
        more = "the table at the end counts them all with examples; " if self.summary else ""
        rank_zero_warn(f"{what} ({more}packing/left_out/* in the logger follows them)", category=LeftOutWarning)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what was trained on, and the last validation beside it."""
        run = self._tally.of_run()
        self._results["train"] = self._tally.metrics.stats(run.counts)
        self._print(trainer, [stage for stage in ("train", "validation") if stage in self._results], run.imbalance)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count this pass on its own, and stop the clock of training."""
        self._clock.pause()
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
            self._evaluate("validation", batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Count a batch."""
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: Any) -> None:
        if (counted := self._counted(stage, batch)) is not None:
            self._evaluation.update(counted)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log ``packing/val_*``."""
        if not trainer.sanity_checking:
            self._log_evaluation(pl_module, "validation", When.VALIDATION)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log ``packing/test_*``."""
        self._log_evaluation(pl_module, "test", When.TEST)

    def _log_evaluation(self, pl_module: LightningModule, stage: str, when: When) -> None:
        counts = sum_over_ranks(self._trainer, self._evaluation.counts, evaluation=True)
        stats = self._results[stage] = self._evaluation.stats(counts)
        log_values(pl_module, stats.ratios(), when=when)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the clock of training go on; print the table where validation is all there is."""
        self._clock.go_on()
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._print(trainer, ["validation"])

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table."""
        self._print(trainer, ["test"])

    def _print(self, trainer: Trainer, stages: list[str], imbalance: Imbalance | None = None) -> None:
        if not self.summary:
            return
        copies = {stage: sharing_ranks(trainer, evaluation=stage != "train") for stage in stages}
        examples = gather_examples(self._examples, copies, earlier=self._earlier)
        if trainer.is_global_zero:
            print_summary({stage: self._results[stage] for stage in stages}, examples, imbalance=imbalance)

    def state_dict(self) -> dict[str, Any]:
        """Global counts as plain numbers. A collective: Lightning calls it on every rank and writes what rank 0 returns.

        They are those of the position in the data, where the datamodule takes that back to the last optimizer step.
        """
        trainer, ahead = self._trainer, self._tally.counted_ahead
        state = self._tally.state_dict(logs_now=lambda: trainer is not None and logs_now(trainer, trainer.lightning_module))
        own = {reason: list(keys) for reason, keys in self._examples.get("train", {}).items()}
        add_examples(own, [] if ahead is None else ahead.left_out)
        gathered = gather_examples({"train": own}, {"train": sharing_ranks(trainer, evaluation=False)}, earlier=self._earlier)
        return state | {"examples": gathered["train"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from a checkpoint; one that is only evaluated changes nothing."""
        if self._trainer is not None and self._trainer.state.fn != TrainerFn.FITTING:
            return
        changed = self._tally.load_state_dict(state_dict)
        self._earlier, self._examples = saved_examples(state_dict.get("examples")), {}
        if changed:
            _warn_other_policy()


def _warn_other_policy() -> None:
    rank_zero_warn(
        "PackingMonitor: what was counted so far had a policy with another capacity or buffer_size, or had none; ages and gap "
        "to the bound are counted anew from here"
    )
