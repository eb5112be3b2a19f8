"""Counts the places in which the host waits for the device."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SAID = "called a synchronizing CUDA operation"
#: Operators that read values of their input on the host, or make a tensor whose size depends on them.
_READING = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim")


@contextmanager
def counted_waits(device: torch.device) -> Iterator[list[str]]:
    """Where the host waits for ``device`` inside, one line for each time; complete on leaving.

    On CUDA these are the waits that torch knows of; a library that synchronizes by itself is not seen. On a CPU nothing waits,
    so the operators are noted that would on a device; what an optimizer reads of its own counters it keeps on the CPU anyway.
    """
    found: list[str] = []
    if device.type != "cuda":
        with _Reading(found):
            yield found
        return
    torch.cuda.synchronize(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{warning.filename}:{warning.lineno}" for warning in caught if _SAID in str(warning.message)]


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Raise at the first place in which the host waits for ``device``; on a CPU, on leaving, at those that would."""
    if device.type != "cuda":
        with counted_waits(device) as found:
            yield
        assert found == []
        return
    torch.cuda.synchronize(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class _Reading(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.partition(".")[0] in _READING:
            frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
            optimizer = any("/torch/optim/" in frame.filename for frame in traceback.extract_stack())
            if not optimizer:
                self.found.append(f"{frames[-2].filename}:{frames[-2].lineno}")
        return func(*args, **(kwargs or {}))
