"""Operations against torch's own counter on tiny real models, and against pairs that attention really weighs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_pack.flops import KNOWN_MODELS, AttentionFlops, ModelFlops, UnknownModelError, peak_flops, peak_flops_of_name

LENGTH = 11
WINDOW = 4
# Every size is another number, so that no two terms can be taken for each other.
_SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
_OWN: dict[str, dict[str, Any]] = {
    "cohere2": _MIXED,
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, **_MIXED},
    "gemma3_text": {"head_dim": 8, **_MIXED},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, **_MIXED},
    "ministral": {"head_dim": 8, **_MIXED},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "olmo3": _MIXED,
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 3},
    "phi3": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, **_MIXED},
    "qwen2_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        **_MIXED,
    },
    "qwen3": {"head_dim": 8, "use_sliding_window": True, **_MIXED},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    },
    "smollm3": {"use_sliding_window": True, **_MIXED},
    "starcoder2": {"sliding_window": WINDOW},
}
_WINDOWED = [kind for kind, own in _OWN.items() if "sliding_window" in own]


def config_of(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **{**_SIZES, **_OWN.get(kind, {}), **changes})


def run(config: Any, *, count: FlopCounterMode | None = None) -> Any:
    """Output of a forward pass over one source, with attention in plain matrix products and one product for each expert."""
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.arange(LENGTH)[None]
    with torch.no_grad():
        if count is None:
            return model(input_ids=ids, use_cache=False, output_attentions=True)
        with count:
            return model(input_ids=ids, use_cache=False)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", KNOWN_MODELS)
def test_weights_cost_exactly_what_torch_counts_and_attention_half_of_full(kind: str) -> None:
    config = config_of(kind)
    counter = FlopCounterMode(display=False)
    run(config, count=counter)
    counted = {str(operation).partition(".")[2]: number for operation, number in counter.get_flop_counts()["Global"].items()}
    assert counted.keys() <= {"mm", "addmm", "bmm"}
    assert counted["bmm"] > 0 < counted.get("mm", 0) + counted.get("addmm", 0)
    flops = ModelFlops.of(config)
    linear = counted.get("mm", 0) + counted.get("addmm", 0)
    assert flops.forward(width=LENGTH, squared_lengths=[0] * len(flops.attention)) == linear
    # Plain products do the whole square, whatever is masked in it.
    full = [LENGTH**2] * len(flops.attention)
    assert 2 * flops.forward(width=0, squared_lengths=full) == counted["bmm"]
    assert flops.training(width=LENGTH, squared_lengths=full) == 3 * (linear + counted["bmm"] // 2)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", [*_WINDOWED, "llama"])
def test_windows_are_those_that_the_layers_look_through(kind: str) -> None:
    config = config_of(kind)
    # Pairs of a query and a key with any weight, of one head of each layer.
    pairs = [int((layer[0, 0] > 0).sum()) for layer in run(config).attentions]
    assert (min(pairs) < LENGTH * (LENGTH + 1) // 2) == (kind != "llama")
    flops = ModelFlops.of(config)
    squares = flops.squared_lengths(torch.tensor([LENGTH])).tolist()
    # The diagonal, half of which the convention leaves out, is the only difference.
    expected = {w: [2 * n - (LENGTH if w is None else w) for n in pairs] for w, _ in flops.attention}
    queries = config.num_attention_heads * (getattr(config, "head_dim", None) or config.hidden_size // 6)
    for (window, per_square), square in zip(flops.attention, squares, strict=True):
        assert per_square == 2 * queries * expected[window].count(square)
    assert sum(kind.per_square for kind in flops.attention) == 2 * queries * 3


def test_squares_under_a_window_against_pairs_counted_one_by_one() -> None:
    flops = ModelFlops(per_position=1, attention=(AttentionFlops(None, 1), AttentionFlops(4, 1), AttentionFlops(1, 1)))
    lengths = [1, 3, 4, 5, 12, 0]
    for (window, _), square in zip(flops.attention, flops.squared_lengths(torch.tensor(lengths)).tolist(), strict=True):
        pairs = sum(min(i + 1, window or i + 1) for n in lengths for i in range(n))
        assert square == 2 * pairs - sum(min(n, window or n) for n in lengths)


def test_what_changes_the_count_and_what_does_not() -> None:
    base, more = config_of("llama"), {"tie_word_embeddings": True}
    assert ModelFlops.of(config_of("llama", **more)) == ModelFlops.of(base)
    narrow, wide = (ModelFlops.of(config_of("llama", num_key_value_heads=heads)) for heads in (1, 6))
    assert narrow.attention == wide.attention == (AttentionFlops(None, 2 * 24 * 3),)
    assert wide.per_position - narrow.per_position == 3 * 2 * 24 * 2 * 5 * 4
    # A window that the model does not use, since its configuration switches it off.
    off = config_of("qwen2", use_sliding_window=False, layer_types=None)
    assert [kind.window for kind in ModelFlops.of(off).attention] == [None]
    moe, wider = (ModelFlops.of(config_of("mixtral", num_local_experts=n)) for n in (5, 9))
    # More experts that a token does not go to cost the router alone.
    assert wider.per_position - moe.per_position == 3 * 2 * 24 * 4


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(UnknownModelError, match=r"of type 'gpt2' are not known; known are cohere, .*: build ModelFlops\("):
        ModelFlops.of(AutoConfig.for_model("gpt2"))
    with pytest.raises(UnknownModelError, match="of type None"):
        ModelFlops.of({"hidden_size": 8})
    config = config_of("qwen3")
    config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(UnknownModelError, match="'chunked_attention' in layer 1 of a qwen3 model"):
        ModelFlops.of(config)
    for attention in [(AttentionFlops(0, 2),), (AttentionFlops(None, 2), AttentionFlops(None, 3))]:
        with pytest.raises(ValueError, match="whole numbers above 0, and each window comes once"):
            ModelFlops(per_position=8, attention=attention)


def test_peaks_are_known_by_whole_names_only() -> None:
    assert peak_flops_of_name("NVIDIA H100 80GB HBM3") == 989_400_000_000_000
    assert peak_flops_of_name("A100-SXM4-40GB") == peak_flops_of_name("NVIDIA A100 80GB PCIe") == 312 * 10**12
    for unknown in ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA H100", "NVIDIA A100X", "AMD Instinct MI300X", ""):
        assert peak_flops_of_name(unknown) is None
    assert peak_flops("cpu") is None
