"""RowLayout: where the sources of one row begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Boundaries of one row. With no padding anywhere both boundary tensors are one object."""

    #: Real tokens of each source.
    lengths: tuple[int, ...]
    #: int32 ``[N+1]``, cumulative real lengths.
    cu_seqlens: Tensor
    #: int32 ``[N+1]``, physical offsets; the last is the width.
    cu_seqlens_padded: Tensor
    #: Longest physical source, in tokens.
    max_seqlen: int
    #: Physical width of the row, in tokens.
    width: int

    @classmethod
    def of(cls, lengths: Sequence[int], *, multiple: int = 1, width: int | None = None) -> RowLayout:
        """Lay out sources of the given real lengths, each padded to ``multiple``, in a row of ``width`` (None: as needed).

        The tail of a wider row belongs to the last source.

        Raises:
            ValueError: for an empty pack, an empty source, or a width that is too small or no multiple of ``multiple``.
        """
        if not len(lengths):
            raise ValueError("a pack holds at least one source, this one is empty")
        for index, length in enumerate(lengths):
            if length < 1:
                raise ValueError(f"source {index} of the pack has {length} tokens; a source without tokens cannot be packed")
        padded = [-(-length // multiple) * multiple for length in lengths]
        natural = sum(padded)
        if width is not None:
            if width % multiple:
                raise ValueError(f"width {width} is not a multiple of {multiple}, to which every source is padded")
            if width < natural:
                raise ValueError(
                    f"sources of {list(lengths)} tokens padded to multiples of {multiple} need a width of {natural}, "
                    f"more than the row's {width}: pack fewer sources or widen the row"
                )
            padded[-1] += width - natural
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        physical = torch.tensor([0, *accumulate(padded)], dtype=torch.int32)
        same = padded == list(lengths)
        return cls(
            lengths=tuple(lengths),
            cu_seqlens=cu_seqlens,
            cu_seqlens_padded=cu_seqlens if same else physical,
            max_seqlen=max(padded),
            width=sum(padded),
        )
