"""Loading: rows that are packed against batches that are padded, with the same encoder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.energon import DefaultTaskEncoder, batch_pad_stack, get_savable_loader, get_train_dataset, stateless

from lightning_pack.bench.comparison import Comparison
from lightning_pack.datamodule import EnergonPackDataModule
from lightning_pack.energon.dataset import worker_config
from lightning_pack.energon.task_encoder import PackTaskEncoder
from lightning_pack.row import PackedBatch


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
    mean = max(1, round(sources / 8 / sum(1 for _ in rows_of(data, sources=sources // 8))))
    encoder = _Plain(data.encoder, policy=data.packing)

    def packing_side() -> float:
        return _rate((len(batch.source_keys) for batch in rows_of(data)), sources=sources)

    def plain_side() -> float:
        options = data.options
        config = replace(worker_config(seed=options.seed), num_workers=data.num_workers)
        dataset = get_train_dataset(
            options.path,
            worker_config=config,
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
            if loader._iterator is not None:
                loader._iterator._shutdown_workers()

    rates = [[side() for side in (packing_side, plain_side)] for _ in range(turns)]
    ours, theirs = (max(rate) for rate in zip(*rates, strict=True))
    note = f"{data.num_workers} workers; plain batches of {mean}"
    what = "loading packed rows, tokenization included, against Energon's plain loader with padded batches"
    return Comparison(name="loader", what=what, ours=ours, theirs=theirs, unit="sources", note=note)


def rows_of(data: EnergonPackDataModule, *, sources: int | None = None) -> Iterator[PackedBatch]:
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
