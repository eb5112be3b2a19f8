"""What a run is made of beside its data at one moment, cheaply noted: random numbers, weights and buffers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """The states of torch's generators, on the CPU and on the device."""
    on_device = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state() if on_device else None}


def optimizer_version(trainer: pl.Trainer) -> int:
    """Changes whenever an optimizer changes its weights or its own state in place. Waits for no device."""
    version = 0
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            version += sum(parameter._version for parameter in group["params"])
        for state in optimizer.state.values():
            version += sum(value._version for value in state.values() if isinstance(value, Tensor))
    return version


def persistent_buffers(module: pl.LightningModule) -> list[tuple[str, Tensor]]:
    """The buffers of a module that a checkpoint holds, by name."""
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]


def go_on_drawing(state: dict[str, Any], *, device: torch.device) -> None:
    """Put torch's generators where :func:`random_state` found them."""
    torch.set_rng_state(state["cpu"])
    if state["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
