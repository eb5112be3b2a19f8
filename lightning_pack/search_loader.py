"""Training rows for Lightning's searches of learning rate and batch size."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_pack.energon import ExactLoader
from lightning_pack.row import PackedBatch


class SearchLoader:
    """Batches for Lightning's searches of learning rate and batch size, which take all callbacks away and restore afterwards.

    Args:
        loader: the stream; batches count as trained when they are given.
    """

    def __init__(self, loader: ExactLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[PackedBatch]:
        for batch in self._loader:
            self._loader.trained()
            self._loader.commit()
            yield batch
