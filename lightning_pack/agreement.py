"""Agreement of ranks: on what each of them knows only of itself, and on whether all of them are there."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

#: Seconds that a rank waits for the others when a run has failed.
SECONDS_TO_ANSWER = 30.0


class Agreement:
    """Asks all ranks of the default process group.

    In a group of its own (gloo, on the CPU), so that it never waits for a device, and a question which is not answered does not
    get in the way of anything else.

    Args:
        seconds: after which an answer is not waited for any longer; None waits as long as other collectives do.
    """

    def __init__(self, *, seconds: float | None = None) -> None:
        self._limit = None if seconds is None else timedelta(seconds=seconds)
        self._group: dist.ProcessGroup | None = None
        self._default: dist.ProcessGroup | None = None

    def open(self) -> None:
        """Prepare the group, on every rank at about the same time."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            self._group = None
        elif self._group is None or self._default is not dist.group.WORLD:
            # monitored_barrier takes its time limit on rank 0 only, so the group has one of its own.
            self._default, self._group = dist.group.WORLD, dist.new_group(backend="gloo", timeout=self._limit)

    def everyone(self, condition: bool) -> bool:
        """Whether a condition holds on every rank. A collective: all ranks call it, equally often."""
        self.open()
        if self._group is None:
            return condition
        answer = torch.tensor([condition], dtype=torch.int32)
        dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self._group)
        return bool(answer.item())

    def reached(self) -> bool:
        """Whether all ranks have asked within the limit of time. The group must be open."""
        if self._group is None:
            return True
        try:
            dist.barrier(self._group)
        except RuntimeError:
            return False
        return True
