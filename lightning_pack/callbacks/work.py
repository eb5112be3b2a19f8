"""How unequal the work of ranks is: attention costs the sum of squared lengths, which equal tokens do not make equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_pack.row import PackedBatch

#: Steps that a rank keeps before its sums must be gathered.
STEPS = 256
#: Ratios are added up in units of 2**-32, so that a sum does not depend on where it was interrupted.
_BITS = 32


class Imbalance(NamedTuple):
    """Optimizer steps and how unequal they were; these add up over intervals, but not over ranks, which all have the same."""

    #: Steps in which any rank had work.
    steps: int = 0
    #: Sum of their ratios, in units of 2**-32.
    ratios: int = 0

    def plus(self, other: Imbalance) -> Imbalance:
        """Of both together."""
        return Imbalance(self.steps + other.steps, self.ratios + other.ratios)

    def minus(self, other: Imbalance) -> Imbalance:
        """Of what came after ``other``."""
        return Imbalance(self.steps - other.steps, self.ratios - other.ratios)

    @property
    def mean(self) -> float:
        """Mean over steps of (largest work of a rank / mean work of the ranks): 1 where all are equal, at most their number.

        A step lasts as long as its slowest rank, so 1.25 means that attention takes a quarter longer than with equal work.
        """
        return self.ratios / self.steps / (1 << _BITS) if self.steps else 0.0


class RankWork:
    """Sums of squared real lengths of the optimizer steps of one rank, until the ranks compare them.

    Counting neither communicates nor waits for the device. The step that is not completed yet belongs to no comparison.

    Args:
        device: where the batches are.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        # Each completed step, then the one that is not: int64 [STEPS + 1].
        self._sums = torch.zeros(STEPS + 1, dtype=torch.int64, device=device)
        self._completed = 0

    @property
    def full(self) -> bool:
        """Whether the ranks must compare before another step is completed."""
        return self._completed == STEPS

    def to(self, device: torch.device | str) -> None:
        """Move the sums."""
        self._sums = self._sums.to(device)

    def add(self, batch: PackedBatch) -> None:
        """Count a batch as work of the present step."""
        if not batch.source_keys:
            # A blank row, which keeps ranks in step.
            return
        self._sums[self._completed] += batch.cu_seqlens.diff().long().square().sum()

    def end_step(self) -> None:
        """Complete the present step."""
        self._completed += 1

    def copy(self) -> RankWork:
        """One that may count on without changing this one."""
        other = RankWork(self._sums.device)
        other._sums.copy_(self._sums)
        other._completed = self._completed
        return other

    def compared(self, gather: Callable[[Tensor], Tensor]) -> Imbalance:
        """The imbalance of the completed steps: a collective, and reads numbers back from the device.

        Args:
            gather: the same tensor of all ranks, int64 ``[n]`` -> ``[ranks, n]``, or ``[n]`` where there is one rank.
        """
        # The number of steps goes along and the size is fixed, so ranks that were interrupted at different steps cannot hang.
        own = self._sums.clone()
        own[-1] = self._completed
        ranks = gather(own).reshape(-1, STEPS + 1).tolist()
        found = Imbalance()
        for works in zip(*(rank[: min(r[-1] for r in ranks)] for rank in ranks), strict=True):
            if total := sum(works):
                found = found.plus(Imbalance(1, (max(works) * len(works) << _BITS) // total))
        return found

    def clear(self) -> None:
        """Forget the completed steps, which were compared."""
        present = self._sums[self._completed].clone()
        self._sums.zero_()
        self._sums[0] += present
        self._completed = 0
