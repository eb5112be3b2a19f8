"""Collated batches of packed rows: rectangles with ``packed_cu_seqlens``, as Megatron-style loaders give them to the model.

Fields of a batch of B rows of T places (a single row may come without the first dimension):

* ``input_ids`` or ``tokens`` ``[B, T]``;
* ``packed_cu_seqlens`` ``[B, M]``: physical boundaries, shorter lists filled up with -1; ``packed_cu_seqlens_lengths`` ``[B]``
  says how many entries are real. The last one is T: the tail belongs to the last source;
* ``packed_max_seqlen`` ``[B]``: the longest source, compared;
* ``labels`` or ``targets`` ``[B, T]``, optional: moved by one place already, the target of each place;
* ``loss_mask`` or ``token_mask`` ``[B, T]``: whether the loss counts the prediction at a place;
* ``position_ids`` ``[B, T]``, optional, compared: they begin at 0 with each source;
* ``packed_cu_seqlens_unpadded`` ``[B, M]``, optional: cumulative real lengths. Without it pads are tokens of their source: real
  lengths are never guessed from token values. The mask does not count them.

Files: ``.jsonl`` with a batch in each line, ``.npz`` with one, ``.pt`` with one or a list (of tensors and plain values only).
"""

from __future__ import annotations

import itertools
import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_pack.offline.given_row import GivenRow, GivenRowError, GivenSource, attempted, mask_of, whole_numbers
from lightning_pack.source import IGNORE

_NAMES = (
    *("input_ids", "tokens", "packed_cu_seqlens", "packed_cu_seqlens_lengths", "packed_max_seqlen", "labels", "targets"),
    *("loss_mask", "token_mask", "position_ids", "packed_cu_seqlens_unpadded"),
)


def read_collated(path: Path) -> Iterator[GivenRow | GivenRowError]:
    """The rows of all batches of a file, or what is wrong with each; a batch that is none counts as one row.

    Raises:
        ValueError: for a file that cannot be read.
    """
    for number, batch in enumerate(_batches(path)):
        place = f"{path.name}[{number}]"
        rows = attempted(partial(_rows, batch, place), place)
        if isinstance(rows, GivenRowError):
            yield rows
            continue
        for i, row in enumerate(rows):
            at = place if len(rows) == 1 else f"{place}.{i}"
            yield attempted(partial(row_of, row, at), at)


def _batches(path: Path) -> Iterator[Any]:
    """Batches, or lines of JSON."""
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8-sig") as file:
            yield from (line for line in file if line.strip())
        return
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                found: Any = dict(arrays)
        else:
            found = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError) as e:
        raise ValueError(
            f"{path} is not read ({type(e).__name__}: {str(e)[:300]}): only tensors, arrays and plain values are loaded"
        ) from e
    yield from found if isinstance(found, list) else [found]


def _rows(batch: Any, place: str) -> list[dict[str, Any]]:
    """The fields row by row."""
    if isinstance(batch, str):
        try:
            batch = json.loads(batch)
        except ValueError as e:
            raise GivenRowError(f"{place}: the line is no JSON ({e})") from e
    if not isinstance(batch, Mapping):
        raise GivenRowError(f"{place} is a {type(batch).__name__}, a batch is a dict")
    given = {name: _plain(batch[name]) for name in _NAMES if batch.get(name) is not None}
    ids = given.get("input_ids", given.get("tokens"))
    if not isinstance(ids, list) or not ids:
        raise GivenRowError(f"{place}: input_ids (or tokens) are missing; it has {', '.join(map(str, batch))}")
    if not isinstance(ids[0], list):
        return [given]
    for name, value in given.items():
        if not isinstance(value, list) or len(value) != len(ids):
            raise GivenRowError(f"{place}: {name} is not for {len(ids)} rows")
    return [{name: value[i] for name, value in given.items()} for i in range(len(ids))]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value


def boundaries(row: Mapping[str, Any], place: str, name: str = "packed_cu_seqlens") -> list[int]:
    """The real entries of a row's boundaries.

    >>> row = {"packed_cu_seqlens": [0, 2, 4, -1], "packed_cu_seqlens_lengths": 3}
    >>> boundaries(row, "row")
    [0, 2, 4]

    Raises:
        GivenRowError: for entries after the real ones that are not -1, a first one that is not 0, or a decrease.
    """
    if name not in row:
        raise GivenRowError(f"{place}: {name} is missing")
    found = whole_numbers(row[name], name, place).tolist()
    real = found.index(-1) if -1 in found else len(found)
    count = _number(row, "packed_cu_seqlens_lengths", place, default=real)
    if count != real or any(entry != -1 for entry in found[real:]):
        raise GivenRowError(
            f"{place}: {name} {found[:12]} has {real} entries before the first -1, packed_cu_seqlens_lengths says {count}; -1 "
            "fills up to the end and stands nowhere else"
        )
    kept = found[:real]
    if len(kept) < 2 or kept[0] != 0 or any(a > b for a, b in itertools.pairwise(kept)):
        raise GivenRowError(f"{place}: {name} {kept[:12]} must begin at 0, never decrease, and end a source at least")
    return kept


