"""Whole runs on a device: precision, waits, transfers, and memory that runs out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_pack import PackedAttention, PackedCausalLM, PackingPolicy
from lightning_pack.callbacks.memory_probe import MemoryProbeError
from lightning_pack.metrics import PackingMetrics
from lightning_pack.row import PackedBatch
from tests.gpu.checks import LARGER, LENGTHS, rows_of
from tests.gpu.device import DEVICE, on_cuda_only, skip_without_device
from tests.gpu.waits import no_waits
from tests.tiny_models import Rows, make_sources, pack_row, quiet_trainer, tiny_config

skip_without_device()
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")]
ACCELERATOR = "gpu" if DEVICE.type == "cuda" else "cpu"
CPU = torch.device("cpu")


def module_of(**changes: Any) -> PackedCausalLM:
    return PackedCausalLM({**tiny_config("llama"), **LARGER, **changes}, learning_rate=1e-3)


# The scaler of half precision starts too high and skips steps.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", pytest.param("16-mixed", marks=on_cuda_only)])
def test_a_run_in_every_precision_learns(precision: str) -> None:
    module, losses = module_of(), []

    class Noting(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *rest: Any) -> None:
            losses.append(float(outputs["loss"].detach()) if isinstance(outputs, dict) else float(outputs.detach()))

    rows = [pack_row(make_sources(LENGTHS), multiple=8)] * 20
    callbacks = [PackedAttention(monitor=False, token_normalization=False), Noting()]
    trainer = quiet_trainer(callbacks=callbacks, accelerator=ACCELERATOR, precision=precision, max_epochs=1)
    trainer.fit(module, Rows(*rows))
    assert trainer.global_step == 20
    assert all(torch.isfinite(torch.tensor(losses)))
    assert losses[-1] < 0.9 * losses[0]


class Opening(Callback):
    """From its third step on, waiting is an error, until :class:`Closing`; both count as one window."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack, self.steps = stack, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx >= 2:
            self.stack.enter_context(no_waits(DEVICE))
            self.steps += 1


class Closing(Callback):
    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        self.stack.close()


def test_steps_of_a_trainer_with_all_callbacks_never_wait() -> None:
    with ExitStack() as stack:
        opening = Opening(stack)
        # The others are inserted behind PackedAttention, so between these two.
        callbacks = [opening, PackedAttention(), Closing(stack)]
        trainer = quiet_trainer(
            callbacks=callbacks, accelerator=ACCELERATOR, precision="bf16-mixed", max_epochs=1, gradient_clip_val=1.0
        )
        module = module_of()
        module.configure_model()
        trainer.fit(module, Rows(*rows_of(6, device=CPU)))
    assert [type(c).__name__ for c in trainer.callbacks][:4] == [  # type: ignore[attr-defined]
        "Opening",
        "PackedAttention",
        "TokenNormalizedGradients",
        "PackingMonitor",
    ]
    assert opening.steps == 4


def test_counting_does_not_wait_for_the_device() -> None:
    metrics, batch = PackingMetrics().to(DEVICE), pack_row(make_sources(LENGTHS), multiple=4).to(DEVICE)
    metrics.update(batch)
    with no_waits(DEVICE):
        metrics.update(batch)
    assert metrics.compute().real_tokens == 2 * sum(LENGTHS)


@on_cuda_only
def test_a_batch_moves_pinned_in_one_piece_and_nobody_waits() -> None:
    rows = [pack_row(make_sources([4, 8]), multiple=4), pack_row(make_sources(LENGTHS), multiple=8)]
    for row, pinned in zip(rows, DataLoader(rows, batch_size=None, collate_fn=_same, pin_memory=True), strict=True):
        assert isinstance(pinned, PackedBatch)
        assert all(value.is_pinned() for value in vars(pinned).values() if isinstance(value, torch.Tensor))
        with no_waits(DEVICE):
            moved = pinned.to(DEVICE)
        for name, value in vars(row).items():
            if isinstance(value, torch.Tensor):
                found = getattr(moved, name)
                assert found.is_cuda
                assert found.dtype == value.dtype
                assert torch.equal(found.cpu(), value), name
            elif not name.startswith("_"):
                assert getattr(moved, name) == value
        assert (moved.cu_seqlens is moved.cu_seqlens_padded) == (row.cu_seqlens is row.cu_seqlens_padded)
    assert rows[0].cu_seqlens is rows[0].cu_seqlens_padded
    assert rows[1].cu_seqlens is not rows[1].cu_seqlens_padded


def _same(row: PackedBatch) -> PackedBatch:
    return row


# --- the memory probe ------------------------------------------------------------------------------------------------------


class Packed(LightningDataModule):
    """Small rows, under packing rules that allow others."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.packing = PackingPolicy(capacity=capacity, multiple=8, algorithm="exact_fill")

    def train_dataloader(self) -> Rows:
        return Rows(*rows_of(2, device=CPU))


@pytest.fixture
def two_gigabytes() -> Iterator[int]:
    """So many bytes at most, on a device of any size."""
    gc.collect()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved(DEVICE) + (2 << 30)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    if limit > total:
        pytest.skip(f"the device has {total / 2**30:.1f} GiB")
    torch.cuda.set_per_process_memory_fraction(limit / total, torch.cuda.current_device())
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0, torch.cuda.current_device())
    torch.cuda.empty_cache()


def probed(capacity: int) -> Trainer:
    """A fit of two steps with the probe; logits take 40 kB a token in half precision."""
    module = module_of(vocab_size=20480, num_hidden_layers=1, hidden_size=64, num_attention_heads=1, num_key_value_heads=1)
    trainer = quiet_trainer(
        callbacks=[PackedAttention(probe_memory=True)], accelerator=ACCELERATOR, precision="bf16-mixed", max_steps=2
    )
    trainer.fit(module, Packed(capacity))
    return trainer


def test_rows_that_fit_are_probed_and_trained_on() -> None:
    assert probed(256).global_step == 2


@on_cuda_only
def test_memory_that_really_runs_out_names_the_capacity_and_is_given_back(two_gigabytes: int) -> None:
    before = torch.cuda.memory_allocated(DEVICE)
    message = (
        r"a step on 1 source of 65536 tokens \(capacity=65536, packs_per_batch=1, 65536 tokens wide\) ran out of it, "
        r"peak of \d+\.\d\d GiB on a device of \d+\.\d\d GiB\. Lower capacity=65536; .*What was said: CUDA out of memory"
    )
    with pytest.raises(MemoryProbeError, match=message):
        probed(65536)
    gc.collect()
    # Weights and what a library keeps; the logits alone would be 2.5 GiB.
    assert torch.cuda.memory_allocated(DEVICE) - before < 256 << 20
    # In the same process, with the allocator full of what is free again: a capacity that fits is no false alarm.
    cached = torch.empty(3 << 29, dtype=torch.int8, device=DEVICE)
    del cached
    assert torch.cuda.memory_reserved(DEVICE) - torch.cuda.memory_allocated(DEVICE) >= 3 << 29
    assert probed(2048).global_step == 2
