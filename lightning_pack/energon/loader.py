"""ExactLoader: the endless stream under Lightning, with a state that says what was trained on.

Lightning may fetch a batch and never train it (it prefetches one, it starts a new epoch, it stops). So every fetched batch is
kept with the position before it until :meth:`ExactLoader.trained` says that it was trained; the state is the position of the
first that was not, and a new iteration begins with it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megatron.energon.savable_loader import SavableDataLoader

from lightning_pack.energon.reader import PositionLostError, Reader, open_reader
from lightning_pack.energon.validity import refused_as_damaged
from lightning_pack.row import LeftOut, PackedBatch

#: So many sources in a row without one that can be trained on end the run.
MOST_LEFT_OUT_IN_A_ROW = 10_000
#: So many batches that are fetched and never counted as trained are a mistake, and memory.
MOST_UNTRAINED = 1024


class _Fetched(NamedTuple):
    batch: PackedBatch
    before: Any


class ExactLoader:
    """The endless stream of one data-parallel rank. A plain iterable: Lightning saves and restores nothing of it by itself.

    Args:
        open_loader: opens the stream at its beginning.
    """

    def __init__(self, open_loader: Callable[[], SavableDataLoader[Any]]) -> None:
        self._open_loader = open_loader
        self._reader: Reader | None = None
        self._untrained: deque[_Fetched] = deque()
        #: After the last batch that was fetched whole; an interrupted fetch does not move it.
        self._reached: Any = None
        #: Where a reader that is opened now starts: a plain state, or None for the beginning.
        self._origin: Any = None
        self._error: Exception | None = None
        #: Batches to come before every worker has restored its part of the origin.
        self._restoring = 0

    def __iter__(self) -> Iterator[PackedBatch]:
        for fetched in list(self._untrained):
            yield fetched.batch
        while True:
            yield self._fetch()

    def trained(self) -> PackedBatch:
        """Count the oldest fetched batch as trained, and return it as it was fetched (on the CPU)."""
        return self._untrained.popleft().batch

    def state(self) -> Any:
        """Where training stands, as plain containers; None is the beginning.

        Raises:
            PositionLostError: if a loader worker has failed, so that nobody knows where it stood.
        """
        if isinstance(self._origin, PositionLostError):
            raise self._origin
        if self._reader is None:
            return self._origin
        return self._reader.state(self._untrained[0].before if self._untrained else self._reached)

    def restore(self, state: Any) -> None:
        """Go to a state of :meth:`state`; batches that were fetched and not trained are forgotten."""
        self._close()
        self._origin = state

    def stop(self) -> None:
        """End the workers. The state stays; iterating again goes on from it."""
        try:
            self._origin = self.state()
        except PositionLostError as e:
            self._origin = e
        finally:
            self._close()

    def _close(self) -> None:
        reader, self._reader, self._error = self._reader, None, None
        self._untrained.clear()
        if reader is not None:
            reader.close()

    def _fetch(self) -> PackedBatch:
        if len(self._untrained) >= MOST_UNTRAINED:
            raise RuntimeError(
                f"{MOST_UNTRAINED} batches were fetched and none was counted as trained, so no position can be saved: give the "
                "Trainer the datamodule itself and not its loader, or call the loader's trained() after each batch"
            )
        if self._reader is None:
            if isinstance(self._origin, PositionLostError):
                raise self._origin
            loader = self._open_loader()
            # Each worker reads its buffer again before its first batch.
            self._restoring = 0 if self._origin is None else max(loader.num_workers, 1)
            with refused_as_damaged(restoring=self._restoring > 0):
                self._reader = open_reader(loader, origin=self._origin)
            self._reached = self._reader.position()
        before, left_out = self._reached, list[LeftOut]()
        while True:
            batch = self._read(self._reader)
            if batch.source_keys:
                batch.left_out[:0] = left_out
                self._untrained.append(_Fetched(batch, before))
                self._reached = self._reader.position()
                return batch
            # Only markers of left-out sources: they ride with the next sources that can be trained on.
            left_out += batch.left_out
            if len(left_out) >= MOST_LEFT_OUT_IN_A_ROW:
                reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(gone.reason for gone in left_out).most_common())
                raise ValueError(
                    f"{len(left_out)} sources in a row cannot be trained on ({reasons}; the last is {left_out[-1].key!r}): "
                    "check capacity, tokenizer and data"
                )

    def _read(self, reader: Reader) -> PackedBatch:
        if self._error is not None:
            # Energon's loader would end silently, or go on from the middle of a batch.
            raise RuntimeError("the loader has failed before and cannot go on: start again from a checkpoint") from self._error
        try:
            with refused_as_damaged(restoring=self._restoring > 0):
                batch = reader.read()
            self._restoring = max(self._restoring - 1, 0)
            return batch
        except Exception as e:
            self._error = e
            if isinstance(e, StopIteration):
                raise RuntimeError("the endless stream has ended") from e
            if isinstance(e, AssertionError) and "empty dataset" in str(e):
                raise ValueError("a loader worker has no sample to read: use fewer workers or ranks, or more data") from e
            raise
