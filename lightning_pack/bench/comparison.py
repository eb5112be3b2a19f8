"""One measured ratio."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One answer: ``ours`` and ``theirs`` in ``unit`` per second."""

    name: str
    ours: float
    theirs: float
    unit: str
    note: str = ""

    @property
    def ratio(self) -> float:
        """How many times as fast as the other side."""
        return self.ours / self.theirs

    def __str__(self) -> str:
        return (
            f"{self.name:10} {self.ratio:6.2f}x   {self.ours:10,.0f} against {self.theirs:10,.0f} {self.unit}/s   {self.note}"
        )
