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

from lightning_pack.bench.result import BenchResult
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
NEXT_FIT = "next fit"


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
        set_name: of the lengths.
        count: how many.
        capacity: of a bin, in tokens.
        packer: its name.
        bins: how many it made.
        bound: how many there must be at least.
        baseline: how many next fit makes.
        seconds: that packing took.
    """

    set_name: str
    count: int
    capacity: int
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


def measured(name: str, lengths: list[int], capacity: int, *, turns: int) -> Iterator[BinsOfPacker]:
    """The baseline first, then every registered packer.

    Raises:
        RuntimeError: if a packer loses a source or fills a bin over its capacity.
    """
    bound = lower_bound(lengths, capacity)
    baseline = len(next_fit(lengths, capacity))
    for way, packer in [(NEXT_FIT, next_fit), *((way, get_packer(way)) for way in packers())]:
        fastest = float("inf")
        for _ in range(turns):
            started = time.process_time()
            groups = packer(lengths, capacity)
            fastest = min(fastest, time.process_time() - started)
        if sorted(index for group in groups for index in group) != list(range(len(lengths))) or any(
            sum(lengths[index] for index in group) > capacity for group in groups
        ):
            raise RuntimeError(f"{way} does not give every source once, in bins of at most {capacity} tokens")
        yield BinsOfPacker(
            set_name=name,
            count=len(lengths),
            capacity=capacity,
            packer=way,
            bins=len(groups),
            bound=bound,
            baseline=baseline,
            seconds=fastest,
        )


def compared(sets: Sequence[str], counts: Sequence[int], *, turns: int) -> Iterator[BinsOfPacker]:
    """The adversary, then so many lengths of each set, by every packer."""
    adversary = [length for length, count in ADVERSARY.items() for _ in range(count)]
    yield from measured("adversary", adversary, ADVERSARY_CAPACITY, turns=turns)
    for name in sets:
        for count in counts:
            yield from measured(name, *drawn(name, count), turns=turns)


def results_of(found: Sequence[BinsOfPacker]) -> Iterator[BenchResult]:
    """Rows of the table: of each set, with most lengths, what ``minimum_bin_slack`` makes of it."""
    most = {line.set_name: max(each.count for each in found if each.set_name == line.set_name) for line in found}
    for name, count in most.items():
        ways = {line.packer: line for line in found if (line.set_name, line.count) == (name, count)}
        best, quick, simple = (ways[way] for way in ("minimum_bin_slack", "best_fit_decreasing", NEXT_FIT))
        yield BenchResult(
            name=f"bins/{name}",
            what=f"rows above the fewest there can be, minimum_bin_slack, {'set ' if name in SETS else 'the '}{name}",
            value=best.gap,
            unit="share",
            better="less",
            details=f"best_fit_decreasing {quick.gap:.2%}, next fit {simple.gap:.2%}; {count:,} lengths in "
            f"{best.seconds:.3f} s ({quick.seconds:.3f} s)",
        )


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
    found = []
    for line in compared(options.sets, options.counts, turns=options.turns):
        if line.packer == NEXT_FIT:
            name = f"set {line.set_name}" if line.set_name in SETS else f"the {line.set_name}"
            print(f"{name}, {line.count:,} lengths, capacity {line.capacity:,}: at least {line.bound:,} bins", flush=True)
        print(f"  {line}", flush=True)
        found.append(line)
    print(*results_of(found), sep="\n", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps([{**asdict(line), "gap": line.gap} for line in found], indent=2) + "\n")
        print(f"written: {options.out}")
