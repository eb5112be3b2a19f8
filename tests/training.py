"""A training run small enough to be stopped, killed and repeated many times, and a record of what it trained on.

``python -m tests.training '{"data": ..., "record": ...}'`` runs it in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_pack import EnergonPackDataModule, PackedBatch, PackingPolicy
from tests.numbers_data import NumberEncoder


def digest(batch: PackedBatch) -> str:
    """Changes if any field of the batch does."""
    hasher = hashlib.sha256(repr((batch.source_keys, batch.ages, batch.left_out, batch.max_seqlen)).encode())
    for name in ("input_ids", "labels", "shift_labels", "position_ids", "cu_seqlens", "cu_seqlens_padded", "segment_ids"):
        hasher.update(getattr(batch, name).numpy().tobytes())
    return hasher.hexdigest()[:16]


class Recorder(pl.LightningModule):
    """Predicts the next token from the last one, with dropout; remembers each batch under (epoch, batch index).

    After ``stands_after`` batches it stands still, until there is a file ``{record}.go``.
    """

    def __init__(self, record: Path | None = None, *, sleep: float = 0.0, stands_after: int | None = None) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Embedding(600, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 600))
        self.record, self.sleep, self.stands_after = record, sleep, stands_after
        self.trained: dict[tuple[int, int], str] = {}
        self.works: list[int] = []
        self.validated: list[list[str]] = []

    def weights(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.parameters()]).tolist()

    def loss(self, batch: PackedBatch) -> Tensor:
        logits = self.model(batch.input_ids)
        return torch.nn.functional.cross_entropy(logits[0], batch.shift_labels[0])

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        time.sleep(self.sleep)
        self.trained[self.current_epoch, batch_idx] = digest(batch)
        self.works.append(int((batch.cu_seqlens.diff() ** 2).sum()))
        if self.record is not None:
            with open(f"{self.record}.{self.global_rank}", "a") as file:
                file.write(json.dumps([self.current_epoch, batch_idx, digest(batch)]) + "\n")
        while len(self.trained) == self.stands_after and not Path(f"{self.record}.go").exists():
            time.sleep(0.01)
        return self.loss(batch)

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self.validated[-1] += batch.source_keys
        self.log("val_loss", self.loss(batch), batch_size=len(batch.source_keys), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run. Paths as text, so that they can cross a command line."""

    data: str
    checkpoints: str | None = None
    record: str | None = None
    workers: int = 0
    policy: dict[str, Any] = field(default_factory=dict)
    epochs: int | None = None
    every_n_steps: int = 1
    resume: str | None = None
    sleep: float = 0.0
    stands_after: int | None = None
    trainer: dict[str, Any] = field(default_factory=dict)


def datamodule(options: Options) -> EnergonPackDataModule:
    return EnergonPackDataModule(
        options.data,
        encoder=NumberEncoder(),
        packing=PackingPolicy(**{"capacity": 64, "buffer_size": 16, "multiple": 4} | options.policy),
        num_workers=options.workers,
        epochs=options.epochs,
        shuffle_buffer_size=8,
        max_samples_per_sequence=10,
    )


def trainer(options: Options) -> pl.Trainer:
    callbacks: list[pl.Callback] = []
    if options.checkpoints:
        callbacks.append(
            ModelCheckpoint(
                options.checkpoints,
                filename="{step}",
                every_n_train_steps=options.every_n_steps,
                save_top_k=-1,
                save_last=True,
                save_on_exception=True,
            )
        )
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "limit_val_batches": 0} | options.trainer
    return pl.Trainer(
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def run(options: Options) -> Recorder:
    record = Path(options.record) if options.record else None
    module = Recorder(record, sleep=options.sleep, stands_after=options.stands_after)
    trainer(options).fit(module, datamodule(options), ckpt_path=options.resume)
    return module


def read_record(record: Path, *, rank: int = 0) -> dict[tuple[int, int], list[str]]:
    """Every batch that a recorded run began to train on, with all its digests (several, if it was trained again)."""
    found: dict[tuple[int, int], list[str]] = {}
    for line in Path(f"{record}.{rank}").read_text().splitlines():
        epoch, index, seen = json.loads(line)
        found.setdefault((epoch, index), []).append(seen)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    pl.seed_everything(0)
    run(Options(**json.loads(sys.argv[1])))
