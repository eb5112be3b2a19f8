"""Which of the combinations to take, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from lightning_pack.planner.balance import RankBalance
from lightning_pack.planner.combination import Combination
from lightning_pack.planner.sources import Sources
from lightning_pack.policy import AUTO, PackingPolicy

#: A smaller buffer is taken where its fill is at most so far below the best one.
FILL_MARGIN = 0.002
#: From this mean of max/mean of the work of ranks on, balance is recommended.
UNEQUAL = 1.2
#: A larger share of lost tokens is warned of.
TOO_MUCH_LOST = 0.01
#: Capacities that are proposed are multiples of this, and of the policy's own.
_ROUND = 64


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """One policy.

    Args:
        combination: its figures.
        reason: why this algorithm and buffer, in a sentence.
        remarks: what else to know.
    """

    combination: Combination
    reason: str
    remarks: tuple[str, ...] = ()

    @property
    def policy(self) -> PackingPolicy:
        """The packing rules."""
        return self.combination.policy


def settled(combinations: Sequence[Combination]) -> list[Combination]:
    """For each buffer size what ``algorithm="auto"`` would be, had it seen all these sources; smallest buffer first."""
    by_size: dict[int, list[Combination]] = {}
    for each in combinations:
        if each.policy.algorithm in AUTO and each.policy.carry_over:
            by_size.setdefault(each.policy.buffer_size, []).append(each)
    return [min(by_size[size], key=lambda each: (each.packs, AUTO.index(each.policy.algorithm))) for size in sorted(by_size)]


def recommended(
    sources: Sources,
    combinations: Sequence[Combination],
    *,
    balance: RankBalance | None,
    chosen: Combination,
    workers: int,
    ranks: int,
) -> Recommendation:
    """The chosen combination, with balance where ranks need it, and everything that speaks for it.

    Args:
        sources: what was packed.
        combinations: all that were measured.
        balance: the work of the ranks under the chosen one, where there are several.
        chosen: that of :func:`smallest_sufficient`.
        workers: loader workers of a rank.
        ranks: data-parallel ranks.
    """
    reason, remarks = _reason(combinations, chosen), []
    if balance is not None:
        balanced = replace(chosen, policy=replace(chosen.policy, balance="quadratic"))
        (equal,) = [each.imbalance for each in balance.windows if each.window == balanced.policy.window_size]
        unequal = f"the busiest of {ranks} ranks has {balance.unbalanced:.2f} times the mean attention work of a step"
        if balance.unbalanced > UNEQUAL:
            chosen = balanced
            remarks.append(f"{unequal}; balance='quadratic' makes that {equal:.2f}")
        else:
            remarks.append(f"{unequal}, which needs no balance")
    policy = chosen.policy
    lost = chosen.overlength.lost
    if lost > TOO_MUCH_LOST:
        enough = sources.sufficient(policy, lost=TOO_MUCH_LOST, step=lcm(policy.multiple, _ROUND))
        remarks.append(
            f"at capacity {policy.capacity:,} overlength={policy.overlength!r} loses {lost:.1%} of the tokens; from capacity "
            f"{enough:,} on it would be at most {TOO_MUCH_LOST:.0%}"
        )
    held = policy.buffer_size * workers * ranks
    if sources.whole and held > len(sources.lengths):
        remarks.append(
            f"there are only {len(sources.lengths):,} sources, fewer than the {held:,} that the buffers of {ranks} x {workers} "
            "loader workers hold, so a buffer may hold a source more than once"
        )
    return Recommendation(combination=chosen, reason=reason, remarks=tuple(remarks))


def smallest_sufficient(combinations: Sequence[Combination]) -> Combination:
    """Of what ``"auto"`` chooses, the smallest buffer that is within :data:`FILL_MARGIN` of the best fill."""
    candidates = settled(combinations)
    best = max(each.fill for each in candidates)
    return next(each for each in candidates if each.fill >= best - FILL_MARGIN)


def _reason(combinations: Sequence[Combination], chosen: Combination) -> str:
    size = chosen.policy.buffer_size
    text = f"a buffer of {size:,} sources fills {chosen.fill:.2%} of the slots"
    others = settled(combinations)
    smaller = [each.fill for each in others if each.policy.buffer_size < size]
    larger = [each.fill for each in others if each.policy.buffer_size > size]
    if smaller:
        text += f", {100 * (chosen.fill - max(smaller)):.2f} points more than a smaller one"
    if larger:
        gain = f"{100 * (max(larger) - chosen.fill):.2f} points" if max(larger) - chosen.fill >= 5e-5 else "nothing"
        text += f"; a larger one gains {gain}, needs more memory and resumes slower"
    (other,) = [
        each
        for each in combinations
        if each.policy.algorithm in AUTO and each.policy.algorithm != chosen.policy.algorithm
        if each.policy.buffer_size == size and each.policy.carry_over
    ]
    if other.packs == chosen.packs:
        return f"{text}; {chosen.policy.algorithm} and {other.policy.algorithm} need equally many packs there"
    return f"{text}; {chosen.policy.algorithm} needs {chosen.packs:,} packs there, {other.policy.algorithm} {other.packs:,}"
