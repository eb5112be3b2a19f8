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
    #: int32 ``[N+1]``, cumulative real lengths; more where the number of boundaries is fixed, and the last is repeated.
    cu_seqlens: Tensor
    #: int32, as many: physical offsets; the last is the width.
    cu_seqlens_padded: Tensor
    #: Longest physical source, in tokens.
    max_seqlen: int
    #: Physical width of the row, in tokens.
    width: int

    @classmethod
    def of(
        cls, lengths: Sequence[int], *, multiple: int = 1, width: int | None = None, fixed_sources: int | None = None
    ) -> RowLayout:
        """Lay out sources of the given real lengths, each padded to ``multiple``, in a row of ``width`` (None: as needed).

        The tail of a wider row belongs to the last source. With ``fixed_sources`` there are that many boundaries and one,
        however many sources there are: the last offset is repeated.

        Raises:
            ValueError: for an empty pack, an empty source, a width that is too small or no multiple of ``multiple``, or more
                sources than ``fixed_sources``.

        >>> RowLayout.of([5, 3], width=12, fixed_sources=4).cu_seqlens_padded.tolist()
        [0, 5, 12, 12, 12]
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
        if fixed_sources is not None and len(lengths) > fixed_sources:
            raise ValueError(
                f"{len(lengths)} sources of {list(lengths)} tokens do not fit a row with boundaries for {fixed_sources}: pack "
                "fewer sources or raise max_sources"
            )
        spare = [0] * ((fixed_sources or len(lengths)) - len(lengths))
        cu_seqlens = torch.tensor([0, *accumulate([*lengths, *spare])], dtype=torch.int32)
        physical = torch.tensor([0, *accumulate([*padded, *spare])], dtype=torch.int32)
        same = padded == list(lengths)
        return cls(
            lengths=tuple(lengths),
            cu_seqlens=cu_seqlens,
            cu_seqlens_padded=cu_seqlens if same else physical,
            max_seqlen=max(padded),
            width=sum(padded),
        )
