"""Energon's loader state <-> plain containers.

A checkpoint must load without unpickling classes, so Energon's state objects and its dict subclass become dicts, lists, tuples,
numbers, strings and bytes, each wrapped with the name of what it was.

A checkpoint may come from a stranger. What is read back is made of the kinds below and of nothing else; each field has a type
and a range. The work is linear in what the file holds, since no part may occur twice, and nothing is allocated before its size
is known. Whether the values fit the data is for :mod:`lightning_pack.energon.validity`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.state import FlexState

from lightning_pack.energon.fields import (
    MOST_COUNT,
    Check,
    StateError,
    count,
    count_or_none,
    damaged,
    instance,
    list_of,
    restore_key,
    restore_key_or_none,
    shown,
    torch_random_or_none,
)

__all__ = ["StateError", "from_plain", "to_plain"]

#: Levels of containers; a state of today has about 50, each dataset inside a dataset adds 4.
MOST_DEPTH = 200
#: Bytes of a byte string, bytes of a tensor (a state of random numbers), characters of a string.
MOST_BYTES = 1 << 24
MOST_TENSOR = 1 << 16
MOST_CHARACTERS = 1 << 20

_Field = dict[str, Check]

#: The objects of a state, with all their fields. A further class is one more entry.
_CLASSES: dict[type[Any], _Field] = {SliceState: {"index": count, "current": count}}
#: Entries of a FlexState or dict, wherever they occur; what is not named here may be any plain value.
_ENTRIES: _Field = {
    "__class__": instance(str),
    "datasets": list_of(instance(FlexState)),
    "rng": torch_random_or_none,
    "exhausted": list_of(instance(bool)),
    "_ended": instance(bool),
    "_active_slice_state": list_of(instance(SliceState, optional=True)),
    "_pending_slice_indexes": list_of(count, optional=True),
    "_pending_slices_offset": count_or_none,
    "_restore_keys": list_of(restore_key),
    "_generator_sample_key": restore_key_or_none,
    "_generator_offset": count_or_none,
    **dict.fromkeys(
        (
            "_sample_index",
            "_sample_count",
            "_epoch_count",
            "_epoch_sample_count",
            "_repetition",
            "_index",
        ),
        count,
    ),
}
_KIND = "__kind__"
_NAMED = {cls.__name__: (cls, fields) for cls, fields in _CLASSES.items()}


def to_plain(value: Any) -> Any:
    """A deep copy made of plain containers, for :func:`from_plain`.

    Raises:
        TypeError: for a type that Energon's states do not hold today.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, FlexState):
        return {_KIND: "FlexState", "items": [(key, to_plain(item)) for key, item in value.items()]}
    if isinstance(value, dict):
        return {_KIND: "dict", "items": [(to_plain(key), to_plain(item)) for key, item in value.items()]}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item) for item in value)
    if type(value) in _CLASSES:
        fields = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {_KIND: type(value).__name__, "fields": fields}
    raise TypeError(f"a {type(value).__qualname__} in the loader's state cannot be stored without pickle")


def from_plain(value: Any, *, where: str = "loader") -> Any:
    """The state that :func:`to_plain` was given, as fresh objects: Energon changes a restored state in place.

    Args:
        value: anything that was read from a checkpoint; a plain dict without a kind is decoded entry by entry.
        where: what the errors call the value.

    Raises:
        StateError: for everything that :func:`to_plain` does not give.
    """
    return _Decoder().decode(value, where, 0)


