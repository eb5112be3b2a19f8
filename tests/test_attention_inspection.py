"""Models that cannot run packed rows are refused before their first step, with the reason."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from lightning_pack.attention import (
    STRICT_ATTENTION,
    ActivatedModel,
    ModelRefusedError,
    find_models,
    inspect_model,
    require_packable,
)
from tests.tiny_models import LENGTHS, forward_inputs, make_sources, pack_row, tiny_model

PLAIN = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**PLAIN, "num_key_value_heads": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": (PLAIN, "does not use transformers' attention interface"),
    "falcon": ({k: v for k, v in PLAIN.items() if k != "intermediate_size"}, "does not use transformers' attention interface"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64}, "takes no position_ids"),
    "gpt_neo": (
        {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "vocab_size": 64},
        "does not use transformers' attention interface",
    ),
    "xglm": ({"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "vocab_size": 64}, "attention interface"),
    "mamba": (
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2},
        "mixes tokens of the whole row in Conv1d, MambaMixer",
    ),
    "bamba": ({**GROUPED, **MAMBA}, "Conv1d"),
    "granitemoehybrid": (
        {**GROUPED, **MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1},
        "layer_types has",
    ),
    "qwen3_next": ({**GROUPED, "layer_types": ["linear_attention", "full_attention"]}, "layer_types has linear_attention"),
    "lfm2": ({**GROUPED, "layer_types": ["conv", "full_attention"]}, "layer_types has conv"),
    "llama4_text": ({**GROUPED, "intermediate_size_mlp": 48, "num_local_experts": 2}, "layer_types has chunked_attention"),
    "recurrent_gemma": (GROUPED, "linear_attention"),
    "bert": (PLAIN, "attends in both directions in BertSelfAttention"),
}


def build(model_type: str, values: dict[str, Any]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))


@pytest.mark.parametrize("model_type", REFUSED)
def test_unsafe_models_are_refused_with_the_reason(model_type: str) -> None:
    values, reason = REFUSED[model_type]
    model = build(model_type, values)
    before = model.config._attn_implementation
    findings = inspect_model(model)
    assert findings
    assert any(reason in finding.reason for finding in findings), findings
    assert all("unpacked" in finding.way_out and finding.model == type(model).__name__ for finding in findings)
    with pytest.raises(ModelRefusedError, match=f"not safe with this model. {type(model).__name__}: "):
        ActivatedModel.of(model)
    assert model.config._attn_implementation == before


GOOD = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe", "phi3"]


@pytest.mark.parametrize("model_type", GOOD)
def test_good_models_have_no_findings(model_type: str) -> None:
    assert inspect_model(tiny_model(model_type)) == []


def test_bidirectional_configuration_is_refused() -> None:
    model = tiny_model("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(ModelRefusedError, match=r"use_bidirectional_attention=True.*set use_bidirectional_attention=False"):
        require_packable(model)


def test_only_the_outermost_models_are_found() -> None:
    model = tiny_model("llama")
    assert sum(isinstance(part, PreTrainedModel) for part in model.modules()) > 1
    teacher = tiny_model("qwen2")
    assert find_models(nn.ModuleDict({"wrapped": nn.Sequential(model), "teacher": teacher})) == [model, teacher]
    assert find_models(model) == [model]


def test_models_in_containers_are_found_once_and_recorded_copies_are_not() -> None:
    model, teacher = tiny_model("llama"), tiny_model("qwen2")
    module = nn.Module()
    module.first, module.again = nn.Sequential(model), nn.Sequential(model)
    # A container that leads back to its owner is no way without end.
    module.kept = {"owner": module, "teacher": nn.Sequential(teacher)}
    module._hparams_initial = {"model": tiny_model("llama")}
    assert find_models(module) == [model, teacher]


def test_no_model_is_an_error_with_a_way_out() -> None:
    with pytest.raises(ModelRefusedError, match=r"no transformers model was found in Linear.*leave .* PackedAttention out"):
        find_models(nn.Linear(2, 2))


def test_activation_is_undone() -> None:
    model = tiny_model("llama")
    assert model.config.use_cache is True
    active = ActivatedModel.of(model)
    assert (model.config._attn_implementation, model.config.use_cache) == (STRICT_ATTENTION, False)
    assert model(input_ids=torch.ones(1, 3, dtype=torch.long), **one_segment(3)).past_key_values is None
    active.restore()
    assert (model.config._attn_implementation, model.config.use_cache) == ("sdpa", True)


def one_segment(length: int) -> dict[str, Any]:
    cu = torch.tensor([0, length], dtype=torch.int32)
    return {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": length, "max_length_k": length}


def test_a_composite_model_keeps_its_vision_attention() -> None:
    text = {**GROUPED, "head_dim": 16, "hidden_size": 64}
    rope = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision))
    config = model.config
    assert (config.vision_config._attn_implementation, config.text_config.use_cache) == ("sdpa", True)
    sources = make_sources()
    alone = [model(input_ids=s.input_ids[None], use_cache=False).logits[0] for s in sources]

    active = ActivatedModel.of(model)
    assert config.text_config._attn_implementation == STRICT_ATTENTION
    assert config.vision_config._attn_implementation == "sdpa"
    assert config.text_config.use_cache is False
    batch = pack_row(sources, multiple=4)
    # Text rows of M-RoPE: all four rows are the restarting positions.
    inputs = {**forward_inputs(batch), "position_ids": batch.position_ids.expand(4, 1, -1)}
    logits = model(**inputs).logits
    assert len(alone) == len(LENGTHS)
    for number, expected in enumerate(alone):
        torch.testing.assert_close(logits[batch.segment_ids == number + 1], expected, rtol=0, atol=1e-5)
    active.restore()
    assert config.text_config._attn_implementation == "sdpa"
    assert config.text_config.use_cache is True
