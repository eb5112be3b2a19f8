"""Rows of one shape under captured graphs and compilers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from lightning_pack.attention import THDInputs
from lightning_pack.policy import PackingPolicy
from lightning_pack.row import PackedBatch
from tests.gpu.checks import (
    Heads,
    distance,
    largest_error,
    of_width,
    packed_model,
    random_row,
    reference_of,
    results_of,
)
from tests.gpu.device import DEVICE, DTYPE, TOLERANCES, backend_or_skip, on_cuda_only, skip_without_device
from tests.tiny_models import forward_inputs, make_sources

skip_without_device()
pytestmark = pytest.mark.gpu
FIXED = PackingPolicy(capacity=128, multiple=8, width="fixed", max_sources=6, fixed_boundaries=True)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def different_rows(count: int) -> list[PackedBatch]:
    """Rows of one shape, no two with the same boundaries."""
    draw, packs = random.Random(0), {}
    while len(packs) < count:
        packs[tuple(draw.randint(1, 20) for _ in range(draw.randint(1, 6)))] = None
    rows = [PackedBatch.from_packs([FIXED.build(make_sources([*p], seed=n, prompt=0))], pad_id=0) for n, p in enumerate(packs)]
    assert {(row.input_ids.shape, row.cu_seqlens.shape) for row in rows} == {((1, 128), (7,))}
    assert len({tuple(row.cu_seqlens_padded.tolist()) for row in rows}) > count / 2
    return [row.to(DEVICE) for row in rows]


@on_cuda_only
def test_a_captured_kernel_follows_other_boundaries() -> None:
    attend = backend_or_skip("varlen")
    row = random_row(128, Heads(), device=DEVICE, dtype=DTYPE)
    cu = torch.tensor([0, 64, 128, 128, 128, 128, 128], dtype=torch.int32, device=DEVICE)

    def step() -> list[Tensor]:
        return results_of(attend, row, inputs=THDInputs(cu_seqlens=cu, cu_seqlens_padded=cu, max_seqlen=128, total=128))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for lengths in ([64, 64], [128], [1, 7, 40, 80], [20, 20, 20, 20, 20, 28]):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        cu.copy_(torch.nn.functional.pad(offsets, (0, 7 - len(offsets)), value=128).int())
        graph.replay()
        assert largest_error(results, reference_of(row, lengths)) < TOLERANCES[DTYPE]


def losses_and_gradients(model: torch.nn.Module, weights: torch.nn.Module, row: PackedBatch) -> tuple[Tensor, list[Tensor]]:
    weights.zero_grad()
    logits = model(**forward_inputs(row)).logits[0]
    loss = torch.nn.functional.cross_entropy(logits.float(), row.shift_labels[0])
    loss.backward()
    # Clones: the memory of a captured graph is written again by its next replay.
    return loss.detach().clone(), [p.grad.clone() for p in weights.parameters() if p.grad is not None]


@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("captured", [True, False], ids=["reduce-overhead", "aot_eager"])
@pytest.mark.parametrize("backend", ["varlen", "segments"])
def test_a_compiled_model_compiles_once_and_at_most_once_more(backend: str, captured: bool) -> None:
    models = [packed_model(backend_or_skip(backend), "llama", device=DEVICE, dtype=DTYPE) for _ in range(2)]
    mode = {"mode": "reduce-overhead"} if captured and DEVICE.type == "cuda" else {"backend": "aot_eager"}
    compiled = torch.compile(models[0], fullgraph=True, **mode)
    # A captured graph holds for one max_seqlen; other compilers take the number for a constant until it changes.
    rows = [of_width(row) if captured else row for row in different_rows(20)]
    assert len({row.max_seqlen for row in rows}) == 1 or not captured
    for row in rows:
        torch.compiler.cudagraph_mark_step_begin()
        mine, theirs = losses_and_gradients(compiled, models[0], row), losses_and_gradients(models[1], models[1], row)
        assert float(theirs[0]) > 0.1
        assert largest_error([mine[0]], [theirs[0].float()]) < 2 * TOLERANCES[DTYPE]
        assert distance(mine[1], theirs[1]) < 3 * TOLERANCES[DTYPE]
    assert counters["stats"]["unique_graphs"] <= (1 if captured else 2)
    assert not counters["graph_break"]
