"""The sets of ``bench stream`` through the real loader: written as a dataset, read, encoded, packed and made rows."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from lightning_pack.bench.bins import drawn
from lightning_pack.energon import StreamOptions, sample_sources
from lightning_pack.energon.dataset import open_evaluation_share
from lightning_pack.energon.worker import End, Whereabouts, rows_of_share
from lightning_pack.policy import PackingPolicy
from lightning_pack.source import EncodedSource


class _Lengths:
    """``{"n": length}`` -> so many tokens."""

    pad_id = 0

    def __call__(self, key: str, record: Mapping[str, Any]) -> EncodedSource:
        return EncodedSource.of(key, torch.ones(record["n"], dtype=torch.int64))

    def fingerprint(self) -> dict[str, Any]:
        return {"encoder": "lengths"}


@dataclass(frozen=True, kw_only=True)
class LoadedFill:
    """What a loader worker makes of a set.

    Args:
        set_name: of the lengths.
        buffer_size: sources that it holds.
        algorithm: that ``"auto"`` chose by the first sources read.
        rows: that it made, the last one included.
        fill: real tokens per slot.
        oldest: the longest wait of a source, in turnovers of the buffer.
        sources: that were packed; a source of one token has no target and is left out.
        seconds: in all, reading and encoding included.
    """

    set_name: str
    buffer_size: int
    algorithm: str
    rows: int
    fill: float
    oldest: float
    sources: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"  buffer {self.buffer_size:5,}  auto: {self.algorithm:20} fill {self.fill:7.2%}   oldest {self.oldest:4.1f} "
            f"turnovers   {self.rows:7,} rows of {self.sources:,} sources, {self.sources / self.seconds:8,.0f} sources/s in all"
        )


def loaded(name: str, *, count: int, buffer_size: int) -> LoadedFill:
    """Read a set once, in its order, through a loader worker in this process.

    Raises:
        RuntimeError: if a source is lost or comes twice.
    """
    lengths, capacity = drawn(name, count)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lengths.jsonl"
        file.write_text("".join(json.dumps({"n": length}) + "\n" for length in lengths))
        with contextlib.redirect_stdout(io.StringIO()):
            CrudeJsonlDatasetFactory.prepare_dataset(str(file))
        options = StreamOptions(
            path=str(file), encoder=_Lengths(), policy=PackingPolicy(capacity=capacity, buffer_size=buffer_size)
        )
        started = time.perf_counter()
        found = sample_sources(options, evaluation=True)
        options = replace(options, policy=options.policy.settled(found.lengths))
        rows = tokens = oldest = 0
        keys: list[str] = []
        for message in rows_of_share(
            lambda whereabouts: open_evaluation_share(options, 0, whereabouts, split="train", of=1), Whereabouts(), None
        ):
            if isinstance(message, End):
                break
            rows += 1
            tokens += int(message.batch.cu_seqlens[-1])
            oldest = max(oldest, *message.batch.ages)
            keys += message.batch.source_keys
        seconds = time.perf_counter() - started
    if len(keys) != len(set(keys)) or len(keys) != sum(length > 1 for length in lengths):
        raise RuntimeError(f"{len(keys)} sources came, {len(set(keys))} different ones, of {len(lengths)}")
    return LoadedFill(
        set_name=name,
        buffer_size=buffer_size,
        algorithm=options.policy.algorithm,
        rows=rows,
        fill=tokens / (rows * capacity),
        oldest=oldest / buffer_size,
        sources=len(keys),
        seconds=seconds,
    )
