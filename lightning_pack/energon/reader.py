"""Readers: raw batches from an Energon loader, each with a position that another reader can start from.

A position is cheap, so it can be noted for every batch: how many batches came since a snapshot of Energon's state. Worker
processes take snapshots of themselves every few seconds; in the main process that is done here. Whoever starts from a position
works off the batches since the snapshot again.

Energon's own account is wrong for a worker that has not given a batch since it was started: its answer may replay or skip
batches, or never come. Such a worker stands where it was started, which is known here, so it is never asked.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

from megatron.energon.savable_loader import SavableDataLoader, SavableDataLoaderState, SavableDatasetCheckpoint

from lightning_pack.energon.state import from_plain, to_plain
from lightning_pack.row import PackedBatch

#: Seconds between snapshots: a resumed run works off at most about this much again.
SNAPSHOT_SECONDS = 5.0


class PositionLostError(RuntimeError):
    """A loader worker has failed, so nobody knows where it stood."""


class Reader(Protocol):
    """The raw batches of one open loader."""

    def read(self) -> PackedBatch:
        """The next batch."""

    def position(self) -> Any:
        """Where the reader stands; cheap."""

    def state(self, position: Any) -> Any:
        """A position as plain containers, from which a new reader can start.

        Raises:
            PositionLostError: if a worker has failed.
        """

    def close(self) -> None:
        """End the workers."""


def open_reader(loader: SavableDataLoader[Any], *, origin: Any) -> Reader:
    """A reader of a loader that was just made, from a state of another reader, or None for the beginning."""
    return WorkerReader(loader, origin=origin) if loader.num_workers else MainProcessReader(loader, origin=origin)


class MainProcessReader:
    """Reads without workers."""

    def __init__(self, loader: SavableDataLoader[Any], *, origin: Any) -> None:
        self._loader = loader
        self._snapshot: Any = None if origin is None else origin["snapshot"]
        offset: int = 0 if origin is None else origin["offset"]
        if self._snapshot is not None:
            loader.restore_state_rank(from_plain(self._snapshot))
        self._taken = time.monotonic()
        self._batches: Iterator[PackedBatch] = iter(loader)
        for _ in range(offset):
            next(self._batches)
        self._since = offset

    def read(self) -> PackedBatch:
        """The next batch."""
        if time.monotonic() - self._taken > SNAPSHOT_SECONDS:
            self._snapshot, self._since = to_plain(self._loader.save_state_rank()), 0
            self._taken = time.monotonic()
        batch = next(self._batches)
        self._since += 1
        return batch

    def position(self) -> tuple[Any, int]:
        """The last snapshot, and the batches since."""
        return self._snapshot, self._since

    def state(self, position: tuple[Any, int]) -> Any:
        """The position as plain containers."""
        snapshot, offset = position
        return {"snapshot": snapshot, "offset": offset}

    def close(self) -> None:
        """Nothing runs beside the main process."""


class _Given(NamedTuple):
    #: Number of the last batch that each worker has given, by logical worker.
    last: tuple[int, ...]
    next_worker: int


class WorkerReader:
    """Reads through worker processes."""

    def __init__(self, loader: SavableDataLoader[Any], *, origin: Any) -> None:
        self._loader = loader
        state: SavableDataLoaderState | None = from_plain(origin)
        loader.restore_state_rank(state)
        # Kept apart from what the loader got: Energon changes a restored state in place.
        self._start: list[SavableDatasetCheckpoint] = (
            [SavableDatasetCheckpoint(state=None, offset=0) for _ in range(loader.num_workers)]
            if state is None
            else from_plain(origin).worker_states
        )
        # Energon forgets the offset here, and would take a worker for standing before its first batch.
        loader._worker_sample_counters = self._at_start()
        self._batches: Iterator[PackedBatch] = iter(loader)
        self._failed = False

    def _at_start(self) -> list[int]:
        return [(-1 if w.state is None else w.state.sample_index - 1) + w.offset for w in self._start]

    def read(self) -> PackedBatch:
        """The next batch."""
        try:
            return next(self._batches)
        except Exception:
            # The worker stands in the middle of a batch.
            self._failed = True
            raise

    def position(self) -> _Given:
        """What each worker has given."""
        return _Given(tuple(self._loader._worker_sample_counters), self._loader._next_worker_id)

    def state(self, position: _Given) -> Any:
        """The position as plain containers; asks the workers for their snapshots."""
        given = [now > then for now, then in zip(position.last, self._at_start(), strict=True)]
        workers = self._start
        if any(given):
            try:
                answers = self._ask_workers("get_checkpoint", list(position.last))
            except Exception as e:
                # A worker that dies while it is asked shows in many ways.
                self._failed = True
                raise PositionLostError(
                    "a loader worker has failed, so the position in the data is not known: resume from an older checkpoint"
                ) from e
            workers = [answer if asked else known for answer, asked, known in zip(answers, given, self._start, strict=True)]
        state = SavableDataLoaderState(
            worker_states=list(workers),
            next_worker_id=position.next_worker,
            micro_batch_size=self._loader._get_batch_size(),
        )
        return to_plain(state)

    def _ask_workers(self, *command: Any) -> list[Any]:
        """Energon's own way to ask waits for ever for a worker that died."""
        answers: dict[int, Any] = {}
        if not self._failed:
            for commands in self._loader.cmd_queues:
                commands.put(command)
        for results in self._loader.result_queues:
            while True:
                if self._failed or not all(process.is_alive() for process in self._loader._iterator._workers):
                    raise RuntimeError("a worker does not answer any more")
                with contextlib.suppress(queue.Empty):
                    answers |= results.get(timeout=1)
                    break
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise answer
        return [answers[worker] for worker in range(len(answers))]

    def close(self) -> None:
        """End the workers."""
        stop_workers(self._loader)


def stop_workers(loader: Any) -> None:
    """End the worker processes of an Energon loader, if it has any."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        # The command thread of a savable worker looks up once a second; told to end, it does not hold up the worker's exit.
        for commands in getattr(loader, "cmd_queues", ()):
            commands.put((None,))
        iterator._shutdown_workers()
        loader._iterator = None


def tie_workers_to_this_process(loader: Any) -> None:
    """Make the loader's workers leave Ctrl-C to this process, and exit when it is gone, even killed.

    A terminal sends Ctrl-C to workers too, which would take the position with them. And a worker that is blocked while it
    sends a batch waits for ever: its siblings hold the other end of the pipe open.
    """
    loader.worker_init_fn = partial(_follow_parent, loader.worker_init_fn, os.getpid())


def _follow_parent(then: Callable[[int], None], parent: int, worker_id: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, name="parent watch", daemon=True).start()
    then(worker_id)
