"""The rows that cost most memory among all that a policy can build."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_pack.attention import find_models
from lightning_pack.policy import PackingPolicy
from lightning_pack.row import PackedBatch
from lightning_pack.source import EncodedSource


def heaviest_rows(policy: PackingPolicy, *, packs_per_batch: int, token_ids: Tensor) -> dict[str, PackedBatch]:
    """Full rows, by what they are: one source to a pack, and as many sources as a pack can have.

    Args:
        policy: builds them.
        packs_per_batch: packs in a row.
        token_ids: int64 ``[n]``, taken in turn.

    Returns:
        One row, where one source is the most that a pack can have; else two.
    """
    slots = policy.capacity // policy.multiple
    # A source of one token has no target and is left out, so no pack is full of these.
    most = max(policy.capacity // policy.aligned(2), 1)
    if policy.max_sources is not None:
        most = min(most, policy.max_sources)
    rows = {}
    for number in dict.fromkeys((1, most)):
        # All slots are given out, so the row is full also where max_sources would let short sources leave room.
        each, more = divmod(slots, number)
        lengths = [(each + (i < more)) * policy.multiple for i in range(number)]
        name = f"{number} source{'s' * (number > 1)} of {_span(lengths)} tokens"
        name += f" in each of {packs_per_batch} packs" if packs_per_batch > 1 else ""
        pack = policy.build(_sources(lengths, token_ids))
        rows[name] = PackedBatch.from_packs([pack] * packs_per_batch, pad_id=int(token_ids[0]))
    return rows


def _span(lengths: Sequence[int]) -> str:
    return str(lengths[0]) if lengths[0] == lengths[-1] else f"{lengths[-1]} to {lengths[0]}"


def _sources(lengths: Sequence[int], token_ids: Tensor) -> list[EncodedSource]:
    row = token_ids[torch.arange(sum(lengths)) % len(token_ids)]
    return [EncodedSource.of(f"memory-probe-{i}", ids) for i, ids in enumerate(row.split(list(lengths)))]


def ordinary_token_ids(module: nn.Module) -> Tensor:
    """Ids that every model in ``module`` embeds and that none of them treats in a way of its own, int64 ``[n]``."""
    configs = [model.config for model in find_models(module)]
    size = min(config.get_text_config().vocab_size for config in configs)
    special = set()
    for config in configs:
        for part in (config, config.get_text_config()):
            # Of images and the like: their places would be filled with features that the row does not bring.
            named = (value for name, value in part.to_dict().items() if name.endswith(("_token_id", "_token_index")))
            special |= {i for value in named for i in (value if isinstance(value, list) else [value])}
    ids = torch.tensor([i for i in range(size) if i not in special], dtype=torch.int64)
    return ids if len(ids) else torch.arange(size)
