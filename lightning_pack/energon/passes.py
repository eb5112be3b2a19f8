"""PassLoader: a finite split, read from its beginning at every iteration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from functools import partial

from lightning_pack.blank_row import blank_row
from lightning_pack.energon.dataset import StreamOptions, open_evaluation_share
from lightning_pack.energon.reader import RankReader, Workers
from lightning_pack.row import PackedBatch


class PassLoader:
    """Validation batches. Each ``iter`` opens the data anew, so no pass depends on how far an earlier one got.

    A plain iterable without a length, since the number of packs is not known before they are packed. Where a rank has no row at
    all but must take part in the evaluation, it gets a blank one: no source, no target.

    Args:
        options: of the data.
        workers: those of this rank.
        split: to read.
        everyone: whether a condition holds on all ranks, for strategies whose forward pass is a collective: all ranks then get
            equally many rows, the last ones blank. None lets each rank end on its own.
    """

    def __init__(
        self, options: StreamOptions, *, workers: Workers, split: str, everyone: Callable[[bool], bool] | None = None
    ) -> None:
        self._options, self._workers, self._split = options, workers, split
        self._everyone = everyone

    def __iter__(self) -> Iterator[PackedBatch]:
        rows = self._rows()
        blank_needed = len(self._workers.numbers) < self._workers.of
        try:
            for row in rows:
                blank_needed = False
                if self._everyone is not None:
                    self._everyone(False)
                yield row
        finally:
            rows.close()
        if self._everyone is not None:
            while not self._everyone(True):
                yield self._blank()
        elif blank_needed:
            yield self._blank()

    def _rows(self) -> Generator[PackedBatch, None, None]:
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

    def _blank(self) -> PackedBatch:
        return blank_row(self._options.policy, pad_id=self._options.encoder.pad_id)
