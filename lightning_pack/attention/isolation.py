"""The probe: change one source of a row and see whether the outputs of any other source move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pack.row import PackedBatch


@torch.no_grad()
def leaking_sources(model: nn.Module, batch: PackedBatch, *, source: int = 0, tolerance: float = 0.0) -> list[str]:
    """Keys of the other sources whose logits move when the tokens and images of one source change.

    Costs two forwards. The model is run in evaluation mode and left in the mode it was in.

    Args:
        model: a transformers causal model.
        batch: a row with at least two sources.
        source: number of the source to change; earlier ones can only be reached by attention that is not causal.
        tolerance: largest move that counts as none. 0 is right where every token takes the same kernels in both runs; experts
            that gather their tokens need about 1e-5.

    Raises:
        ValueError: for a row of fewer than two sources, or a source that does not exist.
    """
    if not 0 <= source < len(batch.source_keys) or len(batch.source_keys) < 2:
        raise ValueError(f"source {source} of {len(batch.source_keys)}: the probe needs that source and at least one other")
    changed = batch.segment_ids == source + 1
    # Placeholders stay where they are, for there are as many as the images have features.
    kept = torch.tensor(sorted(_placeholders(model)), dtype=batch.input_ids.dtype, device=batch.input_ids.device)
    # The other half of the ids in use, so that every token differs and each id is known to the model.
    ids = torch.unique(batch.input_ids)
    ids = ids[~torch.isin(ids, kept)]
    if len(ids) < 2:
        raise ValueError(f"all tokens of the row are {ids.tolist()}: the probe needs two different ones to change a source")
    at = torch.searchsorted(ids, batch.input_ids)
    text = changed & ~torch.isin(batch.input_ids, kept)
    other = torch.where(text, ids[(at + max(1, len(ids) // 2)) % len(ids)], batch.input_ids)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        before, after = (
            _logits(model, row) for row in (batch, replace(batch, input_ids=other, media=_other_media(batch, source=source)))
        )
    finally:
        for module, training in modes.items():
            module.training = training
    if torch.equal(before[changed], after[changed]):
        raise ValueError("changing a source did not change its own outputs: the probe cannot tell anything about this model")
    moved = (before - after).abs().amax(dim=-1)
    return [
        key
        for number, key in enumerate(batch.source_keys)
        if number != source and bool((moved[batch.segment_ids == number + 1] > tolerance).any())
    ]


def _placeholders(model: nn.Module) -> set[int]:
    """Ids that a model replaces with features of images and the like."""
    config: Any = getattr(model, "config", None)
    values = {} if config is None else config.to_dict()
    names = [name for name in values if name.endswith(("_token_id", "_token_index"))]
    return {
        values[name] for name in names if name.startswith(("image", "video", "audio", "vision")) and values[name] is not None
    }


def _other_media(batch: PackedBatch, *, source: int) -> dict[str, Tensor]:
    """The row's media with other values, not other sizes, in the rows of one source."""
    media = dict(batch.media)
    for name, tensor in batch.media.items():
        counts = batch.media_rows[name]
        if tensor.is_floating_point() and counts[source]:
            begin = sum(counts[:source])
            rows = slice(begin, begin + counts[source])
            media[name] = tensor.clone()
            # Not a mere shift, which a norm could take away.
            media[name][rows] = tensor[rows].flip(-1) * 2 + 1
    return media


def _logits(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    inputs = batch.model_inputs()
    del inputs["labels"], inputs["shift_labels"]
    return model(**inputs).logits
