"""Encoded sources on disk, between encoding and packing: only where they lie and how long they are is in memory.

The data is read in parts, whose number depends on the data alone. A part is two files: ``part-00012.bin``, and
``part-00012.npz`` with an index, which appears when the part is complete. So a run that was ended encodes only those parts
again that were under way, on any number of processes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lightning_pack.energon.dataset import StreamOptions, open_evaluation_share
from lightning_pack.energon.worker import Whereabouts
from lightning_pack.source import EncodedSource, LeftOut

#: Samples of the data that make it worth having a further part, and how many parts there are at most.
_SAMPLES_PER_PART, _MOST_PARTS = 256, 256


def number_of_parts(samples: int) -> int:
    """Parts in which a split of so many samples is encoded."""
    return min(max(-(-samples // _SAMPLES_PER_PART), 1), _MOST_PARTS)


@dataclass(frozen=True)
class Part:
    """A part of a split: the share of one of ``of`` logical workers."""

    folder: Path
    split: str
    number: int
    of: int

    @property
    def data(self) -> Path:
        """Keys, ids and labels of its sources, one after the other."""
        return self.folder / f"{self.split}-part-{self.number:05d}.bin"

    @property
    def index(self) -> Path:
        """Where they lie."""
        return self.data.with_suffix(".npz")

    def is_complete(self) -> bool:
        """Whether it is encoded to its end."""
        with contextlib.suppress(OSError, ValueError, KeyError, zipfile.BadZipFile), np.load(self.index) as index:
            return int(index["end"]) == self.data.stat().st_size
        return False


def encode_part(part: Part, options: StreamOptions) -> int:
    """Read and encode a part of the data; returns the number of its samples and pieces, those left out included.

    Raises:
        ValueError: for data that cannot be read, and sources that are refused.
    """
    starts, lengths, key_bytes, groups = list[int](), list[int](), list[int](), list[int]()
    names: dict[str, int] = {}
    gone: list[LeftOut] = []
    end = 0
    with part.data.open("wb") as file:
        for source in _encoded(part, options):
            if source.left_out is not None:
                gone.append(source.left_out)
            if not len(source):
                continue
            key = source.key.encode()
            record = key + source.input_ids.numpy().astype("<i4").tobytes() + source.labels.numpy().astype("<i4").tobytes()
            file.write(record)
            starts.append(end)
            lengths.append(len(source))
            key_bytes.append(len(key))
            groups.append(-1 if source.group is None else names.setdefault(source.group, len(names)))
            end += len(record)
        file.flush()
        os.fsync(file.fileno())
    said = {"left_out": gone, "groups": list(names)}
    array = io.BytesIO()
    np.savez(
        array,
        starts=np.array(starts, dtype=np.int64),
        lengths=np.array(lengths, dtype=np.int32),
        key_bytes=np.array(key_bytes, dtype=np.int32),
        groups=np.array(groups, dtype=np.int32),
        said=np.frombuffer(json.dumps(said).encode(), dtype=np.uint8),
        end=np.int64(end),
    )
    unfinished = part.index.with_suffix(".partial")
    unfinished.write_bytes(array.getvalue())
    unfinished.replace(part.index)
    return len(starts) + len(gone)


def _encoded(part: Part, options: StreamOptions) -> Iterator[EncodedSource]:
    """The sources of a part in the order of the data, and markers of those that are left out."""
    with contextlib.redirect_stdout(io.StringIO()):
        share = open_evaluation_share(options, part.number, Whereabouts(), split=part.split, of=part.of)
    if not share.dataset.worker_has_samples():
        return
    share.worker_config.worker_activate(0)
    try:
        for source in share.dataset:
            yield from share.take_damaged()
            yield source
        yield from share.take_damaged()
    finally:
        share.worker_config.worker_deactivate()


@dataclass(frozen=True, kw_only=True)
class SourceStore:
    """All sources of a split: 25 bytes of memory for each.

    Args:
        parts: in order; the sources are numbered through.
        part: of each source.
        starts: first byte of each in its part.
        lengths: tokens of each.
        key_bytes: bytes of the key of each.
        groups: index into ``group_names`` of each; -1 for none.
        group_names: those that occur.
        left_out: what is not among the sources, or was cut.
    """

    parts: Sequence[Part]
    part: np.ndarray = field(repr=False)
    starts: np.ndarray = field(repr=False)
    lengths: np.ndarray = field(repr=False)
    key_bytes: np.ndarray = field(repr=False)
    groups: np.ndarray = field(repr=False)
    group_names: Sequence[str]
    left_out: Sequence[LeftOut] = field(repr=False)

    @classmethod
    def of(cls, parts: Sequence[Part]) -> SourceStore:
        """The sources of parts that are complete."""
        columns: dict[str, list[np.ndarray]] = {name: [] for name in ("part", "starts", "lengths", "key_bytes", "groups")}
        names: dict[str, int] = {}
        gone: list[LeftOut] = []
        for part in parts:
            with np.load(part.index) as index:
                said: dict[str, Any] = json.loads(bytes(index["said"]))
                for name in ("starts", "lengths", "key_bytes"):
                    columns[name].append(index[name])
                # The last is for sources without a group.
                known = np.array([*(names.setdefault(name, len(names)) for name in said["groups"]), -1], dtype=np.int32)
                columns["groups"].append(known[index["groups"]])
            columns["part"].append(np.full(len(columns["starts"][-1]), part.number, dtype=np.int16))
            gone += [LeftOut(*each) for each in said["left_out"]]
        joined = {name: np.concatenate(arrays) for name, arrays in columns.items()}
        return cls(parts=parts, group_names=list(names), left_out=gone, **joined)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, number: int, file: Any) -> tuple[str, np.ndarray]:
        """Key of a source, and its ids and labels as int32 ``[2, L]``.

        Args:
            number: of the source.
            file: its part's data, opened.
        """
        length, key_bytes = int(self.lengths[number]), int(self.key_bytes[number])
        record = os.pread(file.fileno(), key_bytes + 8 * length, int(self.starts[number]))
        return record[:key_bytes].decode(), np.frombuffer(record, dtype="<i4", offset=key_bytes).reshape(2, length)
