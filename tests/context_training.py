"""Training runs that are the same with rows on one rank and cut over several; in float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_pack import EnergonPackDataModule, PackedBatch, PackingPolicy, ParallelLayout
from lightning_pack.attention.backends import choice
from lightning_pack.callbacks import PackedAttention, PackingMonitor
from lightning_pack.context import ContextSlice
from lightning_pack.module import PackedCausalLM
from tests.context_ranks import attention, compiled, models, prompt_row, refusals, row_of, stand_ins
from tests.numbers_data import NumberEncoder
from tests.tiny_models import Rows, make_sources, pack_row, quiet_trainer, tiny_config, tiny_model

#: Every source of the data may be cut for two ranks, in all runs, so that all pack the same.
MULTIPLE = 4
VOCABULARY = 256


class Recorded(PackedCausalLM):
    """Plain gradient descent on a tiny model; keeps what each step got and logged."""

    def __init__(self, model_type: str = "llama", dtype: str = "float64") -> None:
        super().__init__(tiny_config(model_type, vocab_size=VOCABULARY), dtype=dtype)
        self.keys: list[list[str]] = []
        self.parts: list[tuple[int, int] | None] = []
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            kind = self.hparams["model"]["model_type"]
            self.model.load_state_dict(tiny_model(kind, vocab_size=VOCABULARY).to(self._dtype).state_dict())

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        self.keys.append(batch.source_keys)
        self.parts.append((batch.rank, batch.context) if isinstance(batch, ContextSlice) else None)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: PackedBatch, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1)

    def weights(self) -> dict[str, Tensor]:
        full = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in self.named_parameters()}
        return {name: p.detach().clone() for name, p in full.items()}


class Sharded(Recorded):
    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            for part in (*self.model.model.layers, self.model):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])


@dataclass(frozen=True, kw_only=True)
class Run:
    """One fit of three steps, with a validation at its end, on as many ranks as there are."""

    data: str
    layout: dict[str, int]
    model_type: str = "llama"
    backend: str = "segments"
    sharded: bool = False
    checkpoints: str | None = None
    resume: str | None = None

    def results(self, *, devices: int) -> dict[str, Any]:
        monitor = PackingMonitor(summary=False)
        callbacks: list[Any] = [PackedAttention(backend=self.backend), monitor]  # type: ignore[arg-type]
        if self.checkpoints is not None:
            callbacks.append(ModelCheckpoint(self.checkpoints, filename="{step}", every_n_train_steps=1, save_top_k=-1))
        options: dict[str, Any] = {"strategy": "ddp" if devices > 1 else "auto", "precision": "64-true"}
        if self.sharded:  # double precision is not to be had with it
            strategy = ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1)
            options = {"strategy": strategy, "precision": "32-true"}
        module = (Sharded if self.sharded else Recorded)(self.model_type, "float32" if self.sharded else "float64")
        trainer = quiet_trainer(
            callbacks=callbacks,
            enable_checkpointing=self.checkpoints is not None,
            devices=devices,
            max_steps=3,
            val_check_interval=3,
            log_every_n_steps=1,
            num_sanity_val_steps=1,
            **options,
        )
        datamodule = EnergonPackDataModule(
            self.data,
            encoder=NumberEncoder(),
            packing=PackingPolicy(capacity=64, buffer_size=16, multiple=MULTIPLE),
            num_workers=0,
            shuffle_buffer_size=8,
            max_samples_per_sequence=10,
            parallel=ParallelLayout(**self.layout),
        )
        trainer.fit(module, datamodule, ckpt_path=self.resume)
        assert "on_before_batch_transfer" not in vars(module)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items() if "second" not in name}
        return {
            "weights": module.weights(),
            "keys": module.keys,
            "parts": module.parts,
            "losses": module.losses,
            "val_loss": logged.pop("val_loss"),
            "logged": {name: value for name, value in logged.items() if name != "train_loss"},
            "counts": dict(monitor._results),
        }


class Own(LightningDataModule):
    """A datamodule as users have it, which only says how the model is spread."""

    def __init__(self, layout: ParallelLayout, rows: list[PackedBatch]) -> None:
        super().__init__()
        self.parallel, self.rows = layout, rows

    def train_dataloader(self) -> Rows:
        return Rows(*self.rows)


class DealtOut(Own):
    """Its loader is one of torch, which Lightning deals out over all ranks unless it is told not to."""

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=None)


def dealt_out(*, sampler: bool) -> str:
    """The message of a run over a loader of torch; how many steps it made, if there is none."""
    rows = [pack_row(make_sources((7, 1, 12), seed=seed), multiple=4) for seed in range(4)]
    callbacks = [PackedAttention(monitor=False)]
    trainer = quiet_trainer(
        callbacks=callbacks, strategy="ddp", devices=2, max_epochs=1, precision="64-true", use_distributed_sampler=sampler
    )
    try:
        trainer.fit(PlainModule(), datamodule=DealtOut(ParallelLayout(context=2), rows))
    except ValueError as e:
        return str(e)
    return f"{trainer.global_step} steps"


class PlainModule(LightningModule):
    """A module as users have it: the loss is the model's own mean, of what the step gets."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model("llama", dtype=torch.float64)
        self.gradients: dict[str, Tensor] = {}
        self.targets: list[int] = []
        self.hooked = 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert not isinstance(batch, ContextSlice)
        self.hooked += 1
        return batch

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        self.targets.append(int(batch.loss_mask.sum()))
        return self.model(**batch.model_inputs()).loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1)


