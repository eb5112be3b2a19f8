"""A model that is only looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; mode, attributes, buffers and random state as before outside."""
    # Rotary frequencies that depend on the length are computed in the forward: buffers, and attributes that go with them.
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    buffers = [(module, dict(module._buffers)) for module, _ in attributes]
    contents = [(buffer, buffer.clone()) for _, own in buffers for buffer in own.values() if buffer is not None]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        model.eval()
        try:
            yield
        finally:
            for module, values in attributes:
                vars(module).clear()
                vars(module).update(values)
            for module, own in buffers:
                module._buffers.clear()
                module._buffers.update(own)
            for buffer, content in contents:
                if not torch.equal(buffer, content):
                    buffer.copy_(content)
