"""What a collator's batch consists of: its tokens, what lies along them, what belongs to whole sources, and media."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

#: Names under which batches keep the keys of their samples.
KEY_NAMES = ("__key__", "__keys__", "keys", "key", "ids", "id", "sample_ids", "sample_id")
#: What transformers calls images, videos and sounds: not one entry per source, but all of them in the order of the sources.
_MEDIA = frozenset(
    (
        *("pixel_values", "pixel_values_videos", "pixel_values_images", "pixel_attention_mask", "image_grid_thw"),
        *("video_grid_thw", "image_sizes", "image_sizes_videos", "second_per_grid_ts", "second_grid_ts", "image_position_ids"),
        *("input_features", "input_audio_embeds", "feature_attention_mask", "image_attention_mask", "audio_feature_lengths"),
        *("image_embeds", "video_embeds", "spatial_shapes"),
    )
)
#: What this package reads and replaces.
READ = ("input_ids", "attention_mask", "lengths", "labels", "shift_labels", "position_ids")
#: Boundaries, which only a batch that is packed already has.
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
#: Arguments that a packed row cannot have, and why.
_REFUSED = {
    "inputs_embeds": "packing needs the token ids",
    "decoder_input_ids": "packed attention is for causal models, not for encoder-decoder models",
    "past_key_values": "a packed row has no KV cache",
    "cache": "a packed row has no KV cache",
    "cache_position": "a packed row has no KV cache",
    "num_items_in_batch": "the loss would be divided by it, and the gradient by the number of targets too",
}


class CollatedBatchError(ValueError):
    """A batch that cannot be packed as it is."""


@dataclass(frozen=True, kw_only=True)
class BatchFields:
    """What the entries of a batch are, where names and shapes do not tell.

    Without it, tensors that begin with ``[B, S]`` lie along the tokens, other tensors and lists that begin with ``B`` belong to
    the sources, and transformers' names of images, videos and sounds are media.

    Args:
        per_source: tensors ``[B, ...]`` that belong to whole sources though their second dimension is that of the tokens.
        media: tensors with any number of entries, in the order of the sources.
        leave_out: entries that are taken out of the batch.
        key: entry with a name for each source, a list of strings or numbers or an int tensor ``[B]``; None takes one of
            ``__key__``, ``key``, ``id``, ``sample_id`` and their plurals, or else the number of the batch and the row.
    """

    per_source: tuple[str, ...] = ()
    media: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    key: str | None = None

    def __post_init__(self) -> None:
        for name in ("per_source", "media", "leave_out"):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(entry, str) for entry in given):
                raise ValueError(f"{name}={given!r}: a tuple of names is needed, such as ({str(given)!r},)")
            object.__setattr__(self, name, tuple(given))
            if read := sorted({*READ, *BOUNDARIES}.intersection(given)):
                raise ValueError(f"{name}={given!r}: {', '.join(read)} {'is' if len(read) == 1 else 'are'} read for packing")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A batch, sorted. B sources in rows of S tokens.

    Args:
        input_ids: ``[B, S]``.
        read: the other entries that packing reads, those that there are.
        tokens: tensors ``[B, S, ...]``.
        sources: tensors and lists of ``B``.
        media: tensors.
        others: what does not change.
        keys: for each source; None where the batch names none.
        rows: sources of the batch; more than ``input_ids`` has rows where it is flattened.
    """

    input_ids: Tensor
    read: dict[str, Any]
    tokens: dict[str, Tensor]
    sources: dict[str, Any]
    media: dict[str, Tensor]
    others: dict[str, Any]
    keys: list[Any] | Tensor | None
    rows: int


