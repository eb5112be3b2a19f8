"""One measured ratio."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pack.bench.result import BenchResult


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One answer: ``ours`` and ``theirs`` in ``unit`` per second.

    Args:
        name: of the result.
        what: is compared with what.
        ours: the rate of this side.
        theirs: the rate of the other one.
        unit: what is counted.
        note: sizes of both sides.
    """

    name: str
    what: str
    ours: float
    theirs: float
    unit: str
    note: str

    @property
    def ratio(self) -> float:
        """How many times as fast as the other side."""
        return self.ours / self.theirs

    @property
    def result(self) -> BenchResult:
        """The line of the table."""
        details = f"{self.note}; {self.ours:,.0f} against {self.theirs:,.0f} {self.unit}/s"
        return BenchResult(name=self.name, what=self.what, value=self.ratio, unit="x", better="more", details=details)
