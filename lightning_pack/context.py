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
import torch.distributed as dist
from torch import Tensor

from lightning_pack.parallel import ParallelLayout
from lightning_pack.row import PackedBatch

#: Fields that are cut, along their last dimension.
_CUT = ("input_ids", "labels", "shift_labels", "loss_mask", "position_ids", "segment_ids")


@dataclass(kw_only=True, eq=False, repr=False)
class ContextSlice(PackedBatch):
    """The part of a :class:`~lightning_pack.row.PackedBatch` that one context-parallel rank holds; a batch like any other.

    T is the width of the full row, ``t = T / context`` that of the slice. ``input_ids``, ``labels``, ``shift_labels``,
    ``loss_mask`` and ``segment_ids`` are ``[1, t]``, ``position_ids`` ``[1, t]`` or, with M-RoPE positions, ``[4, 1, t]``.
    ``shift_labels`` were shifted in the full row; ``labels`` are only cut, and a model must not shift them, since the next
    token is not at the next place. All else is that of the full row, boundaries and ``max_seqlen`` too. A slice may hold no
    target.
    """

    #: Context-parallel rank, and how many there are.
    rank: int
    context: int
    #: int64 ``[t]``: where its tokens are in the full row.
    indices: Tensor
    #: Target tokens of the full row.
    targets: int
    #: Process group of the ranks that hold the parts of the row; None where there is none.
    group: Any = None

    @classmethod
    def of(cls, batch: PackedBatch, *, layout: ParallelLayout, rank: int, group: Any = None) -> ContextSlice:
        """Cut a row.

        Args:
            batch: the full row. One on an accelerator is waited for: cut before the transfer (:meth:`to`) where that matters.
            layout: whose ``context`` is the number of ranks.
            rank: context-parallel rank, ``0 <= rank < layout.context``.
            group: process group of the ranks, for :meth:`token_mean`.

        Raises:
            ValueError: for a row that cannot be cut for these ranks or is cut already, and for a rank that does not exist.
        """
        if isinstance(batch, ContextSlice):
            raise ValueError(f"the row is cut already, this is the part of rank {batch.rank} of {batch.context}: cut rows once")
        if batch.media:
            raise ValueError(
                f"the row has {', '.join(batch.media)}, and its placeholders would be cut apart from their features: train "
                "with images on context=1"
            )
        if not 0 <= rank < layout.context:
            raise ValueError(f"context-parallel rank {rank} does not exist: there are {layout.context}")
        indices = layout.context_slices(batch.cu_seqlens_padded, width=batch.width)[rank].to(batch.input_ids.device)
        whole = {field.name: getattr(batch, field.name) for field in fields(batch)}
        cut = {name: whole[name].index_select(-1, indices) for name in _CUT}
        targets = int(batch.loss_mask.sum())
        return cls(**whole | cut, rank=rank, context=layout.context, indices=indices, targets=targets, group=group)

    @property
    def width(self) -> int:
        """T, in tokens: of the full row."""
        return self.input_ids.shape[-1] * self.context

    def target_tokens(self) -> int:
        """Targets of the full row."""
        return self.targets

    def token_mean(self, total: Tensor) -> Tensor:
        """Mean loss over the target tokens of the full row, ``[]``, for a log. A collective of the ranks that hold its parts.

        Args:
            total: sum of the losses of the targets in :attr:`shift_labels` of this part, without a gradient.

        Raises:
            ValueError: if the slice has no group.
        """
        if self.group is None:
            raise ValueError(
                "the slice has no process group to add up losses over: let PackedAttention cut the row, or pass "
                "ContextSlice.of(group=)"
            )
        # In float64, where it is to be had: parts of a sum in another order would differ in the last digits.
        total = total.to(torch.float32 if total.device.type == "mps" else torch.float64, copy=True)
        dist.all_reduce(total, group=self.group)
        return total / max(self.targets, 1)

    def __repr__(self) -> str:
        return f"ContextSlice(rank {self.rank} of {self.context}, {self.input_ids.shape[-1]} tokens of {super().__repr__()})"
