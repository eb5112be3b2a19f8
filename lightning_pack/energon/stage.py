"""The last stages of a worker's stream: sources -> buffer -> packs -> rows, with a position that costs nothing to note.

The position after a row is the state of the stages below from before the buffer was filled, and the number of its packs that
were emitted since. Whoever starts from it fills the same buffer again and leaves those packs out, so that a start from a
position takes as long as a start from the beginning, and the buffer itself is never stored.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.state import FlexState
from megatron.energon.wrappers.base import BaseWrapperDataset

from lightning_pack.row import EncodedSource, LeftOut, Pack, PackedBatch

#: So many sources in a row without one that can be trained on end the run.
MOST_LEFT_OUT_IN_A_ROW = 10_000


@dataclass
class _Buffer:
    number: int
    #: State of the stages below before the first source.
    start: FlexState
    sources: list[EncodedSource] = field(default_factory=list)
    #: Markers of sources that are left out; they take no place in the buffer.
    markers: list[EncodedSource] = field(default_factory=list)


@dataclass(frozen=True)
class StagePosition:
    """Where a stage stands between two rows.

    Args:
        buffer: number of the buffer whose packs come next.
        emitted: how many of its packs were emitted.
        start: state of the stages below before that buffer was filled; the same object for all positions in a buffer.
    """

    buffer: int
    emitted: int
    start: FlexState


class PackingStage(BaseWrapperDataset[EncodedSource, PackedBatch]):
    """Rows from sources, exactly resumable after every row, in endless streams and to the end of finite ones.

    While the packs of one buffer are emitted the next one is filled, so rows come at an even pace. The global random states of
    Python, numpy and torch are a function of the seed, the worker and the number of the buffer while sources are encoded, so an
    encoder may use them.

    Args:
        dataset: sources, and markers of those that are left out.
        buffer_size: sources to choose from.
        select: buffer -> groups (Energon's first hook); markers ride along.
        build: group -> pack (Energon's second hook).
        batch: packs -> row.
        packs_per_batch: packs in a row; only the last row of a finite stream may have fewer.
        take_damaged: markers of the samples that could not be read since the last call.
        worker_config: of the logical worker.
    """

    def __init__(
        self,
        dataset: SavableDataset[EncodedSource],
        *,
        buffer_size: int,
        select: Callable[[list[EncodedSource]], list[list[EncodedSource]]],
        build: Callable[[list[EncodedSource]], Pack],
        batch: Callable[[Sequence[Pack]], PackedBatch],
        packs_per_batch: int,
        take_damaged: Callable[[], list[EncodedSource]],
        worker_config: WorkerConfig,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self._buffer_size = buffer_size
        self._select, self._build, self._batch = select, build, batch
        self._packs_per_batch = packs_per_batch
        self._take_damaged = take_damaged
        self.reset_state_own()

    def reset_state_own(self) -> None:
        """Stand at the beginning."""
        self._origin: tuple[int, int] = (0, 0)
        self._position: StagePosition | None = None
        self._randomness: list[Any] | None = None
        self._left_out_in_a_row: Counter[str] = Counter()
        #: What was left out of a finite stream in which nothing can be trained on.
        self.orphans: list[LeftOut] = []

    @property
    def position(self) -> StagePosition:
        """After the last row."""
        return self._position or StagePosition(*self._origin, self.dataset.save_state())

    def save_state(self) -> FlexState:
        """The position, for Energon."""
        at = self.position
        return FlexState(__class__=type(self).__name__, buffer=at.buffer, emitted=at.emitted, start=at.start)

    def restore_state(self, state: FlexState) -> None:
        """Go to a position; before the stage is iterated."""
        self.reset_state_own()
        self.dataset.restore_state(state["start"])
        self._origin = (state["buffer"], state["emitted"])

    def __iter__(self) -> Iterator[PackedBatch]:
        packs: list[Pack] = []
        for pack, position in self._packs():
            packs.append(pack)
            if len(packs) == self._packs_per_batch:
                self._position = position
                yield self._batch(packs)
                packs = []
        if packs:
            self._position = position
            yield self._batch(packs)

    def _packs(self) -> Iterator[tuple[Pack, StagePosition]]:
        """Each pack, with the position after it."""
        sources = iter(self.dataset)
        number, emitted = self._origin
        current = _Buffer(number, self.dataset.save_state())
        self._fill(current, sources, upto=self._buffer_size)
        while current.sources:
            # The stream goes on at a source or has ended: no marker is left that would find no pack to ride in.
            ahead = self._next(current, sources) if len(current.sources) == self._buffer_size else None
            groups = self._groups(current)
            for i, group in enumerate(groups):
                if i >= emitted:
                    if ahead is not None and i == len(groups) - 1:
                        yield self._build(group), StagePosition(ahead.number, 0, ahead.start)
                    else:
                        yield self._build(group), StagePosition(current.number, i + 1, current.start)
                if ahead is not None and i >= emitted:
                    # Over the packs that are left, so that a start in the middle keeps the pace too.
                    done, all_left = i + 1 - emitted, len(groups) - emitted
                    self._fill(ahead, sources, upto=self._buffer_size * done // all_left)
            if ahead is None:
                return
            self._fill(ahead, sources, upto=self._buffer_size)
            current, emitted = ahead, 0
        self.orphans = [marker.left_out for marker in current.markers if marker.left_out is not None]

    def _groups(self, buffer: _Buffer) -> list[list[EncodedSource]]:
        self.worker_config.worker_push_sample_index(buffer.number)
        try:
            return self._select(buffer.sources + buffer.markers)
        finally:
            self.worker_config.worker_pop_sample_index()

    def _fill(self, buffer: _Buffer, sources: Iterator[EncodedSource], *, upto: int) -> None:
        if len(buffer.sources) >= upto:
            return
        with self._random_numbers(None if buffer.sources or buffer.markers else buffer.number):
            while len(buffer.sources) < upto:
                source = self._take(sources, buffer)
                if source is None:
                    return
                (buffer.sources if self._usable(source) else buffer.markers).append(source)

    def _next(self, current: _Buffer, sources: Iterator[EncodedSource]) -> _Buffer | None:
        """The buffer after ``current``, with its first source; markers before that belong to ``current``."""
        while True:
            start = self.dataset.save_state()
            with self._random_numbers(current.number + 1):
                source = self._take(sources, current)
            if source is None:
                return None
            if self._usable(source):
                return _Buffer(current.number + 1, start, [source])
            current.markers.append(source)

    def _take(self, sources: Iterator[EncodedSource], buffer: _Buffer) -> EncodedSource | None:
        source = next(sources, None)
        for marker in self._take_damaged():
            self._usable(marker)
            buffer.markers.append(marker)
        return source

    def _usable(self, source: EncodedSource) -> bool:
        if len(source):
            self._left_out_in_a_row.clear()
            return True
        assert source.left_out is not None
        self._left_out_in_a_row[source.left_out.reason] += 1
        if (count := self._left_out_in_a_row.total()) >= MOST_LEFT_OUT_IN_A_ROW:
            reasons = ", ".join(f"{n} {reason}" for reason, n in self._left_out_in_a_row.most_common())
            raise ValueError(
                f"{count} sources in a row cannot be trained on ({reasons}; the last is {source.left_out.key!r}): "
                "check capacity, tokenizer and data"
            )
        return False

    @contextmanager
    def _random_numbers(self, buffer: int | None) -> Iterator[None]:
        """The stream's own global random states, from the beginning of a buffer or from where they were."""
        outside = [random.getstate(), np.random.get_state(), torch.get_rng_state()]  # noqa: NPY002
        if buffer is None:
            assert self._randomness is not None
            _set_random_states(self._randomness)
        else:
            words = np.random.SeedSequence([self.worker_config.worker_seed(), buffer]).generate_state(3)
            random.seed(int(words[0]))
            np.random.seed(int(words[1]))  # noqa: NPY002
            torch.random.default_generator.manual_seed(int(words[2]))
        try:
            yield
        finally:
            self._randomness = [random.getstate(), np.random.get_state(), torch.get_rng_state()]  # noqa: NPY002
            _set_random_states(outside)

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Samples of a worker: the number of packs is not known before they are packed."""
        return self.dataset.len_worker(worker_idx)

    def config(self) -> dict[str, Any]:
        """What decides about the rows."""
        return {
            "type": type(self).__qualname__,
            "buffer_size": self._buffer_size,
            "packs_per_batch": self._packs_per_batch,
            "select": self._function_config(self._select),
            "dataset": self.dataset.config(),
        }


def _set_random_states(states: list[Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])
