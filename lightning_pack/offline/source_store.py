"""Encoded sources on disk, between encoding and packing: only where they lie and how long they are is in memory.

The data is read in parts, whose number depends on the data alone. A part is two files: ``part-00012.bin``, and
``part-00012.npz`` with an index, which appears when the part is complete. So a run that was ended encodes only those parts
again that were under way, on any number of processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_pack.media import MediaFile
from lightning_pack.source import LeftOut

#: Samples of the data that make it worth having a further part, and how many parts there are at most.
_SAMPLES_PER_PART, _MOST_PARTS = 256, 256
#: Of a source, beside its part: numbers, and their types.
COLUMNS = {
    "starts": np.int64,
    "lengths": np.int32,
    "key_bytes": np.int32,
    "groups": np.int32,
    "head_bytes": np.int32,
    "media_tokens": np.int32,
    "media_bytes": np.int64,
}


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
        """Keys, ids and labels of its sources, and their files, one after the other."""
        return self.folder / f"{self.split}-part-{self.number:05d}.bin"

    @property
    def index(self) -> Path:
        """Where they lie."""
        return self.data.with_suffix(".npz")

    def is_complete(self) -> bool:
        """Whether it is encoded to its end."""
        with contextlib.suppress(OSError, ValueError, KeyError, zipfile.BadZipFile), np.load(self.index) as index:
            return int(index["end"]) == self.data.stat().st_size and {*COLUMNS} <= {*index.files}
        return False


class StoredSource(NamedTuple):
    """A source as it lies in the store."""

    key: str
    #: Ids and labels, int32 ``[2, L]``.
    tokens: np.ndarray
    files: list[MediaFile]


@dataclass(frozen=True, kw_only=True)
class SourceStore:
    """All sources of a split: 41 bytes of memory for each.

    Args:
        parts: in order; the sources are numbered through.
        part: of each source.
        starts: first byte of each in its part.
        lengths: tokens of each.
        key_bytes: bytes of the key of each.
        groups: index into ``group_names`` of each; -1 for none.
        head_bytes: bytes of what is said of the files of each; 0 for none.
        media_tokens: placeholders of each.
        media_bytes: of the tensors that the media of each become.
        group_names: those that occur.
        left_out: what is not among the sources, or was cut.
        files: how many there are, over all sources.
        file_bytes: of them.
    """

    parts: Sequence[Part]
    part: np.ndarray = field(repr=False)
    starts: np.ndarray = field(repr=False)
    lengths: np.ndarray = field(repr=False)
    key_bytes: np.ndarray = field(repr=False)
    groups: np.ndarray = field(repr=False)
    head_bytes: np.ndarray = field(repr=False)
    media_tokens: np.ndarray = field(repr=False)
    media_bytes: np.ndarray = field(repr=False)
    group_names: Sequence[str]
    left_out: Sequence[LeftOut] = field(repr=False)
    files: int
    file_bytes: int

    @classmethod
    def of(cls, parts: Sequence[Part]) -> SourceStore:
        """The sources of parts that are complete."""
        columns: dict[str, list[np.ndarray]] = {name: [] for name in ("part", *COLUMNS)}
        names: dict[str, int] = {}
        gone: list[LeftOut] = []
        files = file_bytes = 0
        for part in parts:
            with np.load(part.index) as index:
                said: dict[str, Any] = json.loads(bytes(index["said"]))
                for name in COLUMNS:
                    columns[name].append(index[name])
                # The last is for sources without a group.
                known = np.array([*(names.setdefault(name, len(names)) for name in said["groups"]), -1], dtype=np.int32)
                columns["groups"][-1] = known[columns["groups"][-1]]
            columns["part"].append(np.full(len(columns["starts"][-1]), part.number, dtype=np.int16))
            gone += [LeftOut(*each) for each in said["left_out"]]
            files, file_bytes = files + said["files"], file_bytes + said["file_bytes"]
        joined = {name: np.concatenate(arrays) for name, arrays in columns.items()}
        return cls(parts=parts, group_names=list(names), left_out=gone, files=files, file_bytes=file_bytes, **joined)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, number: int, file: Any) -> StoredSource:
        """A source.

        Args:
            number: of the source.
            file: its part's data, opened.
        """
        length, key_bytes, head_bytes = (int(of[number]) for of in (self.lengths, self.key_bytes, self.head_bytes))
        start, size = int(self.starts[number]), key_bytes + 8 * length + head_bytes
        record = os.pread(file.fileno(), size, start)
        tokens = np.frombuffer(record, dtype="<i4", offset=key_bytes, count=2 * length).reshape(2, length)
        files, at = [], start + size
        for kind, count, nbytes, held in json.loads(record[size - head_bytes :] or b"[]"):
            files.append(MediaFile(os.pread(file.fileno(), held, at), kind=kind, tokens=count, nbytes=nbytes))
            at += held
        return StoredSource(record[:key_bytes].decode(), tokens, files)
