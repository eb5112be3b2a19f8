"""``lightning-pack bench bins``: how full each packer makes its bins, and how long it takes.

Three sets of lengths: A is long-tailed, B uniform, C a mixture of long and short sources. Every packer is compared with the
lower bound, below which no packing can be, and with next fit in order of arrival, written as a plain loop. Times are of the
process, the fastest of some turns.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lightning_pack.binning import Groups, get_packer, lower_bound, packers


def _long_tailed(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.clip(rng.lognormal(5.5, 1.0, count).astype(np.int64), 16, 4096)


def _uniform(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(1, 2049, count)


def _mixture(rng: np.random.Generator, count: int) -> np.ndarray:
    long = rng.random(count) < 0.30
    lengths = np.where(long, rng.normal(1500, 300, count), rng.normal(200, 50, count))
    return np.clip(np.rint(lengths).astype(np.int64), 1, 2048)


#: Length -> how many: 60 bins of 2050 + 1026 + 1020 and 30 of 2 x 1028 + 2 x 1020 are exactly full, 90 in all.
ADVERSARY = {2050: 60, 1028: 60, 1026: 60, 1020: 120}
ADVERSARY_CAPACITY = 4096


#: How the lengths of each set are drawn, and the capacity of its bins, in tokens.
SETS: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], int]] = {
    "A": (_long_tailed, 4096),
    "B": (_uniform, 2048),
    "C": (_mixture, 2048),
}


def drawn(name: str, count: int) -> tuple[list[int], int]:
    """The first ``count`` lengths of a set, from a generator of their own, and its capacity; both in tokens."""
    draw, capacity = SETS[name]
    return draw(np.random.default_rng(0), count).tolist(), capacity


@dataclass(frozen=True, kw_only=True)
class BinsOfPacker:
    """What one packer makes of one set.

    Args:
        packer: its name.
        bins: how many it made.
        bound: how many there must be at least.
        baseline: how many next fit makes.
        seconds: that packing took.
    """

    packer: str
    bins: int
    bound: int
    baseline: int
    seconds: float

    @property
    def gap(self) -> float:
        """Bins above the bound, as a share of it."""
        return self.bins / self.bound - 1

    @property
    def saved(self) -> float:
        """Share of the bins of next fit that are not needed."""
        return 1 - self.bins / self.baseline

    def __str__(self) -> str:
        return (
            f"{self.packer:30} {self.bins:7,} bins, {self.gap:7.2%} above the bound, {self.saved:6.1%} fewer than next fit, "
            f"{1e3 * self.seconds:8.2f} ms"
        )


def next_fit(lengths: Sequence[int], capacity: int) -> Groups:
    """The simple baseline: a row is closed when the next source does not fit."""
    groups: Groups = []
    load = capacity + 1
    for index, length in enumerate(lengths):
        if load + length > capacity:
            groups.append([])
            load = 0
        groups[-1].append(index)
        load += length
    return groups


def measured(lengths: list[int], capacity: int, *, turns: int) -> Iterator[BinsOfPacker]:
    """The baseline first, then every registered packer.

    Raises:
        RuntimeError: if a packer loses a source or fills a bin over its capacity.
    """
    bound = lower_bound(lengths, capacity)
    baseline = len(next_fit(lengths, capacity))
    for name, packer in [("next fit", next_fit), *((name, get_packer(name)) for name in packers())]:
        fastest = float("inf")
        for _ in range(turns):
            started = time.process_time()
            groups = packer(lengths, capacity)
            fastest = min(fastest, time.process_time() - started)
        if sorted(index for group in groups for index in group) != list(range(len(lengths))) or any(
            sum(lengths[index] for index in group) > capacity for group in groups
        ):
            raise RuntimeError(f"{name} does not give every source once, in bins of at most {capacity} tokens")
        yield BinsOfPacker(packer=name, bins=len(groups), bound=bound, baseline=baseline, seconds=fastest)


def main(args: Sequence[str]) -> None:
    """``lightning-pack bench bins`` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="lightning-pack bench bins", description="How full each packer makes its bins, and how long it takes."
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="sets of lengths (default: all)")
    parser.add_argument("--counts", nargs="+", type=int, default=[1_000, 10_000, 100_000], help="how many lengths of each")
    parser.add_argument("--turns", type=int, default=2, help="turns of each packer, of which the fastest counts (default: 2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures there as JSON")
    options = parser.parse_args(args)
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: there is no folder {options.out.parent}")
    for name, values in (("counts", options.counts), ("turns", [options.turns])):
        for value in values:
            if value < 1:
                parser.error(f"--{name} {value}: at least 1 is needed")
    adversary = [length for length, count in ADVERSARY.items() for _ in range(count)]
    tasks = [(f"set {name}", *drawn(name, count)) for name in options.sets for count in options.counts]
    found = []
    for name, lengths, capacity in [("the adversary", adversary, ADVERSARY_CAPACITY), *tasks]:
        bound = lower_bound(lengths, capacity)
        print(f"{name}, {len(lengths):,} lengths, capacity {capacity:,}: at least {bound:,} bins", flush=True)
        for line in measured(lengths, capacity, turns=options.turns):
            print(f"  {line}", flush=True)
            found.append({"lengths": name, "count": len(lengths), **asdict(line), "gap": line.gap})
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
        print(f"written: {options.out}")
