"""The row that a rank without a source is given where all of them take part."""

from __future__ import annotations

import torch

from lightning_pack.policy import PackingPolicy
from lightning_pack.row import PackedBatch
from lightning_pack.source import IGNORE, EncodedSource, Pack


def blank_row(policy: PackingPolicy, *, pad_id: int) -> PackedBatch:
    """A row of pads as narrow as the policy allows, with no source and no target.

    Args:
        policy: of the other rows.
        pad_id: its tokens.
    """
    token = torch.tensor([pad_id])
    source = EncodedSource(key="", input_ids=token, labels=torch.full_like(token, IGNORE))
    row = PackedBatch.from_packs([Pack(sources=[source], layout=policy.layout([1]))], pad_id=pad_id)
    row.source_keys.clear()
    return row
