"""The first sources of a dataset as lengths: what a dry run decides by."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from lightning_pack.energon.dataset import StreamOptions, has_end, open_evaluation_share, open_share
from lightning_pack.energon.randomness import put_back
from lightning_pack.energon.worker import Whereabouts
from lightning_pack.media_budget import MediaCost
from lightning_pack.source import EncodedSource, LeftOut

#: Sources that ``algorithm="auto"`` looks at.
MOST_SAMPLED = 2048


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
    with put_back():
        share.worker_config.worker_activate(0)
        try:
            # Without their tokens: they may be long.
            taken = [_Taken.of(source) for source in islice(share.dataset, most)]
        finally:
            share.worker_config.worker_deactivate()
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
