"""Packers: lengths and a capacity -> groups of indices.

A packer is a plain function. Every index comes out exactly once, no group is longer than the capacity, and the same lengths
always give the same groups, on every machine. Groups come in the order in which their bins were opened, sources in a group in
the order in which they were placed.

Cost, n lengths: ``concatenative`` O(n); the two ``decreasing`` packers O(n log n), in pure Python.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

Groups = list[list[int]]
Packer = Callable[[Sequence[int], int], Groups]

_PACKERS: dict[str, Packer] = {}


def register_packer(name: str) -> Callable[[Packer], Packer]:
    """Decorator that makes a packer usable as ``PackingPolicy(algorithm=name)``.

    Raises:
        ValueError: if the name is taken.
    """

    def register(packer: Packer) -> Packer:
        if name in _PACKERS:
            raise ValueError(f"a packer called {name!r} is registered already: choose another name")
        _PACKERS[name] = packer
        return packer

    return register


def packers() -> list[str]:
    """Names of all registered packers, sorted."""
    return sorted(_PACKERS)


def get_packer(name: str) -> Packer:
    """The packer registered as ``name``.

    Raises:
        ValueError: naming the registered ones, if there is none.
    """
    if name not in _PACKERS:
        raise ValueError(f"algorithm {name!r} is not known; known are {', '.join(packers())}")
    return _PACKERS[name]


@register_packer("concatenative")
def concatenative(lengths: Sequence[int], capacity: int) -> Groups:
    """Next fit in order of arrival: the bin is closed when the next source does not fit.

    >>> concatenative([4, 3, 5, 2], 8)
    [[0, 1], [2, 3]]
    """
    groups: Groups = []
    room = -1
    for index, length in enumerate(lengths):
        if length > room:
            groups.append([])
            room = capacity
        groups[-1].append(index)
        room -= length
    return groups


@register_packer("first_fit_decreasing")
def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Groups:
    """Longest first (equal lengths: larger index first), each into the oldest bin with room.

    The oldest bin is found in a tree whose nodes hold the most room in their half of the bins.

    >>> first_fit_decreasing([7, 5, 3, 9], 18)
    [[3, 0], [1, 2]]
    """
    count = len(lengths)
    leaves = 1 << max(count - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)
    groups: Groups = [[] for _ in range(count)]
    for index in sorted(range(count), key=lambda i: (-lengths[i], -i)):
        length = lengths[index]
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        groups[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [group for group in groups if group]


@register_packer("best_fit_decreasing")
def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> Groups:
    """Longest first (equal lengths: arrival), each into the fullest bin with room (equally full: the oldest).

    Bins are kept by the room they have left, so the search is one bisection over the distinct rooms.

    >>> best_fit_decreasing([6, 5, 4, 3, 2], 10)
    [[0, 2], [1, 3, 4]]
    """
    groups: Groups = []
    bins_with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, chosen = capacity, len(groups)
            groups.append([])
        else:
            room = rooms[at]
            chosen = heappop(bins_with_room[room])
            if not bins_with_room[room]:
                del bins_with_room[room], rooms[at]
        groups[chosen].append(index)
        left = room - length
        if left > 0:
            if left not in bins_with_room:
                bins_with_room[left] = []
                insort(rooms, left)
            heappush(bins_with_room[left], chosen)
    return groups


def fullest(lengths: Sequence[int], room: int, *, most: int | None = None) -> list[int]:
    reach = 1
    mask = (1 << (room + 1)) - 1
    history = []
    for length in lengths:
        history.append(reach)
        if length <= room:
            reach |= (reach << length) & mask
            if reach >> room:
                break
    best = reach.bit_length() - 1
    chosen = []
    for i in range(len(history) - 1, -1, -1):
        if best == 0:
            break
        if history[i] >> best & 1:
            continue
        chosen.append(i)
        best -= lengths[i]
    return chosen[::-1]


@register_packer("minimum_bin_slack")
def minimum_bin_slack(lengths: Sequence[int], capacity: int) -> Groups:
    rest = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups = []
    while rest:
        seed, *rest = rest
        chosen = fullest([lengths[i] for i in rest], capacity - lengths[seed])
        gone = set(chosen)
        groups.append([seed, *(rest[i] for i in chosen)])
        rest = [x for k, x in enumerate(rest) if k not in gone]
    return groups


def packer_options(name):
    return {"minimum_bin_slack": frozenset({"max_sources"})}.get(name, frozenset())


def check_options(name, options):
    get_packer(name)


def pack(lengths, capacity, *, algorithm, min_bins=None, bins_multiple_of=1, **options):
    return get_packer(algorithm)(lengths, capacity, **options)
