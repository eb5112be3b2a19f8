"""What a loader worker takes in memory, measured on one that runs for a short time."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_pack.policy import PackingPolicy

if TYPE_CHECKING:
    from lightning_pack.energon import StreamOptions

#: Seconds that a worker runs at most where there are images, unless told otherwise.
MOST_SECONDS = 30.0
#: Between two looks at its memory.
_INTERVAL = 0.01
#: It makes rows from so many buffers: while the packs of one are emitted the next one is filled.
_BUFFERS = 2.5
#: Seconds without work after which it waits for a row to be taken.
_IDLE = 0.3


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory:
    """Memory of a loader worker.

    Args:
        nbytes: most that it had for itself, beyond what it shares with the process that starts it; None where it could not be
            measured.
        rows: that were taken from it meanwhile.
        seconds: that it ran.
        whole: whether it came so far that its buffers had been full; else a longer run may take more.
        problem: why it could not be measured.
    """

    nbytes: int | None
    rows: int = 0
    seconds: float = 0.0
    whole: bool = False
    problem: str = ""

    @classmethod
    def of_worker(
        cls, options: StreamOptions, policy: PackingPolicy, *, rows_per_buffer: float, seconds: float = MOST_SECONDS
    ) -> MeasuredMemory:
        """Run the first loader worker of a dataset in a process of its own, until its buffers have been full.

        Args:
            options: of the stream.
            policy: the packing rules.
            rows_per_buffer: that a buffer becomes.
            seconds: after which it is ended at the latest.
        """
        if not Path("/proc/self/smaps_rollup").exists():
            return cls(nbytes=None, problem=f"on this system ({sys.platform}) a process does not tell what it has for itself")
        from lightning_pack.energon.dataset import open_share
        from lightning_pack.energon.worker import WorkerProcess

        share = partial(open_share, replace(options, policy=policy), 0, split="train", of=1, epoch=None)
        started = time.monotonic()
        worker = WorkerProcess(share, number=0, origin=None, timeout=seconds)
        watched, rows, problem = _Watched(str(worker.process.pid)), 0, ""
        wanted = int(_BUFFERS * rows_per_buffer) + 1
        try:
            # Then no row is taken any more, so it makes ready as many as it does ahead of a slow training step.
            while time.monotonic() - started < seconds and not (rows >= wanted and watched.idle):
                ready = rows < wanted and worker.ready(within=_INTERVAL)
                watched.look()
                if ready:
                    worker.receive()
                    rows += 1
                elif rows >= wanted:
                    time.sleep(_INTERVAL)
        except Exception as error:
            # It would end training too, where it is told at length.
            problem = f"its worker failed: {type(error).__name__}: {error}"
        finally:
            worker.close()
        took = time.monotonic() - started
        if not (problem or rows):
            problem = f"it made no row in {took:.0f} seconds"
        whole = rows >= wanted and watched.idle
        nbytes = None if problem else watched.most
        return cls(nbytes=nbytes, rows=rows, seconds=took, whole=whole, problem=problem)


class _Watched:
    """A process: the most memory that it had for itself, and whether it is idle."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._worked, self._since = -1, time.monotonic()
        self.most = 0

    def look(self) -> None:
        self.most = max(self.most, _private(self._process))
        # Behind the name, which may hold anything: whether it would run, and its time in the process and in the system.
        fields = Path(f"/proc/{self._process}/stat").read_text().rpartition(")")[2].split()
        worked = int(fields[11]) + int(fields[12])
        if worked != self._worked or fields[0] in "RD":
            self._worked, self._since = worked, time.monotonic()

    @property
    def idle(self) -> bool:
        return time.monotonic() - self._since > _IDLE


def _private(process: str) -> int:
    """Bytes that are in no other process: what a fork shares counts from the moment that one of the two writes to it.

    That is asked page by page. What a process holds in all, less what its parent held, would be too little: it also makes use
    of what was free in memory that it shares.
    """
    try:
        found = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except ProcessLookupError:
        return 0  # It has ended, which is told where its next row is taken.
    return sum(int(line.split()[1]) * 1024 for line in found if line.startswith("Private_Dirty:"))
