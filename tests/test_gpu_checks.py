"""What the checks in tests/gpu rest on, as far as a CPU shows it."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils

from lightning_pack.attention import ATTENTION, STRICT_ATTENTION, SegmentsBackend, THDInputs, VarlenBackend, detection
from lightning_pack.attention.detection import skip_detection
from tests.context_ranks import stand_ins
from tests.gpu.checks import (
    Heads,
    largest_error,
    leaks_of_kernel,
    leaks_of_model,
    random_row,
    reference_of,
    results_of,
    results_over_ranks,
    thd_inputs,
    unusable_gradients,
    waits_of_step,
)
from tests.gpu.sides import Cost, by_boundaries, cost_of
from tests.gpu.waits import counted_waits, no_waits
from tests.tiny_models import forward_inputs, make_sources, pack_row, tiny_model

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}


class Leaking(SegmentsBackend):
    """Takes the first two sources for one."""

    def __call__(self, *row: Tensor, inputs: THDInputs, **options: Any) -> Tensor:
        cu = torch.cat([inputs.cu_seqlens[:1], inputs.cu_seqlens[2:]])
        joined = THDInputs(cu_seqlens=cu, cu_seqlens_padded=cu, max_seqlen=inputs.total, total=inputs.total)
        return super().__call__(*row, inputs=joined, **options)


class Unwritten(SegmentsBackend):
    """Leaves the last row as a kernel would that does not write it."""

    def __call__(self, *row: Tensor, **options: Any) -> Tensor:
        out = super().__call__(*row, **options)
        return torch.cat([out[:-1], torch.full_like(out[-1:], float("nan"))])


class Waiting(SegmentsBackend):
    def __call__(self, *row: Tensor, **options: Any) -> Tensor:
        assert float(row[0].detach().abs().max()) > 0
        return super().__call__(*row, **options)


def test_a_sound_backend_passes_all_checks_and_a_broken_one_fails_its_own() -> None:
    lengths, sound = [9, 30, 1, 24], SegmentsBackend()
    row, inputs = random_row(64, Heads(queries=4, keys=2, size=8), **CPU), thd_inputs(lengths, device=CPU["device"])
    for window in (None, 5):
        reference = reference_of(row, lengths, window=window)
        assert largest_error(results_of(sound, row, inputs=inputs, window=window), reference) < 1e-5
        assert largest_error(results_of(Leaking(), row, inputs=inputs, window=window), reference) > 0.1
        assert largest_error(results_of(Unwritten(), row, inputs=inputs, window=window), reference) == float("inf")
    assert leaks_of_kernel(sound, row, lengths, inputs=inputs) == []
    assert leaks_of_kernel(Leaking(), row, lengths, inputs=inputs) == ["source 1 sees 0"]
    assert leaks_of_model(sound, "mistral", **CPU) == []
    assert leaks_of_model(Leaking(), "llama", **CPU) == ["s0.1 sees source 0 of llama"]
    assert unusable_gradients(sound, **CPU) == []
    assert "model.layers.0.self_attn.q_proj.weight" in unusable_gradients(Unwritten(), **CPU)
    assert waits_of_step(sound, **CPU) == []
    waits = waits_of_step(Waiting(), **CPU)
    assert len(waits) == 2, "one for each layer"
    assert all("test_gpu_checks.py" in place for place in waits)


# --- what the checks do on CUDA, with its counters stood in for --------------------------------------------------------------


def test_waits_on_cuda_are_those_that_torch_tells_of() -> None:
    cuda, modes = torch.device("cuda"), mock.Mock()
    with mock.patch.multiple(torch.cuda, synchronize=mock.DEFAULT, set_sync_debug_mode=modes):
        with counted_waits(cuda) as found:
            for said in ("called a synchronizing CUDA operation", "another warning") * 2:
                warnings.warn(said, stacklevel=1)
        assert len(found) == 2, "each time, also at the same place"
        assert all(place.startswith(__file__) for place in found)
        with no_waits(cuda):
            pass
        with pytest.raises(RuntimeError, match="synchronizing"), no_waits(cuda):
            raise RuntimeError("called a synchronizing CUDA operation")
    assert [call.args[0] for call in modes.call_args_list] == ["warn", "default"] + ["error", "default"] * 2


def test_costs_on_cuda_are_those_of_its_events_and_its_allocator() -> None:
    elapsed = iter([4.0, 2.0, 9.0])
    event = mock.Mock()
    event.return_value.elapsed_time = lambda end: next(elapsed)
    names = ("synchronize", "empty_cache", "reset_peak_memory_stats")
    counters_ = {"Event": event, "memory_allocated": lambda device: 100, "max_memory_allocated": lambda device: 1100}
    make = partial(by_boundaries, SegmentsBackend(), [5, 9], Heads(queries=2, keys=1, size=8), **CPU)
    with mock.patch.multiple(torch.cuda, **counters_, **dict.fromkeys(names, mock.DEFAULT)):
        cost = cost_of(make, device=torch.device("cuda"), turns=3)
    assert cost == Cost(seconds=0.004, peak=1000)


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="torch 2.9 and later can be told")
def test_segments_stays_out_of_captured_graphs() -> None:
    for name in ("segment_attention", "segment_attention_backward"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.lightning_pack, name).default.tags


# --- the search for packed sources -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_the_strict_attention_reads_no_positions(kind: str) -> None:
    model, inputs = tiny_model(kind).eval(), forward_inputs(pack_row(make_sources(), multiple=4))
    logits = []
    for name, waits in ((ATTENTION, 1), (STRICT_ATTENTION, 0)):
        model.set_attn_implementation(name)
        with torch.no_grad(), counted_waits(torch.device("cpu")) as found:
            logits.append(model(**inputs).logits)
        # One for each kind of layer.
        assert len(found) == waits * (2 if kind == "gemma3_text" else 1)
        assert all("masking_utils.py" in place for place in found)
    assert torch.equal(*logits)


def test_other_attentions_are_searched_as_before() -> None:
    model, inputs = tiny_model("llama").eval(), forward_inputs(pack_row(make_sources()))
    with torch.no_grad():
        model.set_attn_implementation(STRICT_ATTENTION)
        packed = model(**inputs).logits
        model.set_attn_implementation("sdpa")
        searched = model(inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
        unsearched = model(inputs["input_ids"], use_cache=False).logits
    assert torch.allclose(packed, searched, atol=1e-5)
    assert not torch.allclose(packed, unsearched, atol=1e-2)


@pytest.fixture
def preprocess(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The function of transformers, put back afterwards."""
    monkeypatch.setattr(masking_utils, "_preprocess_mask_arguments", masking_utils._preprocess_mask_arguments)
    return monkeypatch


