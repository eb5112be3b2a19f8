"""Tiny real models, sources and rows that several tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightning_pack.policy import PackingPolicy
from lightning_pack.row import PackedBatch
from lightning_pack.source import IGNORE, EncodedSource

VOCABULARY = 64
LENGTHS = (7, 1, 12, 5, 9)
#: Of models with a sliding window: shorter than the longest source, so it cuts.
WINDOW = 4

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, **_MIXED},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, **_MIXED},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **_MIXED},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "cohere2": _MIXED,
    "phi3": {"pad_token_id": 0},
    # Learned positions; the general names of sizes are theirs as well.
    "gpt2": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64, "do_layer_norm_before": True},
}


def tiny_config(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **_SIZES, **_OWN[model_type], **changes}


def tiny_model(model_type: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model with random weights that are large enough for attention to matter."""
    values = tiny_config(model_type, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Drawn in float32 also where a trainer has set another default: other widths draw other numbers.
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim >= 2 and "embed" not in name:
                    parameter.mul_(4)
                elif name.endswith("sinks"):
                    parameter.normal_()
    return model.to(dtype).train()


def make_sources(lengths: tuple[int, ...] | list[int] = LENGTHS, *, seed: int = 0, prompt: int = 2) -> list[EncodedSource]:
    """Sources of random tokens; the first ``prompt`` tokens of each are no targets."""
    generator = torch.Generator().manual_seed(seed)
    sources = []
    for number, length in enumerate(lengths):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[:prompt] = IGNORE
        sources.append(EncodedSource.of(f"s{seed}.{number}", ids, labels))
    return sources


def pack_row(sources: list[EncodedSource], *, multiple: int = 1) -> PackedBatch:
    """One row of these sources, built by the policy."""
    return PackedBatch.from_packs([PackingPolicy(capacity=256, multiple=multiple).build(sources)], pad_id=0)


def forward_inputs(batch: PackedBatch) -> dict[str, Any]:
    """Arguments of a model that is to give logits only."""
    inputs = batch.model_inputs()
    del inputs["labels"], inputs["shift_labels"]
    return inputs


def alone_logits(model: PreTrainedModel, source: EncodedSource) -> Tensor:
    """Logits ``[L, V]`` of a source in a batch of its own: no positions, no boundaries, no mask."""
    return model(input_ids=source.input_ids[None], use_cache=False).logits[0]


def alone_loss(model: PreTrainedModel, source: EncodedSource) -> tuple[Tensor, int]:
    """Sum of the losses of a source's targets, and their number, with the shift written out."""
    logits = alone_logits(model, source)
    total = logits.sum() * 0
    count = 0
    for position in range(len(source) - 1):
        target = int(source.labels[position + 1])
        if target != IGNORE:
            total = total - F.log_softmax(logits[position], dim=-1)[target]
            count += 1
    return total, count


def alone_gradients(model: PreTrainedModel, sources: list[EncodedSource]) -> tuple[float, dict[str, Tensor]]:
    """Mean loss per target of sources that each run alone, and its gradients by parameter."""
    parts = [alone_loss(model, source) for source in sources]
    loss = torch.stack([part for part, _ in parts]).sum() / sum(count for _, count in parts)
    model.zero_grad()
    loss.backward()
    return loss.item(), gradients_of(model)


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


class Rows:
    """A loader of given rows. (Lightning takes a plain list for several loaders.)"""

    def __init__(self, *rows: PackedBatch) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[PackedBatch]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def quiet_trainer(**options: Any) -> Trainer:
    """A trainer on one CPU that writes nothing."""
    defaults = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    return Trainer(**{**defaults, "enable_progress_bar": False, "enable_model_summary": False, **options})
