"""What only a CUDA device shows. Run with: pytest -m gpu"""

from __future__ import annotations

import pytest
import torch

from lightning_pack import PackedAttention, PackedCausalLM, PackingMonitor
from lightning_pack.attention import ActivatedModel
from tests.tiny_models import Rows, make_sources, pack_row, quiet_trainer, tiny_config, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LENGTHS = [7, 1, 12, 5, 9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_row_equals_each_source_alone(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to("cuda", dtype).eval()
    sources = make_sources(LENGTHS)
    alone = [model(source.input_ids[None].cuda(), use_cache=False).logits[0] for source in sources]
    batch = pack_row(sources, multiple=4).to("cuda")
    active = ActivatedModel.of(model)
    logits = model(**batch).logits[0]
    active.restore()
    starts = batch.cu_seqlens_padded[:-1].tolist()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for start, length, expected in zip(starts, LENGTHS, alone, strict=True):
        torch.testing.assert_close(logits[start : start + length], expected, atol=tolerance, rtol=tolerance)


def test_a_batch_moves_in_one_piece_and_pinned() -> None:
    batch = pack_row(make_sources([4, 8]), multiple=4).pin_memory()
    assert batch.cu_seqlens is batch.cu_seqlens_padded
    assert batch.input_ids.is_pinned()
    moved = batch.to("cuda")
    assert moved.cu_seqlens is moved.cu_seqlens_padded
    assert moved.cu_seqlens.is_cuda
    assert moved.cu_seqlens.dtype == torch.int32


def test_counting_does_not_wait_for_the_device() -> None:
    from lightning_pack.metrics import PackingMetrics

    metrics = PackingMetrics().to("cuda")
    batch = pack_row(make_sources(LENGTHS), multiple=4).to("cuda")
    metrics.update(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics.update(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert metrics.compute().real_tokens == 2 * sum(LENGTHS)


def test_a_run_in_mixed_precision() -> None:
    module = PackedCausalLM(tiny_config("llama"), learning_rate=1e-3)
    rows = [pack_row(make_sources(LENGTHS), multiple=4)] * 20
    trainer = quiet_trainer(
        callbacks=[PackedAttention(), PackingMonitor(summary=False)], accelerator="gpu", precision="bf16-mixed", max_epochs=1
    )
    trainer.fit(module, Rows(*rows))
    assert torch.isfinite(trainer.callback_metrics["train_loss"])
