"""Packers that put each source into a bin of those that are open: next fit, first fit, best fit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np

from lightning_pack.binning.limits import fitting, most_sources, whole
from lightning_pack.binning.registry import Groups, register_packer
from lightning_pack.binning.remaining import Pattern, Remaining, by_length

#: Fewer sources than these are packed one by one, which is faster then.
_FEW = 8_000


@register_packer("concatenative")
def concatenative(lengths: Sequence[int], capacity: int, *, max_sources: int | None = None) -> Groups:
    """Next fit in order of arrival: the bin is closed when the next source does not fit.

    >>> concatenative([4, 3, 5, 2], 8)
    [[0, 1], [2, 3]]
    """
    most = most_sources(max_sources)
    groups: Groups = []
    room = slots = 0
    for index, length in enumerate(fitting(lengths, capacity)):
        if length > room or not slots:
            groups.append([])
            room, slots = capacity, most
        groups[-1].append(index)
        room -= length
        slots -= 1
    return groups


@register_packer("first_fit_decreasing")
def first_fit_decreasing(lengths: Sequence[int], capacity: int, *, max_sources: int | None = None) -> Groups:
    """Longest first (equal lengths: larger index first), each into the oldest bin with room.

    >>> first_fit_decreasing([7, 5, 3, 9], 18)
    [[3, 0], [1, 2]]
    """
    remaining = Remaining(fitting(lengths, capacity), last_first=True)
    return largest_that_fits(remaining, capacity, most=most_sources(max_sources))


def largest_that_fits(remaining: Remaining, capacity: int, *, most: int) -> Groups:
    """Fill one bin after the other, each with the largest source that fits, again and again.

    That is first fit with the longest first: the oldest bin gets the first source that still fits it, and so on, and sources
    of one length come to the bins in order.
    """
    groups: Groups = []
    while remaining:
        room, slots = capacity, most
        pattern: Pattern = []
        while slots and (length := remaining.largest(min(room, pattern[-1][0] - 1) if pattern else room)):
            each = min(remaining.count(length), room // length, slots)
            pattern.append((length, each))
            room -= each * length
            slots -= each
        groups += remaining.take_bins(pattern)
    return groups


@register_packer("first_fit_shuffle")
def first_fit_shuffle(lengths: Sequence[int], capacity: int, *, seed: int = 0, max_sources: int | None = None) -> Groups:
    """In an order that is drawn from ``seed`` alone, each into the oldest bin with room.

    >>> first_fit_shuffle([4, 4, 8, 4], 8, seed=1) == first_fit_shuffle([4, 4, 8, 4], 8, seed=1)
    True
    """
    values = fitting(lengths, capacity)
    order = np.random.default_rng(whole("seed", seed, least=0)).permutation(len(values))
    return _first_fit(values, order.tolist(), capacity, most=most_sources(max_sources))


def _first_fit(lengths: list[int], order: Iterable[int], capacity: int, *, most: int) -> Groups:
    # The oldest bin with room is found in a tree, whose nodes hold the most room in their half of the bins. Bins without
    # any source are the leaves on the right; the tree grows when none is left.
    leaves = 1
    room = [0, capacity]
    groups: Groups = []
    for index in order:
        length = lengths[index]
        if room[1] < length:
            old, leaves = leaves, 2 * leaves
            grown = [capacity] * (2 * leaves)
            width = 1
            while width <= old:
                grown[2 * width : 3 * width] = room[width : 2 * width]
                width *= 2
            room = grown
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        at = node - leaves
        if at == len(groups):
            groups.append([])
        group = groups[at]
        group.append(index)
        left = room[node] = 0 if len(group) == most else room[node] - length
        while node > 1:
            left = max(left, room[node ^ 1])
            node //= 2
            if room[node] == left:
                break
            room[node] = left
    return groups


@register_packer("best_fit_decreasing")
def best_fit_decreasing(lengths: Sequence[int], capacity: int, *, max_sources: int | None = None) -> Groups:
    """Longest first (equal lengths: arrival), each into the fullest bin with room (equally full: the oldest).

    >>> best_fit_decreasing([6, 5, 4, 3, 2], 10)
    [[0, 2], [1, 3, 4]]
    """
    values = fitting(lengths, capacity)
    if max_sources is not None or len(values) < _FEW:
        return _best_fit(values, capacity, most=most_sources(max_sources))
    groups: Groups = []
    bins_with: dict[int, list[int]] = {}
    rooms: list[int] = []

    def leave(room: int, bins: list[int]) -> None:
        there = bins_with.get(room)
        if there is None:
            if room and bins:
                bins_with[room] = bins
                insort(rooms, room)
        elif len(bins) == 1:
            insort(there, bins[0])
        else:
            there += bins
            there.sort()

    for length, indices in sorted(by_length(values).items(), reverse=True):
        done = 0
        while done < len(indices):
            at = bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else capacity
            # A bin that got a source is the fullest one with room until nothing more of this length fits it, so bins with
            # the same room are served one after the other, each with as many sources as it holds.
            each = room // length
            needed = -((done - len(indices)) // each)
            if at == len(rooms):
                bins = list(range(len(groups), len(groups) + needed))
                groups += [indices[i : i + each] for i in range(done, len(indices), each)]
            else:
                bins = bins_with[room]
                if needed < len(bins):
                    bins_with[room] = bins[needed:]
                    bins = bins[:needed]
                else:
                    del bins_with[room], rooms[at]
                if each == 1:
                    for chosen, index in zip(bins, indices[done : done + len(bins)], strict=True):
                        groups[chosen].append(index)
                else:
                    for turn, chosen in enumerate(bins):
                        groups[chosen] += indices[done + turn * each : done + (turn + 1) * each]
            done += each * len(bins)
            if done > len(indices):
                leave(room - (each - done + len(indices)) * length, [bins.pop()])
            leave(room - each * length, bins)
    return groups


def _best_fit(lengths: list[int], capacity: int, *, most: int) -> Groups:
    # Source by source: bins with the same room may differ in how many sources they still take, and few sources have few
    # equal lengths to gain from.
    groups: Groups = []
    bins_with: dict[int, list[int]] = {}
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[index]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, chosen = capacity, len(groups)
            groups.append([])
        else:
            room = rooms[at]
            chosen = heappop(bins_with[room])
            if not bins_with[room]:
                del bins_with[room], rooms[at]
        groups[chosen].append(index)
        left = room - length
        if left and len(groups[chosen]) < most:
            if left not in bins_with:
                bins_with[left] = []
                insort(rooms, left)
            heappush(bins_with[left], chosen)
    return groups
