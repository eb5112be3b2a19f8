"""A padded batch as one packed row: the sources of a micro-batch, packed by the same policy as everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lightning_pack.collated.extent import Extent, extents
from lightning_pack.collated.fields import BOUNDARIES, BatchFields, CollatedBatchError, Contents, contents_of, entries
from lightning_pack.collated.flattened import is_flattened, pack_flattened
from lightning_pack.collated.gathering import gather_row
from lightning_pack.collated.row import CollatedRow
from lightning_pack.collated.usable import usable_policy
from lightning_pack.policy import PackingPolicy
from lightning_pack.source import IGNORE, EncodedSource, Pack

#: Media of models whose positions depend on them.
_GRIDS = ("image_grid_thw", "video_grid_thw")


def pack_collated(
    batch: Any,
    *,
    policy: PackingPolicy | None,
    roles: BatchFields = BatchFields(),  # noqa: B008 - frozen
    pad_id: int = 0,
    name: str = "batch",
    needs_targets: bool = True,
) -> CollatedRow | None:
    """The packed row of a collator's batch, on the batch's device; the batch is not changed.

    A padded batch is a dict, ``BatchEncoding`` or mutable dataclass with ``input_ids`` ``[B, S]`` and ``attention_mask`` or
    ``lengths``, padded left, right or on both sides. ``labels`` are those of transformers, not shifted, ``shift_labels``
    shifted; where both are there the second count, as in transformers. The first token of a source is nobody's target. A
    flattened batch (``DataCollatorWithFlattening``) has one row and its boundaries, and stays in its order; a row that breaks
    ``capacity``, ``multiple`` or another limit of the policy is refused.

    Waits for the device once, to learn the lengths; see :func:`~lightning_pack.collated.extent.extents`. Where ``lengths`` are
    on the CPU and labels are not, it does not wait at all, and sources without a target are packed like others.

    Args:
        batch: of a collator.
        policy: decides which sources share a pack, how they are aligned and what happens to those that fit in none; the packs
            lie end to end in one row. None packs flattened batches only.
        roles: what the entries of the batch are.
        pad_id: token id in gaps.
        name: of the batch, for sources without a key.
        needs_targets: whether sources without a target are left out, where there are labels.

    Returns:
        The row; None for a batch that has no named entries or no ``input_ids``, and without a policy for one that is not
        flattened. A row of which every source is left out holds one pad and no source.

    Raises:
        CollatedBatchError: for a batch that cannot be packed as it is, naming the entry and the ways out.
        OverlengthError: under ``overlength="error"``.
    """
    named = entries(batch)
    if named is None or "input_ids" not in named:
        return None
    flattened = is_flattened(named)
    if policy is None and not flattened:
        return None
    contents = contents_of(named, roles=roles, flattened=flattened)
    if flattened:
        return pack_flattened(contents, policy=policy, pad_id=pad_id, name=name)
    if boundaries := [entry for entry in BOUNDARIES if entry in contents.read]:
        raise CollatedBatchError(
            f"{name} holds {', '.join(boundaries)}, as a flattened batch does, and attention_mask, lengths or several rows, as "
            "a padded one does: return only one of them"
        )
    assert policy is not None
    found = extents(contents, name=name)
    labelled = "labels" in contents.read or "shift_labels" in contents.read
    return _packed(contents, found, policy=policy, pad_id=pad_id, needs_targets=needs_targets and labelled)


def _packed(contents: Contents, found: list[Extent], *, policy: PackingPolicy, pad_id: int, needs_targets: bool) -> CollatedRow:
    policy = usable_policy(policy)
    if contents.media:
        policy = _in_order(policy, contents)
    sources: list[EncodedSource] = []
    rows: list[int] = []
    gone = []
    for row, extent in enumerate(found):
        source = _source(extent, row=row, width=contents.input_ids.shape[1])
        (admitted,) = policy.admit(source, needs_targets=needs_targets)
        if admitted.left_out is not None:
            gone.append(admitted.left_out)
            if contents.media:
                raise CollatedBatchError(
                    f"source {extent.key!r} would be left out ({admitted.left_out.reason}), and {', '.join(contents.media)} "
                    "do not tell which of their entries are its own: leave it out of the data, or raise the capacity"
                )
        if len(admitted):
            sources.append(replace(admitted, left_out=None))
            rows.append(row)
    groups = policy.pack([len(source) for source in sources])
    packs = [policy.build([sources[i] for i in group]) for group in groups]
    places = [rows[i] for group in groups for i in group]
    if not packs:
        packs = [_blank(contents, policy)]
    packs.append(Pack([], None, left_out=gone))
    result = gather_row(packs, contents, places=places, pad_id=pad_id)
    result.rows = len(contents.input_ids)
    largest = [found[row].largest for row in places]
    if None not in largest:
        result.largest_id = max([pad_id, *largest])  # type: ignore[type-var]
    if not places:
        # The step goes on, on every rank, over a pad that is no source and no target.
        result.source_keys.clear()
    if (lengths := contents.read.get("lengths")) is not None:
        real = [len(sources[i]) for group in groups for i in group]
        result.extras["lengths"] = torch.tensor(real, device=lengths.device) if isinstance(lengths, torch.Tensor) else real
    return result


def _source(extent: Extent, *, row: int, width: int) -> EncodedSource:
    """A source whose tokens and labels are their places in the flat batch."""
    start = row * width + extent.start
    places = torch.arange(start, start + extent.length)
    labels = places if extent.targets != 0 else torch.full_like(places, IGNORE)
    return EncodedSource.of(extent.key, places, labels)


def _blank(contents: Contents, policy: PackingPolicy) -> Pack:
    place = torch.tensor([contents.input_ids.numel()])
    source = EncodedSource(key="", input_ids=place, labels=torch.full_like(place, IGNORE))
    return Pack(sources=[source], layout=policy.layout([1]))


def _in_order(policy: PackingPolicy, contents: Contents) -> PackingPolicy:
    """A policy that keeps the order of the sources, as media do."""
    if policy.algorithm not in ("auto", "concatenative"):
        raise CollatedBatchError(
            f"algorithm={policy.algorithm!r} changes the order of the sources, which {', '.join(contents.media)} follow: use "
            "algorithm='auto' or 'concatenative', which keep it"
        )
    positions = contents.read.get("position_ids")
    if any(grid in contents.media for grid in _GRIDS) and (positions is None or positions.dim() == 2):
        raise CollatedBatchError(
            "the positions of this model depend on its images (image_grid_thw or video_grid_thw), and in a packed row it could "
            "not tell whose they are: put position_ids [3, B, S] into the batch, from get_rope_index of the padded batch"
        )
    return replace(policy, algorithm="concatenative")
