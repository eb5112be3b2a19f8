"""Rotary frequencies that a model chooses by the longest source of a row.

Two kinds do: ``longrope`` has one set for rows up to its original length and another beyond, ``dynamic`` computes a set for
each length beyond. In a packed row one long source would then change how all the short ones are seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def chooses_frequencies(config: Any) -> bool:
    """Whether a model's rotary frequencies depend on the longest source of a row."""
    return next(_limits(config), None) is not None


def refuse_shared_frequencies(config: Any, lengths: Sequence[int], *, ranks: int = 1) -> None:
    """Refuse a row whose longest source would change the rotary frequencies of another.

    Args:
        config: of the layer; None is passed over.
        lengths: of the sources of the row, in tokens; 0 is no source.
        ranks: that hold parts of the row; each sees the longest position of its own part only.

    Raises:
        ValueError: with the length up to which rows are right.
    """
    longest, shortest = max(lengths), min(filter(None, lengths), default=0)
    for kind, limit in _limits(config) if ranks > 1 else ():
        if longest > limit:
            raise ValueError(
                f"a source of {longest} tokens is spread over {ranks} context-parallel ranks, and beyond {limit} tokens this "
                f"model's rotary frequencies ({kind}) follow the longest position of a rank, so ranks would not agree: set the "
                f"capacity to {limit}, or context=1"
            )
    if longest == shortest:
        return
    for kind, limit in _limits(config):
        if longest > limit and (shortest <= limit or kind == "dynamic"):
            raise ValueError(
                f"sources of {shortest} and {longest} tokens share a row, and beyond {limit} tokens this model's rotary "
                f"frequencies ({kind}) follow the longest source of a row, so the short one would be another than alone: set "
                f"the capacity to {limit}, or max_sources=1, or train this model unpacked"
            )


def _limits(config: Any) -> Iterator[tuple[str, int]]:
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return
    # Models with two kinds of layers have one mapping for each.
    several = [value for value in parameters.values() if isinstance(value, Mapping) and "rope_type" in value]
    for values in several or [parameters]:
        kind = str(values.get("rope_type", "default"))
        if kind == "longrope":
            yield kind, values.get("original_max_position_embeddings") or config.max_position_embeddings
        elif "dynamic" in kind:
            yield "dynamic", config.max_position_embeddings
