"""Whether this run can go on from a checkpoint's position, decided by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from lightning_pack.energon.state import StateError
from lightning_pack.energon.validity import refuse_impossible
from lightning_pack.resume import ResumeError, refuse_damaged_rank, refuse_other_settings, refuse_redistribution, topology


def problem_of(
    state: Any, *, settings: Mapping[str, Any], rank: int, counts: Collection[str], open_loader: Callable[[], Any]
) -> ValueError | None:
    """Why a rank cannot go on from a checkpoint's state, or None if it can.

    Args:
        state: the datamodule's state, or whatever else the checkpoint holds in its place.
        settings: those of this run.
        rank: data-parallel rank.
        counts: names of what a rank counts.
        open_loader: opens the rank's stream at its beginning; its workers are not started.
    """
    try:
        if refuse_other_settings(state, settings=settings) == "redistribute":
            refuse_redistribution(topology(state["settings"]), topology(settings))
        mine = state["ranks"][rank]
        refuse_damaged_rank(mine, counts=counts, where=f"ranks[{rank}]")
        if mine["loader"] is not None:
            refuse_impossible(mine["loader"], open_loader(), where=f"ranks[{rank}].loader")
    except (ResumeError, StateError) as e:
        return e
    return None


def first_problem(mine: ValueError | None) -> ValueError | None:
    """This rank's problem, or that of another: they refuse or start over together. Collective, where there are ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return mine
    everyone: list[ValueError | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return mine or next((problem for problem in everyone if problem is not None), None)
