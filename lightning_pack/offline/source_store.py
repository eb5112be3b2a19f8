"""Encoded sources on disk, between encoding and packing: only where they lie and how long they are is in memory.

The data is read in parts, whose number depends on the data alone. A part is two files: ``part-00012.bin``, and
``part-00012.npz`` with an index, which appears when the part is complete. So a run that was ended encodes only those parts
again that were under way, on any number of processes.

The images of a source are decoded and processed on trial, and their files lie behind its tokens. So a source with one that
breaks is left out here, once, and not again in every pass over the rows.
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
from typing import Any, NamedTuple

import numpy as np

from lightning_pack.encoders import Encoder
from lightning_pack.energon.dataset import StreamOptions, open_evaluation_share
from lightning_pack.energon.task_encoder import tried
from lightning_pack.energon.worker import Whereabouts
from lightning_pack.media import MediaFile, MediaStore
from lightning_pack.source import EncodedSource, LeftOut

#: Samples of the data that make it worth having a further part, and how many parts there are at most.
_SAMPLES_PER_PART, _MOST_PARTS = 256, 256
#: Of a source, beside its part: numbers, and their types.
_COLUMNS = {
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
            return int(index["end"]) == self.data.stat().st_size and {*_COLUMNS} <= {*index.files}
        return False


def encode_part(part: Part, options: StreamOptions) -> int:
    """Read and encode a part of the data; returns the number of its samples and pieces, those left out included.

    Raises:
        ValueError: for data that cannot be read, and sources that are refused.
    """
    columns: dict[str, list[int]] = {name: [] for name in _COLUMNS}
    names: dict[str, int] = {}
    gone: list[LeftOut] = []
    end = number_of_files = file_bytes = 0
    with part.data.open("wb") as file:
        for source in _encoded(part, options):
            if source.left_out is not None:
                gone.append(source.left_out)
            if not len(source):
                continue
            files = _files(source, options.encoder)
            if isinstance(files, str):
                gone.append(LeftOut(source.key, files, len(source)))
                continue
            key = source.key.encode()
            tokens = source.input_ids.numpy().astype("<i4").tobytes() + source.labels.numpy().astype("<i4").tobytes()
            head = _head(files)
            record = [key, tokens, head, *(each.content for each in files)]
            file.writelines(record)
            held = sum(len(each.content) for each in files)
            row = {
                "starts": end,
                "lengths": len(source),
                "key_bytes": len(key),
                "groups": -1 if source.group is None else names.setdefault(source.group, len(names)),
                "head_bytes": len(head),
                "media_tokens": sum(each.tokens for each in files),
                "media_bytes": sum(each.nbytes for each in files),
            }
            for name, value in row.items():
                columns[name].append(value)
            end += sum(map(len, record))
            number_of_files, file_bytes = number_of_files + len(files), file_bytes + held
        file.flush()
        os.fsync(file.fileno())
    said = {"left_out": gone, "groups": list(names), "files": number_of_files, "file_bytes": file_bytes}
    array = io.BytesIO()
    np.savez(
        array,
        said=np.frombuffer(json.dumps(said).encode(), dtype=np.uint8),
        end=np.int64(end),
        **{name: np.array(values, dtype=_COLUMNS[name]) for name, values in columns.items()},
    )
    unfinished = part.index.with_suffix(".partial")
    unfinished.write_bytes(array.getvalue())
    unfinished.replace(part.index)
    return len(columns["starts"]) + len(gone)


def _files(source: EncodedSource, encoder: Encoder) -> list[MediaFile] | str:
    """The media of a source, put together and processed on trial; or the reason why it is left out.

    Raises:
        ValueError: for media that rows cannot hold.
    """
    if not getattr(encoder, "has_media", False):
        if source.has_media or source.mrope is not None:
            raise ValueError(
                f"sample {source.key!r} has {'images or the like' if source.has_media else 'M-RoPE positions'}, and "
                f"{type(encoder).__name__} does not say so (has_media = True): rows would lose them"
            )
        return []
    # Prepacking refuses others before anything is read.
    assert isinstance(encoder, MediaStore)
    bare = EncodedSource(key=source.key, input_ids=source.input_ids, labels=source.labels, group=source.group)

    def tried_out() -> list[MediaFile]:
        files = encoder.files_of(source)
        encoder.with_files(bare, files).completed()
        return files

    return tried(source.key, tried_out)


def _head(files: Sequence[MediaFile]) -> bytes:
    if not files:
        return b""
    return json.dumps([(each.kind, each.tokens, each.nbytes, len(each.content)) for each in files]).encode()


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
        columns: dict[str, list[np.ndarray]] = {name: [] for name in ("part", *_COLUMNS)}
        names: dict[str, int] = {}
        gone: list[LeftOut] = []
        files = file_bytes = 0
        for part in parts:
            with np.load(part.index) as index:
                said: dict[str, Any] = json.loads(bytes(index["said"]))
                for name in _COLUMNS:
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
