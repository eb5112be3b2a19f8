"""One line of a benchmark's table: what every benchmark gives, alone or with all others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """One figure that answers one question.

    Args:
        name: the benchmark and its part, such as ``"training/fixed-rows"``; the same at every size.
        what: is compared with what.
        value: the figure; not a number where it cannot be measured.
        unit: ``"x"`` for how many times as much as the other side, ``"share"`` for a part of 1, or what is counted.
        better: whether more or less of it is good.
        details: sizes, and the figures behind the ratio.
    """

    name: str
    what: str
    value: float
    unit: str
    better: Literal["more", "less"]
    details: str = ""

    @property
    def figure(self) -> str:
        """The value with its unit, for people."""
        if math.isnan(self.value):
            return "unknown"
        if self.unit == "x":
            return f"{self.value:.2f}x" if self.value < 10 else f"{self.value:.1f}x"
        if self.unit == "share":
            return f"{self.value:.2%}"
        return f"{self.value:,.0f} {self.unit}"

    def __str__(self) -> str:
        details = f" ({self.details})" if self.details else ""
        return f"{self.name:28} {self.figure:>10}   {self.what}; {self.better} is better{details}"
