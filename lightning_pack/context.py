"""What one context-parallel rank holds of a packed row.

Every source is cut in ``2 * context`` equal chunks; rank ``r`` takes chunk ``r`` and chunk ``2 * context - 1 - r``, which makes
causal work equal. Of the row of lengths 8 and 4, in tokens of the full row::

    rank 0    0  1  6  7 |  8 11
    rank 1    2  3  4  5 |  9 10

The neighbours of a token are on other ranks then, so targets are shifted before the row is cut, and positions stay those of
the full row. Boundaries stay global: kernels divide them by the number of ranks themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pack.model_arguments import model_arguments
from lightning_pack.parallel import ParallelLayout
from lightning_pack.row import PackedBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextSlice:
    """The part of a :class:`~lightning_pack.row.PackedBatch` that one context-parallel rank holds.

    T is the width of the full row, ``t = T / context`` that of the slice. Every tensor is on the device of the batch.
    """

    #: Context-parallel rank, and how many there are.
    rank: int
    context: int
    #: int64 ``[t]``: where its tokens are in the full row.
    indices: Tensor
    #: int64 ``[1, t]``.
    input_ids: Tensor
    #: int64 ``[1, t]``: cut, not shifted; a model must not shift them, since the next token is not at the next place.
    labels: Tensor
    #: int64 ``[1, t]``: shifted in the full row, then cut.
    shift_labels: Tensor
    #: bool ``[1, t]``.
    loss_mask: Tensor
    #: int64 ``[1, t]``, or ``[4, 1, t]`` where the row has M-RoPE positions: those of the full row.
    position_ids: Tensor
    #: int32 ``[1, t]``.
    segment_ids: Tensor
    #: int32 ``[N+1]``, global: the very tensors of the full row.
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    #: Longest physical source of the full row.
    max_seqlen: int

    @classmethod
    def of(cls, batch: PackedBatch, *, layout: ParallelLayout, rank: int) -> ContextSlice:
        """Cut a row.

        Args:
            batch: the full row. One on an accelerator is waited for: cut before the transfer (:meth:`to`) where that matters.
            layout: whose ``context`` is the number of ranks.
            rank: context-parallel rank, ``0 <= rank < layout.context``.

        Raises:
            ValueError: for a row that cannot be cut for these ranks, and for a rank that does not exist.
        """
        if not 0 <= rank < layout.context:
            raise ValueError(f"context-parallel rank {rank} does not exist: there are {layout.context}")
        indices = layout.context_slices(batch.cu_seqlens_padded, width=batch.input_ids.shape[-1])[rank]
        names = ("input_ids", "labels", "shift_labels", "loss_mask", "position_ids", "segment_ids")
        return cls(
            rank=rank,
            context=layout.context,
            indices=indices,
            **{name: getattr(batch, name).index_select(-1, indices.to(batch.input_ids.device)) for name in names},
            cu_seqlens=batch.cu_seqlens,
            cu_seqlens_padded=batch.cu_seqlens_padded,
            max_seqlen=batch.max_seqlen,
        )

    def to(self, device: torch.device | str, *, non_blocking: bool | None = None) -> ContextSlice:
        """A copy with every tensor on ``device``, as :meth:`~lightning_pack.row.PackedBatch.to` gives one of a row."""
        # Each tensor is moved once, so one object in two fields stays one object.
        moved: dict[int, Tensor] = {}
        values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                if id(value) not in moved:
                    waits_not = value.is_pinned() if non_blocking is None else non_blocking
                    moved[id(value)] = value.to(device, non_blocking=waits_not)
                value = moved[id(value)]
            values[field.name] = value
        return type(self)(**values)

    def padding_mask(self) -> Tensor:
        """Bool ``[1, t]``, True on pads."""
        return self.segment_ids == 0

    def model_inputs(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Keyword arguments of a model whose attention gathers keys over the ranks, boundaries global.

        Args:
            model: as in :meth:`~lightning_pack.row.PackedBatch.model_inputs`.
        """
        return model_arguments(self, model)
