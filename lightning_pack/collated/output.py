"""unpack: what a model gives for a packed row, apart by source; and the sources of many rows in the order of the data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_pack.collated.row import CollatedRow, packed_row


class SourceOutput(NamedTuple):
    """What belongs to one source."""

    key: str
    #: ``[L, ...]``, a view of the output.
    values: Tensor


def unpack(outputs: Any, batch: Any) -> list[SourceOutput]:
    """The values of each source, in the order in which the sources came in this batch.

    Rows of :func:`~lightning_pack.collated.pack_loader` and of a datamodule hold sources of many batches, so their results come
    by key and not in the order of the data; :func:`in_reading_order` puts them in order.

    Call it in the step, with the batch that the step was given; ``dict(unpack(...))`` finds values by key. Pads are in none of
    them. Waits for the device once, to learn the boundaries. A source that was left out has no entry; the
    row's ``left_out`` says why.

    Args:
        outputs: a tensor along the row, ``[1, T, ...]``, or a model's output, whose ``logits`` are taken.
        batch: a :class:`~lightning_pack.row.PackedBatch`, or the dict or dataclass that
            :class:`~lightning_pack.callbacks.PackedAttention` has packed.

    Raises:
        ValueError: for a batch that is not packed, and for outputs that do not lie along its row.
    """
    row = packed_row(batch)
    if row is None:
        raise ValueError(
            f"unpack got a {type(batch).__name__} that is not packed, or is not the batch in hand any more: call it in the "
            "step, with the batch that the step was given and PackedAttention(policy=...) among the callbacks"
        )
    values = outputs
    if not isinstance(values, Tensor):
        values = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    width = row.input_ids.shape[1]
    if not isinstance(values, Tensor):
        raise ValueError(
            f"unpack got a {type(outputs).__name__}, which is neither a tensor nor has logits: pass the tensor itself"
        )
    if tuple(values.shape[:2]) != (1, width):
        raise ValueError(
            f"unpack got values of shape {list(values.shape)} for a row of {width} tokens: they need to begin with [1, "
            f"{width}], so that each token has its own (logits_to_keep and the like give others)"
        )
    count = len(row.source_keys)
    physical, real = row.cu_seqlens_padded.tolist(), row.cu_seqlens.diff().tolist()
    found = [SourceOutput(row.source_keys[i], values[0, physical[i] : physical[i] + real[i]]) for i in range(count)]
    if not isinstance(row, CollatedRow):
        return found
    return [found[i] for i in sorted(range(count), key=lambda i: row.places[i])]


#: A number, or the names that sources without a key are given.
_NUMBERED = re.compile(r"(?:batch )?(\d+)(?: of loader (\d+))?(?:, (?:row|source) (\d+))?")


def in_reading_order(results: Iterable[Iterable[SourceOutput]], *, keys: Sequence[str] | None = None) -> list[SourceOutput]:
    """The sources of all rows in the order of the data: of what ``trainer.predict`` returns, where the step returns ``unpack``.

    A source that was left out has no entry here either.

    Args:
        results: of each row.
        keys: of the sources, in the order that is wanted; those that have no result are passed over. None takes the order in
            which they were read: keys are numbers then, or sources had no key of their own and are named by batch and row.

    Raises:
        ValueError: for a source that comes twice, one that ``keys`` do not hold, and without ``keys`` for one whose key does
            not tell its place.

    Example:
        >>> import torch
        >>> rows = [[SourceOutput("10", torch.ones(2)), SourceOutput("2", torch.ones(3))], [SourceOutput("9", torch.ones(1))]]
        >>> [result.key for result in in_reading_order(rows)]
        ['2', '9', '10']
    """
    found: dict[str, SourceOutput] = {}
    for result in (result for row in results for result in row):
        if result.key in found:
            raise ValueError(f"source {result.key!r} comes twice: order the results of one pass, whose sources have a key each")
        found[result.key] = result
    if keys is None:
        return sorted(found.values(), key=lambda result: _place(result.key))
    if strange := found.keys() - set(keys):
        raise ValueError(f"{len(strange)} sources are not among the {len(keys)} keys, such as {min(strange)!r}")
    return [found[key] for key in keys if key in found]


def _place(key: str) -> tuple[int, int, int]:
    match = _NUMBERED.fullmatch(key)
    if match is None:
        raise ValueError(
            f"source {key!r} has a key of its own, which does not tell its place: pass the keys in the order that is wanted, "
            "in_reading_order(results, keys=[...])"
        )
    batch, loader, row = (int(number or 0) for number in match.groups())
    return loader, batch, row
