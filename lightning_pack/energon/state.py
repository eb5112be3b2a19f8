"""Energon's loader state <-> plain containers.

A checkpoint must load without unpickling classes, so Energon's state objects, its dict subclass and numpy's arrays become
dicts, lists, tuples, numbers, strings, bytes and tensors, each wrapped with the name of what it was.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState
from megatron.energon.state import FlexState

_CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState, SystemRngState, SliceState)
}
_KIND = "__kind__"


def to_plain(value: Any) -> Any:
    """A deep copy made of plain containers, for :func:`from_plain`.

    Raises:
        TypeError: for a type that Energon's states do not hold today.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {_KIND: "ndarray", "dtype": value.dtype.str, "shape": list(value.shape), "data": value.tobytes()}
    if isinstance(value, FlexState):
        return {_KIND: "FlexState", "items": [(key, to_plain(item)) for key, item in value.items()]}
    if isinstance(value, dict):
        return {_KIND: "dict", "items": [(to_plain(key), to_plain(item)) for key, item in value.items()]}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item) for item in value)
    if type(value).__name__ in _CLASSES:
        fields = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {_KIND: type(value).__name__, "fields": fields}
    raise TypeError(f"a {type(value).__qualname__} in the loader's state cannot be stored without pickle")


def from_plain(value: Any) -> Any:
    """The state that :func:`to_plain` was given, as fresh objects: Energon changes a restored state in place."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list | tuple):
        return type(value)(from_plain(item) for item in value)
    if not isinstance(value, dict):
        return value
    kind = value[_KIND]
    if kind == "ndarray":
        return np.frombuffer(value["data"], dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if kind == "FlexState":
        return FlexState((key, from_plain(item)) for key, item in value["items"])
    if kind == "dict":
        return {from_plain(key): from_plain(item) for key, item in value["items"]}
    return _CLASSES[kind](**{name: from_plain(item) for name, item in value["fields"].items()})
