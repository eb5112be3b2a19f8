"""Several capacities, compared at the same number of token slots in a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_pack.planner.combination import Combination, bound_of
from lightning_pack.planner.sources import Sources
from lightning_pack.policy import AUTO, PackingPolicy


@dataclass(frozen=True, kw_only=True)
class CapacityChoice:
    """One capacity with the algorithm that packs best there.

    Args:
        combination: what a loader worker makes of the sources.
        packs_per_step: on a rank, for as many slots in a step as the largest capacity has.
        squares_per_token: sum of the squared lengths per real token: attention's part of the work of a token.
    """

    combination: Combination
    packs_per_step: float
    squares_per_token: float

    @property
    def capacity(self) -> int:
        """Of a pack, in tokens."""
        return self.combination.policy.capacity

    @property
    def sources_per_step(self) -> float:
        """Mean number of sources that a rank trains on in a step."""
        return self.packs_per_step * self.combination.sources / self.combination.packs


def around(capacity: int, *, multiple: int) -> list[int]:
    """Half of a capacity (rounded down to the multiple, left out where nothing is left), itself and twice as much."""
    half = capacity // 2 // multiple * multiple
    return [*([half] if half > 1 else []), capacity, 2 * capacity]


def compared(sources: Sources, policy: PackingPolicy, *, capacities: list[int], count: int) -> tuple[CapacityChoice, ...]:
    """Pack the same sources at each capacity; capacities into which no source fits are left out.

    Args:
        sources: what is packed.
        policy: with the other rules; the algorithm is chosen anew for each capacity.
        capacities: in tokens.
        count: sources to pack.
    """
    found = []
    for capacity in sorted(set(capacities)):
        at = replace(policy, capacity=capacity)
        if not sources.fit(at):
            continue
        stream = sources.stream(at, count=count)
        bound = bound_of(at, stream)
        best = min(
            (Combination.measured(replace(at, algorithm=name), stream, bound=bound) for name in AUTO),
            key=lambda combination: combination.packs,
        )
        found.append(
            CapacityChoice(
                combination=best,
                packs_per_step=max(capacities) / capacity,
                squares_per_token=sum(length**2 for length in stream.lengths) / sum(stream.lengths),
            )
        )
    return tuple(found)
