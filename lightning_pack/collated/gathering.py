"""Tensors of a collator's batch moved to their places in a packed row, without a loop on the device.

The row is built of *places* instead of tokens, by the same code that packs tokens: in ``input_ids`` is where each token comes
from, in ``labels`` and ``shift_labels`` where each target does. What is on the device is gathered by these places.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_pack.collated.fields import Contents
from lightning_pack.collated.row import CollatedRow
from lightning_pack.source import IGNORE, Pack


def gather_row(packs: Iterable[Pack], contents: Contents, *, places: list[int], pad_id: int) -> CollatedRow:
    """The row of packs whose sources hold places in the flat ``[B * S]`` tokens of a batch.

    Args:
        packs: of places; labels are the places of the labels.
        contents: of the batch.
        places: row of the batch that each source comes from, in row order.
        pad_id: token id in gaps.
    """
    ids, read = contents.input_ids, contents.read
    row = CollatedRow.from_packs(packs, pad_id=ids.numel())
    if ids.device.type == "cuda":
        # Else the copies would wait for the device.
        row = row.pin_memory()
    assert isinstance(row, CollatedRow)
    moved = row.to(ids.device)
    assert isinstance(moved, CollatedRow)
    row, index = moved, moved.input_ids
    row.input_ids = _take(ids, index, fill=pad_id)
    # So far it is that of the places.
    row.largest_id = None
    row.labelled = "labels" in read or "shift_labels" in read
    for name in ("labels", "shift_labels"):
        setattr(row, name, _labels(read, getattr(row, name)))
    row.loss_mask = row.shift_labels != IGNORE
    row.position_ids = _positions(read.get("position_ids"), index, text=row.position_ids)
    row.places, row.with_media = places, bool(contents.media)
    row.extras = dict(contents.others) | contents.media
    row.extras |= {name: _along(tensor, index) for name, tensor in contents.tokens.items()}
    changed = places != list(range(contents.rows))
    for name, value in contents.sources.items():
        row.extras[name] = _of_sources(value, places) if changed else value
    return row


def _take(tensor: Tensor, index: Tensor, *, fill: int) -> Tensor:
    """``[B, S]`` -> ``[1, T]``."""
    flat = tensor.reshape(-1)
    found = flat[index.clamp(0, len(flat) - 1)]
    return torch.where((index >= 0) & (index < len(flat)), found, fill)


def _labels(read: dict[str, Any], index: Tensor) -> Tensor:
    if (shifted := read.get("shift_labels")) is not None:
        # The label of a token lies one place before it there.
        return _take(shifted.to(index.device), torch.where(index == IGNORE, IGNORE, index - 1), fill=IGNORE)
    if (labels := read.get("labels")) is not None:
        return _take(labels.to(index.device), index, fill=IGNORE)
    return torch.full_like(index, IGNORE)


def _positions(given: Tensor | None, index: Tensor, *, text: Tensor) -> Tensor:
    """Those of the row, ``[1, T]``; with M-RoPE's under them, ``[4, 1, T]``."""
    if given is None or given.dim() == 2:
        return text
    axes = given[-3:].to(text.device).flatten(1)
    inside = (index >= 0) & (index < axes.shape[1])
    found = torch.where(inside[0], axes[:, index[0].clamp(0, axes.shape[1] - 1)], text)
    return torch.cat([text[None], found[:, None]])


def _along(tensor: Tensor, index: Tensor) -> Tensor:
    """``[B, S, ...]`` -> ``[1, T, ...]``, zero in gaps."""
    flat = tensor.flatten(0, 1)
    place = index[0].to(tensor.device)
    found = flat[place.clamp(0, len(flat) - 1)]
    inside = (place < len(flat)).reshape(-1, *(1,) * (found.dim() - 1))
    return torch.where(inside, found, torch.zeros((), dtype=found.dtype, device=found.device))[None]


def _of_sources(value: Any, places: list[int]) -> Any:
    if isinstance(value, Tensor):
        order = torch.tensor(places, dtype=torch.int64)
        order = order.pin_memory() if value.device.type == "cuda" else order
        return value[order.to(value.device, non_blocking=True)]
    return type(value)([value[i] for i in places]) if type(value) in (list, tuple) else [value[i] for i in places]
