"""What every packer may rely on: whole lengths that fit a bin, and limits that make sense."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence


def whole(name: str, value: object, *, least: int) -> int:
    """``value`` as an int.

    Raises:
        ValueError: if it is no whole number, or less than ``least``.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise ValueError(f"{name}={value!r}: a whole number of at least {least} is needed")
    return operator.index(value)


def most_sources(max_sources: int | None) -> int:
    """How many sources a bin may hold, as a number in any case.

    Raises:
        ValueError: if it is no whole number, or less than 1.
    """
    return sys.maxsize if max_sources is None else whole("max_sources", max_sources, least=1)


def fitting(lengths: Sequence[int], capacity: int) -> list[int]:
    """``lengths`` as a list of ints, none of them empty or longer than ``capacity`` (in tokens).

    Raises:
        ValueError: naming the first source that is, a length that is no whole number, or a capacity below 1.
    """
    capacity = whole("capacity", capacity, least=1)
    # Arrays of numbers give Python's own ints, with which the packers are several times as fast.
    values: list[int] = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
    if set(map(type, values)) - {int}:
        values = [whole(f"length {index}", length, least=0) for index, length in enumerate(values)]
    if values and (min(values) < 1 or max(values) > capacity):
        index, length = next((i, n) for i, n in enumerate(values) if not 1 <= n <= capacity)
        if length < 1:
            raise ValueError(f"source {index} has {length} tokens; a source without tokens cannot be packed")
        raise ValueError(
            f"source {index} has {length} tokens, more than capacity={capacity}: raise the capacity, or leave out, cut or "
            "split the source"
        )
    return values
