"""What the monitor left in a checkpoint, as typed values: the whole of training, its history, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_pack.callbacks.history import TIMES, History, Stretch
from lightning_pack.callbacks.summary import Examples, saved_examples
from lightning_pack.callbacks.tally import STATE_VERSION
from lightning_pack.callbacks.totals import Totals
from lightning_pack.callbacks.work import Imbalance
from lightning_pack.energon.fields import shown
from lightning_pack.metrics import PackingStats

_ENTRIES = {"version", "policy", "total", "epoch", "logged"}
#: No run counts so far, and floats are exact below it.
_MOST = 1 << 53


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """Training since it began, resumed parts included, over all ranks.

    Args:
        stats: counts of all of it.
        imbalance: of all of its optimizer steps.
        points: its stretches in order, which add up to it; the last ends at the checkpoint. One where there is no history.
        history: as it was saved; None in a checkpoint of a release that kept none.
        examples: reason -> keys of sources that were left out for it.
    """

    stats: PackingStats
    imbalance: Imbalance
    points: tuple[Stretch, ...]
    history: History | None
    examples: Examples

    @property
    def total(self) -> Stretch:
        """All points together."""
        total = Stretch()
        for point in self.points:
            total = total.plus(point)
        return total

    def remarks(self) -> list[str]:
        """What a reader must know about the points."""
        if self.history is None:
            return [
                "There is no history in this checkpoint: the release that wrote it kept none. What it tells is of the whole "
                "run; a run that is resumed from it keeps one from there on."
            ]
        found = []
        if self.history.undetailed_steps:
            found.append(
                f"The first {self.history.undetailed_steps:,} steps were counted by a release without a history: they are one "
                "stretch."
            )
        if len(self.points) == 1:
            found.append(
                "There is one stretch only: a point is kept at each logging, so a smaller log_every_n_steps of the Trainer "
                "gives more."
            )
        if self.history.stride > 1:
            found.append(
                f"Each point is of {self.history.stride:,} loggings: neighbours were merged to keep their number down."
            )
        if self.total.nanoseconds and not self.total.operations:
            found.append("TFLOP/s are not known: the model is none whose operations are known, or weights of it are frozen.")
        return found

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        stats = self.stats
        counts = {name: getattr(stats, name) for name in ("packs", "sources", "real_tokens", "target_tokens", "slots")}
        return {
            **counts,
            "alignment_padding": stats.alignment_padding,
            "tail_padding": stats.tail_padding,
            "left_out": stats.left_out,
            "left_out_tokens": stats.left_out_tokens,
            **stats.ratios(),
            "rank_imbalance": self.imbalance.mean if self.imbalance.steps else None,
            "real_tokens_per_second": self.total.tokens_per_second,
            "tflops_per_second": self.total.tflops_per_second,
            "examples": self.examples,
            "points": None if self.history is None else [point._asdict() for point in self.points],
        }


def training_record(checkpoint: Mapping[Any, Any]) -> TrainingRecord | str:
    """The record of a checkpoint; or why there is none, in words that follow "no record of training: "."""
    state = _monitor_state(checkpoint)
    if state is None:
        return (
            "the run had no PackingMonitor, which counts; lightning-pack's own fit and PackedAttention bring one, and so does "
            "callbacks=[PackingMonitor()]"
        )
    if state.get("version") != STATE_VERSION:
        return (
            f"the PackingMonitor's state has version {shown(state.get('version'))}, this release reads version {STATE_VERSION}"
        )
    try:
        total = Totals.from_plain(state["total"])
        history = History.from_plain(state["history"]) if "history" in state else None
        # A policy is (None, None) where none was known.
        capacity = state["policy"][0]
        if capacity is not None and (type(capacity) is not int or capacity < 1):
            raise ValueError(f"the PackingMonitor's state in the checkpoint is damaged: its capacity is {shown(capacity)}")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        return str(error) if isinstance(error, ValueError) else "the PackingMonitor's state in the checkpoint is damaged"
    if not all(0 <= number < _MOST for number in (*total.counts, total.imbalance.steps)):
        return "the PackingMonitor's state in the checkpoint is damaged: it holds numbers that no run can count to"
    whole = Stretch.of(total)
    before = () if history is None else history.points
    rest = whole.minus(History(points=before).total._replace(**dict.fromkeys(("loggings", *TIMES), 0)))
    if min(rest) < 0:
        return "the PackingMonitor's state in the checkpoint is damaged: its history has more than the whole"
    return TrainingRecord(
        stats=PackingStats.of(total.counts, capacity=capacity),
        imbalance=total.imbalance,
        points=(*before, rest) if any(rest) else before,
        history=history,
        examples=saved_examples(state.get("examples")),
    )


def _monitor_state(checkpoint: Mapping[Any, Any]) -> Mapping[str, Any] | None:
    callbacks = checkpoint.get("callbacks")
    if not isinstance(callbacks, Mapping):
        return None
    states = [state for state in callbacks.values() if isinstance(state, Mapping) and set(state) >= _ENTRIES]
    return states[0] if states else None
