"""The sources of a collator's batch on the CPU, one by one: for packing over several batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pack.collated.extent import extents
from lightning_pack.collated.fields import BOUNDARIES, KEY_NAMES, BatchFields, CollatedBatchError, Contents, contents_of
from lightning_pack.collated.flattened import is_flattened, offsets_of
from lightning_pack.row import PackedBatch
from lightning_pack.source import IGNORE, EncodedSource


def sources_of(batch: Any, *, roles: BatchFields, name: str, needs_targets: bool = True) -> list[EncodedSource]:
    """The sources of a padded or flattened batch, or of a list of samples that are not padded, in their order.

    Args:
        batch: as :func:`~lightning_pack.collated.pack_collated` takes it, but frozen dataclasses and named tuples too, since it
            is not changed; or a list of samples, each a mapping or dataclass with ``input_ids`` ``[L]`` and ``labels`` ``[L]``,
            or an :class:`~lightning_pack.source.EncodedSource`.
        roles: what the entries are.
        name: of the batch, for sources without a key.
        needs_targets: whether labels have to be there; without them no token is a target.

    Raises:
        CollatedBatchError: for what cannot be packed, and for entries that a packed row has no place for.
    """
    if isinstance(batch, PackedBatch):
        raise CollatedBatchError(f"{name} is a PackedBatch already: give its loader to the Trainer as it is")
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        numbered = ((sample, f"{name}, row {row}") for row, sample in enumerate(batch))
        return [_sample(sample, roles=roles, name=each, needs_targets=needs_targets) for sample, each in numbered]
    named = _named(batch, name=name)
    named = {entry: value.cpu() if isinstance(value, Tensor) else value for entry, value in named.items()}
    _refuse_sample(named.get("input_ids"), name=name)
    flattened = is_flattened(named)
    contents = contents_of(named, roles=roles, flattened=flattened)
    _refuse_others(contents, named, roles=roles, name=name)
    if flattened:
        return _flattened(contents, name=name, needs_targets=needs_targets)
    if any(entry in contents.read for entry in BOUNDARIES):
        raise CollatedBatchError(f"{name} holds boundaries of a flattened batch beside attention_mask, lengths or several rows")
    labels = _labels(contents, name=name, needs_targets=needs_targets)
    found = []
    for row, extent in enumerate(extents(contents, name=name)):
        place = slice(extent.start, extent.start + extent.length)
        found.append(EncodedSource.of(extent.key, contents.input_ids[row, place].long().clone(), labels[row, place]))
    return found


def _refuse_sample(ids: Any, *, name: str) -> None:
    """Refuse what a dataset gives, where a batch should be."""
    vector = ids.dim() == 1 if isinstance(ids, Tensor) else isinstance(ids, list) and bool(ids) and type(ids[0]) is int
    if vector:
        raise CollatedBatchError(
            f"{name} is a single sample, with input_ids [{len(ids)}], and pack_loader packs the samples of batches: give it "
            "DataLoader(dataset, batch_size=..., collate_fn=list), or batches with input_ids [sources, tokens]"
        )


def _named(batch: Any, *, name: str) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return {str(entry): value for entry, value in batch.items()}
    if is_dataclass(batch) and not isinstance(batch, type):
        return {f.name: getattr(batch, f.name) for f in fields(batch)}
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        return dict(batch._asdict())
    raise CollatedBatchError(
        f"{name} is a {type(batch).__name__}, and pack_loader takes dicts and dataclasses with input_ids, attention_mask and "
        "labels, or lists of samples with input_ids and labels: let collate_fn return one of them"
    )


def _labels(contents: Contents, *, name: str, needs_targets: bool) -> Tensor:
    """``[B, S]``, not shifted."""
    shifted = contents.read.get("shift_labels")
    if shifted is not None:
        labels = torch.full_like(shifted, IGNORE)
        labels[:, 1:] = shifted[:, :-1]
        return labels.long()
    if (given := contents.read.get("labels")) is not None:
        return given.long()
    if needs_targets:
        raise CollatedBatchError(
            f"{name} has neither labels nor shift_labels, so nobody can tell its targets: let the collator return labels "
            f"(those of plain text are its input_ids, -100 on padding), or, {_FOR_PREDICT}"
        )
    return torch.full_like(contents.input_ids, IGNORE, dtype=torch.int64)


_FOR_PREDICT = "where the rows are for trainer.predict, say pack_loader(..., for_predict=True)"


def _refuse_others(contents: Contents, named: Mapping[str, Any], *, roles: BatchFields, name: str) -> None:
    entries = {**contents.tokens, **contents.sources, **contents.media, **contents.others}
    others = sorted(
        entry
        for entry, value in entries.items()
        if value is not None and not (contents.keys is not None and _is_key(entry, roles))
    )
    if others:
        raise CollatedBatchError(
            f"{name} holds {', '.join(others)}, for which a PackedBatch has no place: leave them out (pack_loader(..., "
            f"fields=BatchFields(leave_out={tuple(others)!r}))), or pack each batch with PackedAttention(policy=...), where "
            "they travel"
        )
    positions = named.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 3:
        raise CollatedBatchError(
            f"{name} holds position_ids with an axis for M-RoPE, for which a PackedBatch has no place: pack each batch with "
            "PackedAttention(policy=...), where they travel"
        )


def _is_key(entry: str, roles: BatchFields) -> bool:
    return entry == roles.key if roles.key else entry in KEY_NAMES


def _flattened(contents: Contents, *, name: str, needs_targets: bool) -> list[EncodedSource]:
    ends = offsets_of(contents.read, width=contents.input_ids.shape[1], name=name)
    labels = _labels(contents, name=name, needs_targets=needs_targets)
    keys = contents.keys.tolist() if isinstance(contents.keys, Tensor) else contents.keys
    if keys is None or len(keys) != len(ends) - 1:
        keys = [f"{name}, row {row}" for row in range(len(ends) - 1)]
    return [
        EncodedSource.of(str(key), contents.input_ids[0, start:stop].long().clone(), labels[0, start:stop])
        for key, (start, stop) in zip(keys, pairwise(ends), strict=True)
    ]


def _sample(sample: Any, *, roles: BatchFields, name: str, needs_targets: bool) -> EncodedSource:
    if isinstance(sample, EncodedSource):
        return sample
    named = _named(sample, name=name)
    ids = _vector(named.get("input_ids"), what="input_ids", name=name)
    labels = named.get("labels")
    if labels is None and needs_targets:
        raise CollatedBatchError(
            f"{name} has no labels, so nobody can tell its targets: add them (those of plain text are its input_ids), or, "
            f"{_FOR_PREDICT}"
        )
    targets = torch.full_like(ids, IGNORE) if labels is None else _vector(labels, what="labels", name=name)
    if len(targets) != len(ids):
        raise CollatedBatchError(f"{name} has {len(ids)} input_ids and {len(targets)} labels")
    mask = named.get("attention_mask")
    if mask is not None and not bool((torch.as_tensor(mask) == 1).all()):
        raise CollatedBatchError(
            f"{name} is a sample with padding or several sources in its attention_mask: batch such samples, cut "
            "padding off, give sources one by one"
        )
    others = [
        entry
        for entry, value in named.items()
        if entry not in ("input_ids", "labels", "attention_mask", "lengths", *roles.leave_out)
        and value is not None
        and not _is_key(entry, roles)
    ]
    if others:
        raise CollatedBatchError(
            f"{name} holds {', '.join(others)}, for which a PackedBatch has no place: leave them out (pack_loader(..., "
            f"fields=BatchFields(leave_out={tuple(others)!r})))"
        )
    key = next((value for entry, value in named.items() if _is_key(entry, roles) and isinstance(value, str | int)), name)
    return EncodedSource.of(str(key), ids, targets)


def _vector(value: Any, *, what: str, name: str) -> Tensor:
    tensor = None
    if isinstance(value, Tensor | Sequence | np.ndarray) and not isinstance(value, str):
        with suppress(TypeError, ValueError, RuntimeError):
            tensor = torch.as_tensor(value)
    if tensor is not None and tensor.dim() == 1 and (not tensor.is_floating_point() or not len(tensor)):
        return tensor.to("cpu", torch.int64, copy=True)
    raise CollatedBatchError(
        f"{what} of {name} is no list, array or tensor [L] of whole numbers: pass samples with one, or a padded batch"
    )
