"""Packers that fill one bin after the other, or all of them evenly."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from lightning_pack.binning.fit import largest_that_fits
from lightning_pack.binning.limits import fitting, most_sources, whole
from lightning_pack.binning.registry import Groups, register_packer
from lightning_pack.binning.remaining import Remaining


@register_packer("greedy_knapsack")
def greedy_knapsack(lengths: Sequence[int], capacity: int, *, max_sources: int | None = None) -> Groups:
    """The largest remaining source that fits the open bin (equal lengths: arrival), until none does; then the next bin.

    >>> greedy_knapsack([6, 5, 4, 3, 2], 10)
    [[0, 2], [1, 3, 4]]
    """
    return largest_that_fits(Remaining(fitting(lengths, capacity)), capacity, most=most_sources(max_sources))


@register_packer("balanced_greedy_knapsack")
def balanced_greedy_knapsack(
    lengths: Sequence[int], capacity: int, *, delta: int = 0, max_sources: int | None = None
) -> Groups:
    """Longest first (equal lengths: arrival), each into the least filled bin (equally filled: the lowest).

    As many bins are opened at first as all sources together need if they can be cut (and as ``max_sources`` needs), and
    ``delta`` more. Where a source does not fit the least filled bin, a new one is opened. Bins that stay empty are left out.

    >>> balanced_greedy_knapsack([4, 4, 4, 4], 8)
    [[0, 2], [1, 3]]
    """
    values = fitting(lengths, capacity)
    most = most_sources(max_sources)
    opened = max(-(-sum(values) // capacity), -(-len(values) // most)) + whole("delta", delta, least=0)
    groups: Groups = [[] for _ in range(min(opened, len(values)))]
    loads = [(0, number) for number in range(len(groups))]
    for index in sorted(range(len(values)), key=values.__getitem__, reverse=True):
        if loads and loads[0][0] + values[index] <= capacity:
            load, chosen = heappop(loads)
        else:
            load, chosen = 0, len(groups)
            groups.append([])
        groups[chosen].append(index)
        if len(groups[chosen]) < most:
            heappush(loads, (load + values[index], chosen))
    return [group for group in groups if group]
