"""Limits on the media of a pack: groups that were made by tokens alone are cut down until their images fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_pack.binning import Groups


class MediaCost(NamedTuple):
    """What the media of one source cost: placeholders, bytes of their tensors, and bytes that are held until these are made."""

    tokens: int = 0
    nbytes: int = 0
    held: int = 0


@dataclass(frozen=True, kw_only=True)
class MediaBudget:
    """Most media of one pack; None is no limit.

    Args:
        tokens: placeholders.
        nbytes: of the tensors.
    """

    tokens: int | None = None
    nbytes: int | None = None

    @property
    def limits(self) -> bool:
        """Whether there is a limit."""
        return (self.tokens, self.nbytes) != (None, None)

    def allows(self, tokens: int, nbytes: int) -> bool:
        """Whether so much fits in a pack."""
        return tokens <= _limit(self.tokens) and nbytes <= _limit(self.nbytes)


def within_budget(
    groups: Groups, *, budget: MediaBudget, costs: Sequence[tuple[int, int]], must_leave: Sequence[bool], in_order: bool
) -> Groups:
    """The groups, each within the budget.

    What is too much for a group stays in the buffer. A source that must leave gets another group of such sources.

    Args:
        groups: of indices.
        budget: of each group.
        costs: tokens and bytes of the media of each source; none is beyond the budget alone.
        must_leave: whether a source may not stay; those come first in their group.
        in_order: whether the order of arrival is kept: a group is then cut in pieces one behind the other, which all leave.
    """
    found: Groups = []
    for group in groups:
        order = group if in_order else sorted(group, key=lambda i: not must_leave[i])
        pieces: list[_Piece] = [_Piece(budget)]
        for i in order:
            if pieces[0 if not in_order else -1].take(i, costs[i]):
                continue
            if not in_order and not must_leave[i]:
                continue
            if in_order or not any(piece.take(i, costs[i]) for piece in pieces[1:]):
                pieces.append(_Piece(budget))
                pieces[-1].take(i, costs[i])
        place = {i: number for number, i in enumerate(group)}
        found += [sorted(piece.indices, key=place.__getitem__) for piece in pieces]
    return found


class _Piece:
    def __init__(self, budget: MediaBudget) -> None:
        self._budget = budget
        self._tokens = self._nbytes = 0
        self.indices: list[int] = []

    def take(self, index: int, cost: tuple[int, int]) -> bool:
        """Add a source if it fits."""
        tokens, nbytes = self._tokens + cost[0], self._nbytes + cost[1]
        if not self._budget.allows(tokens, nbytes):
            return False
        self._tokens, self._nbytes = tokens, nbytes
        self.indices.append(index)
        return True


def _limit(value: int | None) -> float:
    return float("inf") if value is None else value
