"""What is expected of each architecture of transformers, as tiny models with random weights, and the table of it on a page.

``python -m tests.architectures`` runs all of them and prints the table; with ``--write`` it goes there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from lightning_pack.attention import IsolationVerdict, inspect_model, isolation_check

README = Path(__file__).parents[1] / "lightning_pack" / "attention" / "README.md"
BEGIN, END = "<!-- models: python -m tests.architectures --write -->", "<!-- /models -->"

#: Each field goes to the configurations that have it.
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {"num_key_value_heads": 2}
_HEADS = {**_GROUPED, "head_dim": 8}
_WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_SCALED = {**_HEADS, "query_pre_attn_scalar": 8}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2}

_SHARED = {
    **_HEADS,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}

_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 28, "patch_size": 14}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_QWEN_VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}

INTERFACE = "does not use transformers' attention interface"
LOST = "does not hand boundaries on to attention"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A kind of model, and what has to come out."""

    model_type: str
    #: What its attention is, or why it is refused; architectures with the same words share a row of the table.
    about: str
    config: dict[str, Any] = field(default_factory=dict)
    #: Part of a finding; None for a model whose sources are isolated.
    refused: str | None = None

    def build(self) -> PreTrainedModel:
        """The model, with weights that are large enough for tokens to meet visibly."""
        composite = "text_config" in self.config
        values = self.config if composite else {**_SIZES, **self.config}
        auto = AutoModelForImageTextToText if composite else AutoModelForCausalLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = AutoConfig.for_model(self.model_type, **{k: v for k, v in values.items() if v is not None})
            model = auto.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.ndim >= 2 and "embed" not in name:
                        parameter.mul_(4)
                    elif name.endswith("sinks"):
                        parameter.normal_()
        return model

    def run(self) -> IsolationVerdict | list[str]:
        """The verdict on it, or the reasons of its refusal."""
        model = self.build()
        return [finding.reason for finding in inspect_model(model)] or isolation_check(model)


def _isolated(about: str, models: dict[str, dict[str, Any]]) -> list[Architecture]:
    return [Architecture(model_type=name, about=about, config=config) for name, config in models.items()]


def _refused(about: str, reason: str, models: dict[str, dict[str, Any]]) -> list[Architecture]:
    return [Architecture(model_type=name, about=about, config=config, refused=reason) for name, config in models.items()]


