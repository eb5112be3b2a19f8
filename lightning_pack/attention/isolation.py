"""The probe: change one source of a row and see whether the outputs of any other source move."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from lightning_pack.row import PackedBatch


@torch.no_grad()
def leaking_sources(model: nn.Module, batch: PackedBatch, *, source: int = 0, tolerance: float = 0.0) -> list[str]:
    """Keys of the other sources whose logits move when the tokens of one source change.

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
    # The other half of the ids in use, so that every token differs and each id is known to the model.
    ids = torch.unique(batch.input_ids)
    if len(ids) < 2:
        raise ValueError(f"all tokens of the row are {ids.tolist()}: the probe needs two different ones to change a source")
    at = torch.searchsorted(ids, batch.input_ids)
    other = torch.where(changed, ids[(at + max(1, len(ids) // 2)) % len(ids)], batch.input_ids)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        before, after = (_logits(model, row) for row in (batch, replace(batch, input_ids=other)))
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


def _logits(model: nn.Module, batch: PackedBatch) -> torch.Tensor:
    inputs = batch.model_inputs()
    del inputs["labels"], inputs["shift_labels"]
    return model(**inputs).logits
