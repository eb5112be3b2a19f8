"""Models under torch.compile: how often they are compiled, and that they compute the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, library
from torch._dynamo.utils import counters

from lightning_pack.attention import ATTENTION, ActivatedModel, SegmentsBackend, THDInputs
from lightning_pack.attention.backends.segments import _operator
from lightning_pack.callbacks import PackedAttention
from lightning_pack.module import PackedCausalLM
from lightning_pack.policy import PackingPolicy
from lightning_pack.pretrained import checkpoint_activations
from lightning_pack.row import PackedBatch
from tests.tiny_models import (
    Rows,
    forward_inputs,
    gradients_of,
    largest_difference,
    make_sources,
    quiet_trainer,
    tiny_config,
    tiny_model,
)

FIXED = PackingPolicy(capacity=64, multiple=2, width="fixed", max_sources=6, fixed_boundaries=True)
VARIABLE = PackingPolicy(capacity=64, multiple=2)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def different_packs(count: int) -> list[list[int]]:
    """Lengths of so many packs, no two alike."""
    draw = random.Random(0)
    packs: dict[tuple[int, ...], None] = {}
    while len(packs) < count:
        packs[tuple(draw.randint(1, 10) for _ in range(draw.randint(1, 6)))] = None
    return [list(pack) for pack in packs]


def pair(kind: str, **changes: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    models = [tiny_model(kind, dtype=torch.float64, **changes) for _ in range(2)]
    for model in models:
        ActivatedModel.of(model)
    return models[0], models[1]


def step(model: Any, weights: torch.nn.Module, batch: PackedBatch) -> tuple[float, dict[str, Tensor]]:
    """Loss per target, and the gradients of ``weights``."""
    logits = model(**forward_inputs(batch)).logits[0]
    weights.zero_grad()
    loss = torch.nn.functional.cross_entropy(logits, batch.shift_labels[0])
    loss.backward()
    return loss.item(), gradients_of(weights)


def differences(compiled: Any, models: tuple[torch.nn.Module, torch.nn.Module], packs: list[list[int]], policy: Any) -> float:
    """Largest difference of losses and gradients over rows of these packs."""
    most = 0.0
    for number, lengths in enumerate(packs):
        # No prompt, so that each row has a target.
        batch = PackedBatch.from_packs([policy.build(make_sources([*lengths[:5], 4], seed=number, prompt=0))], pad_id=0)
        losses, gradients = zip(*(step(m, w, batch) for m, w in zip((compiled, models[1]), models, strict=True)), strict=True)
        assert losses[0] > 0.1
        assert max(float(g.abs().max()) for g in gradients[1].values()) > 1e-3
        most = max(most, abs(losses[0] - losses[1]), largest_difference(*gradients))
    return most


def test_a_hundred_different_packs_compile_a_model_once_and_once_more() -> None:
    packs = different_packs(100)
    assert len({len(pack) for pack in packs}) == 6
    models = pair("llama")
    compiled = torch.compile(models[0], backend="eager", fullgraph=True)
    assert differences(compiled, models, packs, FIXED) < 1e-12
    # max_seqlen, a number, is taken for a constant until it changes.
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.slow
def test_rows_of_any_width_take_one_graph_more() -> None:
    models = pair("llama", num_hidden_layers=1)
    compiled = torch.compile(models[0], backend="eager", fullgraph=True)
    assert differences(compiled, models, different_packs(12), VARIABLE) < 1e-12
    assert counters["stats"]["unique_graphs"] in (2, 3)


def test_windows_and_capped_scores_are_the_same() -> None:
    # A layer with a window, and one without.
    models = pair("gemma2")
    compiled = torch.compile(models[0], backend="eager", fullgraph=True)
    # Gemma computes its norms and its rotation in float32.
    assert differences(compiled, models, [[9, 3, 12]], FIXED) < 1e-6
    assert counters["stats"]["unique_graphs"] == 1


def operator_arguments(*, gaps: bool, requires_grad: bool = True) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(24, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)
    for tensor in (*drawn, sinks):
        tensor.requires_grad_(requires_grad)
    real, physical = (torch.tensor(v, dtype=torch.int32) for v in ([0, 7, 9, 15, 15], [0, 10, 12, 24, 24]))
    boundaries = (real, physical) if gaps else (physical, None)
    # scale, causal, window, softcap
    rule = (12, 0.3, True, 5, 20.0) if gaps else (12, None, True, None, None)
    return (*drawn, sinks if gaps else None, *boundaries, *rule)


def test_layers_that_are_recomputed_stay_in_the_graph() -> None:
    models = pair("llama")
    for model in models:
        checkpoint_activations(model)  # type: ignore[arg-type]
    compiled = torch.compile(models[0], backend="eager", fullgraph=True)
    assert differences(compiled, models, [[9, 3, 12]], FIXED) < 1e-12
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_compiled_model_is_trained_to_the_same_weights() -> None:
    rows = [
        PackedBatch.from_packs([FIXED.build(make_sources(lengths, seed=number, prompt=0))], pad_id=0)
        for number, lengths in enumerate([[5, 9, 7], [12, 3], [8], [4, 4, 4, 4]])
    ]
    weights = []
    for compiled in (True, False):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = PackedCausalLM(tiny_config("llama", num_hidden_layers=1), learning_rate=0.1)
            module.configure_model()
        before = [weight.detach().clone() for weight in module.parameters()]
        if compiled:
            module.model = torch.compile(module.model, backend="eager", fullgraph=True)  # type: ignore[assignment]
        trainer = quiet_trainer(max_epochs=1, callbacks=[PackedAttention(backend="segments", monitor=False)])
        trainer.fit(module, Rows(*rows))
        assert trainer.global_step == 4
        weights.append([weight.detach() for weight in module.parameters()])
        assert all((new - old).abs().max() > 0.01 for new, old in zip(weights[-1], before, strict=True))
    assert counters["stats"]["unique_graphs"] == 2
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*weights, strict=True))


@pytest.mark.parametrize("gaps", [False, True], ids=["plain", "gaps, window, softcap, sinks"])
def test_the_operator_is_what_the_backend_computes(gaps: bool) -> None:
    library.opcheck(_operator, operator_arguments(gaps=gaps))
    query, key, value, sinks, real, physical, longest, scale, causal, window, softcap = operator_arguments(gaps=gaps)
    inputs = THDInputs(real, real if physical is None else physical, longest, total=24, pad_between_seqs=gaps)
    expected = SegmentsBackend()(
        query, key, value, inputs=inputs, scale=scale, causal=causal, window=window, softcap=softcap, sinks=sinks
    )
    arguments = operator_arguments(gaps=gaps)
    found = _operator(*arguments)
    assert torch.equal(found, expected)
    for out in (found, expected):
        out.square().sum().backward()
    for one, other in zip(arguments[:4], (query, key, value, sinks), strict=True):
        if other is not None:
            assert other.grad.abs().max() > 0.01
            assert torch.equal(one.grad, other.grad)


def test_wrong_boundaries_are_refused_in_the_operator() -> None:
    query, key, value, sinks, _, physical, _, *rule = operator_arguments(gaps=False)
    with pytest.raises(ValueError, match="the last boundary is 20 but the row has 24 tokens"):
        _operator(query, key, value, sinks, torch.tensor([0, 20], dtype=torch.int32), physical, 24, *rule)
    with pytest.raises(ValueError, match="max_length_q=3 is less than the longest source of 24 tokens"):
        _operator(query, key, value, sinks, torch.tensor([0, 24], dtype=torch.int32), physical, 3, *rule)


def test_autocast_is_followed() -> None:
    models = [tiny_model("llama", num_hidden_layers=1) for _ in range(2)]
    for model in models:
        ActivatedModel.of(model)
    batch = PackedBatch.from_packs([FIXED.build(make_sources([9, 3, 12]))], pad_id=0)
    compiled = torch.compile(models[0], backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = [model(**forward_inputs(batch)).logits for model in (compiled, models[1])]
    assert logits[0].dtype == logits[1].dtype == torch.bfloat16
    assert (logits[0] - logits[1]).abs().max() <= 0.02 * logits[1].abs().max()


# --- what is not computed ------------------------------------------------------------------------------------------------


def test_a_part_of_a_composed_mask_is_refused_by_name() -> None:
    model = tiny_model("gemma3_text")
    ActivatedModel.of(model)
    batch = PackedBatch.from_packs([FIXED.build(make_sources([9, 3]))], pad_id=0)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(**forward_inputs(batch))
        assert counters["stats"]["unique_graphs"] == 1
        blocks = torch.zeros_like(batch.input_ids)
        make = sys.modules[type(model).__module__]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(make, "create_causal_mask", partial(make.create_causal_mask, block_sequence_ids=blocks))
            torch._dynamo.reset()
            with pytest.raises(Exception, match=r"its mask is made with .*or_masks"):
                compiled(**forward_inputs(batch))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_masks_that_are_more_than_causal_are_refused_by_name(fullgraph: bool) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    ActivatedModel.of(model)
    batch = PackedBatch.from_packs([FIXED.build(make_sources([9, 3]))], pad_id=0)
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    refusal = r"more than causal: its mask is made with .*bidirectional_mask_function"
    with torch.no_grad(), pytest.raises(Exception, match=refusal):
        compiled(**forward_inputs(batch), is_causal=False)


def test_rows_without_boundaries_are_refused() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    ActivatedModel.of(model)
    batch = PackedBatch.from_packs([FIXED.build(make_sources([9, 3]))], pad_id=0)
    with torch.no_grad(), pytest.raises(ValueError, match="no boundaries reached LlamaAttention"):
        torch.compile(model, backend="eager")(batch.input_ids, position_ids=batch.position_ids, use_cache=False)


@pytest.mark.slow
def test_without_boundaries_positions_are_looked_at() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    ActivatedModel.of(model, attention=ATTENTION)
    batch = PackedBatch.from_packs([FIXED.build(make_sources([9, 3]))], pad_id=0)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        plain = model(batch.input_ids, use_cache=False).logits
        assert torch.allclose(compiled(batch.input_ids, use_cache=False).logits, plain, atol=1e-6)
        with pytest.raises(ValueError, match="position_ids restart inside the row"):
            compiled(batch.input_ids, position_ids=batch.position_ids, use_cache=False)


def test_dropout_stays_out_of_the_graph_and_its_gradient_is_that_of_its_forward() -> None:
    backend = SegmentsBackend()
    query, key, value, *_ = operator_arguments(gaps=False, requires_grad=False)
    cu = torch.tensor([0, 10, 12, 24, 24], dtype=torch.int32)

    def attend(value: Tensor) -> Tensor:
        return backend(query, key, value, inputs=THDInputs(cu, cu, 12, total=24), dropout=0.5, training=True)

    value.requires_grad_()
    out = torch.compile(attend, backend="eager")(value)
    assert counters["graph_break"]
    assert not torch.allclose(out, backend(query, key, value, inputs=THDInputs(cu, cu, 12, total=24)))
    # Outputs are linear in the values, so with the same weights dropped <gradient, value> is the sum of the outputs.
    out.sum().backward()
    assert value.grad is not None
    assert torch.allclose((value.grad * value).sum(), out.sum())
