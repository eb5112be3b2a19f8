"""PassLoader: a finite split, read from its beginning at every iteration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from megatron.energon.savable_loader import BasicDataLoader

from lightning_pack.energon.reader import stop_workers
from lightning_pack.row import LeftOut, PackedBatch


class PassLoader:
    """Validation batches. Each ``iter`` opens the data anew, so no pass depends on how far an earlier one got.

    A plain iterable without a length, since the number of packs is not known before they are packed.

    Args:
        open_loader: opens the data at its beginning.
    """

    def __init__(self, open_loader: Callable[[], BasicDataLoader[Any]]) -> None:
        self._open = open_loader

    def __iter__(self) -> Iterator[PackedBatch]:
        loader = self._open()
        held: PackedBatch | None = None
        orphans: list[LeftOut] = []
        try:
            # One batch is held back, so that what is left out after the last pack still has a batch to ride in.
            for batch in loader:
                if not batch.source_keys:
                    (held.left_out if held is not None else orphans).extend(batch.left_out)
                    continue
                batch.left_out[:0] = orphans
                orphans = []
                if held is not None:
                    yield held
                held = batch
            if held is not None:
                yield held
        finally:
            stop_workers(loader)
        if orphans:
            listed = ", ".join(f"{gone.key} ({gone.reason})" for gone in orphans[:3])
            warnings.warn(f"no source of the pass is usable: {len(orphans)} are left out, such as {listed}", stacklevel=2)
