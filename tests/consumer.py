"""A project that uses the public names, for a type checker: it is checked strictly, and never run."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import assert_type

from lightning_pack import (
    BatchFields,
    EnergonPackDataModule,
    LoraOptions,
    PackedAttention,
    PackedBatch,
    PackedCausalLM,
    PackingMonitor,
    PackingPolicy,
    ParallelLayout,
    ResumeError,
    SourceOutput,
    TokenNormalizer,
    isolation_check,
    lower_bound,
    pack_loader,
    packed_row,
    plan,
    prepack,
    unpack,
)
from lightning_pack.attention import IsolationVerdict, THDInputs
from lightning_pack.encoders import Encoder, LeaveOut
from lightning_pack.offline import PackedRows, convert
from lightning_pack.planner import Plan


class Module(LightningModule):
    """A module with packed rows."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.normalizer = TokenNormalizer(self)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        """The loss of a row."""
        assert_type(batch.input_ids, torch.Tensor)
        assert_type(batch.source_keys, list[str])
        assert_type(THDInputs.of(batch).cu_seqlens, torch.Tensor)
        row = packed_row(batch)
        assert_type(row, PackedBatch | None)
        outputs: list[SourceOutput] = unpack(self.model(**batch.model_inputs(self.model)), batch)
        total = torch.stack([each.values.sum() for each in outputs]).sum()
        assert_type(batch.token_mean(total.detach()), torch.Tensor)
        return self.normalizer.scale(total, batch)


def train(model: torch.nn.Module, encoder: Encoder) -> None:
    """Pack, train, resume."""
    policy = PackingPolicy(capacity=4096, overlength="truncate", multiple=ParallelLayout(context=2).multiple)
    assert_type(policy.pack([5, 3]), list[list[int]])
    assert_type(lower_bound([5, 3], 8), int)
    data = EnergonPackDataModule("data/mine", packing=policy, encoder=encoder)
    callbacks = [PackedAttention(policy=None), PackingMonitor()]
    try:
        Trainer(callbacks=callbacks).fit(Module(model), data, ckpt_path="last.ckpt")
    except (ResumeError, LeaveOut) as error:
        print(error)
    PackedCausalLM("folder", lora=LoraOptions(rank=8))
    for row in pack_loader([{"input_ids": torch.zeros(1, 2)}], policy, fields=BatchFields()):
        assert_type(row, PackedBatch)


def prepare(model: torch.nn.Module) -> None:
    """Plan, write rows, check a model."""
    assert_type(plan([5, 3, 6], capacity=8), Plan)
    assert_type(prepack("data/mine", "data/rows", capacity=2048), PackedRows)
    assert_type(convert("packed.npy", "data/rows"), PackedRows)
    assert_type(isolation_check(model), IsolationVerdict)
