"""The same sources as padded batches, as loaders without packing give them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_pack.row import PackedBatch
from lightning_pack.source import IGNORE, EncodedSource


def sources_of(batch: PackedBatch) -> list[EncodedSource]:
    """The sources of a row, as they were before it was packed."""
    starts, lengths = batch.cu_seqlens_padded[:-1].tolist(), batch.cu_seqlens.diff().tolist()
    # There may be more boundaries than sources: the last one is repeated where their number is fixed.
    cut = [(key, slice(s, s + n)) for key, s, n in zip(batch.source_keys, starts, lengths, strict=False)]
    return [EncodedSource(key=key, input_ids=batch.input_ids[0, at], labels=batch.labels[0, at]) for key, at in cut]


Padded = list[tuple[Tensor, Tensor, Tensor]]


def groups_of_rows(sources: Sequence[EncodedSource], *, budget: int) -> list[list[EncodedSource]]:
    """Batches of a fixed number of rows, the largest with which the mean padded batch is within ``budget`` tokens."""
    best: list[list[EncodedSource]] = [[source] for source in sources]
    for rows in range(2, len(sources) + 1):
        groups = [list(sources[at : at + rows]) for at in range(0, len(sources), rows)]
        if sum(len(group) * max(map(len, group)) for group in groups) > budget * len(groups):
            break
        best = groups
    return best


def groups_of_tokens(sources: Sequence[EncodedSource], *, budget: int) -> list[list[EncodedSource]]:
    """Batches of as many rows as fit into ``budget`` padded tokens, in order."""
    groups: list[list[EncodedSource]] = []
    for source in sources:
        group = groups[-1] if groups else []
        if group and (len(group) + 1) * max(map(len, [*group, source])) <= budget:
            group.append(source)
        else:
            groups.append([source])
    return groups


def padded(groups: Sequence[Sequence[EncodedSource]], *, pad_id: int) -> Padded:
    """Each group as (ids, attention mask, shifted labels), int64 ``[B, L]`` each."""
    batches = []
    for group in groups:
        shape = (len(group), max(map(len, group)))
        ids, mask = torch.full(shape, pad_id), torch.zeros(shape, dtype=torch.int64)
        targets = torch.full(shape, IGNORE)
        for row, source in enumerate(group):
            ids[row, : len(source)] = source.input_ids
            mask[row, : len(source)] = 1
            targets[row, : len(source) - 1] = source.labels[1:]
        batches.append((ids, mask, targets))
    return batches
