"""More bins than the packer made, as full as the others can spare."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from lightning_pack.binning.limits import most_sources, whole
from lightning_pack.binning.registry import Groups

#: The least filled bin is left as it is from this share of the mean on.
_EVEN = 0.95
#: Most sources that are looked at, over all moves.
_LOOKS = 200_000_000


def with_bin_count(
    groups: Groups,
    lengths: Sequence[int],
    *,
    min_bins: int | None = None,
    bins_multiple_of: int = 1,
    max_sources: int | None = None,
) -> Groups:
    """At least ``min_bins`` bins, and a multiple of ``bins_multiple_of``, by moving sources into new bins.

    Where no bin is missing, the groups stay as they are. Otherwise those bins are split in two whose smaller half is the
    largest, and then single sources are moved to the least filled bin until it is nearly as full as the mean, or no move
    helps; it then holds at least half of what the most even packing could give it. (With ``max_sources``, or where tens of
    thousands of sources need thousands of new bins, it may be less.) New bins come last, none is empty.

    Args:
        groups: of a packer.
        lengths: of all sources, in tokens.
        min_bins: fewest bins; None for no such limit.
        bins_multiple_of: what the number of bins must be a multiple of.
        max_sources: most sources in a bin.

    Raises:
        ValueError: if there are fewer sources than bins are needed.
    """
    multiple = whole("bins_multiple_of", bins_multiple_of, least=1)
    fewest = 0 if min_bins is None else whole("min_bins", min_bins, least=1)
    most = most_sources(max_sources)
    needed = -(-max(len(groups), fewest) // multiple) * multiple
    if needed == len(groups):
        return groups
    count = sum(map(len, groups))
    if count < needed:
        raise ValueError(
            f"{count} sources cannot make {needed} bins (the packer made {len(groups)}, min_bins={min_bins}, "
            f"bins_multiple_of={multiple}): pack more sources at once, or lower min_bins or bins_multiple_of"
        )
    groups = [list(group) for group in groups]
    _split(groups, lengths, needed)
    _even_out(groups, lengths, most=most)
    return groups


def _split(groups: Groups, lengths: Sequence[int], needed: int) -> None:
    # Of the bins, the one is split whose smaller half is the largest.
    halves = {number: _halves(group, lengths) for number, group in enumerate(groups) if len(group) > 1}
    largest = [(-halved[0], number) for number, halved in halves.items()]
    heapify(largest)
    while len(groups) < needed:
        _, number = heappop(largest)
        _, groups[number], other = halves[number]
        groups.append(other)
        for at in (number, len(groups) - 1):
            if len(groups[at]) > 1:
                halves[at] = _halves(groups[at], lengths)
                heappush(largest, (-halves[at][0], at))


def _halves(group: list[int], lengths: Sequence[int]) -> tuple[int, list[int], list[int]]:
    """What the smaller half holds, in tokens, and both."""
    halves: Groups = [[], []]
    loads = [0, 0]
    for index in sorted(group, key=lengths.__getitem__, reverse=True):
        side = int(loads[1] < loads[0])
        halves[side].append(index)
        loads[side] += lengths[index]
    return min(loads), halves[0], halves[1]


def _even_out(groups: Groups, lengths: Sequence[int], *, most: int) -> None:
    sources = np.fromiter((i for group in groups for i in group), dtype=np.int64)
    size = np.asarray(lengths, dtype=np.int64)[sources]
    held = np.array([len(group) for group in groups])
    home = np.repeat(np.arange(len(groups)), held)
    loads = np.array([sum(lengths[i] for i in group) for group in groups])
    # Bins that hold as many sources as they may, and which no exchange fills better.
    settled = np.zeros(len(groups), dtype=bool)
    enough = _EVEN * loads.mean()
    for _ in range(max(_LOOKS // len(sources), 1)):
        low = int(np.where(settled, loads.max(), loads).argmin())
        load = int(loads[low])
        if settled[low] or load >= enough:
            return
        back = None
        moved = size
        if held[low] >= most:
            # There is no place, so the least source goes back in exchange.
            own = np.flatnonzero(home == low)
            back = int(own[size[own].argmin()])
            moved = size - size[back]
        gain = np.minimum(loads[home] - moved, load + moved)
        best = int(np.where(home == low, 0, gain).argmax())
        giver = int(home[best])
        if home[best] == low or gain[best] <= load:
            # What does not help the least filled bin helps no fuller one, unless this one was short of places.
            if back is None:
                return
            settled[low] = True
            continue
        _move(groups, int(sources[best]), giver, low)
        home[best] = low
        if back is None:
            held[low] += 1
            held[giver] -= 1
        else:
            _move(groups, int(sources[back]), low, giver)
            home[back] = giver
        loads[giver] -= moved[best]
        loads[low] += moved[best]


def _move(groups: Groups, index: int, giver: int, taker: int) -> None:
    groups[giver].remove(index)
    groups[taker].append(index)
