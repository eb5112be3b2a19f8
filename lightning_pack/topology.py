"""How a stream is spread over data-parallel ranks and loader workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from lightning_pack.energon.fields import number

#: Names of the settings.
RANKS, WORKERS = "data-parallel ranks", "num_workers"


@dataclass(frozen=True)
class Topology:
    """How a stream is spread: data-parallel ranks, and loader workers of each."""

    ranks: int
    workers: int

    @property
    def streams(self) -> int:
        """Parts that the data is dealt out to; a rank without workers reads one part itself."""
        return self.ranks * max(self.workers, 1)

    def differs_from(self, now: Topology) -> list[str]:
        """A line for ranks and for workers where they differ."""
        pairs = ((RANKS, self.ranks, now.ranks), (WORKERS, self.workers, now.workers))
        return [f"  {name}: {old} in the checkpoint, {new} now" for name, old, new in pairs if old != new]

    def legal(self) -> list[str]:
        """Every topology of as many streams, in words."""
        small = [n for n in range(1, isqrt(self.streams) + 1) if self.streams % n == 0]
        return [
            f"{many(ranks, 'rank')} x {many(self.streams // ranks, 'worker')}" + (" or 0" if ranks == self.streams else "")
            for ranks in sorted({*small, *(self.streams // n for n in small)})
        ]


def many(n: int, noun: str) -> str:
    """A number of things, in words."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def topology(settings: Mapping[str, Any]) -> Topology:
    """The topology that settings name.

    Raises:
        StateError: if they name none.
    """
    for name, least, most in ((RANKS, 1, 100_000), (WORKERS, 0, 1000)):
        number(least, most)(settings.get(name), f"settings.{name}")
    return Topology(settings[RANKS], settings[WORKERS])
