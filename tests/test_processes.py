"""No process outlives the run that started it, and a worker that hangs or dies ends the run by name."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest

from lightning_pack import EnergonPackDataModule, PackingPolicy
from lightning_pack.energon.worker import WorkerFailedError
from lightning_pack.source import EncodedSource
from tests.numbers_data import NumberEncoder, records_of, write_webdataset
from tests.training import Options, Recorder, datamodule, run, trainer


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


class Stops(pl.Callback):
    """Raises in the third batch, after it has seen that workers run."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.workers: set[int] = set()

    def on_train_batch_end(self, *_: Any) -> None:
        self.workers |= children()
        if len(self.workers) >= 2:
            raise self.error


@pytest.mark.parametrize("error", [ValueError("stop"), KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__)
def test_workers_end_with_an_error(numbers: Path, error: BaseException) -> None:
    before = children()
    stops = Stops(error)
    options = Options(data=str(numbers), workers=2, trainer={"max_steps": 20})
    settings = trainer(options)
    settings.callbacks.append(stops)  # type: ignore[attr-defined]
    with pytest.raises((ValueError, SystemExit)):
        # Lightning makes an exit of Ctrl-C.
        settings.fit(Recorder(), datamodule(options))
    assert len(stops.workers - before) == 2
    assert children() <= before


def test_a_notebook_cell_run_twice_leaves_nothing(numbers: Path) -> None:
    before = children()
    for _ in range(2):
        run(Options(data=str(numbers), workers=2, trainer={"max_steps": 3, "limit_val_batches": 1.0}))
        assert children() <= before
    # A loader that is read by hand and then dropped, as one does in a notebook.
    data = datamodule(Options(data=str(numbers), workers=2))
    data.setup("fit")
    next(iter(data.train_dataloader()))
    assert len(children() - before) == 2
    data.setup("fit")
    next(iter(data.train_dataloader()))
    assert len(children() - before) == 2
    del data
    gc.collect()
    assert children() <= before


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_parent(numbers: Path, tmp_path: Path, end: signal.Signals) -> None:
    options = {"data": str(numbers), "workers": 3, "sleep": 0.05, "record": str(tmp_path / "r"), "trainer": {"max_steps": 2000}}
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.training", json.dumps(options)],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "r.0").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        workers = psutil.Process(parent.pid).children(recursive=True)
        assert len(workers) == 3
        if end == signal.SIGINT:
            # As a terminal does: to the whole group.
            os.killpg(parent.pid, end)
        else:
            parent.send_signal(end)
        parent.wait(timeout=60)
        gone, alive = psutil.wait_procs(workers, timeout=60)
        assert not alive
        assert len(gone) == 3
    finally:
        parent.kill()


@dataclass(frozen=True, kw_only=True)
class Hangs(NumberEncoder):
    """Sleeps for ever at one sample."""

    def __call__(self, key: str, record: Mapping[str, Any]) -> EncodedSource:
        if key == "train000100":
            time.sleep(1000)
        return super().__call__(key, record)


def train(rows: Iterator[Any], loader: Any) -> None:
    for _ in range(20):
        next(rows)
        loader.trained()


def test_a_worker_that_stops_in_the_middle_of_a_row_ends_training_by_name(tmp_path: Path) -> None:
    # A row of 16,384 tokens is larger than a pipe.
    path = write_webdataset(tmp_path / "wide", {"train": records_of([400] * 400)}, shards=1)
    data = EnergonPackDataModule(
        path, encoder=NumberEncoder(), packing=PackingPolicy(capacity=16384, buffer_size=64), num_workers=1, worker_timeout=5.0
    )
    data.setup("fit")
    loader = data.train_dataloader()
    rows = iter(loader)
    next(rows)
    loader.trained()
    time.sleep(2)
    assert loader._reader is not None
    (worker,) = loader._reader.pids
    os.kill(worker, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(WorkerFailedError, match=r"loader worker 0 \(process \d+\) does not answer"):
        train(rows, loader)
    assert time.monotonic() - began < 60
    data.teardown("fit")
    assert not psutil.pid_exists(worker)


def test_a_hanging_worker_ends_training_by_name(numbers: Path) -> None:
    before = children()
    data = EnergonPackDataModule(
        numbers,
        encoder=Hangs(),
        packing=PackingPolicy(capacity=64, buffer_size=16, multiple=4),
        num_workers=2,
        worker_timeout=5.0,
        shuffle_buffer_size=0,
        max_samples_per_sequence=10,
    )
    began = time.monotonic()
    with pytest.raises(WorkerFailedError, match=r"loader worker [01] \(process \d+\) does not answer.*/train-1\.tar\[\d+\]"):
        trainer(Options(data="", trainer={"max_steps": 100})).fit(Recorder(), data)
    assert time.monotonic() - began < 60
    assert children() <= before