def row_of(row: Mapping[str, Any], place: str) -> GivenRow:
    """A row of the fields that :mod:`this module <lightning_pack.offline.collated>` explains, without the first dimension.

    Raises:
        GivenRowError: for fields that do not fit together.
    """
    ids = whole_numbers(_one_of(row, "input_ids", "tokens", place), "input_ids", place)
    width = len(ids)
    physical = boundaries(row, place)
    said = len(physical)
    if physical[-1] != width:
        raise GivenRowError(
            f"{place}: the last boundary is {physical[-1]} and the row has {width} places; tokens outside of every source have "
            "no defined attention: give the tail to the last source"
        )
    while len(physical) > 2 and physical[-1] == physical[-2]:
        # A fixed number of boundaries repeats the last one: no sources.
        physical.pop()
    rooms = np.diff(physical).tolist()
    longest = _number(row, "packed_max_seqlen", place, default=max(rooms))
    if longest != max(rooms):
        raise GivenRowError(f"{place}: packed_max_seqlen is {longest}, the longest source takes up {max(rooms)} places")
    lengths = rooms
    if "packed_cu_seqlens_unpadded" in row:
        lengths = np.diff(boundaries({**row, "packed_cu_seqlens_lengths": said}, place, _REAL)).tolist()
    mask = mask_of(_one_of(row, "loss_mask", "token_mask", place), "loss_mask", place, length=width)
    labels = _one_of(row, "labels", "targets", place, optional=True)
    following = np.append(ids[1:], IGNORE)
    shifted = following if labels is None else whole_numbers(labels, "labels", place)
    if len(shifted) != width:
        raise GivenRowError(f"{place}: labels has {len(shifted)} values for {width} tokens")
    mask &= shifted != IGNORE
    if "position_ids" in row:
        expected = np.concatenate([np.arange(room) for room in rooms])
        if not np.array_equal(whole_numbers(row["position_ids"], "position_ids", place), expected):
            raise GivenRowError(
                f"{place}: position_ids do not begin at 0 with each source and count up: other boundaries are meant"
            )
    sources = []
    for i, (start, room, length) in enumerate(zip(physical, rooms, lengths, strict=False)):
        if not 0 <= length <= room:
            raise GivenRowError(f"{place}#{i} has {length} tokens in {room} places")
        sources.append(_source(ids, shifted, mask, start=start, room=room, length=length, place=f"{place}#{i}"))
    return GivenRow(place=place, sources=sources)


_REAL = "packed_cu_seqlens_unpadded"


def _source(
    ids: np.ndarray, shifted: np.ndarray, mask: np.ndarray, *, start: int, room: int, length: int, place: str
) -> GivenSource:
    """A source; the last place of a row that is full may have a target, whose token then comes with it."""
    own, counted, target = ids[start : start + length], mask[start : start + room], shifted[start : start + room]
    late = np.flatnonzero(counted[max(length - 1, 0) :]) + max(length - 1, 0)
    if len(late):
        at_the_end = start + room == len(ids) and late.tolist() == [length - 1] and length == room
        if not at_the_end or target[-1] == IGNORE:
            raise GivenRowError(
                f"{place}: the loss counts place {start + int(late[0])}, whose target lies beyond the source of {length} "
                "tokens: a target that crosses a boundary is predicted from another source"
            )
        own = np.append(own, target[-1])
    inside = counted[: max(length - 1, 0)]
    if (target[: len(inside)][inside] != own[1:length][inside]).any():
        raise GivenRowError(f"{place}: labels are not the tokens that follow; labels of a collated row are moved by one place")
    targets = np.concatenate([[False], inside, [True] * (len(own) - length)])[: len(own)].astype(bool)
    return GivenSource(ids=own, targets=targets, room=room if len(own) == length else None)


def _one_of(row: Mapping[str, Any], first: str, second: str, place: str, *, optional: bool = False) -> Any:
    if first in row and second in row:
        raise GivenRowError(f"{place} has {first} and {second}: keep one of them, it is not clear which is meant")
    if first not in row and second not in row and not optional:
        way_out = ": give 1 where the loss counts the prediction of the next token, else 0" if first == "loss_mask" else ""
        raise GivenRowError(f"{place}: {first} (or {second}) is missing{way_out}")
    return row.get(first, row.get(second))


def _number(row: Mapping[str, Any], name: str, place: str, *, default: int) -> int:
    value = row.get(name, default)
    while isinstance(value, list) and len(value) == 1:
        (value,) = value
    if isinstance(value, bool) or not isinstance(value, int):
        raise GivenRowError(f"{place}: {name} is {value!r}, a whole number is needed")
    return value
