"""What the fields of a saved position may hold, and the error for those that hold something else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

#: Bytes of an array or a byte string.
MOST_BYTES = 1 << 24
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


def list_of(item: Check, *, least: int = 0, optional: bool = False) -> Check:
    """A list of at least so many items; None too, where ``optional``."""

    def check(value: Any, where: str) -> None:
        if value is None and optional:
            return
        if type(value) is not list or len(value) < least:
            raise damaged(where, f"{shown(value)} is no list" + (f" of at least {least}" if least else ""))
        for i, each in enumerate(value):
            try:
                item(each, where)
            except StateError:
                # Names are made for errors only: a buffer holds thousands of items.
                item(each, f"{where}[{i}]")

    return check


def restore_key(value: Any, where: str) -> None:
    """What Energon finds a sample by: names of datasets and numbers; keys inside where samples were joined."""
    if type(value) is not tuple or not value:
        raise damaged(where, f"{shown(value)} is not the key of a sample")
    for part in value:
        if type(part) is tuple:
            restore_key(part, where)
        elif type(part) is not str and not (type(part) is int and 0 <= part <= MOST_COUNT):
            raise damaged(where, f"{shown(part)} has no place in the key of a sample")


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


def numpy_random(value: Any, where: str) -> None:
    """The state of numpy's global generator."""
    fits = type(value) is tuple and len(value) == 5 and type(value[1]) is np.ndarray
    if fits:
        name, key, at, has_gauss, gauss = value
        fits = type(name) is str and name == "MT19937" and key.dtype == np.uint32 and key.shape == (624,)
        # numpy takes any position for what it is, and would read beyond the array.
        fits = fits and type(at) is int and 0 <= at <= 624 and type(has_gauss) is int and type(gauss) is float
    if not fits:
        raise damaged(where, "this is no state of numpy's random numbers")


def python_random(value: Any, where: str) -> None:
    """The state of Python's global generator."""
    fits = type(value) is tuple and len(value) == 3 and type(value[0]) is int and type(value[1]) is tuple
    fits = fits and type(value[2]) in (float, type(None))
    try:
        fits = fits and all(type(word) is int for word in value[1])
        random.Random(0).setstate(value if fits else ())
    except (TypeError, ValueError, OverflowError, IndexError) as e:
        raise damaged(where, "this is no state of Python's random numbers") from e


#: Arrays hold numbers of these types; an array of objects could hold anything.
_DTYPES = frozenset(np.dtype(name).str for name in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8", "?"))


def array(value: dict[str, Any], where: str) -> np.ndarray[Any, Any]:
    """The array of which type, shape and bytes are given; nothing is allocated before they fit."""
    dtype, shape, data = value["dtype"], value["shape"], value["data"]
    if type(dtype) is not str or dtype not in _DTYPES:
        raise damaged(where, f"arrays of type {shown(dtype)} have no place in it")
    if type(shape) is not list or len(shape) > 8 or any(type(n) is not int or not 0 <= n <= MOST_BYTES for n in shape):
        raise damaged(where, "the shape of an array is no list of whole numbers")
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if type(data) is not bytes or size > MOST_BYTES or len(data) != size:
        raise damaged(where, f"an array of type {dtype} and shape {shape} does not consist of {shown(data)}")
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()
