"""TrackedLoader: rows that come again, each with the position after it, until they are trained on for good.

Lightning may fetch a row and never train it (it prefetches one, it starts a new epoch, it stops), and a row may be trained on
in a step that is never completed. So the position after every row is kept until :meth:`TrackedLoader.trained` and
:meth:`TrackedLoader.commit` say that it is final; the state is the position of the first row that is not. The first rows that
wait so are kept themselves, as many as Lightning ever has in hand; what is beyond is read again if it is asked for again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from lightning_pack.row import PackedBatch

#: So many rows that are fetched and never counted as trained are a mistake.
MOST_UNTRAINED = 1024
#: Rows that wait to be trained on are kept in memory whatever they take: more than Lightning prefetches.
LEAST_KEPT = 4
#: Bytes of such rows beyond which no more of them are kept.
MOST_KEPT_BYTES = 1 << 28

Position = TypeVar("Position")


class TrainedRow(NamedTuple):
    """What is counted of a row: its sources, their real tokens, and the sources left out that it told of."""

    sources: int
    tokens: int
    left_out: int


class ProgressLoader(Protocol):
    """What :class:`~lightning_pack.progress.TrainingProgress` needs of the loader that it drives."""

    before_fetch: Callable[[], None]

    @property
    def finished(self) -> bool: ...  # noqa: D102
    def trained(self) -> TrainedRow: ...  # noqa: D102
    def commit(self) -> None: ...  # noqa: D102
    def state(self) -> Any: ...  # noqa: D102
    def restore(self, state: Mapping[str, Any] | None) -> None: ...  # noqa: D102
    def stop(self) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class Fetched(Generic[Position]):
    """A row, and the position after it."""

    batch: PackedBatch
    after: Position
    ends_pass: bool = False


@dataclass(frozen=True)
class _Waiting(Generic[Position]):
    """A row that is not counted as trained; ``batch`` is None where it is not kept."""

    batch: PackedBatch | None
    nbytes: int
    counts: TrainedRow
    after: Position
    ends_pass: bool


class TrackedLoader(ABC, Generic[Position]):
    """A plain iterable: Lightning saves and restores nothing of it by itself. Each iteration is one pass, or the rest of one.

    Args:
        start: the position before the first row.
    """

    def __init__(self, start: Position) -> None:
        #: Those that are kept come first.
        self._fetched: deque[_Waiting[Position]] = deque()
        #: After the last row that was fetched whole; an interrupted fetch does not move it.
        self._reached = self._counted = self._committed = start
        self._rows: Iterator[Fetched[Position]] | None = None
        self._error: Exception | None = None
        #: Called in the main process before a row is fetched; what it raises, the iteration raises.
        self.before_fetch: Callable[[], None] = lambda: None

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether the last pass is trained on to its end."""

    @abstractmethod
    def state(self) -> Any:
        """Where training stands after the last complete step, as plain containers."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go to a state of :meth:`state`, or to the beginning; rows that were fetched and not trained are forgotten."""

    @abstractmethod
    def _read(self) -> Iterator[Fetched[Position]]:
        """The rows from the position that is reached, to the end of its pass if it has one."""

    @abstractmethod
    def _more(self) -> bool:
        """Whether a row may come after the position that is reached."""

    def _shut(self) -> None:
        """Give up what was opened to read."""

    def _reads_again(self) -> bool:
        """Whether rows behind any position can be read once more, by this rank alone."""
        return True

    def __iter__(self) -> Iterator[PackedBatch]:
        for waiting in list(self._fetched):
            if waiting.batch is None:
                self._forget()
                break
            yield waiting.batch
            if waiting.ends_pass:
                return
        while self._more():
            self.before_fetch()
            fetched = self._fetch()
            yield fetched.batch
            if fetched.ends_pass:
                return

    def trained(self) -> TrainedRow:
        """Count the oldest fetched row as trained, and say what is in it."""
        waiting = self._fetched.popleft()
        self._counted = waiting.after
        return waiting.counts

    def commit(self) -> None:
        """Make what was counted as trained final: an optimizer step is complete."""
        self._committed = self._counted

    def stop(self) -> None:
        """End the workers. The state stays; iterating again goes on from it: what was trained on in an open step is lost."""
        self._close()
        self._reached = self._counted = self._committed

    def _go_to(self, position: Position) -> None:
        self._close()
        self._reached = self._counted = self._committed = position

    def _close(self) -> None:
        self._rows = self._error = None
        self._fetched.clear()
        self._shut()

    def _fetch(self) -> Fetched[Position]:
        if len(self._fetched) >= MOST_UNTRAINED:
            raise RuntimeError(
                f"{MOST_UNTRAINED} rows were fetched and none was counted as trained, so no position can be saved: give the "
                "Trainer the datamodule itself and not its loader, or call the loader's trained() after each batch"
            )
        if self._error is not None:
            # What a worker would give now is not known.
            raise RuntimeError("the loader has failed before and cannot go on: start again from a checkpoint") from self._error
        try:
            if self._rows is None:
                self._rows = self._read()
            fetched = next(self._rows)
        except Exception as e:
            self._error = e
            raise
        if fetched.ends_pass:
            self._rows = None
        batch = fetched.batch
        counts = TrainedRow(len(batch.source_keys), int(batch.cu_seqlens[-1]), len(batch.left_out))
        kept, held = (batch, batch.nbytes) if self._keeps_more() else (None, 0)
        self._fetched.append(_Waiting(kept, held, counts, fetched.after, fetched.ends_pass))
        self._reached = fetched.after
        return fetched

    def _keeps_more(self) -> bool:
        if len(self._fetched) < LEAST_KEPT or not self._reads_again():
            return True
        if self._fetched[-1].batch is None:
            return False
        return sum(waiting.nbytes for waiting in self._fetched) < MOST_KEPT_BYTES

    def _forget(self) -> None:
        """Go back to the first row that is not kept."""
        kept = list(takewhile(lambda waiting: waiting.batch is not None, self._fetched))
        self._rows = None
        self._shut()
        self._fetched = deque(kept)
        self._reached = kept[-1].after if kept else self._counted
