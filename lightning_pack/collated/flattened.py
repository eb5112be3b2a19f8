"""A batch that is flattened already, as transformers' ``DataCollatorWithFlattening`` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pack.boundaries import shown_offsets
from lightning_pack.collated.fields import CollatedBatchError, Contents
from lightning_pack.collated.gathering import gather_row
from lightning_pack.collated.row import CollatedRow
from lightning_pack.layout import RowLayout
from lightning_pack.policy import PackingPolicy
from lightning_pack.source import EncodedSource, Pack


def is_flattened(named: Mapping[str, Any]) -> bool:
    """Whether the entries of a batch are one row with boundaries or restarting positions, and no mask."""
    ids = named.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1:
        return False
    if named.get("attention_mask") is not None or named.get("lengths") is not None:
        return False
    return any(named.get(name) is not None for name in ("position_ids", "cu_seq_lens_q", "seq_idx"))


def pack_flattened(contents: Contents, *, policy: PackingPolicy | None, pad_id: int, name: str) -> CollatedRow:
    """The row with its boundaries: by ``cu_seq_lens_q``, else by the restarts of ``position_ids``, else by ``seq_idx``.

    Waits for the device once. Labels of first tokens, which would be targets of the source before, become no targets.

    Args:
        contents: of the batch.
        policy: that the row has to keep to; None takes it as it is.
        pad_id: token id in gaps.
        name: of the batch.

    Raises:
        CollatedBatchError: for boundaries that do not describe the row or contradict each other, and for a row that is not what
            the policy asks for.
    """
    width = contents.input_ids.shape[1]
    read = contents.read
    for entry in ("labels", "shift_labels"):
        if (value := read.get(entry)) is not None and tuple(value.shape) != (1, width):
            raise CollatedBatchError(f"{entry} of {name} has shape {list(value.shape)} in a row of {width} tokens")
    offsets = offsets_of(read, width=width, name=name)
    lengths = [stop - start for start, stop in pairwise(offsets)]
    if policy is not None:
        _refuse_other_row(lengths, policy=policy, name=name)
    places = torch.arange(width).split(lengths)
    if isinstance(contents.keys, Tensor) or contents.keys is None or len(contents.keys) != len(lengths):
        keys = [f"{name}, source {number}" for number in range(len(lengths))]
    else:
        keys = [str(key) for key in contents.keys]
    sources = [EncodedSource.of(key, place) for key, place in zip(keys, places, strict=True)]
    pack = Pack(sources=sources, layout=RowLayout.of(lengths))
    # Positions are those of every packed row; they have been compared.
    kept = {entry: value for entry, value in read.items() if entry in ("labels", "shift_labels")}
    changed = replace(contents, read=kept, rows=len(lengths))
    row = gather_row([pack], changed, places=list(range(len(lengths))), pad_id=pad_id)
    if "seq_idx" in read:
        row.extras["seq_idx"] = read["seq_idx"]
    return row


def _refuse_other_row(lengths: list[int], *, policy: PackingPolicy, name: str) -> None:
    width, most = sum(lengths), policy.max_sources
    crooked = next((length for length in lengths if length % policy.multiple), None)
    broken = {
        f"{width} tokens, more than capacity={policy.capacity}": width > policy.capacity,
        f"a source of {crooked} tokens, no multiple of multiple={policy.multiple}": crooked is not None,
        f"{len(lengths)} sources, more than max_sources={most}": most is not None and len(lengths) > most,
        f"{width} tokens, not width={policy.width!r} ({policy.row_width})": policy.row_width not in (None, width),
        "as many boundaries as sources need, which fixed_boundaries=True does not allow": policy.fixed_boundaries,
    }
    if wrong := [what for what, is_so in broken.items() if is_so]:
        raise CollatedBatchError(
            f"{name} is a row that its collator packed, and it has {'; '.join(wrong)}. Rows that come packed are not packed "
            "again: leave the policy out of PackedAttention, or let the collator pad (DataCollatorForSeq2Seq and the like)"
        )


def offsets_of(read: dict[str, Any], *, width: int, name: str) -> list[int]:
    """Physical offsets of the sources, the last of which is the width."""
    rows = {entry: read[entry] for entry in ("position_ids", "seq_idx") if entry in read}
    for entry, value in rows.items():
        if not isinstance(value, Tensor) or tuple(value.shape) != (1, width):
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise CollatedBatchError(
                f"{entry} of {name} is {shape}, and a flattened row of {width} tokens needs [1, {width}]: leave it out, and "
                "give cu_seq_lens_q"
            )
    given = {entry: read[entry] for entry in ("cu_seq_lens_q", "cu_seq_lens_k") if entry in read}
    # The one wait for the device.
    parts = {entry: torch.as_tensor(value).reshape(-1).long() for entry, value in (given | rows).items()}
    device = next((part.device for part in parts.values() if part.device.type != "cpu"), torch.device("cpu"))
    flat = torch.cat([part.to(device) for part in parts.values()]).cpu().numpy()
    found = dict(zip(parts, np.split(flat, np.cumsum([len(part) for part in parts.values()])[:-1]), strict=True))
    query, key = found.get("cu_seq_lens_q"), found.get("cu_seq_lens_k")
    if query is not None and key is not None and not np.array_equal(query, key):
        raise CollatedBatchError(f"cu_seq_lens_q and cu_seq_lens_k of {name} differ: sources attend to themselves only")
    if query is not None:
        offsets = query
    elif "position_ids" in found:
        offsets = np.flatnonzero(np.diff(found["position_ids"], prepend=-2, append=-2) != 1)
    else:
        offsets = np.flatnonzero(np.diff(found["seq_idx"], prepend=-1, append=-1))
    # A fixed number of boundaries repeats the last one.
    ends = offsets.tolist()
    while len(ends) > 1 and ends[-1] == ends[-2]:
        ends.pop()
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != width or any(b <= a for a, b in pairwise(ends)):
        raise CollatedBatchError(
            f"the boundaries of {name} are {shown_offsets(ends)} in a row of {width} tokens: they start at 0, rise and end "
            "with the row"
        )
    lengths = np.diff(ends)
    starts = np.repeat(ends[:-1], lengths)
    if "position_ids" in found and not np.array_equal(found["position_ids"], np.arange(width) - starts):
        wrong = int(np.flatnonzero(found["position_ids"] != np.arange(width) - starts)[0])
        raise CollatedBatchError(
            f"position_ids of {name} do not restart at 0 with each source (token {wrong} has {found['position_ids'][wrong]}, "
            f"boundaries {shown_offsets(ends)}), which is what a packed row gives them: leave them out and give cu_seq_lens_q, "
            "or use position_ids_start=0"
        )
    if "seq_idx" in found:
        changes = np.flatnonzero(np.diff(found["seq_idx"])) + 1
        if changes.tolist() != ends[1:-1]:
            raise CollatedBatchError(
                f"seq_idx of {name} changes at {shown_offsets(changes.tolist())}, the boundaries are {shown_offsets(ends)}"
            )
    return ends
