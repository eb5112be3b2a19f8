"""Megatron-Bridge's packed rows: Parquet files, and the older ``.npy`` files of NeMo, read and written.

What a row means there, as its public sources have it (``megatron/bridge/data/datasets``: ``packed_parquet``, ``packing_utils``,
``sft``):

* ``input_ids`` (list of int32) holds the sources end to end, each with its last token; ``seq_start_id`` (list of int32) says
  where each begins, 0 first, without the end of the row.
* ``loss_mask`` (list of int8), as long, is moved by one place already: entry t says whether the loss counts the prediction of
  token t + 1 of the same source. The last entry of each source is not used, whatever it holds.
* The reader there feeds every source without its last token and predicts it without its first, so a source of n tokens takes up
  n - 1 places; here it has all n, the last of which has no target. The loss is the same.
* Real lengths are not stored: for context parallelism a source is padded before it is packed, and the reader there looks for a
  second end token to find where. Here nothing is guessed from token values: such pads are tokens of their source. The mask
  does not count them, and causal attention does not show them to the tokens before.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_pack.offline.array_pickle import ArrayUnpickler
from lightning_pack.offline.given_row import GivenRow, GivenRowError, GivenSource, attempted, mask_of, whole_numbers
from lightning_pack.offline.manifest import Manifest
from lightning_pack.offline.row_file import Row
from lightning_pack.offline.shard_file import samples_of
from lightning_pack.source import IGNORE

COLUMNS = ("input_ids", "loss_mask", "seq_start_id")
#: Rows that are held in memory at a time, as there.
_ROW_GROUP = 500


def need_parquet() -> Any:
    """The module that reads and writes Parquet.

    Raises:
        ValueError: if it is not installed.
    """
    try:
        import pyarrow.parquet as parquet
    except ImportError as e:
        raise ValueError("Parquet files need pyarrow, which is not installed: pip install 'lightning-pack[parquet]'") from e
    return parquet


def read_parquet(path: Path) -> Iterator[GivenRow | GivenRowError]:
    """The rows of a Parquet file, or what is wrong with each.

    Raises:
        ValueError: for a file that is no Parquet, or has other columns.
    """
    parquet = need_parquet()
    try:
        file = parquet.ParquetFile(path)
    except Exception as e:
        raise ValueError(f"{path} cannot be read as Parquet ({type(e).__name__}: {e})") from e
    with file:
        names = file.schema_arrow.names
        missing = [name for name in COLUMNS if name not in names]
        if missing:
            raise ValueError(f"{path} has the columns {', '.join(names)}; packed rows need {', '.join(COLUMNS)}")
        single = [name for name in COLUMNS if file.schema_arrow.field(name).type.num_fields != 1]
        if single:
            found = file.schema_arrow.field(single[0]).type
            raise ValueError(
                f"the column {single[0]} of {path} is {found}; packed rows hold a list of whole numbers in each row"
            )
        number = 0
        for batch in file.iter_batches(batch_size=_ROW_GROUP, columns=list(COLUMNS)):
            columns = {name: batch.column(name) for name in COLUMNS}
            for i in range(batch.num_rows):
                values = {name: column[i].values for name, column in columns.items()}
                place = f"{path.name}[{number}]"
                yield attempted(partial(_row_of_values, values, place), place)
                number += 1


def _row_of_values(values: Mapping[str, Any], place: str) -> GivenRow:
    empty = [name for name, value in values.items() if value is None or value.null_count]
    if empty:
        raise GivenRowError(f"{place}: {empty[0]} holds nulls")
    return row_of({name: value.to_numpy(zero_copy_only=False) for name, value in values.items()}, place)


def read_npy(path: Path) -> Iterator[GivenRow | GivenRowError]:
    """The rows of an array of dicts, or what is wrong with each, read without running what a pickle asks for.

    Raises:
        ValueError: for a file that is no such array, or holds anything but dicts, lists, numbers and arrays.
    """
    for number, record in enumerate(_objects(path)):
        place = f"{path.name}[{number}]"
        yield attempted(partial(row_of, record, place), place)


def row_of(record: Mapping[str, Any], place: str) -> GivenRow:
    """A row of the three lists, which :mod:`this module <lightning_pack.offline.megatron_bridge>` explains.

    Raises:
        GivenRowError: for lists that do not fit together.
    """
    if not isinstance(record, Mapping):
        raise GivenRowError(f"{place} is a {type(record).__name__}, a dict with {', '.join(COLUMNS)} is needed")
    missing = [name for name in COLUMNS if name not in record]
    if missing:
        raise GivenRowError(f"{place}: {missing[0]} is missing, it has {', '.join(map(str, record))}")
    ids = whole_numbers(record["input_ids"], "input_ids", place)
    mask = mask_of(record["loss_mask"], "loss_mask", place, length=len(ids))
    starts = whole_numbers(record["seq_start_id"], "seq_start_id", place)
    ends = [*starts.tolist(), len(ids)]
    if not len(starts) or starts[0] != 0:
        raise GivenRowError(f"{place}: seq_start_id is {ends[:-1][:8]} and must begin at 0, where the first source begins")
    if any(a > b for a, b in itertools.pairwise(ends)):
        raise GivenRowError(f"{place}: seq_start_id {ends[:-1][:8]} decreases, or goes beyond the row of {len(ids)} tokens")
    sources = []
    for start, end in itertools.pairwise(ends):
        # The mask is that of the token before.
        targets = np.concatenate([[False], mask[start : end - 1]]) if end > start else np.zeros(0, dtype=bool)
        sources.append(GivenSource(ids=ids[start:end], targets=targets))
    return GivenRow(place=place, sources=sources)


def _objects(path: Path) -> list[Any]:
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
        except (ValueError, EOFError) as e:
            raise ValueError(f"{path} is no .npy file ({e})") from e
        if not dtype.hasobject:
            raise ValueError(f"{path} holds {dtype} of shape {list(shape)}: packed rows are an array of dicts")
        try:
            found = ArrayUnpickler(io.BytesIO(file.read())).load()
        except Exception as e:
            # A pickle is a program; what it raises when it is stopped can be anything.
            raise ValueError(
                f"{path} is not read: its pickle holds more than dicts, lists, numbers and arrays, or is damaged ({e}). "
                "Nothing of it was run. Write the rows as Parquet where they come from, or load the file yourself if you "
                "trust it"
            ) from e
    if not isinstance(found, np.ndarray) or found.ndim != 1:
        raise ValueError(f"{path} is no list of rows")
    return found.tolist()


def write_parquet(rows: Path, out: Path) -> list[Path]:
    """Write packed rows as Megatron-Bridge reads them: a file ``NAME.idx.parquet`` for each shard.

    Keys and groups have no place there. Where the rows have a multiple m, sources are padded as there, to a multiple of m and
    one token more, so that what the model is fed is a multiple of m.

    Args:
        rows: folder of packed rows.
        out: folder for the files, which replace those that are there.

    Raises:
        ValueError: if there are no packed rows, or labels that the format cannot say, or for rows with images.
    """
    parquet = need_parquet()
    import pyarrow

    manifest = Manifest.read(rows)
    if manifest is None:
        raise ValueError(f"there are no packed rows at {rows}")
    if manifest.media:
        raise ValueError(f"the rows at {rows} hold images, for which this format has no place: rows of text can be written so")
    kinds = {"input_ids": pyarrow.int32(), "loss_mask": pyarrow.int8(), "seq_start_id": pyarrow.int32()}
    schema = pyarrow.schema([(name, pyarrow.list_(kind)) for name, kind in kinds.items()])
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for shard in (name for split in manifest.splits.values() for name in split.shards):
        path = out / f"{shard.removesuffix('.tar')}.idx.parquet"
        unfinished = path.with_name(f".{path.name}.partial")
        with parquet.ParquetWriter(unfinished, schema) as writer:
            held: list[dict[str, list[int]]] = []
            for key, parts in samples_of(rows / shard):
                row = Row.of(parts, key=key)
                held.append(lists_of(row, multiple=int(manifest.packing["multiple"]), pad_id=manifest.pad_id))
                if len(held) == _ROW_GROUP:
                    writer.write_table(pyarrow.Table.from_pylist(held, schema=schema))
                    held = []
            if held:
                writer.write_table(pyarrow.Table.from_pylist(held, schema=schema))
        unfinished.replace(path)
        written.append(path)
    return written


def lists_of(row: Row, *, multiple: int, pad_id: int) -> dict[str, list[int]]:
    """The three lists of a row.

    Raises:
        ValueError: where a label is another token than the one that stands there.
    """
    ids, mask, starts = list[int](), list[int](), list[int]()
    at = 0
    for key, length in zip(row.keys, row.lengths, strict=True):
        tokens, labels = row.tokens[:, at : at + length]
        counted = labels != IGNORE
        if (labels[counted] != tokens[counted]).any():
            raise ValueError(f"{key!r} has labels that are not its tokens, which Megatron-Bridge's rows cannot say")
        pads = 1 + -(-(length - 1) // multiple) * multiple - length if multiple > 1 else 0
        starts.append(len(ids))
        ids += [*tokens.tolist(), *[pad_id] * pads]
        mask += [*counted[1:].astype(int).tolist(), 0, *[0] * pads]
        at += length
    return {"input_ids": ids, "loss_mask": mask, "seq_start_id": starts}
