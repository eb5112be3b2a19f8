"""Token ids for which a model has no embedding, which would fail inside a kernel; on a GPU without naming anything."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from lightning_pack.row import PackedBatch


def embedded_ids(models: Sequence[PreTrainedModel]) -> int | None:
    """How many token ids have an embedding in one of ``models`` at least; None where that is not known.

    A table may be larger than the vocabulary of the tokenizer, and only ids that occur have to be in it. Models with images and
    the like are not judged: their placeholders may lie beyond the table.
    """
    sizes = [_embedded_ids(model) for model in models]
    known = [size for size in sizes if size is not None]
    # Not every model need be given the ids of the row: with several, the one that embeds most has a say.
    return max(known) if known and len(known) == len(sizes) else None


def _embedded_ids(model: PreTrainedModel) -> int | None:
    if model.config.get_text_config() is not model.config:
        return None
    try:
        table = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    size = getattr(table, "num_embeddings", None)
    return size if isinstance(size, int) else None


def require_embeddings(batch: PackedBatch, *, most: int, model: str) -> None:
    """Refuse a row with an id for which there is no embedding.

    Args:
        batch: waited for only where there is such an id.
        most: ids that have an embedding.
        model: its class, for the message.

    Raises:
        ValueError: naming the id and its source.
    """
    largest = int(batch.input_ids.max()) if batch.input_ids.device.type == "cpu" else batch.largest_id
    if largest is None or largest < most:
        return
    place, found = "a row", largest
    beyond = (batch.input_ids[0] >= most).nonzero().flatten().tolist()
    # A part of a row need not hold it.
    if beyond:
        found, number = int(batch.input_ids[0, beyond[0]]), int(batch.segment_ids[0, beyond[0]])
        place = f"source {batch.source_keys[number - 1]!r}" if 0 < number <= len(batch.source_keys) else "a pad of a row"
    raise ValueError(
        f"{place} has the token id {found}, and {model} embeds ids from 0 to {most - 1}: its vocabulary is not that of the "
        "tokenizer. Use the model's own tokenizer, or give the model as many embeddings (resize_token_embeddings, or "
        "vocab_size of its configuration)"
    )
