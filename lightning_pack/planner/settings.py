"""A plan for programs: the configuration it recommends, and its figures as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import yaml

from lightning_pack.planner.capacities import CapacityChoice
from lightning_pack.planner.combination import Combination
from lightning_pack.policy import PackingPolicy
from lightning_pack.prepare.result import LengthStatistics

if TYPE_CHECKING:
    from lightning_pack.planner.result import Plan

#: Of :func:`document`.
VERSION = 1
#: Settings that a configuration names even where they are the defaults.
_NAMED = ("capacity", "algorithm", "buffer_size", "carry_over", "multiple", "overlength", "balance")


def settings(policy: PackingPolicy) -> dict[str, Any]:
    """The keyword arguments that make this policy: those that matter most, and those that are not the defaults."""
    defaults = {each.name: each.default for each in fields(policy)}
    given = {name: value for name, value in asdict(policy).items() if name in _NAMED or value != defaults[name]}
    return dict(sorted(given.items(), key=lambda item: list(defaults).index(item[0])))


def block(plan: Plan) -> str:
    """The recommended policy as YAML, with its place in a configuration of ``fit``."""
    given = {"group_by": plan.sources.group_by, "vision": plan.sources.vision}
    kinds = {name: value for name, value in given.items() if value is not None}
    return yaml.safe_dump({"data": {**kinds, "packing": settings(plan.policy)}}, sort_keys=False)


def document(plan: Plan) -> dict[str, Any]:
    """Plain values; shares are 0 to 1, lengths in tokens, ages in turnovers of the buffer, memory in bytes per worker.

    Memory is estimated, but for ``measured_memory``.
    """
    lengths = LengthStatistics.of(plan.sources.lengths)
    recommendation = plan.recommendation
    return {
        "version": VERSION,
        "sources": {
            "name": plan.sources.name,
            "count": lengths.count,
            "tokens": lengths.total,
            "median": lengths.median,
            "p95": lengths.p95,
            "longest": lengths.longest,
            "whole": plan.sources.whole,
            "left_out": {gone.reason: gone.sources for gone in plan.sources.left_out},
        },
        "media": None if recommendation.combination.media is None else asdict(recommendation.combination.media),
        "measured_memory": None if plan.memory is None else asdict(plan.memory),
        "workers": plan.workers,
        "ranks": plan.ranks,
        "combinations": [_combination(each) for each in plan.combinations],
        "capacities": [_capacity(each) for each in plan.capacities],
        "balance": None if plan.balance is None else asdict(plan.balance),
        "recommendation": {
            "packing": settings(plan.policy),
            "reason": recommendation.reason,
            "remarks": list(recommendation.remarks),
            **_figures(recommendation.combination),
        },
    }


def _combination(each: Combination) -> dict[str, Any]:
    chosen = {name: getattr(each.policy, name) for name in ("algorithm", "carry_over", "buffer_size")}
    return {**chosen, **_figures(each)}


def _capacity(each: CapacityChoice) -> dict[str, Any]:
    return {
        "capacity": each.capacity,
        "packs_per_step": each.packs_per_step,
        "sources_per_step": each.sources_per_step,
        "squares_per_token": each.squares_per_token,
        **_combination(each.combination),
    }


def _figures(each: Combination) -> Mapping[str, float]:
    return {
        "packs": each.packs,
        "lower_bound": each.bound,
        "fill": each.fill,
        "gap_to_bound": each.gap,
        "tail": each.tail,
        "alignment": each.alignment,
        "overlength_tokens": each.overlength.lost,
        "overlength_sources": each.overlength.over,
        "oldest": each.oldest,
        "rank_imbalance": each.imbalance,
        "memory": each.memory,
    }
