"""Encoding a part of the data into the store of sources.

The images of a source are decoded and processed on trial, and their files lie behind its tokens. So a source with one that
breaks is left out here, once, and not again in every pass over the rows.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lightning_pack.encoders import Encoder
from lightning_pack.energon.dataset import StreamOptions, open_evaluation_share
from lightning_pack.energon.task_encoder import Fault, tried
from lightning_pack.energon.worker import Whereabouts
from lightning_pack.media import MediaFile, MediaStore
from lightning_pack.offline.source_store import COLUMNS, Part
from lightning_pack.source import EncodedSource, LeftOut


def encode_part(part: Part, options: StreamOptions) -> int:
    """Read and encode a part of the data; returns the number of its samples and pieces, those left out included.

    Raises:
        ValueError: for data that cannot be read, and sources that are refused.
    """
    columns: dict[str, list[int]] = {name: [] for name in COLUMNS}
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
            if isinstance(files, Fault):
                gone.append(LeftOut(source.key, files.reason, len(source)))
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
    arrays: dict[str, Any] = {name: np.array(values, dtype=COLUMNS[name]) for name, values in columns.items()}
    arrays |= {"said": np.frombuffer(json.dumps(said).encode(), dtype=np.uint8), "end": np.int64(end)}
    array = io.BytesIO()
    np.savez(array, **arrays)
    unfinished = part.index.with_suffix(".partial")
    unfinished.write_bytes(array.getvalue())
    unfinished.replace(part.index)
    return len(columns["starts"]) + len(gone)


def _files(source: EncodedSource, encoder: Encoder) -> list[MediaFile] | Fault:
    """The media of a source, put together and processed on trial; or why it is left out.

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
