"""Minimum bin slack: fill each bin as full as the sources allow, by exact subset sums.

A set of sums is one Python integer, the bit of each room that a choice of sources leaves. One more source is a shift to the
right: rooms below zero fall off the end, and bit 0 says that the room can be filled exactly.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import gcd, isqrt

from lightning_pack.binning.limits import fitting, most_sources, whole
from lightning_pack.binning.registry import Groups, register_packer
from lightning_pack.binning.remaining import Pattern, Remaining

#: Rooms from which on, in tokens, it pays to look for a common divisor of a few lengths.
_WIDE = 1 << 14


@register_packer("minimum_bin_slack")
def minimum_bin_slack(lengths: Sequence[int], capacity: int, *, max_sources: int | None = None) -> Groups:
    """The longest remaining source, and of the others those that fill the rest of its bin best; then the next bin.

    Short sources are spared for later bins, which need them to be filled; of equal lengths the source that arrived first is
    taken first. When a bin is chosen, bins of the same lengths are filled as often as there are sources for.

    >>> minimum_bin_slack([6, 5, 4, 3, 2], 10)
    [[0, 2], [1, 3, 4]]
    """
    values = fitting(lengths, capacity)
    most = most_sources(max_sources)
    remaining = Remaining(values)
    # Aligned lengths have a common divisor, and sums of less of it are as good.
    unit = gcd(*remaining.lengths) or 1
    capacity -= capacity % unit
    search = _Search(remaining, capacity, unit)
    groups: Groups = []
    while remaining:
        seed = remaining.lengths[-1]
        pattern: Pattern = [(seed, 1)]
        room = capacity - seed
        if most > 1 and room >= remaining.lengths[0]:
            pattern = _joined(seed, search.fill(seed, room, most - 1))
        groups += remaining.take_bins(pattern)
        search.taken(pattern)
    return groups


def _joined(seed: int, others: Pattern) -> Pattern:
    if others and others[0][0] == seed:
        return [(seed, others[0][1] + 1), *others[1:]]
    return [(seed, 1), *others]


class _Search:
    """Finds the sources that fill a room best, as a pattern with the longest first. All in units of ``unit`` tokens."""

    def __init__(self, remaining: Remaining, capacity: int, unit: int) -> None:
        self._remaining = remaining
        self._unit = unit
        self._capacity = capacity // unit
        #: Bit n: a source of n units remains. And mirrored, bit capacity - n, so that a shift and an "and" find all pairs.
        self._there = self._mirrored = 0
        for length in remaining.lengths:
            self._there |= 1 << length // unit
            self._mirrored |= 1 << self._capacity - length // unit

    def taken(self, pattern: Pattern) -> None:
        """Forget the lengths of which no source remains."""
        for length, _ in pattern:
            if length not in self._remaining:
                self._there ^= 1 << length // self._unit
                self._mirrored ^= 1 << self._capacity - length // self._unit

    def fill(self, seed: int, room: int, most: int) -> Pattern:
        """At most ``most`` of the remaining sources, but for one of length ``seed``, that leave the least of ``room``.

        Of the choices that fill it exactly, the one whose shortest source is the longest.
        """
        if longest := self._longest(seed, room, most):
            return longest
        if most > 1 and (pair := self._pair(seed, room)):
            return pair
        room //= self._unit
        chunks: Pattern = []
        used = _any_number(self._weights(seed, room, most, chunks), room)
        if sum(chunks[at][1] for at in used) > most:
            chunks = []
            weights = list(self._weights(seed, room, most, chunks))
            used = _at_most(weights, room, [each for _, each in chunks], most)
        counts: dict[int, int] = {}
        for at in used:
            length, each = chunks[at]
            counts[length] = counts.get(length, 0) + each
        return list(counts.items())

    def _longest(self, seed: int, room: int, most: int) -> Pattern:
        # The longest sources that are no longer than the room, if there is room for all of them: nothing fills it better.
        pattern: Pattern = []
        lengths = self._remaining.lengths
        for at in reversed(range(bisect_right(lengths, room))):
            length = lengths[at]
            each = min(self._remaining.count(length) - (length == seed), most)
            room -= each * length
            most -= each
            if room < 0:
                return []
            if each:
                pattern.append((length, each))
            if not most:
                break
        return pattern

    def _weights(self, seed: int, room: int, most: int, chunks: Pattern) -> Iterator[int]:
        # Longest first. Chunks of one length add up to any number of it; each is noted when it is asked for.
        remaining, unit = self._remaining, self._unit
        lengths = remaining.lengths
        for at in reversed(range(bisect_right(lengths, room * unit))):
            length = lengths[at]
            weight = length // unit
            count = min(remaining.count(length) - (length == seed), room // weight, most)
            each = 1
            while count > 0:
                each = min(each, count)
                chunks.append((length, each))
                yield weight * each
                count -= each
                each *= 2

    def _pair(self, seed: int, room: int) -> Pattern:
        # The most even pair that fills the room. If its shorter source takes a third of the room, no three do better.
        room //= self._unit
        half = -(-room // 2)
        pairs = (self._there & self._mirrored >> self._capacity - room) >> half
        while pairs:
            over = (pairs & -pairs).bit_length() - 1
            longer, shorter = half + over, room - half - over
            if 3 * shorter < room:
                break
            longer, shorter = longer * self._unit, shorter * self._unit
            counts = [self._remaining.count(length) - (length == seed) for length in (longer, shorter)]
            if longer == shorter and counts[0] > 1:
                return [(longer, 2)]
            if longer != shorter and all(counts):
                return [(longer, 1), (shorter, 1)]
            pairs ^= 1 << over
        return []


def fullest(lengths: Sequence[int], room: int, *, most: int | None = None) -> list[int]:
    """The sources that fill a room best, early ones preferred.

    Sources are considered in their order until some of them fill the room exactly, so that none after those is looked at;
    and of the choices that are equally full, the one that needs no later source than it must is taken.

    Args:
        lengths: of the sources, in tokens.
        room: in tokens.
        most: how many sources may be taken; None for any number.

    Returns:
        Their indices, ascending: of all subsets of at most ``most`` sources, none has a greater sum within ``room``.

    Raises:
        ValueError: for a source without tokens, or limits below zero.

    Example:
        >>> fullest([6, 5, 4, 3, 2], 9)
        [1, 2]
    """
    room = whole("room", room, least=0)
    limit = sys.maxsize if most is None else whole("most", most, least=0)
    values: list[int] = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
    if values and min(values) < 1:
        index = next(i for i, n in enumerate(values) if n < 1)
        raise ValueError(f"source {index} has {values[index]} tokens; a source without tokens cannot be packed")
    # Aligned lengths have a common divisor, which makes a wide room a narrow one.
    unit = (gcd(*values) or 1) if room > _WIDE else 1
    room //= unit
    if unit > 1:
        values = [length // unit for length in values]
    if not room or not limit:
        return []
    if limit < len(values):
        longest = sorted((at for at, n in enumerate(values) if n <= room), key=values.__getitem__, reverse=True)[:limit]
        if sum(values[at] for at in longest) <= room:
            return sorted(longest)
    chosen = _any_number(values, room)
    return chosen if len(chosen) <= limit else _at_most(values, room, [1] * len(values), limit)


def _any_number(lengths: Iterable[int], room: int) -> list[int]:
    sums = 1 << room
    before = []
    looked_at = []
    for length in lengths:
        before.append(sums)
        looked_at.append(length)
        sums |= sums >> length
        if sums & 1:
            break
    left = (sums & -sums).bit_length() - 1
    used = []
    for at in reversed(range(len(before))):
        if not before[at] >> left & 1:
            used.append(at)
            left += looked_at[at]
    return used[::-1]


def _at_most(lengths: list[int], room: int, sources: list[int], most: int) -> list[int]:
    # One layer of bits for each number of sources that may still be taken. All layers have their bit at the start, so the
    # lowest layer ends with what at most so many sources leave. The upper half of a layer is what falls off the layer above
    # it, and is cleared.
    layer = 2 * (room + 1)
    ones = (1 << room + 1) - 1
    lowest = 1
    for _ in range(most):
        lowest = lowest << layer | 1
    clear = lowest * ones
    steps = [(at, count * layer + lengths[at]) for at, count in enumerate(sources) if lengths[at] <= room]
    # Sums are large here: some are kept, from which those between are found again.
    block = max(isqrt(len(steps)), 1)
    kept = []
    sums = lowest << room
    for number, (_, step) in enumerate(steps):
        if number % block == 0:
            kept.append(sums)
        sums |= sums >> step & clear
        if sums & 1:
            del steps[number + 1 :]
            break
    at_bit = (sums & -sums).bit_length() - 1
    used = []
    while kept:
        before = [kept.pop()]
        part = steps[len(kept) * block :]
        del steps[len(kept) * block :]
        for _, step in part[:-1]:
            before.append(before[-1] | before[-1] >> step & clear)
        for (at, step), sums in zip(reversed(part), reversed(before), strict=True):
            if not sums >> at_bit & 1:
                used.append(at)
                at_bit += step
    return used[::-1]
