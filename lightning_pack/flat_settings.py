"""Nested settings as a flat list of names and values, so that a difference names just what differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(settings: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names.

    >>> flat({"packing": {"capacity": 8}, "seed": 0})
    {'packing.capacity': 8, 'seed': 0}
    """
    result: dict[str, Any] = {}
    for name, value in settings.items():
        result |= flat(value, prefix=f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return result
