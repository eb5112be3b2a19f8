"""The same sources as padded batches, as loaders without packing give them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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


def padded_batch(sources: Sequence[EncodedSource], *, pad_id: int) -> dict[str, Tensor]:
    """A collator's batch, padded at the right: ``input_ids``, ``attention_mask`` and ``labels`` (not shifted), ``[B, L]``."""
    stacked = {
        "input_ids": ([source.input_ids for source in sources], pad_id),
        "attention_mask": ([torch.ones_like(source.input_ids) for source in sources], 0),
        "labels": ([source.labels for source in sources], IGNORE),
    }
    return {name: pad_sequence(rows, batch_first=True, padding_value=fill) for name, (rows, fill) in stacked.items()}


def grouped_by_length(
    lengths: Sequence[int], order: Sequence[int], *, size: int, generator: torch.Generator
) -> list[list[int]]:
    """Batches of sources of similar lengths, as length-grouped samplers make them.

    Each 50 batches of the order are sorted by length and cut into batches, whose order is then drawn anew.

    Args:
        lengths: of all sources, in tokens.
        order: indices into them, shuffled.
        size: sources of a batch.
        generator: draws the order of the batches.
    """
    sorted_at_once = 50 * size
    batches = []
    for start in range(0, len(order), sorted_at_once):
        by_length = sorted(order[start : start + sorted_at_once], key=lambda i: -lengths[i])
        batches += [by_length[at : at + size] for at in range(0, len(by_length), size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
