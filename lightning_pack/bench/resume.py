"""``lightning-pack bench resume``: what the position in a checkpoint costs.

* ``state``: for each size of the buffers (packing buffer and shuffle buffer alike) and number of loader workers, the bytes of
  the datamodule's state in a checkpoint, the time to save it, and the time from opening the data to the first row: of a cold
  start, and of resumes from the middle of a buffer, from its last row, and from the beginning of the next one;
* ``checkpoints``: training steps per second with a checkpoint every 50 steps against none.

States are taken where all buffers are full. Sides are measured in turns and the fastest turn of each counts, so that a busy
machine hurts all alike. Every resume is checked to give the row that it should.
"""

from __future__ import annotations

import argparse
import io
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pack.bench.comparison import Comparison
from lightning_pack.bench.configuration import configured, generated
from lightning_pack.bench.result import BenchResult
from lightning_pack.bench.training import Clock
from lightning_pack.callbacks import PackedAttention, PackingMonitor
from lightning_pack.datamodule import EnergonPackDataModule
from lightning_pack.module import PackedCausalLM

#: What a state may take.
BYTES_PER_SOURCE, BYTES_PER_WORKER = 64, 32 * 1024


@dataclass(frozen=True, kw_only=True)
class StateCost:
    """What the state costs in one setting.

    Args:
        sources: size of the packing buffer, and of the shuffle buffer, of each worker.
        workers: loader processes; 0 is the main process.
        size: bytes of the datamodule's state, saved.
        save: seconds to make and save it, in memory.
        cold: seconds from opening the data to the first row, from the beginning.
        resumed: the same from a state, by where in its buffer that is.
    """

    sources: int
    workers: int
    size: int
    save: float
    cold: float
    resumed: dict[str, float]

    @property
    def buffered(self) -> int:
        """Sources in the packing and shuffle buffers of all workers."""
        return 2 * self.sources * max(self.workers, 1)

    @property
    def limit(self) -> int:
        """Bytes that a state of these buffers may take."""
        return BYTES_PER_SOURCE * self.buffered + BYTES_PER_WORKER * max(self.workers, 1)

    def __str__(self) -> str:
        ratios = ", ".join(f"{seconds / self.cold:.2f}x {where}" for where, seconds in self.resumed.items())
        each = f"{self.size / self.buffered:.1f} a buffered source, {self.size / self.limit:.0%} of the limit"
        return (
            f"state      {self.sources:5} sources, {self.workers} workers: {self.size:7,} bytes ({each}), saved in "
            f"{1e3 * self.save:.1f} ms; first row in {self.cold:.2f} s cold, resumed {ratios}"
        )


def results_of(cost: StateCost) -> Iterator[BenchResult]:
    """Rows of the table."""
    setting = f"{cost.sources:,} sources in each of 2 buffers, {cost.workers} workers"
    yield BenchResult(
        name="resume/state",
        what="what a position in a checkpoint takes for each source that waits in a buffer",
        value=cost.size / cost.buffered,
        unit="bytes",
        better="less",
        details=f"{setting}: {cost.size:,} bytes, saved in {1e3 * cost.save:.1f} ms",
    )
    where, slowest = max(cost.resumed.items(), key=lambda each: each[1])
    yield BenchResult(
        name="resume/first-row",
        what="time to the first row of a resumed run against a cold start",
        value=slowest / cost.cold,
        unit="x",
        better="less",
        details=f"{setting}: {slowest:.2f} s {where}, {cost.cold:.2f} s cold",
    )


class _Saved(NamedTuple):
    state: bytes
    #: Keys of the sources of the row that comes next.
    following: list[str]


