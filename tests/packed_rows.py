"""Rows written ahead, for tests: a dataset of numbers, its rows, ways to end a run, and ways to damage what it wrote."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_pack import PackedBatch
from lightning_pack.offline import PackedRows, prepack
from lightning_pack.offline.shard_file import samples_of
from tests.numbers_data import NumberEncoder, lengths, records_of

CAPACITY = 64


def records(count: int) -> list[Any]:
    """Records of long-tailed lengths; some are too long, some cannot be trained on, some may not share a row."""
    made: list[Any] = records_of(lengths(count, most=80, seed=3))
    made[7] = {"refuse": "corrupt"}
    made[11] = b"{bad json"
    made[17] = {"n": 9, "id": 17, "no_targets": True}
    for i in range(100, min(count, 160)):
        made[i] = made[i] | {"group": "other"}
    return made


def pack_rows(data: Path, out: Path, **options: Any) -> PackedRows:
    settings: dict[str, Any] = {"capacity": CAPACITY, "multiple": 4, "encoder": NumberEncoder(), "workers": 0, "shards": 4}
    return prepack(data, out, **settings | options)


Source = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def sources_of(batches: Iterable[PackedBatch]) -> list[tuple[str, Source]]:
    """Key, tokens, labels, shifted labels and positions of every source."""
    found = []
    for batch in batches:
        real, physical = batch.cu_seqlens.diff().tolist(), batch.cu_seqlens_padded.tolist()
        for key, start, n in zip(batch.source_keys, physical, real, strict=False):
            part = slice(start, start + n)
            rows = (batch.input_ids, batch.labels, batch.shift_labels, batch.position_ids)
            found.append((key, tuple(tuple(row[0, part].tolist()) for row in rows)))
    return found


def stand_still(owner: Any, name: str, *, when: Callable[[], bool]) -> None:
    """In a process that is to be killed: a call that finds it ready waits for that, however busy the machine is."""
    before = getattr(owner, name)

    def stands(*args: Any, **options: Any) -> Any:
        if when():
            time.sleep(1000)
        return before(*args, **options)

    setattr(owner, name, stands)


def kill_when(work: Callable[[], Any], ready: Callable[[], bool], *, seconds: float = 120) -> None:
    """Run ``work`` in a process of its own and kill it as soon as it is ready for that; it should stand still then."""

    def alone() -> None:
        # Threads of OpenMP do not come along in a fork, and whoever asks for them waits for ever.
        torch.set_num_threads(1)
        work()

    process = multiprocessing.get_context("fork").Process(target=alone)
    process.start()
    until = time.monotonic() + seconds
    try:
        while not ready():
            assert process.is_alive(), "it ended before it was killed"
            assert time.monotonic() < until, "it did not get so far"
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join()
    assert process.exitcode == -signal.SIGKILL


def flip(path: Path, wanted: str) -> str:
    """Change a byte in the middle of the first member of a shard with that extension; returns the key of its row."""
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        member = next(member for member in tar if member.name.endswith(wanted))
    place = member.offset_data + member.size - 5
    content[place] ^= 1
    path.write_bytes(content)
    return member.name.partition(".")[0]


def rewrite(path: Path, change: Callable[[list[tuple[str, dict[str, bytes]]]], list[tuple[str, dict[str, bytes]]]]) -> None:
    """Write a shard and its index again with other samples."""
    samples = change(list(samples_of(path)))
    places = []
    with tarfile.open(path, "w") as tar:
        for key, parts in samples:
            places.append(tar.offset)
            for extension, data in parts.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        places.append(tar.offset)
    path.with_name(f"{path.name}.idx").write_bytes(np.array(places, dtype="<u8").tobytes())
