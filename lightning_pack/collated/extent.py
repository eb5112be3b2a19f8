"""Where the real tokens of a padded batch are. Everything that the device alone knows is read in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pack.collated.fields import CollatedBatchError, Contents
from lightning_pack.source import IGNORE


class Extent(NamedTuple):
    """The real tokens of one row of a padded batch."""

    key: str
    #: First real token.
    start: int
    #: Real tokens; 0 in a row of pads.
    length: int
    #: Targets of the loss inside the source; None where that would have to be asked of the device.
    targets: int | None
    #: Largest id of its real tokens; None where that would have to be asked of the device.
    largest: int | None = None


def extents(contents: Contents, *, name: str) -> list[Extent]:
    """The real tokens of each row, by ``attention_mask``, else by ``lengths`` from the left, else all of a single row.

    Waits for the device once; not at all where ``lengths`` are on the CPU and there are no position ids to be checked.

    Args:
        contents: of the batch.
        name: of the batch, for sources without a key.

    Raises:
        CollatedBatchError: for masks with holes or other values than 0 and 1, lengths that do not fit, targets on pads, and
            position ids that do not count up from 0 at the first real token.
    """
    ids, read = contents.input_ids, contents.read
    rows, width = ids.shape
    mask = read.get("attention_mask")
    lengths = _lengths(read.get("lengths"), rows=rows)
    keys = contents.keys
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise CollatedBatchError(
            f"attention_mask is {shape} and input_ids {list(ids.shape)}: only a mask of the tokens, [{rows}, {width}], tells "
            "which of them are real"
        )
    if mask is None and lengths is None:
        if rows > 1:
            raise CollatedBatchError(
                f"{name} has {rows} rows of {width} tokens and neither attention_mask nor lengths, so nobody can tell which "
                "tokens are padding: let the collator return one of them (torch.ones_like(input_ids) if all tokens are real)"
            )
        # A row that has no other to be padded to; without a mask the model would take every token as real, too.
        lengths = [width]
    on_host = isinstance(lengths, list) and not isinstance(keys, Tensor) and "position_ids" not in read
    if mask is None and on_host and ids.device.type != "cpu":
        assert isinstance(lengths, list)
        _check_lengths(lengths, width=width, names=_names(keys, rows=rows, name=name))
        names = _names(keys, rows=rows, name=name)
        return [Extent(key, 0, length, None) for key, length in zip(names, lengths, strict=True)]
    return _from_device(contents, mask=mask, lengths=lengths, name=name)


def _lengths(given: Any, *, rows: int) -> list[int] | Tensor | None:
    if given is None:
        return None
    if isinstance(given, Tensor):
        if given.dim() != 1 or len(given) != rows or given.is_floating_point():
            raise CollatedBatchError(
                f"lengths is {given.dtype} of shape {list(given.shape)}, not one number for each of {rows} rows"
            )
        return [int(n) for n in given.tolist()] if given.device.type == "cpu" else given
    if not isinstance(given, Sequence) or len(given) != rows or not all(type(n) is int for n in given):
        raise CollatedBatchError(f"lengths={given!r}: one whole number for each of the {rows} rows is needed")
    return list(given)


def _names(keys: Any, *, rows: int, name: str) -> list[str]:
    return [f"{name}, row {row}" for row in range(rows)] if keys is None else [str(key) for key in keys]


def _check_lengths(lengths: Sequence[int], *, width: int, names: Sequence[str]) -> None:
    for key, length in zip(names, lengths, strict=True):
        if not 0 <= length <= width:
            raise CollatedBatchError(f"lengths says {length} tokens of source {key!r}, whose row has {width}")


def _from_device(contents: Contents, *, mask: Tensor | None, lengths: list[int] | Tensor | None, name: str) -> list[Extent]:
    ids, read = contents.input_ids, contents.read
    rows, width = ids.shape
    place = torch.arange(width, device=ids.device)
    if mask is None:
        known = torch.as_tensor(lengths, device=ids.device)
        real = one = place < known[:, None]
    else:
        mask = mask.to(ids.device)
        # Others number the sources of a packed row in it, or add it to scores.
        real, one = mask != 0, mask == 1
    first = torch.where(real, place, width).amin(1)
    last = torch.where(real, place, -1).amax(1)
    zero = torch.zeros_like(first)
    targets, stray = _targets(read, real=real, place=place, first=first, last=last)
    columns = {
        "real": real.sum(1),
        "odd": (real & ~one).sum(1),
        "first": first,
        "last": last,
        "targets": targets,
        "largest": torch.where(real, ids, 0).amax(1),
        "stray": stray,
        "moved": _moved(read, real=real, counted=place - first[:, None], zero=zero),
        "length": torch.as_tensor(lengths, device=ids.device) if lengths is not None else zero,
        "key": contents.keys.to(ids.device) if isinstance(contents.keys, Tensor) else zero,
    }
    # The one wait for the device.
    found = dict(zip(columns, torch.stack([column.long() for column in columns.values()]).tolist(), strict=True))
    names = _names(found["key"] if isinstance(contents.keys, Tensor) else contents.keys, rows=rows, name=name)
    if lengths is not None:
        _check_lengths(found["length"], width=width, names=names)
    for row, key in enumerate(names):
        if found["odd"][row]:
            raise CollatedBatchError(
                f"the attention_mask of source {key!r} has {found['odd'][row]} values that are neither 0 (padding) nor 1: "
                "sources that it numbers in a row packed already, or a mask to be added to scores, are not understood; return "
                "a mask of 0 and 1, for packed rows cu_seq_lens_q or position_ids and no mask"
            )
        length, span = found["real"][row], found["last"][row] - found["first"][row] + 1
        if length and span != length:
            raise CollatedBatchError(
                f"the attention_mask of source {key!r} has {length} real tokens within {span}: a hole inside a source cannot "
                "be packed, because positions and neighbours would change; let the mask cover one run of tokens"
            )
        if lengths is not None and found["length"][row] != length:
            raise CollatedBatchError(
                f"source {key!r} has {length} real tokens by attention_mask, {found['length'][row]} by lengths"
            )
        if found["stray"][row]:
            raise CollatedBatchError(
                f"{found['stray'][row]} labels of source {key!r} are targets outside of its real tokens, on padding or behind "
                f"the last one; a packed row has no place for them: set them to {IGNORE} in the collator"
            )
        if found["moved"][row]:
            raise CollatedBatchError(
                f"position_ids of source {key!r} do not count up from 0 at its first real token ({found['moved'][row]} "
                "differ), which is what a packed row gives it: leave position_ids out; where they restart because several "
                "sources are packed in the row already, leave attention_mask out"
            )
    starts = (first if length else 0 for first, length in zip(found["first"], found["real"], strict=True))
    told = (found[column] for column in ("real", "targets", "largest"))
    return [Extent(*each) for each in zip(names, starts, *told, strict=True)]


def _targets(read: dict[str, Any], *, real: Tensor, place: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Targets inside each source, and those that would be lost, ``[B]`` each."""
    for name in ("shift_labels", "labels"):
        if (labels := read.get(name)) is None:
            continue
        if not isinstance(labels, Tensor) or labels.shape != real.shape or labels.is_floating_point():
            shape = f"{labels.dtype} of shape {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
            raise CollatedBatchError(
                f"{name} is {shape}; packing needs one int label for each of the {list(real.shape)} tokens"
            )
        given = labels.to(real.device) != IGNORE
        # The first token of a source is nobody's target; a shifted label lies one place before its token.
        inside = real & (place > first[:, None] if name == "labels" else place < last[:, None])
        lost = given & ~(real if name == "labels" else inside)
        return (given & inside).sum(1), lost.sum(1)
    return torch.zeros_like(first), torch.zeros_like(first)


def _moved(read: dict[str, Any], *, real: Tensor, counted: Tensor, zero: Tensor) -> Tensor:
    """Tokens of each source whose position is not its place in the source, ``[B]``."""
    positions = read.get("position_ids")
    if positions is None:
        return zero
    shape = tuple(positions.shape) if isinstance(positions, Tensor) else ()
    if shape[-2:] != tuple(real.shape) or shape[:-2] not in ((), (3,), (4,)):
        raise CollatedBatchError(
            f"position_ids has shape {list(shape)}; packing understands [B, S] and M-RoPE's [3 or 4, B, S] with "
            f"[B, S] = {list(real.shape)}: leave position_ids out"
        )
    if shape[:-2] == (3,):
        # Three axes of M-RoPE, of which none need count the tokens.
        return zero
    text = positions if positions.dim() == 2 else positions[0]
    return (real & (text.to(real.device) != counted)).sum(1)