def state_cost(data: EnergonPackDataModule, *, sources: int, workers: int, turns: int) -> StateCost:
    """Measure one setting of a datamodule's data, encoder and packing rules.

    Raises:
        RuntimeError: if a resume gives another row than the run that was not stopped.
    """
    buffers: list[list[_Saved]] = [[], []]
    saves = []
    for buffer, saved, seconds in _positions(_with(data, sources=sources, workers=workers)):
        buffers[buffer - 1].append(saved)
        saves.append(seconds)
    full, following = buffers
    points = {"in the middle": full[len(full) // 2], "at the last row": full[-1], "in a new buffer": following[0]}
    fastest = dict.fromkeys(["", *points], float("inf"))
    for _ in range(turns):
        for where, seconds in fastest.items():
            fastest[where] = min(seconds, _first_row(_with(data, sources=sources, workers=workers), points.get(where)))
    return StateCost(
        sources=sources,
        workers=workers,
        size=max(len(saved.state) for saved in points.values()),
        save=min(saves),
        cold=fastest.pop(""),
        resumed=fastest,
    )


def _with(data: EnergonPackDataModule, *, sources: int, workers: int) -> EnergonPackDataModule:
    return EnergonPackDataModule(
        data.path,
        encoder=data.encoder,
        # A cold start would have to choose the algorithm as well, which a resume does not.
        packing=replace(data.packing, buffer_size=sources, algorithm=data.packing.packer),
        num_workers=workers,
        shuffle_buffer_size=sources,
        max_samples_per_sequence=data.max_samples_per_sequence,
        packs_per_batch=data.packs_per_batch,
        seed=data.seed,
        on_damaged=data.on_damaged,
    )


def _positions(data: EnergonPackDataModule) -> Iterator[tuple[int, _Saved, float]]:
    """Every position in the second buffer of the worker that is last to get there, and the first in its third one.

    With the number of the buffer from 0, and the seconds that saving took.
    """
    data.setup("fit")
    loader = data.train_dataloader()
    last: tuple[int, bytes, float] | None = None
    try:
        for row in loader:
            if last is not None:
                buffer, state, seconds = last
                yield buffer, _Saved(state, row.source_keys), seconds
                if buffer == 2:
                    return
            loader.trained()
            loader.commit()
            at = [worker["at"] for worker in loader.state()["workers"]]
            buffer = min(0 if position is None else position["buffer"] for position in at)
            if buffer:
                started = time.perf_counter()
                state = _saved(data)
                last = min(buffer, 2), state, time.perf_counter() - started
    finally:
        data.teardown("fit")


def _saved(data: EnergonPackDataModule) -> bytes:
    file = io.BytesIO()
    torch.save(data.state_dict(), file)
    return file.getvalue()


def _first_row(data: EnergonPackDataModule, saved: _Saved | None) -> float:
    started = time.perf_counter()
    try:
        data.setup("fit")
        if saved is not None:
            data.load_state_dict(torch.load(io.BytesIO(saved.state), weights_only=True))
        row = next(iter(data.train_dataloader()))
        seconds = time.perf_counter() - started
    finally:
        data.teardown("fit")
    if saved is not None and row.source_keys != saved.following:
        raise RuntimeError(f"resumed with {row.source_keys}, where the run went on with {saved.following}")
    return seconds


def compare_checkpoints(
    model: PackedCausalLM, data: EnergonPackDataModule, *, every: int, turns: int, folder: Path
) -> Comparison:
    """Training with a checkpoint in ``every`` steps, the last one linked as in a real run, against none.

    The step at the start is left out; of each other step the fastest turn counts. One of these steps saves.
    """
    sides: list[list[list[float]]] = [[], []]
    for _ in range(turns):
        for side in sides:
            clock = Clock()
            callbacks: list[Callback] = [PackedAttention(), PackingMonitor(summary=False), clock]
            if side is sides[0]:
                callbacks.append(ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1, save_last=True))
            trainer = Trainer(
                accelerator="cpu",
                devices=1,
                max_epochs=1,
                max_steps=every + 1,
                callbacks=callbacks,
                logger=False,
                limit_val_batches=0,
                enable_checkpointing=side is sides[0],
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(model, _with(data, sources=data.packing.buffer_size, workers=data.num_workers))
            side.append(clock.times)
    if not list(folder.glob("*.ckpt")):
        raise RuntimeError("no checkpoint was saved")
    ours, theirs = (sum(min(run[step + 1] - run[step] for run in runs) for step in range(1, every + 1)) for runs in sides)
    note = f"one checkpoint in {every} steps against none"
    what = "training with checkpoints against training without"
    return Comparison(name="resume/checkpoints", what=what, ours=every / ours, theirs=every / theirs, unit="rows", note=note)


def main(args: Sequence[str]) -> None:
    """``lightning-pack bench resume`` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="lightning-pack bench resume", description="What the position in a checkpoint costs, and what a resume costs."
    )
    parser.add_argument("-c", "--config", type=Path, help="a configuration of fit (default: a tiny model, generated texts)")
    parser.add_argument("--buffers", nargs="*", type=int, default=[64, 256, 1024, 4096], help="sizes of the buffers")
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 1, 2], help="numbers of loader workers")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints (default: 50)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each side, of which the fastest counts (default: 3)")
    options = parser.parse_args(args)
    for name, least in (("buffers", 1), ("workers", 0), ("every", 1), ("turns", 1)):
        values = getattr(options, name)
        for value in values if isinstance(values, list) else [values]:
            if value < least:
                parser.error(f"--{name} {value}: at least {least} is needed")
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print("This takes some minutes; the machine should have nothing else to do.", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="lightning-pack-bench-") as name:
        folder = Path(name)
        if options.config is None:
            # Enough for the largest buffers; preparing more would take longer than measuring.
            count = min(max(4 * max(options.buffers, default=0), 1_000), 10_000)
            model, data = generated(folder / "generated", sources=count)
        else:
            model, data = configured(options.config)
        data.prepare_data()
        print(
            f"{options.config or 'generated texts'}: {torch.get_num_threads()} threads, torch {torch.__version__}, "
            f"fastest of {options.turns} turns",
            flush=True,
        )
        largest: list[BenchResult] = []
        for workers in options.workers:
            for sources in options.buffers:
                cost = state_cost(data, sources=sources, workers=workers, turns=options.turns)
                largest = list(results_of(cost))
                print(cost, flush=True)
        training = compare_checkpoints(model, data, every=options.every, turns=options.turns, folder=folder / "checkpoints")
        print(*largest, training.result, sep="\n", flush=True)
