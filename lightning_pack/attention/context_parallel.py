"""Attention of a row whose parts are on several ranks: the group of ranks, and keys and values gathered over it.

Backends without kernels of their own for this compute the queries of a rank over the keys of the whole row. Rank r of c holds
chunks ``r`` and ``2c - 1 - r`` of every source. A chunk is causal over the prefix of its source that ends with it, aligned at
the end; with c = 2, rank 0 and one source::

    keys       0 1 | 2 3 | 4 5 | 6 7
    queries 0  x   |     |     |
            1  x x |     |     |
            6  x x | x x | x x | x
            7  x x | x x | x x | x x
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_pack.attention.context_places import ContextPlaces
from lightning_pack.attention.thd import THDInputs
from lightning_pack.parallel import ParallelLayout

# torch 2.13 gave these collectives new names and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """The ranks that hold the parts of one row. Every collective of attention is one of all of them, in the same order."""

    #: Of this process in the group.
    rank: int
    #: Global ranks, in the order of their parts.
    ranks: tuple[int, ...]
    process_group: Any
    _places: WeakKeyDictionary[THDInputs, ContextPlaces] = field(default_factory=WeakKeyDictionary, repr=False)

    @classmethod
    def of(cls, layout: ParallelLayout, *, rank: int, world_size: int) -> ContextGroup | None:
        """The group of a global ``rank``; None where rows are not cut. Collective: every rank of the world calls it.

        Raises:
            ValueError: if ``world_size`` is not a multiple of the devices that hold a model.
        """
        groups = layout.context_groups(world_size=world_size)
        if layout.context == 1:
            return None
        # Each process takes part in the making of each group.
        made = [(ranks, dist.new_group(ranks)) for ranks in groups]
        ranks, process_group = next((ranks, group) for ranks, group in made if rank in ranks)
        return cls(rank=layout.context_rank(rank), ranks=tuple(ranks), process_group=process_group)

    def __deepcopy__(self, memo: Any) -> ContextGroup:
        # A copied model runs on the same ranks.
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model that is switched on over context-parallel ranks cannot be pickled, since its process group is of this "
            "process alone: save its state_dict()"
        )

    @property
    def size(self) -> int:
        """Ranks that share a row."""
        return len(self.ranks)

    @property
    def chunks(self) -> tuple[int, int]:
        """Numbers of the chunks of every source that this rank holds, of ``2 * size``."""
        return self.rank, 2 * self.size - 1 - self.rank

    def places(self, inputs: THDInputs) -> ContextPlaces:
        """Where tokens are, computed once for a row. Wrong boundaries fail, on a device when it gets there."""
        if inputs not in self._places:
            self._places[inputs] = ContextPlaces(
                inputs.cu_seqlens_padded, width=inputs.total, max_seqlen=inputs.max_seqlen, chunks=self.chunks, size=self.size
            )
        return self._places[inputs]

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all ranks. Collective, and so is its backward pass, which adds up the gradients of all ranks.

        Args:
            key: ``[t, Hk, D]`` of this rank.
            value: ``[t, Hk, Dv]``.

        Returns:
            ``[t * size, Hk, D]`` and ``[t * size, Hk, Dv]``, rank by rank.
        """
        both: Tensor = _Gather.apply(torch.cat([key, value], dim=-1), self)
        gathered_key, gathered_value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        return gathered_key, gathered_value


class _Gather(torch.autograd.Function):
    """All-gather along the first dimension; backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ContextGroup) -> Tensor:
        ctx.group = group
        gathered = local.new_empty(local.shape[0] * group.size, *local.shape[1:])
        _all_gather(gathered, local.contiguous(), group=group.process_group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        group: ContextGroup = ctx.group
        local = gradient.new_empty(gradient.shape[0] // group.size, *gradient.shape[1:])
        _reduce_scatter(local, gradient.contiguous(), group=group.process_group)
        return local, None
