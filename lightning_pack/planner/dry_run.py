"""The dry runs of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_pack.encoders.base import Encoder
from lightning_pack.planner.balance import WINDOWS, RankBalance, rank_balance
from lightning_pack.planner.capacities import around, compared
from lightning_pack.planner.combination import Combination, bound_of, choices
from lightning_pack.planner.memory import MOST_SECONDS, MeasuredMemory
from lightning_pack.planner.recommendation import recommended, smallest_sufficient
from lightning_pack.planner.result import Plan
from lightning_pack.planner.sources import Sources
from lightning_pack.policy import Overlength, PackingPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Sources of the buffers that are tried.
BUFFER_SIZES = (16, 64, 256, 1024)
#: That are read, and packed by each dry run.
SOURCES = 20_000
#: Full windows of packs that each rank should emit where ranks are compared.
_FULL_WINDOWS = 2


def plan(
    source: str | Path | Sequence[int],
    *,
    capacity: int,
    multiple: int = 1,
    overlength: Overlength = "drop",
    workers: int = 2,
    ranks: int = 1,
    buffer_sizes: Sequence[int] = BUFFER_SIZES,
    capacities: Sequence[int] | None = None,
    sources: int = SOURCES,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    encoder: Encoder | None = None,
    group_by: str | None = None,
    vision: str | None = None,
    max_media_tokens: int | None = None,
    max_media_bytes: int | None = None,
    buffer_media_tokens: int | None = None,
    buffer_media_bytes: int | None = None,
    measure_seconds: float | None = None,
) -> Plan:
    """Find out which packing suits some data, from a sample of it and without training.

    Args:
        source: a dataset as :class:`~lightning_pack.EnergonPackDataModule` takes it, or lengths in tokens.
        capacity: most tokens of a pack, alignment included.
        multiple: every source is padded to a multiple of this.
        overlength: what happens to a source that is longer.
        workers: loader workers of a rank; each has a buffer of its own.
        ranks: data-parallel ranks; for more than one their work is compared.
        buffer_sizes: to compare, in sources.
        capacities: to compare beside ``capacity``; None takes half and twice as much.
        sources: most sources to read. Each dry run packs so many; fewer are repeated in new orders, as an endless training
            stream does.
        tokenizer: as for the datamodule; None takes the folder ``tokenizer`` inside the dataset.
        encoder: as for the datamodule.
        group_by: as for the datamodule.
        vision: as for the datamodule.
        max_media_tokens: as for :class:`~lightning_pack.PackingPolicy`, which every dry run keeps to; so are the next three.
        max_media_bytes: of a pack.
        buffer_media_tokens: of a buffer.
        buffer_media_bytes: of a buffer.
        measure_seconds: that a loader worker is run at most to measure its memory under the recommended policy; 0 leaves it at
            the estimate. None is 30 for data with images or the like, and 0 for other data, whose estimate is exact enough.

    Raises:
        ValueError: for settings that do not fit together, a dataset that is not there, or one without usable sources.
        OverlengthError: under ``overlength="error"``, for sources longer than the capacity.

    Example:
        >>> found = plan([300, 700, 200, 800] * 50, capacity=1000, buffer_sizes=[16], sources=200)
        >>> found.policy.algorithm, f"{found.recommendation.combination.fill:.2f}"
        ('exact_fill', '1.00')
    """
    sizes = _buffer_sizes(buffer_sizes)
    for name, value in (("workers", workers), ("ranks", ranks), ("sources", sources)):
        _whole(name, value)
    if measure_seconds is not None and (isinstance(measure_seconds, bool) or not 0 <= measure_seconds < math.inf):
        raise ValueError(f"measure_seconds={measure_seconds!r}: seconds are needed, 0 for no measurement")
    limits: dict[str, Any] = {
        "max_media_tokens": max_media_tokens,
        "max_media_bytes": max_media_bytes,
        "buffer_media_tokens": buffer_media_tokens,
        "buffer_media_bytes": buffer_media_bytes,
    }
    base = PackingPolicy(capacity, multiple=multiple, overlength=overlength, **limits)
    others = around(capacity, multiple=multiple) if capacities is None else [capacity, *capacities]
    for other in others:
        replace(base, capacity=other)
    if isinstance(source, str | Path):
        found = Sources.read(
            source, tokenizer=tokenizer, encoder=encoder, group_by=group_by, vision=vision, policy=base, most=sources
        )
    else:
        unused = {"tokenizer": tokenizer, "encoder": encoder, "group_by": group_by, "vision": vision, **limits}
        unused["measure_seconds"] = measure_seconds
        for name, option in unused.items():
            if option is not None:
                raise ValueError(f"{name}={option!r} is not used with lengths: it goes with a dataset")
        found = Sources.given(source, most=sources)
    stream = found.stream(base, count=sources)
    bound = bound_of(base, stream)
    combinations = tuple(Combination.measured(policy, stream, bound=bound, ranks=ranks) for policy in choices(base, sizes))
    chosen = smallest_sufficient(combinations)
    balance = None if ranks == 1 else _balance(found, chosen, ranks=ranks)
    recommendation = recommended(found, combinations, balance=balance, chosen=chosen, workers=workers, ranks=ranks)
    return Plan(
        sources=found,
        workers=workers,
        ranks=ranks,
        combinations=combinations,
        capacities=compared(found, chosen.policy, capacities=others, count=sources),
        balance=balance,
        recommendation=recommendation,
        memory=_memory(found, recommendation.combination, seconds=measure_seconds),
    )


def _memory(found: Sources, chosen: Combination, *, seconds: float | None) -> MeasuredMemory | None:
    if seconds is None:
        seconds = MOST_SECONDS if found.has_media else 0
    if found.options is None or not seconds:
        return None
    return MeasuredMemory.of_worker(found.options, chosen.policy, rows_per_buffer=chosen.rows_per_buffer, seconds=seconds)


def _balance(found: Sources, chosen: Combination, *, ranks: int) -> RankBalance:
    """Each rank packs enough sources for full windows, but no more than the dry runs."""
    wanted = _FULL_WINDOWS * max(WINDOWS) * chosen.sources // chosen.packs + chosen.policy.buffer_size
    each = min(max(wanted, chosen.sources // ranks), max(chosen.sources, 1))
    stream = found.stream(chosen.policy, count=ranks * each)
    return rank_balance(chosen.policy, stream.lengths, ranks=ranks, keys=stream.keys, media=stream.costs)


def _buffer_sizes(sizes: Sequence[int]) -> list[int]:
    if not sizes:
        raise ValueError("buffer_sizes is empty: give at least one number of sources, such as 256")
    for size in sizes:
        _whole("buffer_sizes", size)
    if len(set(sizes)) < len(sizes):
        raise ValueError(f"buffer_sizes={list(sizes)} has a size twice: give each once")
    return sorted(sizes)


def _whole(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: a whole number of at least 1 is needed")
