"""Agreement of data-parallel ranks on what each of them knows only of itself."""

from __future__ import annotations

import torch
from torch import distributed


class Agreement:
    """Whether a condition holds on every rank. Talks over the CPU, so it never waits for a device."""

    def __init__(self) -> None:
        self._group: distributed.ProcessGroup | None = None

    def everyone(self, condition: bool) -> bool:
        """A collective: every rank calls it, equally often."""
        if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
            return condition
        if self._group is None:
            self._group = distributed.new_group(backend="gloo")
        answer = torch.tensor([condition], dtype=torch.int32)
        distributed.all_reduce(answer, op=distributed.ReduceOp.MIN, group=self._group)
        return bool(answer.item())
