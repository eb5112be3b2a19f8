"""Every number that goes to a logger: its name, unit and meaning. What is not here is not logged.

``packing/*`` come from :class:`~lightning_pack.callbacks.PackingMonitor`, losses from :class:`~lightning_pack.PackedCausalLM`.
The table in the README of this folder is written from :data:`METRICS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from lightning_pack.metrics import REASONS

#: Stands in a name for each of :data:`~lightning_pack.metrics.REASONS`.
REASON = "<reason>"


class When(Enum):
    """When a number is logged, with what its name becomes then."""

    #: At the trainer's ``log_every_n_steps``, of the steps since the last time.
    INTERVAL = "{}"
    #: At the end of an epoch of training, of the whole epoch.
    EPOCH = "{}_epoch"
    #: After a pass over the validation data, of that pass.
    VALIDATION = "val_{}"
    #: After a pass over the test data, of that pass.
    TEST = "test_{}"


#: Of training, and after an evaluation.
ALWAYS = (When.INTERVAL, When.EPOCH, When.VALIDATION, When.TEST)


@dataclass(frozen=True, kw_only=True)
class LoggedMetric:
    """One number in a logger.

    Args:
        name: without folder, prefix and suffix; ``<reason>`` in it stands for each reason.
        unit: what 1 means.
        meaning: one sentence, or part of one.
        when: when it is logged.
        only: under which condition; empty where there is none.
        folder: of the name.
    """

    name: str
    unit: str
    meaning: str
    when: tuple[When, ...] = (When.INTERVAL,)
    only: str = ""
    folder: str = "packing/"

    def full_name(self, when: When) -> str:
        """What loggers call it then."""
        return self.folder + when.value.format(self.name)

    @property
    def full_names(self) -> tuple[str, ...]:
        """All its names in loggers, one for each reason where reasons are part of it."""
        names = [self.full_name(when) for when in self.when]
        return tuple(name.replace(REASON, reason) for name in names for reason in (REASONS if REASON in name else ("",)))


METRICS = (
    LoggedMetric(
        name="fill",
        unit="share of the slots",
        meaning="slots that hold a real token; with the two paddings it adds up to 1",
        when=ALWAYS,
    ),
    LoggedMetric(
        name="alignment_padding",
        unit="share of the slots",
        meaning="slots that pad sources up to the policy's multiple",
        when=ALWAYS,
    ),
    LoggedMetric(
        name="tail_padding",
        unit="share of the slots",
        meaning="slots at the ends of rows, for which no source was short enough",
        when=ALWAYS,
    ),
    LoggedMetric(
        name="overlength",
        unit="share of the tokens read",
        meaning="tokens left out because their source was longer than the capacity, dropped whole or cut",
        when=ALWAYS,
    ),
    LoggedMetric(name="sources_per_pack", unit="sources per pack", meaning="mean number of sources in a pack", when=ALWAYS),
    *(
        LoggedMetric(
            name=f"age_{name}",
            unit="turnovers of the buffer",
            meaning=f"wait in the buffer of a loader worker that {who} exceeded, rounded up to 1/8 (above 8 to a power of two; "
            "1024 is any longer wait)",
            when=ALWAYS,
            only="with a policy",
        )
        for name, who in (
            ("p50", "half of the sources have not"),
            ("p95", "95 % of the sources have not"),
            ("max", "no source has"),
        )
    ),
    LoggedMetric(
        name="gap_to_bound",
        unit="packs per pack of the bound, less 1",
        meaning="packs beyond a lower bound for one packer that has all these sources, of all ranks and workers, before it at "
        "once",
        when=ALWAYS,
        only="with a policy",
    ),
    LoggedMetric(
        name="rank_imbalance",
        unit="largest per mean of the ranks",
        meaning="sum of squared real lengths that a rank trains on in a step, which is what attention costs; mean over the "
        "steps, 1 is equal work",
        when=(When.INTERVAL, When.EPOCH),
    ),
    LoggedMetric(
        name="real_tokens_per_second",
        unit="tokens per second",
        meaning="real tokens trained on, of all ranks, without the time of validation and of the first step",
        only="from the second step of the process on",
    ),
    LoggedMetric(
        name="target_tokens_per_second",
        unit="tokens per second",
        meaning="target tokens trained on, of all ranks, in the same time",
        only="from the second step of the process on",
    ),
    LoggedMetric(
        name="model_tflops_per_second",
        unit="1e12 operations per second",
        meaning="operations of forward and backward pass, of all devices",
        only="for known models, or with `flops`; all weights trained",
    ),
    LoggedMetric(
        name="mfu",
        unit="share of the peak",
        meaning="the same per dense bfloat16 peak of all devices, whatever the precision is",
        only="where also every device is a known one",
    ),
    LoggedMetric(name="real_tokens_seen", unit="tokens", meaning="real tokens since the run began, resumed parts included"),
    LoggedMetric(name="sources_seen", unit="sources", meaning="sources since the run began; pieces of a split one count each"),
    LoggedMetric(name="packs_seen", unit="packs", meaning="packs since the run began"),
    LoggedMetric(
        name=f"left_out/{REASON}",
        unit="sources",
        meaning="sources dropped or cut for that reason since the run began",
        only="once it has occurred",
    ),
    LoggedMetric(
        name="train_loss",
        unit="nats per target token",
        meaning="mean loss of the target tokens of the last row of rank 0",
        only="`PackedCausalLM`",
        folder="",
    ),
    LoggedMetric(
        name="loss",
        unit="nats per target token",
        meaning="mean loss of all target tokens of the pass, of all ranks",
        when=(When.VALIDATION, When.TEST),
        only="`PackedCausalLM`",
        folder="",
    ),
)

_BY_NAME = {name: metric for metric in METRICS for name in metric.full_names}


def registered(name: str) -> LoggedMetric:
    """The metric that loggers call so.

    Raises:
        KeyError: for a name that no metric has.

    >>> registered("packing/val_fill").unit
    'share of the slots'
    """
    return _BY_NAME[name]


def markdown(metrics: Iterable[LoggedMetric] = METRICS) -> str:
    """The metrics as a table in Markdown."""
    lines = ["| metric | unit | meaning | logged |", "|---|---|---|---|"]
    return "\n".join(lines + [_line(metric) for metric in metrics])


def _line(metric: LoggedMetric) -> str:
    names = [metric.full_name(when) for when in metric.when]
    # Of those logged in training the one name stands for all: the others follow from it.
    shown = names[:1] if When.INTERVAL in metric.when else names
    logged = ", ".join(_WORDS[when] for when in metric.when if when in _WORDS)
    only = f"; {metric.only}" if metric.only else ""
    return f"| {', '.join(f'`{name}`' for name in shown)} | {metric.unit} | {metric.meaning} | {logged}{only} |"


_WORDS = {When.INTERVAL: "interval", When.EPOCH: "epoch", When.VALIDATION: "evaluation"}
