"""CollatedRow: the packed row that was made of a collator's batch, and how those who need it find it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_pack.row import PackedBatch


@dataclass(kw_only=True, repr=False)
class CollatedRow(PackedBatch):
    """A packed row that remembers the batch that it was made of."""

    #: For each source, its place in that batch.
    places: list[int] = field(default_factory=list)
    #: Whether the batch had labels; a row of one without has no targets.
    labelled: bool = True
    #: Whether it had media, for which some of its ids may stand.
    with_media: bool = False
    #: Rows of the padded batch, those left out included; None for a flattened one.
    rows: int | None = None
    #: Further entries of the batch: tensors along the tokens ``[1, T, ...]``, those of sources in the order of the row, media.
    extras: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        batch = "a flattened batch" if self.rows is None else f"a batch of {self.rows} rows"
        return f"CollatedRow(of {batch}: {super().__repr__()})"


class CurrentRow:
    """Holds the batch in hand and the row that it became. One for each owner, until the next batch."""

    def __init__(self) -> None:
        self._batch: Any = None
        self._row: CollatedRow | None = None

    def hold(self, batch: Any, row: CollatedRow) -> None:
        """From now on this batch is that row."""
        self._batch, self._row = batch, row
        if self not in _HELD:
            _HELD.append(self)

    def release(self) -> None:
        """Forget both."""
        self._batch = self._row = None
        if self in _HELD:
            _HELD.remove(self)

    def of(self, batch: Any) -> CollatedRow | None:
        """The row of this very batch, if it is the one in hand."""
        return self._row if batch is self._batch else None


# A dict takes no attribute and no weak reference, so the batches in hand are kept here: one per running Trainer.
_HELD: list[CurrentRow] = []


def packed_row(batch: Any) -> PackedBatch | None:
    """The packed row of the batch that a hook or step was given; None if it is not packed.

    A :class:`~lightning_pack.row.PackedBatch` is its own row. A dict or dataclass that
    :class:`~lightning_pack.callbacks.PackedAttention` has packed is looked up, from its ``on_*_batch_start`` until the next
    batch starts.
    """
    if isinstance(batch, PackedBatch):
        return batch
    for held in _HELD:
        if batch is not None and (row := held.of(batch)) is not None:
            return row
    return None
