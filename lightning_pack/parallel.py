"""How a model is spread over devices, and what that asks of a packed row.

Context parallelism cuts every source in ``2 * context`` equal chunks (the zigzag split: rank ``r`` takes chunk ``r`` and
chunk ``2 * context - 1 - r``, so that causal work is equal), and sequence parallelism cuts the row by the tensor-parallel
size. Both ask that each source be padded to a *multiple*. Recipes with scaled low-precision blocks ask for a divisor of
the whole row on top.

Ranks are numbered with tensor parallelism varying fastest, then context parallelism, then data parallelism::

    rank = (data-parallel rank * context + context-parallel rank) * tensor + tensor-parallel rank
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

#: Row divisor of a low-precision recipe for a model that is not parallel at all, in tokens.
RECIPE_DIVISORS = {"fp8": 16, "mxfp8": 32, "fp8-blockwise": 128, "hybrid-ep": 128}


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of the model-parallel groups (not of data parallelism, which packing does not see).

    Args:
        tensor: tensor-parallel size.
        context: context-parallel size in training.
        sequence: whether activations are also split over the tensor-parallel group (sequence parallelism).
        eval_context: context-parallel size in evaluation, where it differs; rows then suit both, and evaluation data is dealt
            out over the data-parallel ranks that are left then.

    Example:
        >>> ParallelLayout(tensor=2, context=4, sequence=True).multiple
        8
    """

    tensor: int = 1
    context: int = 1
    sequence: bool = False
    eval_context: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "eval_context" and value is None:
                continue
            if field.name == "sequence":
                if not isinstance(value, bool):
                    raise ValueError(f"ParallelLayout(sequence={value!r}): True or False is needed")
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"ParallelLayout({field.name}={value!r}): a group size is a whole number of at least 1")

    @property
    def multiple(self) -> int:
        """What every source's padded length is a multiple of, in tokens.

        ``lcm(2*cp if cp > 1 else 1, cp*tp if sp and tp > 1 else 1)``, over training and evaluation.
        """
        return math.lcm(self._multiple(self.context), self._multiple(self.eval_context or self.context))

    def _multiple(self, context: int) -> int:
        zigzag = 2 * context if context > 1 else 1
        sequence = context * self.tensor if self.sequence and self.tensor > 1 else 1
        return math.lcm(zigzag, sequence)

    def row_divisor(self, recipe: str) -> int:
        """What the width of a row is divisible by under a low-precision ``recipe``, in tokens.

        The conservative rule ``d * (2*cp if cp > 1) * (tp if sp and tp > 1)``, ``d`` from :data:`RECIPE_DIVISORS`.

        Raises:
            ValueError: for a recipe that is not known.
        """
        if recipe not in RECIPE_DIVISORS:
            raise ValueError(f"recipe {recipe!r} is not known; known are {', '.join(RECIPE_DIVISORS)}")
        context = max(self.context, self.eval_context or 1)
        zigzag = 2 * context if context > 1 else 1
        return RECIPE_DIVISORS[recipe] * zigzag * (self.tensor if self.sequence else 1)

    @property
    def model_parallel_size(self) -> int:
        """Devices that hold one copy of the model."""
        return self.tensor * self.context

    def data_parallel(self, rank: int, *, world_size: int) -> tuple[int, int]:
        """Data-parallel rank and size of a global ``rank``.

        Raises:
            ValueError: if ``world_size`` is not a multiple of :attr:`model_parallel_size`.
        """
        self._check_world(world_size)
        return rank // self.model_parallel_size, world_size // self.model_parallel_size

    @property
    def evaluation(self) -> ParallelLayout:
        """The layout in evaluation, with ``eval_context`` as its context-parallel size."""
        return self if self.eval_context is None else replace(self, context=self.eval_context, eval_context=None)

    def context_rank(self, rank: int) -> int:
        """Context-parallel rank of a global ``rank``."""
        return rank // self.tensor % self.context

    def context_groups(self, *, world_size: int) -> list[list[int]]:
        """Global ranks that hold the parts of one row, in the order of their context-parallel ranks.

        Raises:
            ValueError: if ``world_size`` is not a multiple of :attr:`model_parallel_size`.

        Example:
            >>> ParallelLayout(tensor=2, context=2).context_groups(world_size=8)
            [[0, 2], [1, 3], [4, 6], [5, 7]]
        """
        self._check_world(world_size)
        models = range(0, world_size, self.model_parallel_size)
        firsts = [first + tensor for first in models for tensor in range(self.tensor)]
        return [[first + self.tensor * rank for rank in range(self.context)] for first in firsts]

    def _check_world(self, world_size: int) -> None:
        if world_size % self.model_parallel_size:
            raise ValueError(
                f"{world_size} processes cannot hold models of {self.model_parallel_size} devices "
                f"(tensor={self.tensor}, context={self.context}): start a multiple of {self.model_parallel_size}"
            )

    def context_indices(self, padded_lengths: Sequence[int], *, rank: int) -> Tensor:
        """Positions of the full row that context-parallel ``rank`` holds.

        Args:
            padded_lengths: physical length of each source, in row order.
            rank: context-parallel rank, ``0 <= rank < context``.

        Returns:
            int64 ``[sum(padded_lengths) / context]``, in the order in which the rank holds them.

        Raises:
            ValueError: if a length cannot be cut in ``2 * context`` equal chunks, or the rank does not exist.

        Example:
            >>> ParallelLayout(context=2).context_indices([8, 4], rank=0).tolist()
            [0, 1, 6, 7, 8, 11]
        """
        if not 0 <= rank < self.context:
            raise ValueError(f"context-parallel rank {rank} does not exist: there are {self.context}")
        lengths = np.asarray(padded_lengths, dtype=np.int64)
        return torch.from_numpy(_places(lengths, self._chunk_lengths(lengths), chunks=self._chunks_of(rank)))

    def context_slices(self, cu_seqlens_padded: Tensor, *, width: int) -> Tensor:
        """Positions of the full row that each context-parallel rank holds (the zigzag split).

        Boundaries on an accelerator are read back, which waits for it: slice before the transfer.

        Args:
            cu_seqlens_padded: ``[N+1]``, physical boundaries of the row, repeats of the last one (sources without tokens)
                included.
            width: of the row; the last boundary.

        Returns:
            int64 ``[context, width / context]`` on the device of the boundaries: row ``r`` is what rank ``r`` holds, in its
            order. Every position is in it once.

        Raises:
            ValueError: if a length cannot be cut in ``2 * context`` equal chunks, or the boundaries do not go from 0 up to
                ``width``.

        Example:
            >>> ParallelLayout(context=2).context_slices(torch.tensor([0, 8, 12]), width=12).tolist()
            [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
        """
        if cu_seqlens_padded.is_floating_point():
            raise ValueError(f"boundaries are {cu_seqlens_padded.dtype}, and offsets are whole numbers: pass cu_seqlens_padded")
        bounds = cu_seqlens_padded.cpu().numpy().astype(np.int64)
        if bounds.ndim != 1 or not bounds.size or bounds[0] != 0 or (np.diff(bounds) < 0).any():
            raise ValueError(f"boundaries {bounds.tolist()} of a row start at 0 and do not fall: pass cu_seqlens_padded")
        if bounds[-1] != width:
            raise ValueError(
                f"the last boundary is {bounds[-1]} and the row is {width} wide: positions after it would be on no rank; "
                "pass physical boundaries (cu_seqlens_padded), which give the tail to the last source"
            )
        lengths = np.diff(bounds)
        size = self._chunk_lengths(lengths)
        ranks = [_places(lengths, size, chunks=self._chunks_of(rank)) for rank in range(self.context)]
        return torch.from_numpy(np.stack(ranks)).to(cu_seqlens_padded.device)

    def _chunks_of(self, rank: int) -> list[int]:
        return [0] if self.context == 1 else [rank, 2 * self.context - 1 - rank]

    def _chunk_lengths(self, lengths: np.ndarray) -> np.ndarray:
        chunks = 1 if self.context == 1 else 2 * self.context
        for source in np.flatnonzero(lengths % chunks)[:1]:
            raise ValueError(
                f"source {source} of the row has a padded length of {lengths[source]}, which is not divisible by "
                f"2 * context = {chunks}: pack with multiple={self.multiple}"
            )
        return lengths // chunks


def _places(lengths: np.ndarray, size: np.ndarray, *, chunks: list[int]) -> np.ndarray:
    """Positions of these chunks of every source, in source order; all chunks of a source have its ``size``."""
    starts = (np.cumsum(lengths) - lengths)[:, None] + size[:, None] * np.array(chunks)
    sizes = np.repeat(size, len(chunks))
    ends = np.cumsum(sizes)
    return np.arange(sizes.sum()) + np.repeat(starts.ravel() - (ends - sizes), sizes)
