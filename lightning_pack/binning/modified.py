"""Modified first fit decreasing, after Johnson and Garey (1985): at most 71/60 of the fewest bins."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pack.binning.fit import largest_that_fits
from lightning_pack.binning.limits import fitting, most_sources
from lightning_pack.binning.registry import Groups, register_packer
from lightning_pack.binning.remaining import Remaining


@register_packer("modified_first_fit_decreasing")
def modified_first_fit_decreasing(lengths: Sequence[int], capacity: int, *, max_sources: int | None = None) -> Groups:
    """One bin for each large source, then what goes best with it; the rest by first fit, longest first.

    Sources are large above 1/2 of the capacity, medium above 1/3, small above 1/6. The bins of the large ones, longest first,
    get the largest medium one that fits; then, from the last bin on, those without a medium one the smallest small one and the
    largest small one that fits beside it; then, from the first bin on, whatever is the largest that fits, until nothing does.
    Of equal lengths the source that arrived first is taken first.

    >>> modified_first_fit_decreasing([6, 4, 3, 3, 2, 2], 10)
    [[0, 1], [2, 3, 4, 5]]
    """
    remaining = Remaining(fitting(lengths, capacity))
    most = most_sources(max_sources)
    groups: Groups = []
    rooms: list[int] = []

    def place(chosen: int, length: int) -> None:
        groups[chosen].append(remaining.take(length))
        rooms[chosen] -= length

    while length := remaining.largest(capacity):
        if 2 * length <= capacity:
            break
        groups.append([])
        rooms.append(capacity)
        place(len(groups) - 1, length)
    if most > 1:
        for chosen, room in enumerate(rooms):
            if 3 * (length := remaining.largest(room)) > capacity:
                place(chosen, length)
    if most > 2:
        _pair_small(remaining, capacity, groups, rooms)
    for chosen in range(len(groups)):
        while len(groups[chosen]) < most and (length := remaining.largest(rooms[chosen])):
            place(chosen, length)
    return groups + largest_that_fits(remaining, capacity, most=most)


def _pair_small(remaining: Remaining, capacity: int, groups: Groups, rooms: list[int]) -> None:
    for chosen in reversed(range(len(groups))):
        if len(groups[chosen]) > 1:
            continue
        first = remaining.smallest(capacity // 6 + 1)
        second = remaining.largest(rooms[chosen] - first)
        if not first or 6 * second <= capacity or (first == second and remaining.count(first) == 1):
            # No two small sources fit, and the bins before this one have less room still.
            return
        groups[chosen] += [remaining.take(first), remaining.take(second)]
        rooms[chosen] -= first + second
