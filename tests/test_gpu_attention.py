"""Kernels of the CUDA backends against the plain formulas. Run with: pytest -m gpu"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pack import PackedAttention, PackedCausalLM
from lightning_pack.attention import (
    ActivatedModel,
    SegmentsBackend,
    THDInputs,
    TransformerEngineBackend,
    VarlenBackend,
    choose_backend,
    leaking_sources,
)
from tests.reference_attention import reference_attention
from tests.tiny_models import Rows, make_sources, pack_row, quiet_trainer, tiny_config, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LENGTHS = [70, 1, 105, 16, 40]
BACKENDS = [
    pytest.param("varlen", id="varlen"),
    pytest.param(
        "te",
        id="te",
        marks=pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="no TransformerEngine"),
    ),
    pytest.param("segments", id="segments"),
]
#: Larger than the tiny models of other tests: kernels need heads of a multiple of 8, here 64.
LARGER = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def backend_of(name: str) -> Any:
    return {"varlen": VarlenBackend, "te": TransformerEngineBackend, "segments": SegmentsBackend}[name]()


def random_row(total: int, *, heads: int = 8, groups: int = 2, size: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(total, number, size) for number in (heads, groups, groups)]
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_follow_the_formulas(backend: str, window: int | None) -> None:
    batch = pack_row(make_sources(LENGTHS), multiple=8)
    inputs = THDInputs.of(batch.to("cuda"))
    row = random_row(inputs.total)
    exact = [x.double().requires_grad_() for x in row]
    ours = [x.cuda().requires_grad_() for x in row]
    out = backend_of(backend)(*ours, inputs=inputs, window=window, training=True)
    offsets = batch.cu_seqlens_padded.tolist()
    expected = reference_attention(*exact, offsets=offsets, scale=64**-0.5, window=window)
    assert window is None or max(LENGTHS) > window
    torch.testing.assert_close(out.cpu().double(), expected, atol=2e-2, rtol=2e-2)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
    (out * weight.to(out)).sum().backward()
    (expected * weight).sum().backward()
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        error = (mine.grad.cpu().double() - theirs.grad).norm() / theirs.grad.norm()
        assert float(error) < 2e-2


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_source_sees_another(backend: str, model_type: str) -> None:
    model = tiny_model(model_type, **{**LARGER, "head_dim": 64}).to("cuda", torch.bfloat16)
    batch = pack_row(make_sources(LENGTHS), multiple=8).to("cuda")
    active = ActivatedModel.of(model, backend=backend_of(backend))
    for source in (0, 2):
        assert leaking_sources(model, batch, source=source) == []
    active.restore()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tails_bring_no_nan_into_gradients(backend: str) -> None:
    model = tiny_model("llama", **LARGER).to("cuda", torch.bfloat16)
    # A wide tail, and memory full of NaN for whatever a kernel leaves unwritten.
    batch = pack_row(make_sources([70, 1]), multiple=64).to("cuda")
    assert int(batch.cu_seqlens_padded[-1]) > int(batch.cu_seqlens[-1]) + 50
    ActivatedModel.of(model, backend=backend_of(backend))
    poison = torch.full((1 << 26,), float("nan"), device="cuda")
    assert bool(poison.isnan().all())
    del poison
    model(**batch).loss.backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_kernels_do_not_wait_for_the_device(backend: str) -> None:
    attend = backend_of(backend)
    rows = [pack_row(make_sources(LENGTHS, seed=seed), multiple=8).to("cuda") for seed in range(2)]
    ours = [x.cuda().requires_grad_() for x in random_row(rows[0].input_ids.shape[1])]

    def step(number: int) -> None:
        out = attend(*ours, inputs=THDInputs.of(rows[number]), training=True)
        torch.autograd.backward(out, torch.ones_like(out))

    step(0)  # kernels are chosen and loaded
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_auto_chooses_a_kernel_and_trains() -> None:
    module = PackedCausalLM({**tiny_config("llama"), **LARGER}, learning_rate=1e-3)
    rows = [pack_row(make_sources(LENGTHS), multiple=8)] * 5
    module.configure_model()
    assert module.model is not None
    chosen = choose_backend("auto", module.model, device=torch.device("cuda"), dtype=torch.bfloat16)
    assert chosen.backend.name in ("te", "varlen")
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], accelerator="gpu", precision="bf16-mixed", max_epochs=1)
    trainer.fit(module, Rows(*rows))
    assert torch.isfinite(trainer.callback_metrics["train_loss"])
