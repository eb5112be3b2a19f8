"""How a model is spread over devices, and what that asks of a packed row.

Context parallelism cuts every source in ``2 * context`` equal chunks (the zigzag split: rank ``r`` takes chunk ``r`` and
chunk ``2 * context - 1 - r``, so that causal work is equal), and sequence parallelism cuts the row by the tensor-parallel
size. Both ask that each source be padded to a *multiple*. Recipes with scaled low-precision blocks ask for a divisor of
the whole row on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

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
        eval_context: context-parallel size in evaluation, where it differs; rows then suit both.

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
            if field.name == "sequence" or (field.name == "eval_context" and value is None):
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
        """Data-parallel rank and size of a global ``rank``, tensor and context ranks varying fastest.

        Raises:
            ValueError: if ``world_size`` is not a multiple of :attr:`model_parallel_size`.
        """
        if world_size % self.model_parallel_size:
            raise ValueError(
                f"{world_size} processes cannot hold models of {self.model_parallel_size} devices "
                f"(tensor={self.tensor}, context={self.context}): start a multiple of {self.model_parallel_size}"
            )
        return rank // self.model_parallel_size, world_size // self.model_parallel_size

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
        chunks = 1 if self.context == 1 else 2 * self.context
        offsets = [0, *accumulate(padded_lengths)]
        kept = []
        for source, (offset, length) in enumerate(zip(offsets, padded_lengths, strict=False)):
            if length % chunks:
                raise ValueError(
                    f"source {source} of the row has a padded length of {length}, which is not divisible by "
                    f"2 * context = {chunks}: pack with multiple={self.multiple}"
                )
            size = length // chunks
            for chunk in sorted({rank, chunks - 1 - rank}):
                kept.append(torch.arange(offset + chunk * size, offset + (chunk + 1) * size))
        return torch.cat(kept) if kept else torch.empty(0, dtype=torch.int64)