ARCHITECTURES: list[Architecture] = [
    *_isolated(
        "full attention",
        {
            "llama": _GROUPED,
            "qwen2": _GROUPED,
            "qwen3": _HEADS,
            "gemma": _HEADS,
            "phi": {},
            "phi3": _GROUPED,
            "olmo2": _GROUPED,
            "glm4": {**_HEADS, "partial_rotary_factor": 0.5},
            "granite": _GROUPED,
            "smollm3": _GROUPED,
            "seed_oss": _HEADS,
            "ernie4_5": _HEADS,
            "hunyuan_v1_dense": _HEADS,
            "apertus": _GROUPED,
            "gpt_neox": {},
        },
    ),
    *_isolated("full attention, learned positions", {"gpt2": {}, "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}}),
    *_isolated(
        "sliding windows, kept inside each source",
        {
            "mistral": {**_GROUPED, "sliding_window": 4},
            "starcoder2": {**_GROUPED, "sliding_window": 4},
            "gemma3_text": {**_SCALED, **_WINDOW},
            "cohere2": {**_GROUPED, **_WINDOW},
            "olmo3": {**_GROUPED, **_WINDOW},
            "exaone4": {**_GROUPED, **_WINDOW},
            "ministral": {**_HEADS, **_WINDOW},
        },
    ),
    *_isolated(
        "sliding windows, layers that share keys and values",
        {
            "gemma3n_text": {
                **_SHARED,
                "activation_sparsity_pattern": [0.0] * 4,
                "intermediate_size": [48] * 4,
                "laurel_rank": 4,
            },
            "gemma4_text": {**_SHARED, "num_global_key_value_heads": 2, "global_head_dim": 8},
        },
    ),
    *_isolated("soft-capped scores, sliding windows", {"gemma2": {**_SCALED, **_WINDOW}}),
    *_isolated("attention sinks, sliding windows, experts", {"gpt_oss": {**_HEADS, **_LOCAL, **_WINDOW}}),
    *_isolated(
        "experts",
        {
            "mixtral": {**_GROUPED, **_LOCAL},
            "qwen2_moe": {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 16},
            "qwen3_moe": {**_HEADS, **_EXPERTS},
            "olmoe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
            "granitemoe": {**_GROUPED, **_LOCAL},
            "glm4_moe": {**_HEADS, **_ROUTED, "n_group": 1, "topk_group": 1},
            "minimax_m2": {**_HEADS, **_LOCAL, "rotary_dim": 4},
        },
    ),
    *_isolated(
        "latent attention, experts",
        {name: {**_LATENT, **_ROUTED, "n_group": 1, "topk_group": 1} for name in ("deepseek_v2", "deepseek_v3")},
    ),
    *_isolated(
        "vision-language models, rows of text",
        {
            "llava": {
                "text_config": {"model_type": "llama", **_SIZES, **_GROUPED},
                "vision_config": {"model_type": "clip_vision_model", **_VISION},
                "image_token_index": 60,
            },
            "mistral3": {
                "text_config": {"model_type": "mistral", **_SIZES, **_HEADS},
                "vision_config": {"model_type": "pixtral", **_VISION, "head_dim": 16},
                "image_token_index": 60,
            },
            "gemma3": {
                "text_config": {**_SIZES, **_SCALED, **_WINDOW},
                "vision_config": _VISION,
                "image_token_index": 60,
                "mm_tokens_per_image": 4,
            },
            **{
                name: {"text_config": {**_SIZES, **_GROUPED, **_MROPE}, "vision_config": vision}
                for name, vision in (
                    ("qwen2_vl", {k: v for k, v in _QWEN_VISION.items() if k not in ("intermediate_size", "out_hidden_size")}),
                    ("qwen2_5_vl", {k: v for k, v in _QWEN_VISION.items() if k != "embed_dim"}),
                )
            },
        },
    ),
    *_refused(
        "the code takes no boundaries",
        INTERFACE,
        {
            "falcon": {"intermediate_size": None},
            "bloom": {},
            "mpt": {"hidden_size": None, "d_model": 32, "n_heads": 4, "n_layers": 2},
            "gpt_neo": {"num_hidden_layers": None, "num_layers": 2, "attention_types": [[["global", "local"], 1]]},
            "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
            "stablelm": _GROUPED,
        },
    ),
    *_refused("the code loses boundaries on the way", LOST, {"nemotron": _GROUPED}),
    *_refused("a mask that the layers choose over the whole row", "makes a mask of its own", {"doge": _GROUPED}),
    *_refused(
        "chunks counted over the whole row",
        "layer_types has chunked_attention",
        {
            "llama4_text": {**_GROUPED, "intermediate_size_mlp": 48, "num_local_experts": 2},
        },
    ),
    *_refused(
        "keys chosen over the whole row",
        "DeepseekV32Indexer",
        {
            "deepseek_v32": {**_LATENT, **_ROUTED, "n_group": 1, "topk_group": 1, "index_n_heads": 2, "index_head_dim": 16},
        },
    ),
    *_refused(
        "state-space, linear-attention or convolution layers",
        "mixes tokens of the whole row in",
        {
            "mamba": {},
            "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
            "falcon_mamba": {},
            "bamba": {**_GROUPED, **_MAMBA},
            "granitemoehybrid": {**_GROUPED, **_LOCAL, **_MAMBA, "layer_types": ["mamba", "attention"]},
            "qwen3_next": {**_GROUPED, "layer_types": ["linear_attention", "full_attention"]},
            "qwen3_5_text": {**_GROUPED, "layer_types": ["linear_attention", "full_attention"]},
            "lfm2": {**_GROUPED, "layer_types": ["conv", "full_attention"]},
            "recurrent_gemma": _GROUPED,
            "minimax": {**_HEADS, **_LOCAL, "layer_types": ["linear_attention", "full_attention"]},
            "rwkv": {"attention_hidden_size": 32},
        },
    ),
    *_refused(
        "images and prompts seen in both directions",
        "its attention is bidirectional",
        {
            "paligemma": {
                "text_config": {"model_type": "gemma", **_SIZES, **_HEADS},
                "vision_config": {"model_type": "siglip_vision_model", **_VISION},
                "image_token_index": 60,
            }
        },
    ),
    *_refused("both directions, or positions that do not start at 0", "in both directions", {"bert": {}, "xlm-roberta": {}}),
]


def table(found: dict[str, str]) -> str:
    """The table of ``{model_type: "isolated" or "refused" or "NOT isolated"}``, in Markdown."""
    rows: dict[tuple[str, str], list[str]] = {}
    for architecture in ARCHITECTURES:
        rows.setdefault((found[architecture.model_type], architecture.about), []).append(f"`{architecture.model_type}`")
    lines = [f"| {verdict} | {about} | {', '.join(names)} |" for (verdict, about), names in rows.items()]
    return "\n".join(["| verdict | why | `model_type` |", "|---|---|---|", *lines])


def expected() -> dict[str, str]:
    """Verdict of each architecture, as it has to be."""
    return {a.model_type: "isolated" if a.refused is None else "refused" for a in ARCHITECTURES}


def found() -> dict[str, str]:
    """Verdict of each architecture, as it is now."""
    verdicts = {}
    for architecture in ARCHITECTURES:
        result = architecture.run()
        word = "refused" if isinstance(result, list) else "isolated" if result.isolated else "NOT isolated"
        verdicts[architecture.model_type] = word
    return verdicts


def in_readme() -> str:
    """What the page says now."""
    return README.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    """Print the table, or write it into the page."""
    now = table(found())
    if "--write" not in sys.argv[1:]:
        print(now)
        return
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{now}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
