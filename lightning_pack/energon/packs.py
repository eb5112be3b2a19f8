"""Sources -> buffer -> packs, each with the position after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset

from lightning_pack.energon.fields import damaged
from lightning_pack.energon.position import Buffer, DamagedDataError, RestoreKey, StagePosition, hashes
from lightning_pack.source import EncodedSource, LeftOut, Pack

#: So many sources in a row without one that can be trained on end the run.
MOST_LEFT_OUT_IN_A_ROW = 10_000
#: Characters of the reason that the error then tells of one of them.
_MOST_SHOWN = 600


class Select(Protocol):
    """Buffer -> groups, in the way of :meth:`lightning_pack.PackingPolicy.select`."""

    def __call__(self, samples: list[EncodedSource], *, ages: Sequence[int], final: bool) -> list[list[EncodedSource]]:
        """Groups of the sources; those in none stay in the buffer, but where ``final``."""


class Emitted(NamedTuple):
    """A pack, the hashes of its sources, and the position after it."""

    pack: Pack
    hashed: bytes
    after: StagePosition


class PackStream:
    """Packs from sources. While the packs of one buffer are emitted the next one is filled, so they come at an even pace.

    Args:
        dataset: sources, and markers of those that are left out.
        buffer_size: sources to choose from.
        media_tokens: no further source is taken once the buffer holds so many placeholders of media; None is no limit.
        media_bytes: the same for the bytes of media that it holds.
        select: buffer -> groups; sources in no group stay in the buffer; markers ride along.
        build: group -> pack (Energon's second hook).
        take_damaged: markers of the samples that could not be read since the last call.
        repair: whether to go on where the sources of a buffer are not those that they were.
        worker_config: of the logical worker.
    """

    def __init__(
        self,
        dataset: SavableDataset[EncodedSource],
        *,
        buffer_size: int,
        media_tokens: int | None,
        media_bytes: int | None,
        select: Select,
        build: Callable[[list[EncodedSource]], Pack],
        take_damaged: Callable[[], list[EncodedSource]],
        repair: bool,
        worker_config: WorkerConfig,
    ) -> None:
        self.dataset = dataset
        self._buffer_size = buffer_size
        self._media_tokens, self._media_bytes = media_tokens, media_bytes
        self._select, self._build = select, build
        self._take_damaged, self.repair = take_damaged, repair
        self._worker_config = worker_config
        self._left_out_in_a_row: Counter[str] = Counter()
        #: What was left out of a finite stream in which nothing can be trained on.
        self.orphans: list[LeftOut] = []

    def packs(self, origin: StagePosition) -> Iterator[Emitted]:
        """Each pack from a position on; the dataset must stand where the position says."""
        sources = iter(self.dataset)
        current = self._begin(origin)
        self._fill(current, sources, upto=self._buffer_size)
        emitted, given = origin.emitted, origin.given
        if emitted and (not current.sources or current.digest != origin.digest):
            self.may_repair(f"buffer {current.number}")
            current.remove(Counter(hashes(given)))
            self._fill(current, sources, upto=self._buffer_size)
            emitted, given = 0, b""
        while current.sources:
            # The stream goes on at a source or has ended: no marker is left that would find no pack to ride in.
            ahead = self._peek(current, sources) if self._full(current, upto=self._buffer_size) else None
            groups = self._groups(current, final=ahead is None)
            place = {id(source): i for i, source in enumerate(current.sources)}
            chosen = [[place[id(source)] for source in group if len(source)] for group in groups]
            hashed = [b"".join(current.hashed[i] for i in indices) for indices in chosen]
            if emitted > len(groups) or given != b"".join(hashed[:emitted]):
                raise damaged(
                    f"loader worker {self._worker_config.rank}",
                    f"{emitted} packs of buffer {current.number} are said to be gone; it has {len(groups)}, of other sources",
                )
            if ahead is not None:
                ahead.carry_over(current, gone={i for indices in chosen for i in indices})
            ages, missing = current.ages, 0 if ahead is None else self._buffer_size - len(ahead.sources)
            for number in range(emitted, len(groups)):
                given += hashed[number]
                last = ahead is not None and number == len(groups) - 1
                pack = self._build(groups[number])
                # A row that was written ahead brings its own: its sources did not wait here.
                pack.ages = pack.ages or [ages[i] for i in chosen[number]]
                yield Emitted(pack, hashed[number], ahead.position() if last and ahead else current.position(number + 1, given))
                if ahead is not None:
                    # Over the packs that are left, so that a start in the middle keeps the pace too.
                    done, all_left = number + 1 - emitted, len(groups) - emitted
                    self._fill(ahead, sources, upto=self._buffer_size - missing + missing * done // all_left)
            if ahead is None:
                return
            self._fill(ahead, sources, upto=self._buffer_size)
            current, emitted, given = ahead, 0, b""
        self.orphans = [gone for marker in current.markers for gone in marker.news]

    def may_repair(self, what: str) -> None:
        """Check that sources other than those that were there before are allowed.

        Raises:
            DamagedDataError: if not.
        """
        if not self.repair:
            raise DamagedDataError(
                f"{what} of loader worker {self._worker_config.rank}: the sources that are read again are not those that the "
                "checkpoint was saved with: the data or the encoder has changed, or the checkpoint is damaged. Restore what it "
                'was, or set on_damaged="skip" to go on with what is left (nothing is trained on twice)'
            )

    def _begin(self, origin: StagePosition) -> Buffer:
        """The buffer of a position, with the sources that were carried over, which are read again by their keys."""
        buffer = Buffer.at(origin)
        # In the order in which they lie in the shards: a key ends with the number of the sample.
        order = sorted(range(len(origin.carried)), key=lambda i: origin.carried[i][-1])
        again = {i: self._read_again(origin.carried[i]) for i in order}
        for source in again.values():
            self._usable(source)
        buffer.read_again([again[i] for i in range(len(again))], origin.entered)
        if not origin.emitted and buffer.carried_digest != origin.digest:
            self.may_repair(f"buffer {buffer.number}")
        return buffer

    def _read_again(self, key: RestoreKey) -> EncodedSource:
        try:
            return self.dataset.restore_sample(key)
        except AssertionError as e:
            # Energon's words where a sample gives fewer pieces than it did.
            if not self.repair or "did not yield enough samples" not in str(e):
                raise
            # A sample that cannot be read is left out once, piece by piece here, since some were trained on.
            map_name, sample, piece, *rest = key
            marker = self.dataset.restore_sample((map_name, sample, 0, *rest))
            return EncodedSource.dropped(f"{marker.key}#{piece}", "damaged")

    def _groups(self, buffer: Buffer, *, final: bool) -> list[list[EncodedSource]]:
        ages = buffer.ages + [0] * len(buffer.markers)
        self._worker_config.worker_push_sample_index(buffer.number)
        try:
            return self._select(buffer.sources + buffer.markers, ages=ages, final=final)
        finally:
            self._worker_config.worker_pop_sample_index()

    def _fill(self, buffer: Buffer, sources: Iterator[EncodedSource], *, upto: int) -> None:
        tokens, held = self._media_of(buffer.sources)
        while not self._full_of(buffer, tokens, held, upto=upto) and (source := self._take(sources, buffer)) is not None:
            if not self._usable(source):
                buffer.markers.append(source)
            elif not buffer.passes_over(source):
                buffer.add(source)
                more = self._media_of([source])
                tokens, held = tokens + more[0], held + more[1]

    def _full(self, buffer: Buffer, *, upto: int) -> bool:
        return self._full_of(buffer, *self._media_of(buffer.sources), upto=upto)

    def _media_of(self, sources: Sequence[EncodedSource]) -> tuple[int, int]:
        """Placeholders and bytes of media, of what is limited."""
        return (
            0 if self._media_tokens is None else sum(source.media_tokens for source in sources),
            0 if self._media_bytes is None else sum(source.held_media for source in sources),
        )

    def _full_of(self, buffer: Buffer, tokens: int, held: int, *, upto: int) -> bool:
        if len(buffer.sources) >= upto:
            return True
        # One more is always taken, else what was carried over could hold up the stream.
        if not buffer.new:
            return False
        return (self._media_tokens is not None and tokens >= self._media_tokens) or (
            self._media_bytes is not None and held >= self._media_bytes
        )

    def _peek(self, current: Buffer, sources: Iterator[EncodedSource]) -> Buffer | None:
        """The buffer after this one, with its first new source; markers before that belong to this one."""
        while True:
            following = current.following(self.dataset.save_state())
            source = self._take(sources, following)
            if source is not None and self._usable(source):
                if not following.passes_over(source):
                    following.add(source)
                    return following
                current.passes_over(source)
            # What was read is done with: a start from the next buffer would not read it again.
            current.markers += following.markers
            if source is None:
                return None
            if not len(source):
                current.markers.append(source)

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
            tokens = f" of {source.left_out.tokens:,} tokens" if source.left_out.tokens else ""
            why = f": {source.why[:_MOST_SHOWN]}" if source.why else ""
            raise ValueError(
                f"{count} sources in a row cannot be trained on ({reasons}; the last is {source.left_out.key!r}{tokens}{why}): "
                + (
                    "check data, tokenizer and encoder (vision)"
                    if why
                    else "check capacity, limits of media, tokenizer or encoder (vision), and data"
                )
            )
        return False
