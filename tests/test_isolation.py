"""The probe for leaks, and that it sees one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_pack.attention import STRICT_ATTENTION, ActivatedModel, leaking_sources
from lightning_pack.row import PackedBatch
from tests.tiny_models import LENGTHS, VOCABULARY, forward_inputs, make_sources, pack_row, tiny_model

MODELS = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gemma2", "phi3", "cohere2"]


def changed(batch: PackedBatch, number: int) -> PackedBatch:
    """The row with other tokens in one source."""
    inside = batch.segment_ids == number + 1
    return replace(batch, input_ids=torch.where(inside, 3 + (batch.input_ids - 3 + 17) % (VOCABULARY - 3), batch.input_ids))


@torch.no_grad()
def outputs(model: nn.Module, batch: PackedBatch, **options: object) -> list[Tensor]:
    logits = model(**{**forward_inputs(batch), **options}).logits
    return [logits[batch.segment_ids == number + 1] for number in range(len(batch.source_keys))]


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("model_type", MODELS)
def test_changing_one_source_moves_no_other(model_type: str, multiple: int) -> None:
    model = tiny_model(model_type).eval()
    batch = pack_row(make_sources(), multiple=multiple)
    ActivatedModel.of(model)
    before = outputs(model, batch)
    for number in range(len(LENGTHS)):
        after = outputs(model, changed(batch, number))
        for other in range(len(LENGTHS)):
            assert torch.equal(before[other], after[other]) == (other != number)


@pytest.mark.parametrize("model_type", MODELS)
def test_no_gradient_crosses_a_boundary(model_type: str) -> None:
    model = tiny_model(model_type, dtype=torch.float64)
    batch = pack_row(make_sources(), multiple=4)
    ActivatedModel.of(model)
    inputs = forward_inputs(batch)
    embedded = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, **inputs).logits
    for number, length in enumerate(LENGTHS):
        own = batch.segment_ids == number + 1
        (gradient,) = torch.autograd.grad(logits[own].square().sum(), embedded, retain_graph=True)
        reached = (gradient != 0).any(-1)
        assert int((reached & own).sum()) == length
        assert not bool((reached & ~own).any())


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_the_same_probe_sees_a_leak(model_type: str) -> None:
    # A KV cache switches off what keeps sources apart in the model's own attention.
    model = tiny_model(model_type).eval()
    batch = pack_row(make_sources())
    assert model.config._attn_implementation == "sdpa"
    before, after = (outputs(model, row, use_cache=True, cu_seq_lens_q=None) for row in (batch, changed(batch, 0)))
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)][1:] != [True] * 4


class Cached(nn.Module):
    """A model that is called with a KV cache, whatever it is asked for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: object) -> object:
        return self.model(**{**inputs, "use_cache": True})


def test_leaking_sources_are_named() -> None:
    model = tiny_model("llama")
    batch = pack_row(make_sources())
    leaking = leaking_sources(Cached(model), batch)
    assert leaking
    assert set(leaking) <= set(batch.source_keys[1:])
    ActivatedModel.of(model)
    assert model.config._attn_implementation == STRICT_ATTENTION
    for number in range(len(LENGTHS)):
        assert leaking_sources(model, batch, source=number) == []


def test_the_probe_leaves_the_model_as_it_was() -> None:
    model = tiny_model("llama")
    model.model.layers[0].eval()
    leaking_sources(model, pack_row(make_sources()))
    assert model.training
    assert model.model.layers[1].training
    assert not model.model.layers[0].training


def test_the_probe_refuses_what_it_cannot_tell() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="source 0 of 1: the probe needs that source and at least one other"):
        leaking_sources(model, pack_row(make_sources((5,))))
    with pytest.raises(ValueError, match="source 7 of 5"):
        leaking_sources(model, pack_row(make_sources()), source=7)
    same = pack_row(make_sources())
    with pytest.raises(ValueError, match=r"all tokens of the row are \[5\]"):
        leaking_sources(model, replace(same, input_ids=torch.full_like(same.input_ids, 5)))
    nn.init.zeros_(model.lm_head.weight)
    with pytest.raises(ValueError, match="did not change its own outputs"):
        leaking_sources(model, pack_row(make_sources()))
