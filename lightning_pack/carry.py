"""Carry-over: which sources of a buffer leave it now, and which wait for better company.

To empty the whole buffer each time leaves its last rows half empty, whatever packs it. So only good rows leave; the sources of
the others stay, and the buffer is filled up again. Three rules:

* :func:`exact_fill` makes one row after the other, each filled exactly where any subset of the buffer allows it, until a
  quarter of the buffer is gone. Best where many sources are short.
* :func:`fullest_half` packs the buffer with any packer and lets the fullest half of the rows go.
* :func:`closed_rows` keeps the order of arrival: all rows but the one that is still open.

No source waits for ever. Its age is counted in sources read since; ``B`` of them are one turnover of a buffer of ``B``. From
the age limit on a source is the first of its row, and somewhat later its row leaves at once. A buffer reads at most ``B``
sources between two choices, so none gets older than 1.5 times the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from lightning_pack.binning import Groups, fullest, register_packer

#: Sources from which on half of the rows leave a buffer together; with fewer to choose from it pays to choose more often.
_MANY = 128
#: Sources that exact fill looks at together in a list: the time for a row grows with them.
_WHOLE_LIST = 1024
#: With a limit of sources in a row, so many are looked at for it: the longest and the oldest.
_FOR_A_SHORT_ROW = 64
#: Packs by any rule: lengths -> groups.
Pack = Callable[[list[int]], Groups]


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """A buffer, as the rules see it; in order of arrival.

    Args:
        lengths: tokens that each source takes up in a row.
        ages: sources read since each was.
        keys: sources with different keys do not share a row.
        old: age from which on a source goes first, in sources.
        overdue: age from which on its row leaves at once.
        capacity: of a row, in tokens.
        max_sources: most sources in a row.
    """

    lengths: Sequence[int]
    ages: Sequence[int]
    keys: Sequence[Hashable]
    old: float
    overdue: float
    capacity: int
    max_sources: int | None = None

    def row_of(self, seed: int, others: Sequence[int]) -> list[int]:
        """The fullest row that holds the source ``seed`` and some of the ``others``, which come in order of preference."""
        key, room = self.keys[seed], self.capacity - self.lengths[seed]
        others = [i for i in others if i != seed and self.lengths[i] <= room and self.keys[i] == key]
        if self.max_sources is not None and len(others) > _FOR_A_SHORT_ROW:
            longest = sorted(others, key=lambda i: -self.lengths[i])[: _FOR_A_SHORT_ROW // 2]
            others = [*dict.fromkeys(others[: _FOR_A_SHORT_ROW // 2] + longest)]
        most = None if self.max_sources is None else self.max_sources - 1
        return [seed, *(others[i] for i in fullest([self.lengths[i] for i in others], room, most=most))]

    def older_than(self, age: float) -> list[int]:
        """Sources of that age or more."""
        return [i for i, its_age in enumerate(self.ages) if its_age >= age]

    def by_key(self, indices: Sequence[int]) -> list[list[int]]:
        """Apart by key, in order of arrival."""
        apart: dict[Hashable, list[int]] = {}
        for i in indices:
            apart.setdefault(self.keys[i], []).append(i)
        return list(apart.values())


def exact_fill(candidates: Candidates, *, final: bool) -> Groups:
    """Rows one by one: the oldest source over the age limit, or else the longest, and what fills its row best.

    Stops when a quarter of the sources is in rows; not before all are where ``final``.
    """
    lengths = candidates.lengths
    old = sorted(candidates.older_than(candidates.old), key=lambda i: (-candidates.ages[i], i), reverse=True)
    longest = sorted(range(len(lengths)), key=lambda i: (lengths[i], -i))
    must = len(candidates.older_than(candidates.overdue))
    waiting = dict.fromkeys(range(len(lengths)))
    enough = 0 if final else len(lengths) - max(len(lengths) // 4, 1)
    rows: Groups = []
    while len(waiting) > enough or must > 0:
        seeds = old or longest
        seed = seeds.pop()
        if seed not in waiting:
            continue
        row = candidates.row_of(seed, list(waiting))
        rows.append(row)
        for i in row:
            del waiting[i]
            must -= candidates.ages[i] >= candidates.overdue
    return rows


def fullest_half(candidates: Candidates, pack: Pack, *, final: bool) -> Groups:
    """The fullest half of the rows that a packer makes; a quarter of a small buffer's; all where ``final``.

    Sources over the age limit get rows of their own first, filled with the best of the others.
    """
    lengths = candidates.lengths
    old = candidates.older_than(candidates.old)
    # The old ones first also in the rows of each other.
    waiting = dict.fromkeys(sorted(old, key=lambda i: (-lengths[i], i)))
    waiting |= dict.fromkeys(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)))
    rows: Groups = []
    for seed in [*waiting][: len(old)]:
        if seed in waiting:
            rows.append(candidates.row_of(seed, list(waiting)))
            for i in rows[-1]:
                del waiting[i]
    for apart in candidates.by_key(sorted(waiting)):
        rows += [[apart[i] for i in row] for row in pack([lengths[i] for i in apart])]
    if final:
        return rows
    forced = set(candidates.older_than(candidates.overdue))
    rows.sort(key=lambda row: -sum(lengths[i] for i in row))
    leaving = max(len(rows) // (2 if len(lengths) >= _MANY else 4), 1)
    return rows[:leaving] + [row for row in rows[leaving:] if not forced.isdisjoint(row)]


def closed_rows(candidates: Candidates, pack: Pack, *, final: bool) -> Groups:
    """The rows that a packer makes in order of arrival, but for the last one of each key, which may still grow.

    Where nothing is closed the open row leaves, so that the buffer never stands still.
    """
    forced = set(candidates.older_than(candidates.overdue))
    rows: Groups = []
    open_rows: Groups = []
    for apart in candidates.by_key(range(len(candidates.lengths))):
        *closed, last = [[apart[i] for i in row] for row in pack([candidates.lengths[i] for i in apart])]
        rows += closed
        (rows if final or not forced.isdisjoint(last) else open_rows).append(last)
    return rows or open_rows[:1]


@register_packer("exact_fill")
def _exact_fill(lengths: Sequence[int], capacity: int, *, max_sources: int | None = None) -> Groups:
    """:func:`exact_fill` of all sources, read through a buffer of :data:`_WHOLE_LIST`."""
    never = float("inf")
    rows: Groups = []
    buffer: list[int] = []
    read = 0
    while buffer or read < len(lengths):
        more = min(_WHOLE_LIST - len(buffer), len(lengths) - read)
        buffer += range(read, read + more)
        read += more
        none = [0] * len(buffer)
        candidates = Candidates(
            lengths=[lengths[i] for i in buffer],
            ages=none,
            keys=none,
            old=never,
            overdue=never,
            capacity=capacity,
            max_sources=max_sources,
        )
        leaving = exact_fill(candidates, final=read == len(lengths))
        rows += [[buffer[i] for i in row] for row in leaving]
        gone = {i for row in leaving for i in row}
        buffer = [source for i, source in enumerate(buffer) if i not in gone]
    return rows
