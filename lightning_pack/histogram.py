"""Histograms of whole numbers that add up: how long sources waited, how long they are, and the fewest packs that can hold them.

Both have bins that never change, so histograms of ranks are summed, those of a resumed run are added to, and the difference of
two moments is the histogram of what came between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Upper edges of the bins of ages in eighths of a turnover: zero, each eighth to 8 turnovers, each doubling to 1024.
AGE_EDGES = np.array([*range(65), *(64 << i for i in range(1, 8))], dtype=np.int64)
#: The last bin has no upper edge.
AGE_BINS = len(AGE_EDGES) + 1
#: Bins of aligned lengths, each 1/64 of the capacity wide.
LENGTH_BINS = 64
#: How many numbers :func:`add_lengths` keeps.
LENGTH_COUNTS = 1 + 2 * LENGTH_BINS
_HALF = LENGTH_BINS // 2


def age_counts(ages: Sequence[int], *, buffer_size: int) -> np.ndarray:
    """Numbers of ages by bin.

    Args:
        ages: how many sources were read after a source before its pack was chosen; ``buffer_size`` of them are one turnover.
        buffer_size: of the policy, in sources.

    Returns:
        int64 ``[AGE_BINS]``. A bin holds the ages above the edge before it, and up to its own edge.
    """
    bins = np.searchsorted(AGE_EDGES * buffer_size, np.asarray(ages, dtype=np.int64) * 8, side="left")
    return np.bincount(bins, minlength=AGE_BINS)


def length_edges(capacity: int) -> Tensor:
    """The largest length of each bin but the last, which takes any other.

    A bin of the lower half holds the lengths from its lower edge to just below its upper one, a bin of the upper half those
    above its lower edge and up to its upper one; half of the capacity is in the lower half. With these edges the sets that
    :attr:`LengthHistogram.lower_bound` needs are known exactly.

    Args:
        capacity: of a pack, in tokens.

    Returns:
        int64 ``[LENGTH_BINS - 1]``.
    """
    below = [(bin_ * capacity - 1) // LENGTH_BINS for bin_ in range(1, _HALF)]
    up_to = [bin_ * capacity // LENGTH_BINS for bin_ in range(_HALF, LENGTH_BINS)]
    return torch.tensor(below + up_to, dtype=torch.int64)


def add_lengths(numbers: Tensor, aligned: Tensor, *, edges: Tensor) -> None:
    """Count sources and their tokens by bin; waits for no device.

    Args:
        numbers: int64 ``[LENGTH_COUNTS]``, in place: packs, which are not counted here, sources by bin, tokens by bin.
        aligned: int64 ``[N]``, tokens that sources take up in a row; those without tokens are not counted.
        edges: of :func:`length_edges`, on the same device.
    """
    bins = torch.bucketize(aligned, edges)
    numbers[1 : 1 + LENGTH_BINS].index_add_(0, bins, aligned.sign())
    numbers[1 + LENGTH_BINS :].index_add_(0, bins, aligned)


class AgeHistogram(NamedTuple):
    """How many sources waited how long for their pack, in turnovers of the buffer of a loader worker."""

    #: Sources by bin, ``[AGE_BINS]``.
    counts: tuple[int, ...]

    def percentile(self, percent: int) -> float:
        """Turnovers that at least ``percent`` of 100 sources have not exceeded: the upper edge of a bin, at most 1/8 too much.

        Above 8 turnovers edges double, and 1024 stands for any longer wait. 0 where nothing was counted.
        """
        needed = percent * sum(self.counts)
        reached = np.cumsum(np.array(self.counts, dtype=np.int64)) * 100 >= needed
        return float(AGE_EDGES[min(int(np.argmax(reached)), AGE_BINS - 2)]) / 8

    @property
    def largest(self) -> float:
        """Turnovers that no source has exceeded, with the same limits."""
        return self.percentile(100)


class LengthHistogram(NamedTuple):
    """Sources by aligned length, with the exact sum of tokens in each bin."""

    #: Tokens that a pack can hold.
    capacity: int
    #: Packs that hold these sources.
    packs: int
    #: Sources by bin, ``[LENGTH_BINS]``.
    counts: tuple[int, ...]
    #: Their aligned tokens by bin, ``[LENGTH_BINS]``.
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, numbers: Sequence[int], *, capacity: int) -> LengthHistogram:
        """The histogram of packs and of what :func:`add_lengths` counted."""
        counts, tokens = numbers[1 : 1 + LENGTH_BINS], numbers[1 + LENGTH_BINS :]
        return cls(capacity=capacity, packs=numbers[0], counts=tuple(counts), tokens=tuple(tokens))

    @property
    def lower_bound(self) -> int:
        """Packs that no packer can do without, had it all these sources before it at once.

        Martello and Toth (Lower bounds and reduction procedures for the bin packing problem, 1990): of lengths w and capacity
        C, for any a from 0 to C/2,

            L(a) = |J1| + |J2| + max(0, ceil((sum(J3) - (|J2| C - sum(J2))) / C))
            J1 = {w > C - a},  J2 = {C - a >= w > C/2},  J3 = {C/2 >= w >= a}

        since no source of J1 shares a pack with one of the others, no two of J2 share one, and what J2 leaves free is all that
        spares J3 packs of its own. The bound is the largest L(a) over the 32 edges a = 0, C/64, 2C/64, ... below C/2; L(0) is
        at least ceil(sum(w) / C). All of these are true bounds; only the best a may lie between two edges.
        """
        best = 0
        for edge in range(_HALF):
            top = LENGTH_BINS - edge
            shared = sum(self.counts[_HALF:top])
            free = shared * self.capacity - sum(self.tokens[_HALF:top])
            more = max(0, -((free - sum(self.tokens[edge:_HALF])) // self.capacity))
            best = max(best, sum(self.counts[top:]) + shared + more)
        return best

    @property
    def gap(self) -> float:
        """Packs per :attr:`lower_bound`, less 1; 0 where nothing was counted."""
        bound = self.lower_bound
        return self.packs / bound - 1 if bound else 0.0
