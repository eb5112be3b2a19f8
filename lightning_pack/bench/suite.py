"""Every benchmark of the project in bounded sizes, for ``lightning-pack bench --all``.

A benchmark is a function of its sizes and of a folder for data. Its rows in the table are named here, so that what the table
has is known without measuring; a benchmark that gives others is in error.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_pack.bench import attention, bins, owners, resume, stream
from lightning_pack.bench.configuration import generated, standard_library
from lightning_pack.bench.loading import compare_loader, rows_of
from lightning_pack.bench.owner_runs import PADDED, WAYS
from lightning_pack.bench.result import BenchResult
from lightning_pack.bench.training import compare_lightning, compare_training
from lightning_pack.datamodule import EnergonPackDataModule
from lightning_pack.module import PackedCausalLM


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much every benchmark does; nothing is cut off by time.

    Args:
        generated_texts: number of texts that are made up; None takes the documentation of the standard library.
        capacity: of rows of texts that are made up, in tokens.
        rows: packed rows to train on.
        turns: of each side where training, loading or resuming is timed.
        loaded_sources: that are loaded.
        owner_rows: rows whose sources every owner trains on.
        owner_turns: of each owner.
        stream_lengths: of each set, and for each rank.
        ranks: whose work is compared.
        bin_lengths: of each set.
        buffer: sources in a packing buffer and in a shuffle buffer that a state holds.
        resume_workers: loader processes.
        checkpoint_every: steps between checkpoints.
        attention_tokens: of a row.
        attention_sources: in it.
    """

    generated_texts: int | None = None
    capacity: int = 2048
    rows: int = 16
    turns: int = 2
    loaded_sources: int = 8_000
    owner_rows: int = 8
    owner_turns: int = 2
    stream_lengths: int = 20_000
    ranks: int = 8
    bin_lengths: int = 100_000
    buffer: int = 1024
    resume_workers: int = 2
    checkpoint_every: int = 50
    attention_tokens: int = 8192
    attention_sources: int = 32


#: Tries the whole run out in less than a minute.
SMALL = Sizes(
    generated_texts=300,
    capacity=256,
    rows=2,
    turns=1,
    loaded_sources=200,
    owner_rows=3,
    owner_turns=1,
    stream_lengths=500,
    ranks=2,
    bin_lengths=500,
    buffer=16,
    resume_workers=1,
    checkpoint_every=2,
    attention_tokens=1024,
    attention_sources=8,
)
#: Of ``stream``, in sources; part of the names of rows.
_STREAM_BUFFER = 64


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a benchmark gives.

    Args:
        results: rows of the table.
        figures: everything measured, as dataclasses.
    """

    results: tuple[BenchResult, ...]
    figures: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One benchmark.

    Args:
        name: of the benchmark.
        what: it measures.
        rows: names of its results.
        run: measures; its folder is shared by all benchmarks of a run.
        separate: whether it runs in a process of its own; not, if it only starts such processes.
    """

    name: str
    what: str
    rows: tuple[str, ...]
    run: Callable[[Sizes, Path], Findings]
    separate: bool = True


