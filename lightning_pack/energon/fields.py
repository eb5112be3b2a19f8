"""What the fields of a saved position may hold, and the error for those that hold something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Counts stay far below what a 64-bit number holds, so that counting on cannot leave it.
MOST_COUNT = 1 << 60


class StateError(ValueError):
    """A position in the data that cannot be read: damaged, or tampered with."""


def damaged(where: str, what: str) -> StateError:
    """The error for a part of a checkpoint."""
    return StateError(f"the checkpoint's data position is damaged: {where}: {what}; resume from another checkpoint")


def shown(value: Any, most: int = 60) -> str:
    """The value for a message: short, whatever it is. A number of thousands of digits must not be written out."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        text = repr(value[:most])
        return text if len(value) <= most else f"{text}... ({len(value)} long)"
    if isinstance(value, float | bool | int) or value is None:
        return repr(value)
    return f"a {type(value).__name__}"


# What a field may hold. A check gets the decoded value and the place, and raises a StateError.

Check = Callable[[Any, str], None]


def number(least: int, most: int, *, optional: bool = False) -> Check:
    """A whole number of the range; None too, where ``optional``."""

    def check(value: Any, where: str) -> None:
        if value is None and optional:
            return
        if type(value) is not int or not least <= value <= most:
            raise damaged(where, f"{shown(value)} is not a whole number from {least} to {most}")

    return check


count, count_or_none = number(0, MOST_COUNT), number(0, MOST_COUNT, optional=True)


def instance(*types: type, optional: bool = False) -> Check:
    """An object of one of the types; None too, where ``optional``."""

    def check(value: Any, where: str) -> None:
        if not (value is None and optional) and type(value) not in types:
            raise damaged(where, f"{shown(value)} is no {' or '.join(t.__name__ for t in types)}")

    return check


def list_of(item: Check, *, optional: bool = False) -> Check:
    """A list of such items; None too, where ``optional``."""

    def check(value: Any, where: str) -> None:
        if value is None and optional:
            return
        if type(value) is not list:
            raise damaged(where, f"{shown(value)} is no list")
        for i, each in enumerate(value):
            item(each, f"{where}[{i}]")

    return check


def restore_key(value: Any, where: str) -> None:
    """What Energon finds a sample by: names of datasets and numbers; keys inside where samples were joined."""
    if type(value) is not tuple or not value:
        raise damaged(where, f"{shown(value)} is not the key of a sample")
    for part in value:
        if type(part) is tuple:
            restore_key(part, where)
        elif type(part) is not str:
            count(part, where)


def restore_key_or_none(value: Any, where: str) -> None:
    """A :func:`restore_key`, or None."""
    if value is not None:
        restore_key(value, where)


def torch_random(value: Any, where: str) -> None:
    """The state of torch's generator on the CPU, as a tensor, or as bytes."""
    try:
        tensor = torch.frombuffer(bytearray(value), dtype=torch.uint8) if type(value) is bytes else value
        torch.Generator().set_state(tensor)
    except (TypeError, RuntimeError, ValueError, AttributeError) as e:
        raise damaged(where, f"{shown(value)} is no state of torch's random numbers") from e


def torch_random_or_none(value: Any, where: str) -> None:
    """A :func:`torch_random`, or None."""
    if value is not None:
        torch_random(value, where)
