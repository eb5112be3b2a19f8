"""Where the tokens of a row are when it is spread over context-parallel ranks, computed on the device of its boundaries.

How many places there are follows from the width and the number of ranks alone, so nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkPlaces:
    """One chunk of every source, and the prefix of its source that it sees."""

    #: int64 ``[T / (2 * size)]``: the chunk's queries among those of the rank.
    queries: Tensor
    #: int32 ``[N+1]``: its boundaries.
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    #: int64: keys of the prefixes among the gathered ones, and their boundaries.
    keys: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_k: int


class ContextPlaces:
    """Places of one row, of which this rank holds two chunks of each source.

    Args:
        cu_seqlens: int32 ``[N+1]``, physical boundaries of the full row.
        width: of the full row, T.
        max_seqlen: at least the longest source.
        chunks: the numbers of the chunks that this rank holds, of ``2 * size``.
        size: number of ranks.

    Raises:
        RuntimeError: where the boundaries are on the CPU, if they do not end with the row or a source cannot be cut; on a
            device the device fails.
    """

    def __init__(self, cu_seqlens: Tensor, *, width: int, max_seqlen: int, chunks: tuple[int, int], size: int) -> None:
        self._cu, self._width, self._longest, self._chunks, self._size = cu_seqlens, width, max_seqlen, chunks, size
        # An uncut row, or one that is cut for other ranks, would read keys of other tokens.
        right = (cu_seqlens[-1] == width) & (cu_seqlens % (2 * size) == 0).all()
        torch._assert_async(
            right,
            f"boundaries end with a row of {width} tokens over {size} context-parallel ranks, and are multiples of {2 * size}: "
            "call the model with the batch that the step gets",
        )

    def _located(self, starts: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """For each of ``number`` places its source, and its offset there; source b begins at ``starts[b]``."""
        places = torch.arange(number, device=starts.device, dtype=starts.dtype)
        source = torch.searchsorted(starts, places, right=True) - 1
        return source, places - starts[source]

    @cached_property
    def _starts(self) -> Tensor:
        return self._cu.long()

    @cached_property
    def gathered(self) -> Tensor:
        """int64 ``[T]``: for each place of the row, where its token is among those that were gathered rank by rank."""
        size, starts = self._size, self._starts
        source, offset = self._located(starts, self._width)
        length = starts.diff()[source] // (2 * size)
        chunk, inside = offset // length, offset % length
        mirrored = chunk >= size
        rank = torch.where(mirrored, 2 * size - 1 - chunk, chunk)
        return rank * (self._width // size) + starts[source] // size + mirrored * length + inside

    @cached_property
    def chunks(self) -> tuple[ChunkPlaces, ChunkPlaces]:
        """The two chunks of this rank."""
        first, second = self._chunks
        return self._chunk(0, first), self._chunk(1, second)

    def _chunk(self, half: int, chunk: int) -> ChunkPlaces:
        of, starts = 2 * self._size, self._starts
        queries, keys = starts // of, starts // of * (chunk + 1)
        source, offset = self._located(queries, self._width // of)
        seen, place = self._located(keys, self._width // of * (chunk + 1))
        return ChunkPlaces(
            queries=2 * queries[source] + half * queries.diff()[source] + offset,
            cu_seqlens_q=queries.int(),
            max_seqlen_q=-(-self._longest // of),
            keys=self.gathered[starts[seen] + place],
            cu_seqlens_k=keys.int(),
            max_seqlen_k=-(-self._longest // of) * (chunk + 1),
        )

    @cached_property
    def back(self) -> Tensor:
        """int64 ``[T / size]``: for each token of this rank, where it is among those of its two chunks, one after the other."""
        starts = self._starts // (2 * self._size)
        source, offset = self._located(2 * starts, self._width // self._size)
        length = starts.diff()[source]
        second = offset >= length
        return torch.where(second, self._width // (2 * self._size) - length, 0) + starts[source] + offset