def test_an_unknown_version_is_left_alone(preprocess: pytest.MonkeyPatch) -> None:
    assert skip_detection(STRICT_ATTENTION)
    patched = masking_utils._preprocess_mask_arguments
    assert skip_detection(STRICT_ATTENTION)
    assert masking_utils._preprocess_mask_arguments is patched, "not wrapped twice"

    def other(config: Any, position_ids: Any) -> None: ...

    preprocess.setattr(masking_utils, "_preprocess_mask_arguments", other)
    assert not skip_detection(STRICT_ATTENTION)
    assert masking_utils._preprocess_mask_arguments is other
    preprocess.delattr(masking_utils, "_preprocess_mask_arguments")
    assert not skip_detection(STRICT_ATTENTION)
    assert list(inspect.signature(patched).parameters)[:5] == detection._ARGUMENTS


# --- torch.compile ----------------------------------------------------------------------------------------------------


def test_the_kernel_of_varlen_is_traced_whole() -> None:
    backend = VarlenBackend()
    torch._dynamo.reset()
    counters.clear()
    # Tensors that have a device and no memory, so that the code for CUDA runs here up to the kernel.
    able = mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0))
    with FakeTensorMode(), torch.no_grad(), able as asked:
        row = [torch.randn(24, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
        cu = torch.zeros(4, dtype=torch.int32, device="cuda")

        def attend(longest: int, *row: Tensor) -> Tensor:
            inputs = THDInputs(cu_seqlens=cu, cu_seqlens_padded=cu, max_seqlen=longest, total=24)
            return backend(*row, inputs=inputs, window=5)

        assert attend(24, *row).shape == (24, 4, 64)
        assert asked.call_count == 1
        compiled = torch.compile(attend, backend="eager", fullgraph=True)
        for longest in (24, 20, 16, 9):
            assert compiled(longest, *row).shape == (24, 4, 64)
        assert asked.call_count == 1
    # max_seqlen, a number, is taken for a constant until it changes.
    assert counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


class Unaligned(VarlenBackend):
    """A kernel that aligns queries with the first keys."""

    def _over_ranks(self, *row: Tensor, **options: Any) -> Tensor:
        out = super()._over_ranks(*row, **options)
        return out.flip(0)


@pytest.mark.parametrize("window", [None, 5])
def test_gradients_over_ranks_are_checked_in_one_process(window: int | None) -> None:
    where: dict[str, Any] = {"device": CPU["device"], "dtype": torch.float64, "window": window}
    with stand_ins():
        for kind in (VarlenBackend, SegmentsBackend):
            results, reference = results_over_ranks(kind(), 2, **where)
            assert largest_error(results, reference) < 1e-6
        results, reference = results_over_ranks(Unaligned(), 2, **where)
        assert min(largest_error([mine], [exact]) for mine, exact in zip(results, reference, strict=True)) > 0.1
