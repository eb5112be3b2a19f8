"""``lightning-pack bench``: what packing gives and what it costs, as ratios within one run.

Three questions, each about a configuration of ``fit``:

* ``training``: real tokens per second, packed against padded batches of the same token budget and the same sources;
* ``lightning``: a step under the Trainer against a bare loop over the same rows;
* ``loader``: sources per second of the packing loader against Energon's plain loader with the same encoder.

Both sides of a ratio are measured in turns and compared by their fastest turn, so that a busy machine hurts both alike.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer
from megatron.energon import DefaultTaskEncoder, batch_pad_stack, get_savable_loader, get_train_dataset, stateless
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pack.attention import ActivatedModel
from lightning_pack.callbacks import PackedAttention
from lightning_pack.callbacks.monitor import PackingMonitor
from lightning_pack.datamodule import EnergonPackDataModule
from lightning_pack.energon.passes import stop_workers
from lightning_pack.energon.task_encoder import PackTaskEncoder
from lightning_pack.module import PackedCausalLM
from lightning_pack.row import IGNORE, EncodedSource, PackedBatch

COMPARISONS = ("training", "lightning", "loader")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One answer: ``ours`` and ``theirs`` in ``unit`` per second."""

    name: str
    ours: float
    theirs: float
    unit: str
    note: str = ""

    @property
    def ratio(self) -> float:
        """How many times as fast as the other side."""
        return self.ours / self.theirs

    def __str__(self) -> str:
        return (
            f"{self.name:10} {self.ratio:6.2f}x   {self.ours:10,.0f} against {self.theirs:10,.0f} {self.unit}/s   {self.note}"
        )


def sources_of(batch: PackedBatch) -> list[EncodedSource]:
    """The sources of a row, as they were before it was packed."""
    starts, lengths = batch.cu_seqlens_padded[:-1].tolist(), batch.cu_seqlens.diff().tolist()
    cut = [(key, slice(s, s + n)) for key, s, n in zip(batch.source_keys, starts, lengths, strict=True)]
    return [EncodedSource(key=key, input_ids=batch.input_ids[0, at], labels=batch.labels[0, at]) for key, at in cut]


