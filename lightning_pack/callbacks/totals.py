"""Global counts of a stretch of training, which can be added and subtracted, and their plain form in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_pack.callbacks.work import Imbalance
from lightning_pack.energon.fields import shown
from lightning_pack.histogram import AGE_BINS, LENGTH_COUNTS
from lightning_pack.metrics import AGES, COUNTERS, COUNTS, LENGTHS

#: No run counts so far; sums of ratios of 2**32 a step reach it last.
MOST_COUNTED = 1 << 96


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Global counts of a stretch of training.

    Args:
        counts: in the order of :attr:`lightning_pack.metrics.PackingMetrics.counts`.
        imbalance: of its optimizer steps.
    """

    counts: tuple[int, ...] = (0,) * COUNTS
    imbalance: Imbalance = Imbalance()  # noqa: RUF009

    def plus(self, other: Totals) -> Totals:
        """Of both stretches."""
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return Totals(counts=counts, imbalance=self.imbalance.plus(other.imbalance))

    def minus(self, other: Totals) -> Totals:
        """Of what came after ``other``."""
        counts = tuple(a - b for a, b in zip(self.counts, other.counts, strict=True))
        return Totals(counts=counts, imbalance=self.imbalance.minus(other.imbalance))

    def without_histograms(self) -> Totals:
        """For another policy, whose bins mean something else."""
        return Totals(counts=self.counts[: len(COUNTERS)] + (0,) * (COUNTS - len(COUNTERS)), imbalance=self.imbalance)

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint: whole numbers by name, and lists of them."""
        histograms = {"ages": list(self.counts[AGES]), "lengths": list(self.counts[LENGTHS])}
        return dict(zip(COUNTERS, self.counts, strict=False)) | histograms | {"imbalance": list(self.imbalance)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Totals:
        """The totals that :meth:`to_plain` was called on; counters that it does not name are 0.

        Raises:
            ValueError: if it is none.
        """
        if not isinstance(plain, Mapping):
            raise _damaged(f"there is a {type(plain).__name__} instead of its counts")
        named = [plain.get(name, 0) for name in COUNTERS]
        lists = [plain.get(name) for name in ("ages", "lengths", "imbalance")]
        # Lists alone: a tensor of a stranger's file may claim more numbers than memory holds.
        sizes = [len(each) if isinstance(each, list) else 0 for each in lists]
        if sizes != [AGE_BINS, LENGTH_COUNTS, 2]:
            raise _damaged(
                f"its ages, lengths and imbalance hold {sizes[0]}, {sizes[1]} and {sizes[2]} numbers instead of {AGE_BINS}, "
                f"{LENGTH_COUNTS} and 2"
            )
        ages, lengths, imbalance = (tuple(each) for each in lists if isinstance(each, list))
        for name, number in [*zip(COUNTERS, named, strict=True), *(("histograms", n) for n in (*ages, *lengths, *imbalance))]:
            if type(number) is not int or abs(number) > MOST_COUNTED:
                raise _damaged(f"its {name} hold {shown(number)}, and should hold whole numbers that a run can count to")
        return cls(counts=(*named, *ages, *lengths), imbalance=Imbalance(*imbalance))


def _damaged(how: str) -> ValueError:
    return ValueError(
        f"the PackingMonitor's state in the checkpoint is damaged: {how}. Take another checkpoint, or resume without the "
        "monitor"
    )
