"""Padded batches as collators make them, and a LightningModule that was written for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import SGD

from lightning_pack.source import IGNORE, EncodedSource
from tests.tiny_models import tiny_model

Side = Literal["left", "right", "both"]
PAD = 1


def pad(sources: Sequence[EncodedSource], side: Side = "right", *, extra: int = 2) -> dict[str, Any]:
    """A dict with input_ids, attention_mask and labels, wider by ``extra`` than the longest source."""
    width = max(len(source) for source in sources) + extra
    batch = {
        "input_ids": torch.full((len(sources), width), PAD),
        "attention_mask": torch.zeros(len(sources), width, dtype=torch.int64),
        "labels": torch.full((len(sources), width), IGNORE),
    }
    for row, source in enumerate(sources):
        spare = width - len(source)
        start = {"left": spare, "right": 0, "both": spare // 2}[side]
        place = slice(start, start + len(source))
        batch["input_ids"][row, place] = source.input_ids
        batch["attention_mask"][row, place] = 1
        batch["labels"][row, place] = source.labels
    return batch


class Batches:
    """A loader that makes its batches anew each time, as a collator does."""

    def __init__(self, *make: Any) -> None:
        self.make = make

    def __iter__(self) -> Any:
        return (each() for each in self.make)

    def __len__(self) -> int:
        return len(self.make)


def stay_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep transformers from rounding to float32 in norms and losses, so that float64 differences are seen."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    to = torch.Tensor.to

    def double(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(tensor, *(torch.float64 if arg is torch.float32 else arg for arg in args), **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", double)


class HuggingFaceModule(LightningModule):
    """Nothing in it knows of packing."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model("llama", dtype=torch.float64)
        self.shapes: list[list[int]] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.shapes.append(list(batch["input_ids"].shape))
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        self.log("val_loss", loss)

    test_step = validation_step

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.5)
