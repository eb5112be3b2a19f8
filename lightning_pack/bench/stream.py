"""``lightning-pack bench stream``: how full rows are when sources are packed as they are read, through a buffer.

The sets of lengths of ``bench bins``, packed by one loader worker with buffers of several sizes. Two baselines are plain loops
written here and there: next fit, which needs no buffer, and a buffer that is packed by best-fit decreasing and emitted whole
each time. Then the carry-over rules, and what ``algorithm="auto"`` makes of them. Every row counts, those at the end included.

Last, how unequal the attention work of ranks is in a step, with and without a window of packs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from lightning_pack.bench.bins import SETS, drawn, next_fit
from lightning_pack.bench.result import BenchResult
from lightning_pack.bench.stream_loader import loaded
from lightning_pack.binning import Groups, lower_bound
from lightning_pack.energon.sampling import MOST_SAMPLED
from lightning_pack.planner.balance import RankBalance, rank_balance
from lightning_pack.policy import AUTO, PackingPolicy
from lightning_pack.simulation import simulate

_BUFFER_SIZES = (16, 64, 256, 1024)
_BALANCED_SET = "A"
NEXT_FIT, FLUSHED = "next fit", "flush, best-fit decreasing"


@dataclass(frozen=True, kw_only=True)
class StreamFill:
    """What one way of packing makes of one set.

    Args:
        set_name: of the lengths.
        buffer_size: sources that it holds.
        name: of the way.
        fill: real tokens per slot.
        gap: rows per row of the lower bound for all lengths together, less 1.
        oldest: the longest wait of a source, in turnovers of the buffer; None for the baselines.
        seconds: that the decisions took, of process time.
        choosing: seconds that "auto" took before that, once.
        sources: that were packed.
    """

    set_name: str
    buffer_size: int
    name: str
    fill: float
    gap: float
    oldest: float | None
    seconds: float
    sources: int
    choosing: float | None = None

    @property
    def rate(self) -> float:
        """Sources decided about per second."""
        return self.sources / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        age = " " * 24 if self.oldest is None else f"   oldest {self.oldest:4.1f} turnovers"
        choosing = "" if self.choosing is None else f", chosen in {self.choosing:.2f} s"
        way = f"buffer {self.buffer_size:5,}  {self.name:26}"
        return f"  {way} fill {self.fill:7.2%}   gap {self.gap:7.2%}{age}   {self.rate:10,.0f} sources/s{choosing}"


def flushed(lengths: Sequence[int], capacity: int, *, buffer_size: int) -> Groups:
    """The simple baseline: each buffer is packed by best-fit decreasing, and all of its rows are emitted."""
    groups: Groups = []
    for start in range(0, len(lengths), buffer_size):
        rooms: list[int] = []
        rows: Groups = []
        for i in sorted(range(start, min(start + buffer_size, len(lengths))), key=lambda i: -lengths[i]):
            fitting = [row for row, room in enumerate(rooms) if room >= lengths[i]]
            if not fitting:
                fitting = [len(rows)]
                rows.append([])
                rooms.append(capacity)
            best = min(fitting, key=lambda row: rooms[row])
            rows[best].append(i)
            rooms[best] -= lengths[i]
        groups += rows
    return groups


def measured(name: str, *, count: int, buffer_sizes: Sequence[int]) -> Iterator[StreamFill]:
    """The baselines and the carry-over rules on one set, buffer by buffer."""
    lengths, capacity = drawn(name, count)
    slots_filled, bound = sum(lengths) / capacity, lower_bound(lengths, capacity)
    for size in buffer_sizes:
        way = partial(StreamFill, set_name=name, buffer_size=size, sources=len(lengths))
        for baseline, loop in (
            (NEXT_FIT, partial(next_fit, lengths, capacity)),
            (FLUSHED, partial(flushed, lengths, capacity, buffer_size=size)),
        ):
            started = time.process_time()
            rows = len(loop())
            fill, gap = slots_filled / rows, rows / bound - 1
            yield way(name=baseline, fill=fill, gap=gap, oldest=None, seconds=time.process_time() - started)
        for algorithm in (*AUTO, "auto"):
            asked = PackingPolicy(capacity, algorithm=algorithm, buffer_size=size)
            started = time.process_time()
            policy = asked.settled(lengths[:MOST_SAMPLED])
            chosen = time.process_time()
            made = simulate(policy, lengths)
            yield way(
                name=algorithm if policy == asked else f"auto: {policy.algorithm}",
                fill=made.fill,
                gap=made.packs / bound - 1,
                oldest=made.oldest,
                seconds=time.process_time() - chosen,
                choosing=None if policy == asked else chosen - started,
            )


def balanced(*, count: int, ranks: int) -> RankBalance:
    """The work of ranks that pack ``count`` lengths each, by exact fill through a buffer of 256."""
    lengths, capacity = drawn(_BALANCED_SET, count * ranks)
    return rank_balance(PackingPolicy(capacity, algorithm="exact_fill"), lengths, ranks=ranks)


def results_of(lines: Sequence[StreamFill], balance: RankBalance) -> Iterator[BenchResult]:
    """Rows of the table: of each set and buffer what "auto" makes of it, then the work of ranks."""
    settings = dict.fromkeys((line.set_name, line.buffer_size) for line in lines)
    for name, size in settings:
        ways = {line.name: line for line in lines if (line.set_name, line.buffer_size) == (name, size)}
        (auto,) = [line for way, line in ways.items() if way.startswith("auto")]
        assert auto.oldest is not None
        yield BenchResult(
            name=f"stream/{name}/{size}",
            what=f"fill of rows that are packed as sources are read, set {name}, buffer of {size:,} sources",
            value=auto.fill,
            unit="share",
            better="more",
            details=f"{ways[FLUSHED].fill:.2%} by whole buffers and {ways[NEXT_FIT].fill:.2%} by next fit; {auto.sources:,} "
            f"lengths, {auto.name}, oldest {auto.oldest:.1f} turnovers, {auto.rate:,.0f} sources/s",
        )
    first, *others = balance.windows
    yield BenchResult(
        name="stream/ranks",
        what=f"attention work of the busiest rank against the mean, window of {first.window} packs",
        value=first.imbalance,
        unit="x",
        better="less",
        details=f"{balance.unbalanced:.2f}x as rows come, "
        + "".join(f"{other.imbalance:.2f}x with {other.window} packs, " for other in others)
        + f"{balance.ranks} ranks, {balance.steps:,} steps",
    )


def main(args: Sequence[str]) -> None:
    """``lightning-pack bench stream`` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="lightning-pack bench stream",
        description="How full rows are when sources are packed as they are read, and how equal the work of ranks is.",
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="sets of lengths (default: all)")
    parser.add_argument(
        "--count", type=int, default=20_000, help="how many lengths of each, and for each rank (default: 20000)"
    )
    parser.add_argument("--buffer-sizes", nargs="+", type=int, default=list(_BUFFER_SIZES), help="in sources")
    parser.add_argument("--ranks", type=int, default=8, help="whose work is compared, on set A (default: 8)")
    parser.add_argument(
        "--loader", action="store_true", help="also write each set as a dataset and read it through the real loader"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures there as JSON")
    options = parser.parse_args(args)
    for name, values, least in (
        ("count", [options.count], 1),
        ("buffer-sizes", options.buffer_sizes, 1),
        ("ranks", [options.ranks], 2),
    ):
        for value in values:
            if value < least:
                parser.error(f"--{name} {value}: at least {least} is needed")
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: there is no folder {options.out.parent}")
    lines, read = [], []
    for name in options.sets:
        print(f"set {name}, {options.count:,} lengths, capacity {SETS[name][1]:,}", flush=True)
        for line in measured(name, count=options.count, buffer_sizes=options.buffer_sizes):
            print(line, flush=True)
            lines.append(line)
        for size in options.buffer_sizes if options.loader else ():
            through = loaded(name, count=options.count, buffer_size=size)
            print(f"{through} (real loader)", flush=True)
            read.append(through)
    balance = balanced(count=options.count, ranks=options.ranks)
    print(
        f"set {_BALANCED_SET}, attention work of {balance.ranks} ranks in a step, largest / mean, mean of {balance.steps:,} "
        f"steps: {balance.unbalanced:.2f} as they come"
    )
    for window in balance.windows:
        print(f"  balance='quadratic', window {window.window:4}: {window.imbalance:.2f}")
    print(*results_of(lines, balance), sep="\n", flush=True)
    if options.out is not None:
        options.out.write_text(
            json.dumps(
                {
                    "fill": [asdict(line) for line in lines],
                    "loader": [asdict(line) for line in read],
                    "balance": asdict(balance),
                },
                indent=2,
            )
            + "\n"
        )
        print(f"written: {options.out}")
