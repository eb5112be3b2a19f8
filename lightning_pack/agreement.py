"""Agreement: whether all ranks are there, asked with a limit of time."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

#: Seconds that a rank waits for the others when a run has failed.
SECONDS_TO_ANSWER = 30.0


class Agreement:
    """Asks all ranks of the default process group, before a collective that would hang if one of them were gone.

    A group of its own (gloo, on the CPU): a question that is not answered ends by itself, and gets in the way of nothing else.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._default: dist.ProcessGroup | None = None

    def open(self) -> None:
        """Prepare the group, on every rank at about the same time."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            self._group = None
        elif self._group is None or self._default is not dist.group.WORLD:
            # monitored_barrier takes its time limit on rank 0 only, so the group has one of its own.
            limit = timedelta(seconds=SECONDS_TO_ANSWER)
            self._default, self._group = dist.group.WORLD, dist.new_group(backend="gloo", timeout=limit)

    def reached(self) -> bool:
        """Whether all ranks have asked within the limit of time."""
        if self._group is None:
            return True
        try:
            dist.barrier(self._group)
        except RuntimeError:
            return False
        return True
