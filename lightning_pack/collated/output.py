"""unpack: what a model gives for a packed row, apart by source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightning_pack.collated.row import CollatedRow, packed_row


class SourceOutput(NamedTuple):
    """What belongs to one source."""

    key: str
    #: ``[L, ...]``, a view of the output.
    values: Tensor


def unpack(outputs: Any, batch: Any) -> list[SourceOutput]:
    """The values of each source, in the order in which the sources came.

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
