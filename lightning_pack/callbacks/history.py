"""How training went over time: the counts of its stretches, one after the other, in as many points as a checkpoint should hold.

A stretch is what lies between two loggings. When there are too many, neighbours are merged, so that the resolution halves and
every sum stays what it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard

from lightning_pack.callbacks.totals import Totals
from lightning_pack.callbacks.work import Imbalance
from lightning_pack.energon.fields import shown
from lightning_pack.metrics import PackingStats

#: Stretches that are kept; an even number.
MOST = 512
HISTORY_VERSION = 1


class Stretch(NamedTuple):
    """Global counts between two moments of training, whole numbers that add up."""

    #: Loggings that ended in it.
    loggings: int = 0
    #: Optimizer steps in which any rank had work, and the sum of their imbalances (:class:`Imbalance`).
    steps: int = 0
    ratios: int = 0
    packs: int = 0
    sources: int = 0
    real_tokens: int = 0
    target_tokens: int = 0
    slots: int = 0
    alignment_padding: int = 0
    #: Sources dropped or cut, and their tokens.
    left_out: int = 0
    left_out_tokens: int = 0
    #: How long was timed, in nanoseconds, and the real tokens of that time.
    nanoseconds: int = 0
    timed_tokens: int = 0
    #: The part of it whose operations are known, and those operations.
    modelled_nanoseconds: int = 0
    operations: int = 0

    @classmethod
    def of(cls, totals: Totals) -> Stretch:
        """The counts of a stretch that was not timed."""
        stats = PackingStats.of(totals.counts)
        names = ("packs", "sources", "real_tokens", "target_tokens", "slots", "alignment_padding")
        return cls(
            **{name: getattr(stats, name) for name in names},
            steps=totals.imbalance.steps,
            ratios=totals.imbalance.ratios,
            left_out=sum(stats.left_out.values()),
            left_out_tokens=sum(stats.left_out_tokens.values()),
        )

    def plus(self, other: Stretch) -> Stretch:
        """Both together."""
        return Stretch(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: Stretch) -> Stretch:
        """What is left without ``other``."""
        return Stretch(*(a - b for a, b in zip(self, other, strict=True)))

    @property
    def fill(self) -> float:
        """Real tokens per slot."""
        return self.real_tokens / self.slots if self.slots else 0.0

    @property
    def alignment(self) -> float:
        """Alignment padding per slot."""
        return self.alignment_padding / self.slots if self.slots else 0.0

    @property
    def tail(self) -> float:
        """Tail padding per slot."""
        return (self.slots - self.real_tokens - self.alignment_padding) / self.slots if self.slots else 0.0

    @property
    def imbalance(self) -> float | None:
        """Mean over the steps of (largest / mean over ranks) of the ranks' work; None where no step was compared."""
        return Imbalance(self.steps, self.ratios).mean if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Real tokens of all ranks; None where nothing was timed."""
        return self.timed_tokens * 1e9 / self.nanoseconds if self.nanoseconds else None

    @property
    def tflops_per_second(self) -> float | None:
        """Operations of the model on all devices, in 1e12 per second; None where they are not known."""
        return self.operations / self.modelled_nanoseconds / 1e3 if self.modelled_nanoseconds else None


#: What a clock says, which no two runs have in common.
TIMES = ("nanoseconds", "timed_tokens", "modelled_nanoseconds", "operations")


@dataclass(frozen=True, kw_only=True)
class History:
    """Stretches of training from its beginning to the last logging.

    Args:
        points: at most :data:`MOST`, in order.
        stride: loggings that a point holds once it is complete; doubles whenever neighbours are merged.
        undetailed_steps: optimizer steps at the beginning that were counted without a history; they are one point.
    """

    points: tuple[Stretch, ...] = ()
    stride: int = 1
    undetailed_steps: int = 0

    @classmethod
    def undetailed(cls, before: Totals) -> History:
        """The history that goes on from counts without one."""
        stretch = Stretch.of(before)
        return cls(points=(stretch._replace(loggings=1),), undetailed_steps=stretch.steps) if any(stretch) else cls()

    def added(self, stretch: Stretch) -> History:
        """With what came after it."""
        stretch = stretch._replace(loggings=1)
        points, stride = list(self.points), self.stride
        if points and points[-1].loggings < stride:
            points[-1] = points[-1].plus(stretch)
            return replace(self, points=tuple(points))
        if len(points) == MOST:
            points = [a.plus(b) for a, b in zip(points[::2], points[1::2], strict=True)]
            stride *= 2
        return replace(self, points=(*points, stretch), stride=stride)

    @property
    def total(self) -> Stretch:
        """All of them together."""
        *_, total = accumulate(self.points, Stretch.plus, initial=Stretch())
        return total

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint: a list of whole numbers for each count; what was timed is apart."""
        columns = dict(zip(Stretch._fields, map(list, zip(*self.points, strict=True)), strict=False))
        return {
            "version": HISTORY_VERSION,
            "stride": self.stride,
            "undetailed_steps": self.undetailed_steps,
            "counts": {name: columns.get(name, []) for name in Stretch._fields if name not in TIMES},
            "times": {name: columns.get(name, []) for name in TIMES},
        }

    @classmethod
    def from_plain(cls, plain: Any) -> History:
        """The history that :meth:`to_plain` was called on.

        Raises:
            ValueError: if it is none, or one of another version.
        """
        if not isinstance(plain, Mapping) or plain.get("version") != HISTORY_VERSION:
            found = plain.get("version") if isinstance(plain, Mapping) else type(plain).__name__
            raise _damaged(f"its version is {shown(found)}, this package reads version {HISTORY_VERSION}")
        parts = [plain.get(name) for name in ("counts", "times")]
        if not all(isinstance(part, Mapping) for part in parts):
            raise _damaged("it has no counts or no times")
        columns: list[list[int]] = []
        for name in Stretch._fields:
            column = {**parts[0], **parts[1]}.get(name)  # type: ignore[dict-item]
            if not isinstance(column, list) or not all(_is_whole(number) for number in column):
                raise _damaged(f"its {name} are no list of whole numbers")
            columns.append(column)
        lengths = sorted({len(column) for column in columns})
        if len(lengths) != 1 or lengths[0] > MOST:
            raise _damaged(f"its lists hold {lengths} numbers, and should hold equally many, at most {MOST}")
        stride, undetailed = plain.get("stride"), plain.get("undetailed_steps")
        if not (_is_whole(stride) and stride) or not _is_whole(undetailed):
            raise _damaged(f"stride {shown(stride)} or undetailed_steps {shown(undetailed)} is no number of loggings and steps")
        points = tuple(Stretch(*numbers) for numbers in zip(*columns, strict=True))
        return cls(points=points, stride=stride, undetailed_steps=undetailed)


def _is_whole(value: Any) -> TypeGuard[int]:
    # Of any size it could come from a stranger's file.
    return type(value) is int and 0 <= value < 1 << 96


def _damaged(how: str) -> ValueError:
    return ValueError(
        f"the PackingMonitor's history in the checkpoint is damaged: {how}. Take another checkpoint, or resume without the "
        "monitor"
    )