def padded(sources: Sequence[EncodedSource], *, budget: int, pad_id: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The sources in their order as padded batches: (ids, attention mask, shifted labels), each ``[B, L]``, B * L <= budget."""
    groups: list[list[EncodedSource]] = []
    for source in sources:
        group = groups[-1] if groups else []
        if group and (len(group) + 1) * max(map(len, [*group, source])) <= budget:
            group.append(source)
        else:
            groups.append([source])
    batches = []
    for group in groups:
        shape = (len(group), max(map(len, group)))
        ids, mask = torch.full(shape, pad_id), torch.zeros(shape, dtype=torch.int64)
        targets = torch.full(shape, IGNORE)
        for row, source in enumerate(group):
            ids[row, : len(source)] = source.input_ids
            mask[row, : len(source)] = 1
            targets[row, : len(source) - 1] = source.labels[1:]
        batches.append((ids, mask, targets))
    return batches


def _fastest(sides: Sequence[Callable[[], Any]], *, turns: int) -> list[float]:
    """Seconds of the fastest of ``turns`` runs of each side, run alternately after one run to warm up."""
    best = [float("inf")] * len(sides)
    for turn in range(turns + 1):
        for i, side in enumerate(sides):
            started = time.perf_counter()
            side()
            if turn:
                best[i] = min(best[i], time.perf_counter() - started)
    return best


def _step(module: PackedCausalLM, logits: Tensor, targets: Tensor, optimizer: torch.optim.Optimizer) -> None:
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    (total / (targets != IGNORE).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def compare_training(
    module: PackedCausalLM, batches: Sequence[PackedBatch], *, budget: int, pad_id: int, turns: int
) -> Comparison:
    """Bare training steps on the same sources, packed and padded."""
    module.configure_model()
    assert module.model is not None
    model, optimizer = module.model, torch.optim.AdamW(module.parameters(), lr=1e-5)
    others = padded([source for batch in batches for source in sources_of(batch)], budget=budget, pad_id=pad_id)

    def packed_side() -> None:
        active = ActivatedModel.of(model)
        for batch in batches:
            _step(module, module(batch), batch.shift_labels, optimizer)
        active.restore()

    def padded_side() -> None:
        for ids, mask, targets in others:
            _step(module, model(input_ids=ids, attention_mask=mask, use_cache=False).logits, targets, optimizer)

    ours, theirs = _fastest([packed_side, padded_side], turns=turns)
    real = sum(int(batch.cu_seqlens[-1]) for batch in batches)
    fill = real / sum(ids.numel() for ids, _, _ in others)
    note = f"{len(batches)} rows and {len(others)} padded batches of up to {budget} tokens; padded fill {fill:.0%}"
    return Comparison(name="training", ours=real / ours, theirs=real / theirs, unit="real tokens", note=note)


@dataclass
class _Clock(Callback):
    """Seconds of the training loop alone, without the start of the Trainer."""

    seconds: float = field(default=0.0)

    # Lightning keeps callbacks by hash.
    __hash__ = object.__hash__

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds = -time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds += time.perf_counter()


def compare_lightning(module: PackedCausalLM, batches: Sequence[PackedBatch], *, turns: int) -> Comparison:
    """The Trainer with packed attention, monitor and token normalisation, against a bare loop over the same rows."""
    module.configure_model()
    assert module.model is not None
    model = module.model
    times = [[float("inf")], [float("inf")]]
    for turn in range(turns + 1):
        active = ActivatedModel.of(model)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
        started = time.perf_counter()
        for batch in batches:
            _step(module, module(batch), batch.shift_labels, optimizer)
        times[1] += [time.perf_counter() - started] if turn else []
        active.restore()
        clock = _Clock()
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            callbacks=[PackedAttention(), PackingMonitor(summary=False), clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(list(batches), batch_size=None))  # type: ignore[arg-type]
        times[0] += [clock.seconds] if turn else []
    return Comparison(name="lightning", ours=len(batches) / min(times[0]), theirs=len(batches) / min(times[1]), unit="steps")


class _Plain(PackTaskEncoder):
    """The same encoder without packing: batches are padded, as Energon does by default."""

    @stateless
    def batch(self, samples: Any) -> Any:
        """Padded tensors, and the number of samples."""
        ids = [sample.input_ids for sample in samples]
        labels = [sample.labels for sample in samples]
        return {"input_ids": batch_pad_stack(ids), "labels": batch_pad_stack(labels), "sources": len(samples)}

    build_batch = DefaultTaskEncoder.build_batch


def compare_loader(data: EnergonPackDataModule, *, sources: int, turns: int) -> Comparison:
    """Sources per second, tokenization included, once the workers run."""
    mean = max(1, round(sources / 8 / sum(1 for _ in _rows(data, sources=sources // 8))))
    encoder = _Plain(data.encoder, policy=data.packing)

    def packing_side() -> float:
        return _rate((len(batch.source_keys) for batch in _rows(data)), sources=sources)

    def plain_side() -> float:
        options = data.options
        dataset = get_train_dataset(
            options.path,
            worker_config=options.worker_config(),
            batch_size=mean,
            shuffle_buffer_size=options.shuffle_buffer_size or None,
            max_samples_per_sequence=options.max_samples_per_sequence,
            task_encoder=encoder,
        )
        loader = get_savable_loader(dataset, watchdog_timeout_seconds=None)
        loader.pin_memory = False
        try:
            return _rate((batch["sources"] for batch in loader), sources=sources)
        finally:
            stop_workers(loader)

    rates = [[side() for side in (packing_side, plain_side)] for _ in range(turns)]
    ours, theirs = (max(rate) for rate in zip(*rates, strict=True))
    note = f"{data.num_workers} workers; plain batches of {mean}"
    return Comparison(name="loader", ours=ours, theirs=theirs, unit="sources", note=note)


def _rows(data: EnergonPackDataModule, *, sources: int | None = None) -> Iterator[PackedBatch]:
    """Rows as training gets them, until so many sources have come."""
    data.setup("fit")
    loader = data.train_dataloader()
    seen = 0
    try:
        for batch in loader:
            loader.trained()
            yield batch
            seen += len(batch.source_keys)
            if sources is not None and seen >= sources:
                return
    finally:
        data.teardown("fit")


def _rate(counts: Iterator[int], *, sources: int) -> float:
    """Sources per second after a tenth of them, when buffers are full and workers busy."""
    seen = begun = 0
    started = None
    for count in counts:
        seen += count
        if started is None and seen >= sources / 10:
            begun, started = seen, time.perf_counter()
        if seen >= sources:
            break
    assert started is not None
    if hasattr(counts, "close"):
        counts.close()
    return (seen - begun) / (time.perf_counter() - started)


def main(args: Sequence[str]) -> None:
    """``lightning-pack bench`` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="lightning-pack bench", description="What packing gives and costs, as ratios in one run."
    )
    parser.add_argument("-c", "--config", type=Path, required=True, help="a configuration of fit; its model and data are used")
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=COMPARISONS, help="what to measure (default: all)")
    parser.add_argument("--rows", type=int, default=24, help="packed rows to train on (default: 24)")
    parser.add_argument("--sources", type=int, default=12_000, help="sources to load (default: 12000)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each side, of which the fastest counts (default: 3)")
    options = parser.parse_args(args)
    for name in ("rows", "sources", "turns"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1 is needed")
    model, data = _read(options.config)
    data.prepare_data()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"{options.config}: {torch.get_num_threads()} threads, torch {torch.__version__}, fastest of {options.turns} turns")
    rows = list(islice(_rows(data), options.rows)) if {"training", "lightning"} & set(options.only) else []
    if "training" in options.only:
        budget, pad_id = data.packing.capacity * data.packs_per_batch, data.encoder.pad_id
        print(compare_training(model, rows, budget=budget, pad_id=pad_id, turns=options.turns), flush=True)
    if "lightning" in options.only:
        print(compare_lightning(model, rows, turns=options.turns), flush=True)
    if "loader" in options.only:
        print(compare_loader(data, sources=options.sources, turns=options.turns), flush=True)


def _read(config: Path) -> tuple[PackedCausalLM, EnergonPackDataModule]:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PackedCausalLM, "model")
    parser.add_class_arguments(EnergonPackDataModule, "data")
    given = yaml.safe_load(config.read_text())
    try:
        parsed = parser.instantiate_classes(parser.parse_object({name: given[name] for name in ("model", "data")}))
    except KeyError as e:
        raise ValueError(f"{config} has no {e}: a configuration of fit, with model and data, is needed") from e
    return parsed.model, parsed.data