def measured(benchmark: Benchmark, sizes: Sizes, folder: Path) -> Findings:
    """Run one, quietly.

    Raises:
        RuntimeError: if its results are not the rows that it is said to have.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        found = benchmark.run(sizes, folder)
    names = tuple(result.name for result in found.results)
    if names != benchmark.rows:
        raise RuntimeError(f"the results are {', '.join(names)}, and were to be {', '.join(benchmark.rows)}")
    return found


def _texts(sizes: Sizes, folder: Path) -> tuple[PackedCausalLM, EnergonPackDataModule]:
    """Model and data, prepared."""
    if sizes.generated_texts is None:
        model, data = standard_library(folder / "stdlib")
    else:
        model, data = generated(
            folder / f"generated-{sizes.generated_texts}", sources=sizes.generated_texts, capacity=sizes.capacity
        )
    data.prepare_data()
    return model, data


def _training(sizes: Sizes, folder: Path) -> Findings:
    model, data = _texts(sizes, folder)
    rows = list(islice(rows_of(data), sizes.rows))
    budget, pad_id = data.packing.capacity * data.packs_per_batch, data.encoder.pad_id
    found = compare_training(model, rows, budget=budget, pad_id=pad_id, turns=sizes.turns)
    return Findings(results=tuple(each.result for each in found), figures=tuple(found))


def _lightning(sizes: Sizes, folder: Path) -> Findings:
    model, data = _texts(sizes, folder)
    found = compare_lightning(model, list(islice(rows_of(data), sizes.rows)), turns=sizes.turns)
    return Findings(results=(found.result,), figures=(found,))


def _loader(sizes: Sizes, folder: Path) -> Findings:
    _, data = _texts(sizes, folder)
    found = compare_loader(data, sources=sizes.loaded_sources, turns=sizes.turns)
    return Findings(results=(found.result,), figures=(found,))


def _owners(sizes: Sizes, folder: Path) -> Findings:
    module, data = _texts(sizes, folder)
    with owners.threads_of_torch(1):
        runs = owners.runs_of(module, data, rows=sizes.owner_rows, folder=folder / "owners-written")
        speeds = owners.compared(runs, turns=sizes.owner_turns)
    return Findings(results=tuple(owners.results_of(speeds)), figures=tuple(speeds))


def _stream(sizes: Sizes, folder: Path) -> Findings:
    lines = [
        line for name in bins.SETS for line in stream.measured(name, count=sizes.stream_lengths, buffer_sizes=[_STREAM_BUFFER])
    ]
    balance = stream.balanced(count=sizes.stream_lengths, ranks=sizes.ranks)
    return Findings(results=tuple(stream.results_of(lines, balance)), figures=(*lines, balance))


def _bins(sizes: Sizes, folder: Path) -> Findings:
    found = list(bins.compared(list(bins.SETS), [sizes.bin_lengths], turns=sizes.turns))
    return Findings(results=tuple(bins.results_of(found)), figures=tuple(found))


def _resume(sizes: Sizes, folder: Path) -> Findings:
    # Enough texts for three buffers of all workers.
    count = max(sizes.generated_texts or 0, 5 * sizes.buffer)
    model, data = generated(folder / f"generated-{count}", sources=count, capacity=sizes.capacity)
    cost = resume.state_cost(data, sources=sizes.buffer, workers=sizes.resume_workers, turns=sizes.turns)
    every, turns = sizes.checkpoint_every, sizes.turns
    training = resume.compare_checkpoints(model, data, every=every, turns=turns, folder=folder / "checkpoints")
    return Findings(results=(*resume.results_of(cost), training.result), figures=(cost, training))


def _attention(sizes: Sizes, folder: Path) -> Findings:
    lengths = attention.equal_lengths(sizes.attention_tokens, sizes.attention_sources)
    found = list(attention.both(attention.AttentionSetting(lengths=lengths)))
    return Findings(results=tuple(result for each in found for result in each.results), figures=tuple(found))


#: In the order of the table.
BENCHMARKS = (
    Benchmark(
        name="training",
        what="bare training steps, packed against padded",
        rows=("training/fixed-rows", "training/fitted-rows"),
        run=_training,
    ),
    Benchmark(name="lightning", what="what the Trainer and all callbacks cost", rows=("lightning",), run=_lightning),
    Benchmark(name="loader", what="loading with packing, against without", rows=("loader",), run=_loader),
    Benchmark(
        name="owners",
        what="training under the Trainer, by who packs",
        rows=tuple(f"owners/{way}" for way in WAYS if way != PADDED),
        run=_owners,
    ),
    Benchmark(
        name="stream",
        what="how full rows are when packed as sources are read",
        rows=(*(f"stream/{name}/{_STREAM_BUFFER}" for name in bins.SETS), "stream/ranks"),
        run=_stream,
    ),
    Benchmark(
        name="bins",
        what="how few rows a list of lengths needs",
        rows=("bins/adversary", *(f"bins/{name}" for name in bins.SETS)),
        run=_bins,
    ),
    Benchmark(
        name="resume",
        what="what state in a checkpoint costs",
        rows=("resume/state", "resume/first-row", "resume/checkpoints"),
        run=_resume,
    ),
    Benchmark(
        name="attention",
        what="attention by boundaries, against a mask over the row",
        rows=tuple(f"attention/{name}/{side}" for name in attention.SHAPES for side in ("speed", "memory")),
        run=_attention,
        separate=False,
    ),
)
