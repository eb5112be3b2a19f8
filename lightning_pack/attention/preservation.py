"""A model that is only looked at."""

from __future__ import annotations

import operator
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; mode, attributes, buffers and random state as before outside."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), unchanged(model):
        model.eval()
        yield


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Modes, attributes and buffers of all submodules as before outside, and what tensors, containers and generators hold.

    Parameters are left to the caller. So are objects of other kinds in attributes: nobody knows what is in them. Tensors are
    kept in memory of the CPU, so that this takes none of the device.
    """
    attributes = [(part, dict(vars(part))) for part in module.modules()]
    # Rotary frequencies that depend on the length are computed in the forward: buffers, and attributes that go with them.
    # A metric keeps its sums in attributes and adds to them in place.
    held = _Held()
    for _, values in attributes:
        for value in values.values():
            held.add(value)
    try:
        yield
    finally:
        for part, values in attributes:
            vars(part).clear()
            vars(part).update(values)
        held.put_back()


class _Held:
    """What containers and tensors hold."""

    def __init__(self) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._generators: dict[int, tuple[Any, Any]] = {}

    def add(self, value: Any) -> None:
        """Note what ``value`` holds, and what its elements hold."""
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and not value.is_meta and id(value) not in self._tensors:
                self._tensors[id(value)] = (value, value.detach().cpu().clone())
        elif isinstance(value, dict | list | set | deque) and id(value) not in self._containers:
            elements = _elements(value)
            self._containers[id(value)] = (value, elements)
            for element in elements:
                self.add(element)
        elif isinstance(value, torch.Generator | random.Random | np.random.Generator):
            self._generators.setdefault(id(value), (value, _random_state(value)))
        elif type(value) is tuple:
            for element in value:
                self.add(element)

    @torch.no_grad()
    def put_back(self) -> None:
        """Make them hold it again."""
        for container, elements in self._containers.values():
            if _same(_elements(container), elements):
                continue
            container.clear()
            if isinstance(container, dict | set):
                container.update(elements)
            else:
                container.extend(elements)
        for tensor, content in self._tensors.values():
            if not torch.equal(tensor.detach().cpu(), content):
                tensor.copy_(content)
        for generator, state in self._generators.values():
            _set_random_state(generator, state)


def _random_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.getstate()


def _set_random_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.setstate(state)


def _elements(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether these are the same objects, or pairs of the same objects."""
    return len(a) == len(b) and all(
        x is y or (type(x) is type(y) is tuple and len(x) == len(y) and all(map(operator.is_, x, y)))
        for x, y in zip(a, b, strict=True)
    )