def users_own(layout: ParallelLayout, *, devices: int) -> dict[str, Any]:
    """One step over two rows, one of them with targets in its last chunk only."""
    module = PlainModule()
    strategy = "ddp" if devices > 1 else "auto"
    trainer = quiet_trainer(
        callbacks=[PackedAttention(monitor=False)],
        strategy=strategy,
        devices=devices,
        max_epochs=1,
        accumulate_grad_batches=2,
        precision="64-true",
    )
    cut = ParallelLayout(context=2)
    trainer.fit(module, datamodule=Own(layout, [prompt_row(cut), row_of((7, 1, 12), cut)]))
    assert module.hooked == 2
    assert "on_before_batch_transfer" not in vars(module)
    return {"gradients": module.gradients, "targets": module.targets}


def pair(argument: dict[str, Any]) -> dict[str, Any]:
    """All that is asked of two ranks."""
    data, folder, two = argument["data"], Path(argument["folder"]), {"context": 2}
    runs: dict[str, Any] = {
        "unsliced": Run(data=data, layout={}),
        "context": Run(data=data, layout=two, checkpoints=str(folder / "checkpoints")),
        "resumed": Run(data=data, layout=two, resume=str(folder / "checkpoints" / "step=2.ckpt")),
        "sharded": Run(data=data, layout=two, sharded=True),
    }
    results = {name: run.results(devices=2) for name, run in runs.items()}
    with stand_ins(), patch.object(choice, "te_unusable", lambda device, dtype: None):
        results["te"] = Run(data=data, layout=two | {"eval_context": 1}, model_type="mistral", backend="te").results(devices=2)
    results["own"] = users_own(ParallelLayout(context=2), devices=2)
    layout = ParallelLayout(context=2)
    results |= {check.__name__: check(layout) for check in (attention, models, compiled, refusals)}
    try:
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
        trainer = quiet_trainer(callbacks=[PackedAttention()], strategy=strategy, devices=2)
        trainer.fit(PlainModule(), datamodule=Own(ParallelLayout(context=2), []))
    except ValueError as e:
        results["refusals"]["mesh"] = str(e)
    results["dealt out"] = {sampler: dealt_out(sampler=sampler) for sampler in (True, False)}
    torch.save(results, folder / f"pair.{torch.distributed.get_rank()}.pt")
    return {}


def four(argument: dict[str, Any]) -> dict[str, Any]:
    """All that is asked of four ranks."""
    data, folder = argument["data"], Path(argument["folder"])
    results = {
        "data": Run(data=data, layout={"context": 2}).results(devices=4),
        "tensor": Run(data=data, layout={"context": 2, "tensor": 2}).results(devices=4),
    }
    layout = ParallelLayout(context=4)
    results |= {"attention": attention(layout), "models": models(layout, ("mistral", "llama prompt"))}
    torch.save(results, folder / f"four.{torch.distributed.get_rank()}.pt")
    return {}
