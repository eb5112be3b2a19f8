"""ExactLoader: Energon's savable loader with a position that says what was trained on.

Lightning may fetch a batch and never train it (it prefetches one, it starts a new epoch, it stops). So every fetched batch is
kept with the position before it until :meth:`ExactLoader.trained` says that it was trained; the state is the position of the
first that was not, and a new iteration begins with it.

A position is cheap where there are workers: how many batches each has given, from which a worker finds a snapshot of itself and
the number of batches since. Without workers it is Energon's state itself, taken after every fetch (about 1 ms for a buffer of
256).

Energon's own account is wrong for a worker that has not given a batch since it was started: its answer may replay or skip
batches, or never come. Such a worker stands where it was started, which is known here, so it is never asked.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megatron.energon.savable_loader import SavableDataLoader, SavableDataLoaderState, SavableDatasetCheckpoint

from lightning_pack.energon.passes import stop_workers
from lightning_pack.energon.state import from_plain, to_plain
from lightning_pack.row import LeftOut, PackedBatch

#: So many sources in a row without one that can be trained on end the run.
MOST_LEFT_OUT_IN_A_ROW = 10_000


class _Position(NamedTuple):
    #: Energon's state (without workers), else the batches that each worker has given, by logical worker.
    at: Any
    next_worker: int


class _Fetched(NamedTuple):
    batch: PackedBatch
    before: _Position


class ExactLoader:
    """The endless stream of one data-parallel rank. A plain iterable: Lightning saves and restores nothing of it by itself.

    Args:
        open_loader: opens the stream at its beginning.
    """

    def __init__(self, open_loader: Callable[[], SavableDataLoader[Any]]) -> None:
        self._open_loader = open_loader
        self._loader: SavableDataLoader[Any] | None = None
        self._batches: Iterator[PackedBatch] | None = None
        self._untrained: deque[_Fetched] = deque()
        #: After the last batch that was fetched whole; an interrupted fetch does not move it.
        self._reached: _Position | None = None
        #: Where a loader that is opened now starts: a plain state, or None for the beginning.
        self._origin: Any = None
        self._start: list[SavableDatasetCheckpoint] = []
        self._failed = False
        self._lost = False

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
            RuntimeError: if a worker died, so that nobody knows where it stood.
        """
        if self._lost:
            raise RuntimeError(
                "a loader worker has failed, so the position in the data is not known: resume from an older checkpoint"
            )
        if self._loader is None:
            return self._origin
        position = self._untrained[0].before if self._untrained else self._reached
        return self._origin if position is None else self._plain(position)

    def restore(self, state: Any) -> None:
        """Go to a state of :meth:`state`; batches that were fetched and not trained are forgotten."""
        self._close()
        self._origin = state
        self._lost = False

    def stop(self) -> None:
        """End the workers. The state stays; iterating again goes on from it."""
        try:
            if not self._failed:
                self._origin = self.state()
            elif self._loader is not None and self._loader.num_workers:
                self._lost = True
        finally:
            self._close()

    def _close(self) -> None:
        loader, self._loader, self._batches = self._loader, None, None
        self._untrained.clear()
        self._reached = None
        self._failed = False
        if loader is not None:
            stop_workers(loader)

    def _open(self) -> SavableDataLoader[Any]:
        loader = self._open_loader()
        if self._origin is not None:
            loader.restore_state_rank(from_plain(self._origin))
        if loader.num_workers:
            origin = from_plain(self._origin)
            self._start = (
                [SavableDatasetCheckpoint(state=None, offset=0) for _ in range(loader.num_workers)]
                if origin is None
                else list(origin.worker_states)
            )
            loader._worker_sample_counters = self._start_counters()
        return loader

    def _start_counters(self) -> list[int]:
        return [(-1 if w.state is None else w.state.sample_index - 1) + w.offset for w in self._start]

    def _fetch(self) -> PackedBatch:
        left_out: list[LeftOut] = []
        if self._loader is None:
            self._loader = self._open()
            self._reached = self._position()
        if self._batches is None:
            self._batches = iter(self._loader)
        assert self._reached is not None
        before = self._reached
        while True:
            batch = self._next(self._batches)
            if batch.source_keys:
                batch.left_out[:0] = left_out
                self._untrained.append(_Fetched(batch, before))
                self._reached = self._position()
                return batch
            # Only markers of left-out sources: they ride with the next sources that can be trained on.
            left_out += batch.left_out
            if len(left_out) >= MOST_LEFT_OUT_IN_A_ROW:
                reasons = ", ".join(f"{n} {reason}" for reason, n in Counter(gone.reason for gone in left_out).most_common())
                raise ValueError(
                    f"{len(left_out)} sources in a row cannot be trained on ({reasons}; the last is {left_out[-1].key!r}): "
                    "check capacity, tokenizer and data"
                )

    def _next(self, batches: Iterator[PackedBatch]) -> PackedBatch:
        if self._failed:
            raise RuntimeError("the loader has failed before and cannot go on: start again from a checkpoint")
        try:
            return next(batches)
        except StopIteration:
            self._failed = True
            raise RuntimeError("the endless stream has ended") from None
        except AssertionError as e:
            self._failed = True
            if "empty dataset" not in str(e):
                raise
            raise ValueError("a loader worker has no sample to read: use fewer workers or ranks, or more data") from e
        except Exception:
            self._failed = True
            raise

    def _position(self) -> _Position:
        loader = self._loader
        assert loader is not None
        if not loader.num_workers:
            return _Position(loader.save_state_rank(), 0)
        return _Position(tuple(loader._worker_sample_counters), loader._next_worker_id)

    def _plain(self, position: _Position) -> Any:
        loader = self._loader
        assert loader is not None
        if not loader.num_workers:
            return to_plain(position.at)
        start = self._start_counters()
        given = [now > then for now, then in zip(position.at, start, strict=True)]
        workers = list(self._start)
        if any(given):
            # A worker that failed stands in the middle of a batch, and one that died does not answer.
            if self._failed or not all(process.is_alive() for process in loader._iterator._workers):
                self._lost = True
                return self.state()
            answers = loader._worker_command("get_checkpoint", list(position.at))
            workers = [answer if asked else known for answer, asked, known in zip(answers, given, self._start, strict=True)]
        state = SavableDataLoaderState(
            worker_states=workers, next_worker_id=position.next_worker, micro_batch_size=loader._get_batch_size()
        )
        return to_plain(state)
