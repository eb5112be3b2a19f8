"""Every backend on a device: against the plain formulas, apart from other sources, and whatever memory holds."""

from __future__ import annotations

import pytest
import torch

from lightning_pack.attention import ActivatedModel, SegmentsBackend, THDInputs, choose_backend
from tests.gpu.checks import (
    LARGER,
    LENGTHS,
    RESULTS,
    Heads,
    distance,
    largest_error,
    leaks_of_kernel,
    leaks_of_model,
    packed_model,
    random_row,
    reference_of,
    results_of,
    thd_inputs,
    unusable_gradients,
    waits_of_step,
)
from tests.gpu.device import BACKENDS, DEVICE, DTYPE, TOLERANCES, backend_or_skip, on_cuda_only, skip_without_device
from tests.tiny_models import alone_logits, make_sources, pack_row, tiny_model

skip_without_device()
# Of libraries that bring kernels.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default::DeprecationWarning")]
WHERE = {"device": DEVICE, "dtype": DTYPE}
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("heads", [Heads(), Heads(queries=4, keys=4), Heads(queries=4, keys=1, size=128)], ids=str)
@every_backend
def test_a_kernel_follows_the_formulas(backend: str, heads: Heads, window: int | None) -> None:
    lengths = list(LENGTHS)
    assert window is None or min(lengths) < window < max(lengths)
    row = random_row(sum(lengths), heads, **WHERE)
    results = results_of(backend_or_skip(backend), row, inputs=thd_inputs(lengths, device=DEVICE), window=window)
    assert {result.dtype for result in results} == {DTYPE}
    for name, mine, exact in zip(RESULTS, results, reference_of(row, lengths, window=window), strict=True):
        assert float(exact.abs().max()) > 0.1, name
        assert largest_error([mine], [exact]) < TOLERANCES[DTYPE], name


@every_backend
def test_boundaries_that_repeat_are_no_sources(backend: str) -> None:
    attend, row = backend_or_skip(backend), random_row(96, Heads(), **WHERE)
    found = []
    for offsets in ([0, 40, 96], [0, 40, 96, 96, 96]):
        cu = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
        inputs = THDInputs(cu_seqlens=cu, cu_seqlens_padded=cu, max_seqlen=56, total=96)
        found.append(results_of(attend, row, inputs=inputs))
    for one, other in zip(*found, strict=True):
        assert largest_error([one], [other.float()]) < TOLERANCES[DTYPE] / 2


@every_backend
def test_no_source_sees_another(backend: str) -> None:
    attend, lengths = backend_or_skip(backend), list(LENGTHS)
    row = random_row(sum(lengths), Heads(), **WHERE)
    assert leaks_of_kernel(attend, row, lengths, inputs=thd_inputs(lengths, device=DEVICE)) == []


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "gemma3_text"])
@every_backend
def test_no_source_of_a_model_sees_another(backend: str, model_type: str) -> None:
    assert leaks_of_model(backend_or_skip(backend), model_type, **WHERE) == []


@every_backend
def test_tails_bring_no_nan_into_gradients(backend: str) -> None:
    assert unusable_gradients(backend_or_skip(backend), **WHERE) == []


@pytest.mark.parametrize("backend", ["varlen", "te"])
def test_a_training_step_never_waits_for_the_device(backend: str) -> None:
    assert waits_of_step(backend_or_skip(backend), **WHERE) == []


@on_cuda_only
def test_segments_waits_once_and_the_wait_is_seen() -> None:
    waits = waits_of_step(SegmentsBackend(), **WHERE)
    assert len(waits) == 1
    assert "segments.py" in waits[0]


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE], ids=str)
def test_a_packed_row_equals_each_source_alone(dtype: torch.dtype) -> None:
    model = tiny_model("llama", **LARGER).to(DEVICE, dtype).eval()
    sources = make_sources(LENGTHS)
    with torch.no_grad():
        moved = [type(s).of(s.key, s.input_ids.to(DEVICE), s.labels.to(DEVICE)) for s in sources]
        alone = [alone_logits(model, source) for source in moved]
        batch = pack_row(sources, multiple=4).to(DEVICE)
        backend = choose_backend("auto", model, device=DEVICE, dtype=dtype).backend
        if DEVICE.type == "cuda":
            assert (backend.name == "segments") == (dtype == torch.float32)
        active = ActivatedModel.of(model, backend=backend)
        logits = model(**batch).logits[0]
        active.restore()
    limit = 1e-3 if dtype == torch.float32 else 5e-2
    for start, length, expected in zip(batch.cu_seqlens_padded[:-1].tolist(), LENGTHS, alone, strict=True):
        assert largest_error([logits[start : start + length]], [expected.float()]) < limit


@every_backend
def test_gradients_of_a_model_are_those_in_float32(backend: str) -> None:
    batch = pack_row(make_sources(LENGTHS), multiple=8).to(DEVICE)
    model = packed_model(backend_or_skip(backend), "mistral", **WHERE)
    exact = packed_model(SegmentsBackend(), "mistral", device=DEVICE, dtype=torch.float32)
    # The same numbers, as far as the other dtype can say them.
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    gradients = []
    for each in (model, exact):
        each(**batch).loss.backward()
        gradients.append([p.grad for p in each.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(list(model.parameters()))
    assert distance(*gradients) < 3 * TOLERANCES[DTYPE]
