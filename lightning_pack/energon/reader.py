"""RankReader: the rows of the logical workers that one rank runs, in turn, and where each of them stands."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from lightning_pack.energon.position import StagePosition
from lightning_pack.energon.stage import PackingStage
from lightning_pack.energon.worker import End, Whereabouts, WorkerHere, WorkerProcess
from lightning_pack.row import PackedBatch
from lightning_pack.source import LeftOut


class WorkerPosition(NamedTuple):
    """Where a logical worker stands; ``at`` None is the beginning of its share."""

    worker: int
    at: StagePosition | None


#: Where the workers of a rank stand, in the order in which their next rows come.
Position = tuple[WorkerPosition, ...]
#: Opens the share of the logical worker of that number.
OpenWorker = Callable[[int, Whereabouts], PackingStage]


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The logical workers that a rank runs.

    Args:
        numbers: theirs.
        of: how many there are over all ranks.
        processes: whether each is a process; else there is one, in the main process.
        timeout: seconds in which a process must read at least one more sample, else it counts as hung.
    """

    numbers: Sequence[int]
    of: int
    processes: bool
    timeout: float

    @classmethod
    def of_rank(cls, rank: int, *, ranks: int, num_workers: int, timeout: float) -> Workers:
        """Dealt out to the ranks in turn, so that their rows have one order over all ranks."""
        of = ranks * max(num_workers, 1)
        return cls(numbers=range(rank, of, ranks), of=of, processes=num_workers > 0, timeout=timeout)

    @property
    def beginning(self) -> Position:
        """Each at the beginning of its share."""
        return tuple(WorkerPosition(number, None) for number in self.numbers)


class RankReader:
    """Reads rows from the logical workers of a rank, one from each in turn; those that reach their end drop out.

    Args:
        open_worker: opens a share, in the process that reads it.
        workers: how they run.
        start: where they stand.
    """

    def __init__(self, open_worker: OpenWorker, *, workers: Workers, start: Position) -> None:
        assert workers.processes or len(start) == 1
        self._workers: dict[int, WorkerProcess | WorkerHere] = {}
        # Also where a loader is read by hand and dropped, as one does in a notebook.
        self._end_workers = weakref.finalize(self, _end, self._workers)
        self._at = dict(start)
        self._turn = deque(worker for worker, _ in start)
        self._ended: list[int] = []
        self._orphans: list[LeftOut] = []
        try:
            for number, origin in start:
                share = partial(open_worker, number)
                self._workers[number] = (
                    WorkerProcess(share, number=number, origin=origin, timeout=workers.timeout)
                    if workers.processes
                    else WorkerHere(share, origin=origin)
                )
        except BaseException:
            self.close()
            raise

    def read(self) -> PackedBatch | None:
        """The next row, or None at the end of all shares."""
        while self._turn:
            number = self._turn[0]
            message = self._workers[number].receive()
            if isinstance(message, End):
                self._orphans += message.orphans
                self._ended.append(self._turn.popleft())
                continue
            at, before = message.at, self._at[number]
            if at.start is None:
                assert before is not None
                at = replace(at, start=before.start, carried=before.carried, entered=before.entered)
            self._at[number] = at
            self._turn.rotate(-1)
            batch = message.batch
            batch.left_out[:0], self._orphans = self._orphans, []
            return batch
        return None

    def position(self) -> Position:
        """Where the workers stand; cheap."""
        return tuple(WorkerPosition(number, self._at[number]) for number in (*self._turn, *self._ended))

    def take_orphans(self) -> list[LeftOut]:
        """What was left out and had no row to ride in."""
        orphans, self._orphans = self._orphans, []
        return orphans

    @property
    def pids(self) -> Sequence[int]:
        """Worker processes."""
        return [worker.process.pid for worker in self._workers.values() if worker.process is not None]  # type: ignore[misc]

    def close(self) -> None:
        """End the workers."""
        self._end_workers()
        self._turn.clear()


def _end(workers: dict[int, WorkerProcess | WorkerHere]) -> None:
    for worker in workers.values():
        worker.close()
    workers.clear()
