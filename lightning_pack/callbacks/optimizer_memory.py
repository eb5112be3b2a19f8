"""The memory that an optimizer takes at its first step, before it has made that step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def missing_state(optimizer: Optimizer) -> list[Tensor]:
    """Uninitialized tensors, on the devices of the parameters, as large as the state that the optimizer has yet to make.

    Nothing for a parameter that has its state (after a resume), nor for optimizers that are not torch's own: to step a copy of
    those might change what the copy shares with them.

    Raises:
        torch.OutOfMemoryError: if there is no room for it.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return []
    device: dict[int, torch.device] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        stand_ins = []
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                stand_in = torch.empty_like(parameter, device="meta").requires_grad_()
                stand_in.grad = torch.empty_like(stand_in, requires_grad=False)
                device[id(stand_in)] = parameter.device
                stand_ins.append(stand_in)
        plain = {name: value for name, value in (("foreach", False), ("fused", False), ("capturable", False)) if name in group}
        groups.append({**group, **plain, "params": stand_ins})
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    hooks: dict[str, Any] = {name: OrderedDict() for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")}
    vars(copy).update(hooks, param_groups=groups, state=defaultdict(dict))
    try:
        # The class's own: a learning-rate schedule has put a counting one in front of that of the object.
        type(optimizer).step(copy)
    except (RuntimeError, NotImplementedError, TypeError):
        # One that reads numbers of its gradients, or that (a TypeError) needs a closure.
        return []
    return [
        torch.empty(value.shape, dtype=value.dtype, device=device[id(parameter)])
        for parameter, state in copy.state.items()
        for value in state.values()
        if isinstance(value, Tensor) and value.device.type == "meta"
    ]
