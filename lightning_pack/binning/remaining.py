"""The sources that are not packed yet, by length."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence

from lightning_pack.binning.registry import Groups

#: What one bin holds: lengths, and how many sources of each, in the order in which they are placed.
Pattern = list[tuple[int, int]]


def by_length(lengths: Sequence[int]) -> dict[int, list[int]]:
    """Indices of the sources of each length, in order of arrival."""
    indices: defaultdict[int, list[int]] = defaultdict(list)
    for index, length in enumerate(lengths):
        indices[length].append(index)
    return indices


class Remaining:
    """Sources that are not packed yet; of equal lengths the one that arrived first is taken first.

    Args:
        lengths: of all sources, in tokens.
        last_first: of equal lengths take the one that arrived last instead.

    Attributes:
        lengths: distinct lengths that remain, ascending.
    """

    def __init__(self, lengths: Sequence[int], *, last_first: bool = False) -> None:
        self._indices = by_length(lengths)
        self.lengths = sorted(self._indices)
        # Sources are taken from the end.
        if not last_first:
            for indices in self._indices.values():
                indices.reverse()

    def __bool__(self) -> bool:
        return bool(self.lengths)

    def __contains__(self, length: object) -> bool:
        return length in self._indices

    def count(self, length: int) -> int:
        """How many sources of this length remain."""
        return len(self._indices.get(length, ()))

    def largest(self, limit: int) -> int:
        """The greatest remaining length that is at most ``limit``, 0 if there is none."""
        at = bisect_right(self.lengths, limit)
        return self.lengths[at - 1] if at else 0

    def smallest(self, limit: int) -> int:
        """The least remaining length that is at least ``limit``, 0 if there is none."""
        at = bisect_left(self.lengths, limit)
        return self.lengths[at] if at < len(self.lengths) else 0

    def take(self, length: int) -> int:
        """Take one source of this length: its index."""
        indices = self._indices[length]
        index = indices.pop()
        if not indices:
            self._forget(length)
        return index

    def take_bins(self, pattern: Pattern) -> Groups:
        """Fill bins of this pattern, as many as there are sources for: at least one."""
        if len(pattern) == 1 and pattern[0][1] == 1:
            length = pattern[0][0]
            groups = [[index] for index in reversed(self._indices[length])]
            self._forget(length)
            return groups
        groups = [[] for _ in range(min(len(self._indices[length]) // each for length, each in pattern))]
        for length, each in pattern:
            indices = self._indices[length]
            if each == 1:
                for group in groups:
                    group.append(indices.pop())
            else:
                for group in groups:
                    group += indices[: -each - 1 : -1]
                    del indices[-each:]
            if not indices:
                self._forget(length)
        return groups

    def _forget(self, length: int) -> None:
        del self._indices[length]
        del self.lengths[bisect_left(self.lengths, length)]