class _Decoder:
    def __init__(self) -> None:
        self._seen: set[int] = set()

    def decode(self, value: Any, where: str, depth: int) -> Any:
        kind = type(value)
        if kind in (dict, list, tuple):
            return self._container(value, where, depth + 1)
        if value is None or kind is bool:
            return value
        if kind is int:
            # Far more than any count; a setting may be as large.
            if value.bit_length() > 64:
                raise damaged(where, f"{shown(value)} is too large")
        elif kind is float:
            if not math.isfinite(value):
                raise damaged(where, f"{value} is not a number to go on with")
        elif kind in (str, bytes):
            if len(value) > (MOST_CHARACTERS if kind is str else MOST_BYTES):
                raise damaged(where, f"{shown(value)} is too long")
        elif kind is torch.Tensor:
            return self._tensor(value, where)
        else:
            raise damaged(where, f"a {kind.__name__} has no place in it")
        return value

    def _container(self, value: Any, where: str, depth: int) -> Any:
        if depth > MOST_DEPTH:
            raise damaged(where, f"it is nested more than {MOST_DEPTH} levels deep")
        if value:
            self._once(id(value), where)
        if type(value) is not dict:
            items = [item if _is_small(item) else self.decode(item, f"{where}[{i}]", depth) for i, item in enumerate(value)]
            return items if type(value) is list else tuple(items)
        name = value.get(_KIND)
        if name is None:
            return self._entries(list(value.items()), where, depth)
        if type(name) is not str or name not in ("FlexState", "dict", *_NAMED):
            raise damaged(where, f"its kind {shown(name)} is not known")
        if name in ("FlexState", "dict"):
            _only(value, (_KIND, "items"), where)
            pairs = value["items"]
            if type(pairs) is not list or any(type(pair) is not tuple or len(pair) != 2 for pair in pairs):
                raise damaged(where, "its items are no pairs")
            return (FlexState if name == "FlexState" else dict)(self._entries(pairs, where, depth))
        _only(value, (_KIND, "fields"), where)
        cls, checks = _NAMED[name]
        _only(value["fields"], checks, where)
        return cls(**self._entries(list(value["fields"].items()), where, depth, checks))

    def _entries(self, pairs: list[Any], where: str, depth: int, checks: _Field = _ENTRIES) -> dict[Any, Any]:
        entries: dict[Any, Any] = {}
        # The dataset that the values belong to: a chain of datasets is named by the one that holds the value.
        owner = next((f".{shown(name, 40)[1:-1]}" for key, name in pairs if _is_class(key, name)), "")
        for key, item in pairs:
            if (key is not None and type(key) not in (str, int, bool)) or key in entries:
                raise damaged(where, f"{shown(key)} cannot be a name in it, or is there twice")
            word = shown(key, 40)[1:-1] if type(key) is str else shown(key)
            place = where if key == "datasets" else f"{where}{owner}.{word}".rstrip(".")
            entries[key] = self.decode(item, place, depth + 1)
            if key in checks:
                checks[key](entries[key], place)
        return entries

    def _tensor(self, value: torch.Tensor, where: str) -> torch.Tensor:
        plain = value.layout == torch.strided and value.device.type == "cpu" and not value.requires_grad
        # A view may claim far more values than are stored.
        if not plain or value.dtype != torch.uint8 or value.numel() > MOST_TENSOR or not value.is_contiguous():
            raise damaged(where, f"a tensor of {value.dtype} and shape {tuple(value.shape)} has no place in it")
        if value.numel():
            self._once(value.untyped_storage().data_ptr(), where)
        return value.clone()

    def _once(self, address: int, where: str) -> None:
        if address in self._seen:
            raise damaged(where, "the same part occurs in it twice")
        self._seen.add(address)


def _is_small(value: Any) -> bool:
    """Most of a state are names and numbers of samples; a shortcut for them."""
    kind = type(value)
    return (kind is int and 0 <= value <= MOST_COUNT) or (kind is str and len(value) <= MOST_CHARACTERS)


def _is_class(key: Any, name: Any) -> bool:
    return type(key) is str and key == "__class__" and type(name) is str


def _only(value: Any, names: Any, where: str) -> None:
    if type(value) is not dict or set(value) != set(names):
        has = sorted(shown(name) for name in value)[:9] if type(value) is dict else shown(value)
        raise damaged(where, f"it should hold {sorted(names)} and holds {has}")
