"""Logical workers: each reads one share of the data, in a process of its own or in the main process.

Which share a logical worker reads depends on its number and on how many there are, not on the rank that runs it, so a run may
continue with its workers spread over more or fewer ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import multiprocessing
import os
import pickle
import queue
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from megatron.energon.state import FlexState

from lightning_pack.energon.fields import damaged
from lightning_pack.energon.position import StagePosition
from lightning_pack.energon.randomness import put_back
from lightning_pack.energon.stage import PackingStage
from lightning_pack.energon.window import StartAgain
from lightning_pack.row import PackedBatch
from lightning_pack.source import LeftOut

#: Before each message.
_SIZE = struct.Struct("!Q")
#: Rows that a worker holds ready.
PREFETCHED = 2
#: Opens the share of a logical worker, given what it is to be told about: where the reading has got to.
OpenShare = Callable[["Whereabouts"], PackingStage]


class WorkerFailedError(RuntimeError):
    """A loader worker has died or does not answer any more."""


class Whereabouts:
    """What a worker reads, seen from outside: how many samples so far, and the last one, readable even when it is dead."""

    def __init__(self) -> None:
        self._samples = multiprocessing.get_context("fork").RawValue(ctypes.c_longlong, 0)
        self._place = multiprocessing.get_context("fork").RawArray(ctypes.c_char, 512)

    def reads(self, place: str) -> None:
        """The next sample is read."""
        self._place.value = place.encode()[-500:]
        self._samples.value += 1

    @property
    def samples(self) -> int:
        """Samples read so far."""
        return self._samples.value

    @property
    def place(self) -> str:
        """The sample that is read, or was read last."""
        return self._place.value.decode(errors="replace") or "nothing yet"


class Row(NamedTuple):
    """A row and the position after it."""

    batch: PackedBatch
    #: Its ``start`` is None where it is that of the row before, and what was carried over too.
    at: StagePosition


@dataclass(frozen=True)
class End:
    """A finite share is read to its end."""

    #: Left out in a share in which nothing can be trained on.
    orphans: list[LeftOut]


@dataclass(frozen=True)
class _Failure:
    error: Exception
    trace: str


class _WorkerTraceback(Exception):  # noqa: N818 - shown as the cause of the error itself
    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class NoSampleError(ValueError):
    """A share of the data in which there is no sample."""


def rows_of_share(open_share: OpenShare, whereabouts: Whereabouts, origin: StagePosition | None) -> Iterator[Row | End]:
    """The rows of a share from a position on, or from its beginning."""
    try:
        yield from _rows(open_share, whereabouts, origin)
    except StartAgain as e:
        yield from _rows(open_share, whereabouts, e.position)


def _rows(open_share: OpenShare, whereabouts: Whereabouts, origin: StagePosition | None) -> Iterator[Row | End]:
    with contextlib.redirect_stdout(io.StringIO()):
        stage = open_share(whereabouts)
    config = stage.worker_config
    if origin is not None:
        # Energon changes a restored state in place.
        stage.go_to(pickle.loads(pickle.dumps(origin)))
    rows = iter(stage)
    known: FlexState | None = None
    number = 0
    while True:
        config.worker_activate(number)
        try:
            batch = next(rows, None)
        except (AssertionError, LookupError, TypeError, AttributeError) as e:
            if "empty dataset" in str(e):
                raise NoSampleError("a loader worker has no sample to read: use fewer workers or ranks, or more data") from e
            if origin is None or number:
                raise
            # Energon reads the samples of its buffers again, and says little about what it does not find.
            last = str(e).strip().splitlines()[-1:] or ["no reason is given"]
            raise damaged("loader", f"the samples that it names cannot be read again ({last[0][:300]})") from e
        finally:
            config.worker_deactivate()
        if batch is None:
            yield End(stage.orphans)
            return
        at = stage.position
        yield Row(batch, replace(at, start=None, carried=[], entered=[]) if at.start is known else at)
        known, number = at.start, number + 1


class WorkerProcess:
    """A logical worker in a process of its own.

    Args:
        open_share: opens the data; called in the process.
        number: of the logical worker, for errors.
        origin: where to start; None is the beginning.
        timeout: seconds in which at least one more sample must be read, else the worker counts as hung.
    """

    def __init__(self, open_share: OpenShare, *, number: int, origin: StagePosition | None, timeout: float) -> None:
        context = multiprocessing.get_context("fork")
        self._number, self._timeout = number, timeout
        self._whereabouts = Whereabouts()
        self._connection, other = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_serve, args=(open_share, self._whereabouts, origin, other, os.getpid()), daemon=True
        )
        # Ctrl-C that comes just now must not end the process before it has said that it ignores it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        other.close()

    def ready(self, *, within: float) -> bool:
        """Whether a row begins to come within so many seconds."""
        return bool(connection.wait([self._connection], timeout=within))

    def receive(self) -> Row | End:
        """The next row, or the end.

        Raises:
            WorkerFailedError: if the process has died or reads nothing any more, naming what it read.
            Exception: whatever was raised in the process.
        """
        (size,) = _SIZE.unpack(self._read(_SIZE.size))
        message = pickle.loads(self._read(size))
        if isinstance(message, _Failure):
            raise message.error from _WorkerTraceback(message.trace)
        return message

    def _read(self, size: int) -> bytes:
        """So many bytes. A row is larger than a pipe: a worker may die or stop in the middle of one."""
        data = bytearray()
        while len(data) < size:
            self._wait()
            part = os.read(self._connection.fileno(), min(size - len(data), 1 << 20))
            if not part:
                self.process.join(timeout=10)
                code = self.process.exitcode
                how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
                raise self._failed(how, "a machine that runs out of memory kills in this way: use fewer workers")
            data += part
        return bytes(data)

    def _wait(self) -> None:
        """Until there is something to read; the end of the process too."""
        samples, since = -1, time.monotonic()
        while not connection.wait([self._connection], timeout=min(1.0, self._timeout / 4)):
            if self._whereabouts.samples != samples:
                samples, since = self._whereabouts.samples, time.monotonic()
            elif time.monotonic() - since > self._timeout:
                raise self._failed(
                    f"does not answer: for {self._timeout:g} seconds it has read no further sample",
                    "check storage and encoder, or raise worker_timeout",
                )

    def _failed(self, how: str, advice: str) -> WorkerFailedError:
        return WorkerFailedError(
            f"loader worker {self._number} (process {self.process.pid}) {how}. The last sample it began to read: "
            f"{self._whereabouts.place}. Resume from the last checkpoint; {advice}"
        )

    def close(self) -> None:
        """End the process. It only reads, so it is not asked."""
        # Not terminated: a stopped process would not notice.
        self.process.kill()
        self.process.join()
        self._connection.close()


class WorkerHere:
    """A logical worker in the main process."""

    def __init__(self, open_share: OpenShare, *, origin: StagePosition | None) -> None:
        self._rows = rows_of_share(open_share, Whereabouts(), origin)
        self.process = None

    def receive(self) -> Row | End:
        """The next row, or the end."""
        with put_back():
            return next(self._rows)

    def close(self) -> None:
        """Nothing runs beside the main process."""
        self._rows.close()  # type: ignore[attr-defined]


def _serve(
    open_share: OpenShare,
    whereabouts: Whereabouts,
    origin: StagePosition | None,
    sink: connection.Connection,
    parent: int,
) -> None:
    """The life of a worker process: send rows until the end, an error, or the end of the parent."""
    # Ctrl-C goes to every process of a terminal; ending the run is the business of the parent alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # The parent's handlers came along with the fork: Lightning's talks to the other ranks.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    # What was there before the fork is never garbage, and looking at it would copy its memory.
    gc.freeze()
    ready: queue.Queue[Any] = queue.Queue(maxsize=PREFETCHED)

    def send() -> None:
        while (message := ready.get()) is not None:
            data = memoryview(ForkingPickler.dumps(message))
            # Rows with pixels are large, so none is kept while the next one is waited for.
            del message
            for part in (memoryview(_SIZE.pack(len(data))), data):
                while part:
                    part = part[os.write(sink.fileno(), part) :]
            del data, part

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    sender = threading.Thread(target=send, name="row sender", daemon=True)
    sender.start()
    threading.Thread(target=watch, name="parent watch", daemon=True).start()
    try:
        for message in rows_of_share(open_share, whereabouts, origin):
            ready.put(message)
    except Exception as e:
        ready.put(_Failure(_portable(e), traceback.format_exc()))
    ready.put(None)
    sender.join()


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