def entries(batch: Any) -> dict[str, Any] | None:
    """Name -> value of a batch whose entries can be replaced in place; None for anything that has no named entries.

    Raises:
        CollatedBatchError: for named entries that cannot be replaced in place, with the ways out.
    """
    kind = type(batch).__name__
    if isinstance(batch, Mapping):
        if not isinstance(batch, MutableMapping):
            raise CollatedBatchError(f"a {kind} cannot be changed in place, as packing in a callback does; {_WAYS_OUT}")
        return {str(name): value for name, value in batch.items()}
    if is_dataclass(batch) and not isinstance(batch, type):
        if batch.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise CollatedBatchError(f"{kind} is a frozen dataclass, which packing in a callback cannot change; {_WAYS_OUT}")
        return {f.name: getattr(batch, f.name) for f in fields(batch)}
    if isinstance(batch, tuple):
        raise CollatedBatchError(f"a {kind} does not name its entries and cannot be changed in place; {_WAYS_OUT}")
    return None


_WAYS_OUT = (
    "let collate_fn return a dict or a dataclass that is not frozen, with input_ids, attention_mask and labels, or pack before "
    "the Trainer: pack_loader(loader, policy)"
)


def contents_of(named: Mapping[str, Any], *, roles: BatchFields, flattened: bool = False) -> Contents:
    """The entries of a batch by what they are; those of a flattened one stay in their order, so only the read ones matter.

    Raises:
        CollatedBatchError: naming the entry that cannot be packed.
    """
    for name, reason in _REFUSED.items():
        if named.get(name) is not None and name not in roles.leave_out:
            raise CollatedBatchError(f"the batch holds {name}: {reason}; leave it out (BatchFields(leave_out=({name!r},)))")
    ids = named.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        found = f"of shape {list(ids.shape)} and {ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise CollatedBatchError(f"input_ids is {found}; to be packed it has to be an int tensor [sources, tokens]")
    for name in (*roles.per_source, *roles.media, *((roles.key,) if roles.key else ())):
        if name not in named:
            raise CollatedBatchError(f"BatchFields names {name!r}, but the batch has {sorted(named)}")
    found_keys = _keys(named, rows=None if flattened else len(ids), name=roles.key)
    result = Contents(
        input_ids=ids,
        read={name: named[name] for name in (*READ[1:], *BOUNDARIES) if named.get(name) is not None},
        tokens={},
        sources={},
        media={},
        others={},
        keys=found_keys,
        rows=len(ids),
    )
    for name, value in named.items():
        if name in READ or name in BOUNDARIES or name in roles.leave_out:
            continue
        if flattened:
            result.others[name] = value
        else:
            _sort(result, name, value, roles=roles)
    return result


def _sort(contents: Contents, name: str, value: Any, *, roles: BatchFields) -> None:
    rows, width = contents.input_ids.shape
    if name in roles.media or (name in _MEDIA and value is not None):
        contents.media[name] = value
    elif isinstance(value, Tensor) and value.dim():
        if value.shape[:2] == (rows, width) and name not in roles.per_source:
            contents.tokens[name] = value
        elif len(value) == rows:
            contents.sources[name] = value
        else:
            raise CollatedBatchError(
                f"{name} has shape {list(value.shape)}, which is neither one entry for each of the {rows} sources nor one for "
                f"each of their [{rows}, {width}] tokens: say BatchFields(media=({name!r},)) if its entries are in the order "
                f"of the sources, or BatchFields(leave_out=({name!r},))"
            )
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if len(value) not in (0, rows):
            raise CollatedBatchError(
                f"{name} is a {type(value).__name__} of {len(value)}, but the batch has {rows} sources: leave it out "
                f"(BatchFields(leave_out=({name!r},)))"
            )
        (contents.sources if len(value) else contents.others)[name] = value
    else:
        contents.others[name] = value


def _keys(named: Mapping[str, Any], *, rows: int | None, name: str | None) -> list[Any] | Tensor | None:
    for candidate in KEY_NAMES if name is None else (name,):
        value = named.get(candidate)
        if isinstance(value, Tensor):
            whole = value.dim() == 1 and not value.is_floating_point() and value.dtype != torch.bool
            if whole and len(value) == (rows or len(value)):
                return value
        elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) == (rows or len(value)):
            found = list(value)
            if all(isinstance(key, str | int) for key in found):
                return found
    if name is not None:
        raise CollatedBatchError(
            f"BatchFields(key={name!r}): this is no list of a string or number for each source, nor an int tensor"
        )
    return None
