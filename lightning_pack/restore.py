"""Whether and where this run goes on from a checkpoint's position, decided by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_pack.energon import StreamOptions, Workers, redistribute
from lightning_pack.energon.fields import StateError, damaged
from lightning_pack.energon.validity import refuse_impossible, refuse_scattered
from lightning_pack.policy import AUTO, PackingPolicy
from lightning_pack.resume import ResumeError, refuse_damaged_rank, refuse_other_settings, refuse_redistribution
from lightning_pack.rewind import ResumePoint, SaveRefusedError
from lightning_pack.topology import topology


def problem_of(
    state: Any,
    *,
    settings: Mapping[str, Any],
    workers: Mapping[int, Workers],
    options: StreamOptions,
    epochs: int | None,
) -> ValueError | None:
    """Why some ranks cannot go on from a checkpoint's state, or None if they can.

    Args:
        state: the datamodule's state, or whatever else the checkpoint holds in its place.
        settings: those of this run.
        workers: those of each data-parallel rank that is asked about.
        options: of the stream.
        epochs: passes over the data; None is an endless stream.
    """
    damage_ok = options.on_damaged == "skip"
    try:
        now = topology(settings)
        verdict = refuse_other_settings(state, settings=settings, damage_ok=damage_ok)
        if verdict == "redistribute" and epochs is not None and len(state["ranks"]) != now.ranks:
            refuse_redistribution(topology(state["settings"]), now)
        for number, saved in enumerate(state["ranks"]):
            refuse_damaged_rank(saved, where=f"ranks[{number}]")
            try:
                if saved["point"] is not None:
                    ResumePoint.from_plain(saved["point"])
            except ValueError as e:
                raise damaged(f"ranks[{number}].point", str(e)) from e
        refuse_scattered([saved["loader"] for saved in state["ranks"]], streams=now.streams, epochs=epochs)
        for rank, its_workers in workers.items():
            mine = of_rank(state["ranks"], rank=rank, ranks=now.ranks)
            place = f"ranks[{rank}].loader"
            refuse_impossible(mine["loader"], options=options, workers=its_workers, epochs=epochs, where=place)
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


def of_rank(states: list[dict[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
    """The state for one rank, from those of all ranks of a run that dealt out its workers to perhaps other ranks.

    The rows go on exactly, the place in Lightning's loops is converted to the new number of batches per rank, and the counts,
    which are of the whole run, stay whole on one rank. Random numbers of a model go on only where the rank has had some before.
    """
    if len(states) == ranks:
        return states[rank]
    loader = redistribute([state["loader"] for state in states], rank=rank, ranks=ranks)
    counts = {name: sum(state["counts"][name] for state in states) if rank == 0 else 0 for name in states[0]["counts"]}
    random = states[rank]["random"] if rank < len(states) else None
    point = states[0]["point"]
    if point is not None:
        point = {
            name: value * len(states) // ranks if name in ("batch", "total_batches") else value for name, value in point.items()
        }
    return {"loader": loader, "counts": counts, "random": random, "point": point}


def point_of(state: Any) -> ResumePoint | None:
    """The place in Lightning's loops, if a state holds one, whatever else is wrong with it."""
    try:
        return ResumePoint.from_plain(state["ranks"][0]["point"])
    except (TypeError, LookupError, ValueError):
        return None


def settled_as(policy: PackingPolicy, settings: Any) -> PackingPolicy:
    """A policy whose algorithm is still to be chosen, with the choice that saved settings hold; any other as it is."""
    chosen = settings.get("packing.algorithm") if isinstance(settings, Mapping) else None
    return replace(policy, algorithm=chosen) if policy.algorithm == "auto" and chosen in AUTO else policy


def gather(mine: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """What each rank saves, by rank. Collective; if one cannot save, all of them say so instead of waiting for it.

    Raises:
        SaveRefusedError: naming the rank and its reason.
    """
    saved: dict[str, Any] | str
    error: Exception | None = None
    try:
        saved = mine()
    except SaveRefusedError as e:
        saved, error = str(e), e
    everyone: list[Any] = [saved]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        everyone = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, saved)
        for rank, state in enumerate(everyone):
            if isinstance(state, str) and error is None:
                error = SaveRefusedError(f"no checkpoint is saved, because of rank {rank}: {state}")
    if error is not None:
        raise error
    return everyone
