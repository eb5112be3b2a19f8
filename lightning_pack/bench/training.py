"""Training steps: packed against padded, and under the Trainer against a bare loop."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pack.attention import ActivatedModel
from lightning_pack.bench.comparison import Comparison
from lightning_pack.bench.padding import Padded, groups_of_rows, groups_of_tokens, padded, sources_of
from lightning_pack.callbacks import PackedAttention, PackingMonitor
from lightning_pack.module import PackedCausalLM
from lightning_pack.row import PackedBatch
from lightning_pack.source import IGNORE


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
) -> list[Comparison]:
    """Bare training steps on the same sources: packed, in padded batches of fixed rows, and of bounded tokens."""
    module.configure_model()
    assert module.model is not None
    model, optimizer = module.model, torch.optim.AdamW(module.parameters(), lr=1e-5)
    sources = [source for batch in batches for source in sources_of(batch)]
    # A pack holds its sources by length; a padded loader gets them as they come.
    random.Random(0).shuffle(sources)
    by_rows, by_tokens = groups_of_rows(sources, budget=budget), groups_of_tokens(sources, budget=budget)

    def packed_side() -> None:
        active = ActivatedModel.of(model)
        for batch in batches:
            _step(module, module(batch), batch.shift_labels, optimizer)
        active.restore()

    def padded_side(others: Padded) -> None:
        for ids, mask, targets in others:
            _step(module, model(input_ids=ids, attention_mask=mask, use_cache=False).logits, targets, optimizer)

    both = [padded(groups, pad_id=pad_id) for groups in (by_rows, by_tokens)]
    ours, *theirs = _fastest([packed_side, *(partial(padded_side, others) for others in both)], turns=turns)
    real = sum(int(batch.cu_seqlens[-1]) for batch in batches)
    sides = (
        ("fixed-rows", "padded batches of equally many rows", f"{len(by_rows[0])} rows to a batch"),
        ("fitted-rows", "padded batches of as many rows as fit in the tokens", f"{budget:,} tokens"),
    )
    return [
        Comparison(
            name=f"training/{name}",
            what=f"training steps on packed rows against {kind}",
            ours=real / ours,
            theirs=real / seconds,
            unit="real tokens",
            note=f"{size}, {real / sum(ids.numel() for ids, _, _ in others):.0%} of them real",
        )
        for (name, kind, size), seconds, others in zip(sides, theirs, both, strict=True)
    ]


class Clock(Callback):
    """When each batch began, and when the last ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """A batch begins."""
        self.times.append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last batch has ended."""
        self.times.append(time.perf_counter())


def compare_lightning(module: PackedCausalLM, batches: Sequence[PackedBatch], *, turns: int) -> Comparison:
    """The Trainer with packed attention, monitor and token normalisation, against a bare loop over the same rows.

    The first row of a run is left out, since it pays for the start; of each other row the fastest turn counts.
    """
    module.configure_model()
    assert module.model is not None
    sides: list[list[list[float]]] = [[], []]
    for _ in range(turns + 1):
        clock = Clock()
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
        sides[0].append(clock.times)
        active = ActivatedModel.of(module.model)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
        times = []
        for batch in batches:
            times.append(time.perf_counter())
            _step(module, module(batch), batch.shift_labels, optimizer)
        sides[1].append([*times, time.perf_counter()])
        active.restore()
    ours, theirs = (sum(min(run[row + 1] - run[row] for run in runs) for row in range(1, len(batches))) for runs in sides)
    steps = len(batches) - 1
    return Comparison(
        name="lightning",
        what="steps under the Trainer, all callbacks on, against a bare loop",
        ours=steps / ours,
        theirs=steps / theirs,
        unit="steps",
        note=f"{steps} steps on the same rows",
    )
