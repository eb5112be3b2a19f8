"""Boundaries of a row checked against each other, once, on the CPU where the row is made.

Kernels do not check what they are given: a wrong offset reads another source's tokens, or memory that was never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_pack.row import PackedBatch

_BUILD = "let PackedBatch.from_packs([policy.build(sources)], pad_id=...) make the row, or correct the boundaries"


class BoundariesError(ValueError):
    """Boundaries that do not describe their row."""


def check_boundaries(batch: PackedBatch) -> None:
    """Refuse a row whose boundaries are wrong; for rows that you make yourself, before they leave the CPU.

    Rows of :meth:`~lightning_pack.row.PackedBatch.from_packs` have been through :func:`check_offsets`.

    Args:
        batch: a row on the CPU: its boundaries are read.

    Raises:
        BoundariesError: for another shape, dtype or device, two tensors where one object is needed, offsets that do not start
            at 0, decrease, or do not end with the row, more real than physical tokens in a source, or a ``max_seqlen`` that
            is less than the longest source or no int.
    """
    row, real, physical = batch.input_ids, batch.cu_seqlens, batch.cu_seqlens_padded
    if row.dim() != 2 or row.shape[0] != 1:
        raise BoundariesError(f"input_ids have shape {list(row.shape)}, a packed row has [1, T]; {_BUILD}")
    for name in ("labels", "shift_labels", "loss_mask", "segment_ids"):
        if getattr(batch, name).shape != row.shape:
            shape = list(getattr(batch, name).shape)
            raise BoundariesError(f"{name} have shape {shape} and input_ids {list(row.shape)}; {_BUILD}")
    if batch.position_ids.shape[-1] != row.shape[1]:
        raise BoundariesError(f"position_ids have shape {list(batch.position_ids.shape)} in a row of {row.shape[1]}; {_BUILD}")
    for name, tensor in (("cu_seqlens", real), ("cu_seqlens_padded", physical)):
        _check_tensor(name, tensor)
    offsets = physical.tolist()
    if real is not physical and torch.equal(real, physical):
        raise BoundariesError(
            f"cu_seqlens and cu_seqlens_padded are both {shown_offsets(offsets)} but two tensors; kernels tell 'no padding' by "
            "identity: pass one tensor as both"
        )
    check_offsets(real.tolist(), offsets, width=row.shape[1], source_keys=batch.source_keys)
    longest = max((stop - start for start, stop in pairwise(offsets)), default=0)
    if type(batch.max_seqlen) is not int:
        raise BoundariesError(
            f"max_seqlen is of type {type(batch.max_seqlen).__name__}, and needs to be a Python int: kernels would wait for "
            "the device to read it; call int() where the row is made"
        )
    if batch.max_seqlen < longest:
        raise BoundariesError(f"max_seqlen={batch.max_seqlen} is less than the longest physical source of {longest} tokens")


def check_offsets(real: Sequence[int], physical: Sequence[int], *, width: int, source_keys: Sequence[str]) -> None:
    """Refuse offsets that do not describe a row of ``width`` tokens.

    Args:
        real: cumulative real lengths, ``N + 1`` of them.
        physical: physical offsets, as many.
        width: tokens of the row, T.
        source_keys: of the first sources; there may be further boundaries that repeat the last offset.

    Raises:
        BoundariesError: naming the source and both values.
    """
    if len(real) != len(physical):
        raise BoundariesError(f"{len(real)} real boundaries and {len(physical)} physical ones; {_BUILD}")
    if len(real) < len(source_keys) + 1:
        raise BoundariesError(f"{len(real)} boundaries for {len(source_keys)} sources, at least one more is needed; {_BUILD}")
    for name, offsets in (("real", real), ("physical", physical)):
        if offsets[0] != 0:
            raise BoundariesError(f"{name} boundaries start at {offsets[0]} and not at 0: {shown_offsets(offsets)}; {_BUILD}")
    for number, (lengths, places) in enumerate(zip(pairwise(real), pairwise(physical), strict=True)):
        tokens, room = lengths[1] - lengths[0], places[1] - places[0]
        if tokens < 0 or room < 0:
            raise BoundariesError(
                f"boundaries decrease at {_named(number, source_keys)}: real {list(lengths)}, physical {list(places)}; {_BUILD}"
            )
        if number >= len(source_keys) and room:
            raise BoundariesError(
                f"boundary {number + 1} goes on from {places[0]} to {places[1]}, but the row has {len(source_keys)} sources: "
                f"boundaries beyond those of the sources repeat the last offset; {_BUILD}"
            )
        if number < len(source_keys) and not tokens:
            raise BoundariesError(
                f"{_named(number, source_keys)} has no tokens: only boundaries beyond those of the sources repeat an offset; "
                f"{_BUILD}"
            )
        if tokens > room:
            raise BoundariesError(
                f"{_named(number, source_keys)} has {tokens} real tokens in {room} physical places, so its end would be read "
                f"as the next source; {_BUILD}"
            )
    if physical[-1] != width:
        raise BoundariesError(
            f"the last physical boundary is {physical[-1]} but the row has {width} tokens; tokens outside of every source have "
            f"no defined attention: give the tail to the last source; {_BUILD}"
        )


def _check_tensor(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int32 or tensor.dim() != 1 or not len(tensor):
        raise BoundariesError(
            f"{name} is {tensor.dtype} of shape {list(tensor.shape)} and needs int32 of shape [N+1]; {_BUILD}"
        )
    if tensor.device.type != "cpu":
        raise BoundariesError(f"{name} is on {tensor.device}: check the row on the CPU, before it is moved")
    if not tensor.is_contiguous():
        raise BoundariesError(f"{name} is not contiguous, and kernels read it as if it were: pass {name}.contiguous()")


def _named(number: int, source_keys: Sequence[str]) -> str:
    return f"source {number} ({source_keys[number]!r})" if number < len(source_keys) else f"empty source {number}"


def shown_offsets(offsets: Sequence[int]) -> str:
    """The first few, for a message."""
    return f"[{', '.join(map(str, offsets[:8]))}{', ...' if len(offsets) > 8 else ''}]"
