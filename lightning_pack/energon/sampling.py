"""The first sources of a dataset as lengths: what a dry run decides by."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from itertools import islice

from lightning_pack.energon.dataset import StreamOptions, open_evaluation_share, open_share
from lightning_pack.energon.randomness import put_back
from lightning_pack.energon.worker import Whereabouts
from lightning_pack.row import LeftOut

#: Sources that ``algorithm="auto"`` looks at.
MOST_SAMPLED = 4096


@dataclass(frozen=True, kw_only=True)
class SampledSources:
    """Sources as they would enter a buffer.

    Args:
        lengths: real tokens of each, in the order of reading.
        groups: their group keys.
        splittable: whether each is a plain text, which may be cut in pieces.
        left_out: what was dropped or cut, and why; with the tokens where they are known.
    """

    lengths: list[int]
    groups: list[str | None]
    splittable: list[bool]
    left_out: list[LeftOut]


def sample_sources(
    options: StreamOptions,
    *,
    most: int = MOST_SAMPLED,
    split: str = "train",
    of: int = 1,
    epoch: int | None = None,
    evaluation: bool = False,
) -> SampledSources:
    """Read and encode the first sources of the first logical worker. Deterministic, and nothing is changed by it.

    Args:
        options: of the stream.
        most: sources to read, those that are left out included.
        split: of the dataset.
        of: how many logical workers there are over all ranks.
        epoch: None reads the endless stream, a number that pass over the data.
        evaluation: whether to read the split in the order of the data.

    Raises:
        ValueError: if there is no such dataset, or no sample in the split.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        if evaluation:
            share = open_evaluation_share(options, 0, Whereabouts(), split=split, of=of)
        else:
            share = open_share(options, 0, Whereabouts(), split=split, of=of, epoch=epoch)
    found = SampledSources(lengths=[], groups=[], splittable=[], left_out=[])
    with put_back():
        share.worker_config.worker_activate(0)
        try:
            for source in islice(share.dataset, most):
                if len(source):
                    found.lengths.append(len(source))
                    found.groups.append(source.group)
                    found.splittable.append(source.splittable)
                if source.left_out is not None:
                    found.left_out.append(source.left_out)
        finally:
            share.worker_config.worker_deactivate()
    return found
