"""What the registered attention takes from a model, and what it refuses."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from lightning_pack.attention import ATTENTION, STRICT_ATTENTION, MaskDescription, describe_mask, packed_attention
from tests.tiny_models import VOCABULARY, WINDOW, forward_inputs, make_sources, pack_row, tiny_config, tiny_model


def packed_model(model_type: str = "llama", name: str = ATTENTION, **changes: Any) -> nn.Module:
    model = tiny_model(model_type, **changes).eval()
    model.set_attn_implementation(name)
    return model


@pytest.mark.parametrize("name", [ATTENTION, STRICT_ATTENTION])
def test_names_do_not_look_like_other_implementations(name: str) -> None:
    assert not any(part in name for part in ("flash", "sdpa", "flex", "|", "/"))


def test_each_layer_follows_its_own_window(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_model("gemma3_text")
    seen: list[tuple[int, int | None, bool]] = []
    real = packed_attention

    def watched(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append((module.layer_idx, mask.window, mask.packed))
        return real(module, query, key, value, mask, **kwargs)

    from transformers import AttentionInterface

    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION, watched)
    model(**forward_inputs(pack_row(make_sources())))
    assert seen == [(0, WINDOW, True), (1, None, True)]


def test_the_boundaries_are_read_once_for_all_layers() -> None:
    description = MaskDescription(window=None, packed=True)
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    first = description.inputs(cu, total=8, max_seqlen=5)
    assert first.lengths == [3, 5]
    assert first.max_seqlen == 5
    assert description.inputs(cu, total=8, max_seqlen=5) is first
    assert description.inputs(cu, total=8, max_seqlen=5).lengths is first.lengths
    other = description.inputs(torch.tensor([0, 8], dtype=torch.int32), total=8)
    assert (other.lengths, other.max_seqlen) == ([8], 8)


def refused(model: nn.Module, message: str, drop: tuple[str, ...] = (), **changes: Any) -> None:
    inputs = {**forward_inputs(pack_row(make_sources())), **changes}
    for name in drop:
        del inputs[name]
    with pytest.raises(ValueError, match=message):
        model(**inputs)


def test_masks_are_refused() -> None:
    model = packed_model()
    total = pack_row(make_sources()).input_ids.shape[1]
    ones = torch.ones(1, total, dtype=torch.long)
    refused(model, rf"attention_mask of shape \[1, {total}\].*attention_mask=None", attention_mask=ones)
    square = torch.ones(1, 1, total, total, dtype=torch.bool)
    refused(
        model,
        rf"LlamaAttention \(layer 0\) got an attention mask of type Tensor and shape \[1, 1, {total}",
        attention_mask=square,
    )
    refused(packed_model("gpt_oss"), "attention_mask of shape", attention_mask=ones)


def test_boundaries_have_to_be_one_object_and_end_with_the_row() -> None:
    model = packed_model()
    batch = pack_row(make_sources(), multiple=4)
    cu = batch.cu_seqlens_padded
    inputs = forward_inputs(batch)
    assert not torch.equal(cu, batch.cu_seqlens)
    for changes, message in (
        ({"cu_seq_lens_k": cu.clone()}, "not one and the same tensor.*cu_seqlens_padded as both"),
        ({"cu_seq_lens_k": None}, "not one and the same tensor"),
        ({"max_length_k": 99}, "max_length_q=12 and max_length_k=99 differ"),
        ({"max_length_q": 11, "max_length_k": 11}, "max_length_q=11 is less than the longest source of 12 tokens"),
        (dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), batch.cu_seqlens), "last boundary is 34 but the row has 44 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**{**inputs, **changes})


def test_several_rows_with_boundaries_are_refused() -> None:
    batch = pack_row(make_sources())
    rows = {name: value.expand(2, -1) for name, value in (("input_ids", batch.input_ids), ("position_ids", batch.position_ids))}
    refused(packed_model(), "the batch has 2 rows: pass one row", **rows)


def test_a_cache_is_refused() -> None:
    model = packed_model()
    ids = torch.randint(3, VOCABULARY, (1, 6))
    cache = model(input_ids=ids, use_cache=True).past_key_values
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with pytest.raises(ValueError, match=r"2 queries meet 8 keys: a KV cache or cross-attention is in use.*use_cache=False"):
        model(input_ids=ids[:, :2], use_cache=True, **{cache_name: cache})


def test_rows_whose_positions_restart_need_boundaries() -> None:
    drop = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    refused(packed_model(), "position_ids restart inside the row.*no boundaries were given", drop=drop)
    # This model builds its mask without positions, so only the argument tells.
    refused(packed_model("gpt_oss"), "position_ids restart inside the row", drop=drop)


def test_a_model_that_loses_boundaries_is_noticed() -> None:
    config = {**tiny_config("llama"), "model_type": "nemotron"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config)).eval()
    batch = pack_row(make_sources())
    model.set_attn_implementation(STRICT_ATTENTION)
    with pytest.raises(ValueError, match=r"no boundaries reached NemotronAttention \(layer 0\).*loses cu_seq_lens_q"):
        model(**forward_inputs(batch))


def test_bidirectional_models_are_refused() -> None:
    refused(packed_model("gemma3_text", use_bidirectional_attention=True), "mask is made with .*bidirectional")
    refused(packed_model(), "mask is made with .*bidirectional_mask_function", is_causal=False)
    layer, q = packed_model().model.layers[1].self_attn, torch.ones(1, 4, 4, 8)
    packed_attention(layer, q, q, q, None)
    layer.is_causal = False
    with pytest.raises(ValueError, match=r"LlamaAttention \(layer 1\) is bidirectional: its real tokens would see pads"):
        packed_attention(layer, q, q, q, None)


def test_chunked_and_blockwise_masks_are_refused_by_name() -> None:
    chunked = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int))
    blockwise = masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.blockwise_overlay(torch.zeros(1, 8, dtype=torch.long))
    )
    for function, name in ((chunked, "chunked_overlay"), (blockwise, "or_masks"), (lambda *a: True, "<lambda>"), (max, "max")):
        with pytest.raises(ValueError, match=f"more than causal: its mask is made with .*{name}.*train this model unpacked"):
            describe_mask(mask_function=function, q_length=8, kv_length=8, local_size=4)
    windowed = masking_utils.sliding_window_causal_mask_function(4)
    assert describe_mask(mask_function=windowed, q_length=8, kv_length=8, local_size=4).window == 4
    with pytest.raises(ValueError, match="does not tell its size"):
        describe_mask(mask_function=windowed, q_length=8, kv_length=8)


@pytest.mark.parametrize("name", ["position_bias", "score_mod", "block_mask", "head_mask", "alibi"])
def test_arguments_that_are_not_served_are_refused(name: str) -> None:
    q = torch.ones(1, 2, 4, 8)
    with pytest.raises(ValueError, match=f"passes {name} to attention"):
        packed_attention(nn.Identity(), q, q, q, None, **{name: torch.ones(1)})


def test_weights_are_refused() -> None:
    q = torch.ones(1, 2, 4, 8)
    with pytest.raises(ValueError, match="output_attentions=True: packed attention keeps no weights"):
        packed_attention(nn.Identity(), q, q, q, None, output_attentions=True)


def test_without_a_mask_the_window_argument_holds() -> None:
    q = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    options = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    plain, _ = packed_attention(nn.Identity(), q, q, q, None, **options)
    cut, _ = packed_attention(nn.Identity(), q, q, q, None, sliding_window=2, **options)
    assert plain.shape == (1, 9, 2, 8)
    assert torch.allclose(plain[:, :2], cut[:, :2])
    assert not torch.allclose(plain[:, 2], cut[:, 2])
