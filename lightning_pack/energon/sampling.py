"""The first sources of a dataset as lengths: what a dry run decides by."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from lightning_pack.encoders import Encoder, LeaveOut
from lightning_pack.energon.dataset import StreamOptions, has_end, open_evaluation_share, open_share
from lightning_pack.energon.randomness import put_back
from lightning_pack.energon.stage import PackingStage
from lightning_pack.energon.worker import Whereabouts
from lightning_pack.media_budget import MediaCost
from lightning_pack.policy import PackingPolicy
from lightning_pack.source import EncodedSource, LeftOut

#: Sources that ``algorithm="auto"`` looks at.
MOST_SAMPLED = 2048
#: Records of which at least one has the field that sources are grouped by.
MOST_WITHOUT_GROUP = 1000


@dataclass(frozen=True, kw_only=True)
class SampledSources:
    """Sources as they would enter a buffer.

    Args:
        lengths: real tokens of each, in the order of reading.
        groups: their group keys.
        splittable: whether each is a plain text, which may be cut in pieces.
        held: bytes that each holds while it waits beyond its ids and labels: positions and encoded media.
        media: of each.
        left_out: what was dropped or cut, and why; with the tokens where they are known.
        whole: whether these are all sources of a share that has an end.
    """

    lengths: list[int]
    groups: list[str | None]
    splittable: list[bool]
    held: list[int]
    media: list[MediaCost]
    left_out: list[LeftOut]
    whole: bool


class _Taken(NamedTuple):
    length: int
    group: str | None
    splittable: bool
    held: int
    media: MediaCost
    left_out: LeftOut | None

    @classmethod
    def of(cls, source: EncodedSource) -> _Taken:
        held = source.held - source.input_ids.nbytes - source.labels.nbytes
        return cls(
            *(len(source), source.group, source.splittable, max(held, 0)),
            MediaCost(source.media_tokens, source.media_bytes, source.held_media),
            source.left_out,
        )


def sample_sources(
    options: StreamOptions,
    *,
    most: int = MOST_SAMPLED,
    split: str = "train",
    of: int = 1,
    evaluation: bool = False,
) -> SampledSources:
    """Read and encode the first sources of the first logical worker, in one pass. Deterministic, and nothing is changed by it.

    Args:
        options: of the stream.
        most: sources to read, those that are left out included.
        split: of the dataset.
        of: how many logical workers there are over all ranks.
        evaluation: whether to read the split in the order of the data, and not in that of training.

    Raises:
        ValueError: if there is no such dataset, or no sample in the split.
    """
    finite = evaluation or has_end(options.path, split)
    with contextlib.redirect_stdout(io.StringIO()):
        if evaluation:
            share = open_evaluation_share(options, 0, Whereabouts(), split=split, of=of)
        else:
            share = open_share(options, 0, Whereabouts(), split=split, of=of, epoch=0 if finite else None)
    # Without their tokens: they may be long.
    taken = [_Taken.of(source) for source in _read(share, most)]
    usable = [source for source in taken if source.length]
    return SampledSources(
        lengths=[source.length for source in usable],
        groups=[source.group for source in usable],
        splittable=[source.splittable for source in usable],
        held=[source.held for source in usable],
        media=[source.media for source in usable],
        left_out=[source.left_out for source in taken if source.left_out is not None],
        whole=finite and len(taken) < most,
    )


def _read(share: PackingStage, most: int) -> Iterator[EncodedSource]:
    """The first sources of a share."""
    with put_back():
        share.worker_config.worker_activate(0)
        try:
            yield from islice(share.dataset, most)
        finally:
            share.worker_config.worker_deactivate()


def check_group_field(options: StreamOptions, *, split: str = "train", most: int = MOST_WITHOUT_GROUP) -> None:
    """Check that the field that an encoder groups by (its ``group_by``) is in the data; nothing is read where it has none.

    Args:
        options: of the stream.
        split: of the dataset.
        most: records that are read at most.

    Raises:
        ValueError: if none of these has it, with the fields that they have.
    """
    field = getattr(options.encoder, "group_by", None)
    if field is None:
        return
    noting = _Noting(options.encoder, field)
    # In the order of reading, so that the first record answers.
    asked = replace(options, encoder=noting, policy=PackingPolicy(options.policy.capacity), shuffle_buffer_size=0)
    epoch = 0 if has_end(options.path, split) else None
    with contextlib.redirect_stdout(io.StringIO()):
        share = open_share(asked, 0, Whereabouts(), split=split, of=1, epoch=epoch)
    for _ in _read(share, most):
        if noting.found:
            return
    if not noting.records:
        # What is wrong with the data is told where it is trained on.
        return
    raise ValueError(
        f"group_by={field!r}: none of the {'first ' * (noting.records >= most)}{noting.records:,} records of {options.path!r} "
        f"has a value in this field, so nothing would be kept apart; their fields are {sorted(noting.fields)}: correct the "
        "name, or leave group_by out"
    )


class _Noting:
    """An encoder that notes what fields its records have."""

    def __init__(self, encoder: Encoder, field: str) -> None:
        self._encoder, self._field = encoder, field
        self.records, self.found = 0, False
        self.fields: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def __call__(self, key: str, record: Mapping[str, Any]) -> EncodedSource:
        self.records += 1
        self.fields.update(map(str, record))
        self.found = self.found or record.get(self._field) is not None
        raise LeaveOut("noted", "its fields are all that is asked for")
