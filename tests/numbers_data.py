"""A dataset whose samples are lengths: sample i becomes n tokens of value i + 1, so that loss and order are visible."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.energon.flavors import BaseWebdatasetFactory

from lightning_pack.encoders import LeaveOut
from lightning_pack.row import PackedBatch
from lightning_pack.source import EncodedSource


@dataclass(frozen=True, kw_only=True)
class NumberEncoder:
    """``{"n": length, "id": i}`` -> n tokens i + 1; ``"refuse"`` in the record raises."""

    pad_id: int = 0
    salt: int = 0

    def __call__(self, key: str, record: Mapping[str, Any]) -> EncodedSource:
        if "refuse" in record:
            raise LeaveOut(record["refuse"], "the record asks for it")
        if "crash" in record:
            raise TypeError("the encoder has a fault")
        ids = torch.full((record["n"],), record["id"] + 1, dtype=torch.int64)
        labels = torch.full_like(ids, -100) if record.get("no_targets") else None
        source = EncodedSource.of(key, ids, labels)
        source.group = record.get("group")
        return source

    def fingerprint(self) -> dict[str, Any]:
        return {"type": "NumberEncoder", "salt": self.salt}


def lengths(count: int, *, most: int, seed: int = 0) -> list[int]:
    """Long-tailed lengths between 2 and ``most``."""
    drawn = np.random.default_rng(seed).lognormal(2.5, 0.8, count)
    return np.clip(drawn, 2, most).astype(int).tolist()


def records_of(sizes: Iterable[int]) -> list[dict[str, Any]]:
    return [{"n": n, "id": i} for i, n in enumerate(sizes)]


def write_webdataset(folder: Path, parts: Mapping[str, list[Any]], *, shards: int = 3) -> Path:
    """Write records (dict: as JSON, bytes: as they are) as an Energon dataset with a split for every part."""
    samples = {
        part: [{"json": record if isinstance(record, bytes) else json.dumps(record).encode()} for record in records]
        for part, records in parts.items()
    }
    return write_samples(folder, samples, shards=shards, digits=6)


def write_samples(folder: Path, parts: Mapping[str, Sequence[Mapping[str, bytes]]], *, shards: int, digits: int) -> Path:
    """Write samples (files by their ending) as an Energon dataset; ``digits`` of their number are in the key."""
    folder.mkdir(parents=True)
    names = []
    for part, samples in parts.items():
        for shard in range(shards):
            names.append(f"{part}-{shard}.tar")
            with tarfile.open(folder / names[-1], "w") as tar:
                for i in range(shard, len(samples), shards):
                    for ending, data in samples[i].items():
                        info = tarfile.TarInfo(f"{part}{i:0{digits}d}.{ending}")
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
    (folder / ".nv-meta").mkdir()
    (folder / ".nv-meta" / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    with contextlib.redirect_stdout(io.StringIO()):
        BaseWebdatasetFactory.prepare_dataset(
            folder, names, split_parts_patterns=[(part, f"^{part}-.*") for part in parts], shuffle_seed=None, workers=1
        )
    return folder


def same_batch(a: PackedBatch, b: PackedBatch) -> bool:
    """Equal in every field, bitwise."""
    tensors = (
        "input_ids",
        "labels",
        "shift_labels",
        "loss_mask",
        "position_ids",
        "cu_seqlens",
        "cu_seqlens_padded",
        "segment_ids",
    )
    return (
        all(torch.equal(getattr(a, name), getattr(b, name)) for name in tensors)
        and (a.max_seqlen, a.source_keys, a.ages, a.left_out) == (b.max_seqlen, b.source_keys, b.ages, b.left_out)
        and (a.cu_seqlens is a.cu_seqlens_padded) == (b.cu_seqlens is b.cu_seqlens_padded)
        and a.__restore_key__ == b.__restore_key__
    )
