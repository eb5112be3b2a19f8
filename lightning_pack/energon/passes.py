"""PassLoader: a finite split, read from its beginning at every iteration."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

from lightning_pack.energon.dataset import StreamOptions, open_evaluation_share
from lightning_pack.energon.reader import RankReader, Workers
from lightning_pack.row import PackedBatch


class PassLoader:
    """Validation batches. Each ``iter`` opens the data anew, so no pass depends on how far an earlier one got.

    A plain iterable without a length, since the number of packs is not known before they are packed.

    Args:
        options: of the data.
        workers: those of this rank.
        split: to read.
    """

    def __init__(self, options: StreamOptions, *, workers: Workers, split: str) -> None:
        self._options, self._workers, self._split = options, workers, split

    def __iter__(self) -> Iterator[PackedBatch]:
        share = partial(open_evaluation_share, self._options, split=self._split, of=self._workers.of)
        reader = RankReader(share, workers=self._workers, start=self._workers.beginning)
        try:
            # One row is held back, so that what a last worker leaves out still has a row to ride in.
            held: PackedBatch | None = None
            while (batch := reader.read()) is not None:
                if held is not None:
                    yield held
                held = batch
            orphans = reader.take_orphans()
            if held is not None:
                held.left_out += orphans
                yield held
        finally:
            reader.close()
        if held is None and orphans:
            listed = ", ".join(f"{gone.key} ({gone.reason})" for gone in orphans[:3])
            warnings.warn(f"no source of the pass is usable: {len(orphans)} are left out, such as {listed}", stacklevel=2)
