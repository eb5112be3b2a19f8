"""Position embeddings that are learned, of which a model has only so many."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from lightning_pack.attention.inspection import decoder_of
from lightning_pack.row import PackedBatch

#: Names under which models of transformers keep such a table.
_TABLES = {"wpe", "embed_positions", "position_embeddings", "position_embedding"}


def learned_positions(model: PreTrainedModel) -> int | None:
    """Tokens of the longest source that ``model`` has positions for; None where positions are computed (rotary and others)."""
    sizes = [
        module.num_embeddings
        for name, module in decoder_of(model).named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _TABLES
    ]
    if not sizes:
        return None
    # Some tables have a few places more, which stand for pads.
    return min(*sizes, getattr(model.config.get_text_config(), "max_position_embeddings", None) or sizes[0])


def require_positions(batch: PackedBatch, *, most: int, model: str) -> None:
    """Refuse a row with a source that is longer than the table of positions, which would fail inside a kernel.

    Args:
        batch: waited for only where its longest physical source is too long.
        most: positions of the model.
        model: its class, for the message.

    Raises:
        ValueError: naming the source.
    """
    if batch.max_seqlen <= most:
        return
    real, physical = batch.cu_seqlens.diff().tolist(), batch.cu_seqlens_padded.diff().tolist()
    for key, length, padded in zip(batch.source_keys, real, physical, strict=False):
        if length > most:
            raise ValueError(
                f"source {key} has {length} tokens, and {model} has learned {most} positions: set capacity={most} or less, so "
                "that overlength= says what happens to longer sources, or take a model with more positions"
            )
        if padded - length > most:
            raise ValueError(
                f"{padded - length} pads follow source {key}, whose positions count up from 0, and {model} has learned {most} "
                f"positions: set width='variable', or capacity={most} or less"
            )
