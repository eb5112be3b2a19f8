"""The last stages of a worker's stream: sources -> buffer -> packs -> rows, with a position that costs nothing to note."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.state import FlexState
from megatron.energon.wrappers.base import BaseWrapperDataset

from lightning_pack.energon.fields import damaged
from lightning_pack.energon.position import Buffer, DamagedDataError, StagePosition, hash_of, hashes
from lightning_pack.energon.randomness import StreamRandomness
from lightning_pack.row import EncodedSource, LeftOut, Pack, PackedBatch

#: So many sources in a row without one that can be trained on end the run.
MOST_LEFT_OUT_IN_A_ROW = 10_000


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
        repair: whether to go on where the sources of a buffer are not those that they were.
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
        repair: bool,
        worker_config: WorkerConfig,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self._buffer_size = buffer_size
        self._select, self._build, self._batch = select, build, batch
        self._packs_per_batch = packs_per_batch
        self._take_damaged, self._repair = take_damaged, repair
        self.reset_state_own()

    def reset_state_own(self) -> None:
        """Stand at the beginning."""
        self._origin: StagePosition | None = None
        self._position: StagePosition | None = None
        self._random = StreamRandomness(self.worker_config)
        self._left_out_in_a_row: Counter[str] = Counter()
        #: What was left out of a finite stream in which nothing can be trained on.
        self.orphans: list[LeftOut] = []

    @property
    def position(self) -> StagePosition:
        """After the last row."""
        return self._position or self._origin or StagePosition(0, 0, self.dataset.save_state())

    def go_to(self, position: StagePosition) -> None:
        """Go to a position, before the stage is iterated. Energon changes the state in it, so give a copy."""
        self.reset_state_own()
        self.dataset.restore_state(position.start)
        # What was restored is not changed before it is iterated.
        self._origin = replace(position, start=self.dataset.save_state())

    def save_state(self) -> FlexState:
        """The position, for Energon."""
        at = self.position
        return FlexState(__class__=type(self).__name__, **{f.name: getattr(at, f.name) for f in fields(at)})

    def restore_state(self, state: FlexState) -> None:
        """Go to a position, for Energon."""
        self.go_to(StagePosition(**{f.name: state[f.name] for f in fields(StagePosition)}))

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
        origin = self.position
        sources = iter(self.dataset)
        skip = Counter(hashes(origin.skip))
        current = Buffer(origin.buffer, origin.start, skip=skip, unmet=skip.copy())
        self._fill(current, sources, upto=self._buffer_size)
        emitted, given = origin.emitted, origin.given
        if emitted and (not current.sources or current.digest != origin.digest):
            self._pass_over(current, given)
            self._fill(current, sources, upto=self._buffer_size)
            emitted, given = 0, b""
        while current.sources:
            # The stream goes on at a source or has ended: no marker is left that would find no pack to ride in.
            ahead = self._next(current, sources) if len(current.sources) == self._buffer_size else None
            groups, digest = self._groups(current), current.digest
            hashed = [b"".join(hash_of(source) for source in group if len(source)) for group in groups]
            if emitted > len(groups) or given != b"".join(hashed[:emitted]):
                raise damaged(
                    f"loader worker {self.worker_config.rank}",
                    f"{emitted} packs of buffer {current.number} are said to be gone; it has {len(groups)}, of other sources",
                )
            for i, group in enumerate(groups):
                if i < emitted:
                    continue
                given += hashed[i]
                if ahead is not None and i == len(groups) - 1:
                    yield self._build(group), ahead.position()
                else:
                    yield self._build(group), current.position(i + 1, given, digest)
                if ahead is not None:
                    # Over the packs that are left, so that a start in the middle keeps the pace too.
                    done, all_left = i + 1 - emitted, len(groups) - emitted
                    self._fill(ahead, sources, upto=self._buffer_size * done // all_left)
            if ahead is None:
                return
            self._fill(ahead, sources, upto=self._buffer_size)
            current, emitted, given = ahead, 0, b""
        self.orphans = [marker.left_out for marker in current.markers if marker.left_out is not None]

    def _pass_over(self, buffer: Buffer, given: bytes) -> None:
        """Take out of a buffer what was emitted when it was another one; what is not in it is passed over when it comes."""
        if not self._repair:
            raise DamagedDataError(
                f"buffer {buffer.number} of loader worker {self.worker_config.rank}: the sources that are read again are not "
                "those that the checkpoint was saved with: the data or the encoder has changed, or the checkpoint is damaged. "
                'Restore what it was, or set on_damaged="skip" to go on with what is left (nothing is trained on twice)'
            )
        emitted = Counter(hashes(given))
        buffer.skip += emitted
        buffer.unmet += emitted
        buffer.sources = [source for source in buffer.sources if not self._was_emitted(source, buffer)]

    @staticmethod
    def _was_emitted(source: EncodedSource, buffer: Buffer) -> bool:
        if not buffer.unmet or (found := hash_of(source)) not in buffer.unmet:
            return False
        buffer.unmet[found] -= 1
        if not buffer.unmet[found]:
            del buffer.unmet[found]
        return True

    def _groups(self, buffer: Buffer) -> list[list[EncodedSource]]:
        self.worker_config.worker_push_sample_index(buffer.number)
        try:
            return self._select(buffer.sources + buffer.markers)
        finally:
            self.worker_config.worker_pop_sample_index()

    def _fill(self, buffer: Buffer, sources: Iterator[EncodedSource], *, upto: int) -> None:
        if len(buffer.sources) >= upto:
            return
        with self._random.of_buffer(None if buffer.sources or buffer.markers else buffer.number):
            while len(buffer.sources) < upto:
                source = self._take(sources, buffer)
                if source is None:
                    return
                if not self._usable(source):
                    buffer.markers.append(source)
                elif not self._was_emitted(source, buffer):
                    buffer.sources.append(source)

    def _next(self, current: Buffer, sources: Iterator[EncodedSource]) -> Buffer | None:
        """The buffer after ``current``, with its first source; markers before that belong to ``current``."""
        while True:
            start = self.dataset.save_state()
            with self._random.of_buffer(current.number + 1):
                source = self._take(sources, current)
            if source is None:
                return None
            if not self._usable(source):
                current.markers.append(source)
            elif not self._was_emitted(source, current):
                return Buffer(current.number + 1, start, [source], skip=current.unmet, unmet=current.unmet.copy())

    def _take(self, sources: Iterator[EncodedSource], buffer: Buffer) -> EncodedSource | None:
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
