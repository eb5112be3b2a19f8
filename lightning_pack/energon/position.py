"""Where a worker's stream stands between two rows.

The position is the state of the stages below from before the buffer was filled up, the keys of the sources that were in it
already (carried over), and the number of its packs that were emitted since. Whoever starts from it reads those sources again,
fills up the same buffer and leaves those packs out, so that a start from a position takes about as long as a start from the
beginning, and no token is ever stored.

That holds while the data is the same. If a part of it cannot be read any more, the buffer is another one: hashes of the sources
tell, and those that were emitted are passed over one by one, wherever they come now.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.energon.state import FlexState

from lightning_pack.source import EncodedSource

#: Bytes of the hash of a source.
HASH_BYTES = 8
RestoreKey = tuple[Any, ...]


@dataclass(frozen=True)
class StagePosition:
    """Where a stage stands between two rows.

    Args:
        buffer: number of the buffer whose packs come next.
        emitted: how many of its packs were emitted.
        start: state of the stages below before that buffer was filled up; the same object for all positions in a buffer.
        carried: keys of the sources that were in it before that, in order; the same object for all positions in a buffer.
        entered: for each of them, how many sources had been read before it.
        read: sources read before the buffer was filled up.
        skip: hashes of sources that are passed over while it is filled, :data:`HASH_BYTES` each.
        given: hashes of the sources that were emitted of it.
        digest: hash of all its sources in order; of those that were in it before, where none was emitted.
        window: number of the window of packs that is being emitted, where packs are balanced. What is above is then the
            position before its first pack.
        window_emitted: how many of its packs were emitted.
        window_given: hashes of their sources.
    """

    buffer: int
    emitted: int
    start: FlexState
    carried: Sequence[RestoreKey] = field(default_factory=list)
    entered: Sequence[int] = field(default_factory=list)
    read: int = 0
    skip: bytes = b""
    given: bytes = b""
    digest: bytes = b""
    window: int = 0
    window_emitted: int = 0
    window_given: bytes = b""


@dataclass
class Buffer:
    """Sources that packs are chosen from."""

    number: int
    #: State of the stages below before the first source that is new.
    start: FlexState
    #: Sources read before those that are new.
    read: int = 0
    #: What was in it before, see :class:`StagePosition`.
    carried: Sequence[RestoreKey] = field(default_factory=list)
    carried_entered: Sequence[int] = field(default_factory=list)
    carried_digest: bytes = b""
    #: In order of arrival; for each its hash, and how many sources had been read before it.
    sources: list[EncodedSource] = field(default_factory=list)
    hashed: list[bytes] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    #: Sources that are new.
    new: int = 0
    #: Markers of sources that are left out; they take no place in the buffer.
    markers: list[EncodedSource] = field(default_factory=list)
    #: Hashes of sources to be passed over, since they were emitted before the data was damaged.
    skip: Counter[bytes] = field(default_factory=Counter)
    #: What of ``skip`` has not come yet.
    unmet: Counter[bytes] = field(default_factory=Counter)

    @classmethod
    def at(cls, position: StagePosition) -> Buffer:
        """The buffer of a position, without its sources."""
        skip = Counter(hashes(position.skip))
        return cls(position.buffer, position.start, position.read, skip=skip, unmet=skip.copy())

    def following(self, start: FlexState) -> Buffer:
        """The next buffer, still empty."""
        return Buffer(self.number + 1, start, self.read + self.new, skip=self.unmet.copy(), unmet=self.unmet.copy())

    def carry_over(self, before: Buffer, *, gone: Collection[int]) -> None:
        """Put the sources of the buffer before this one that are not ``gone`` in front of those that are new."""
        stay = [i for i in range(len(before.sources)) if i not in gone]
        new = self.sources
        self.sources, self.hashed = [before.sources[i] for i in stay], [before.hashed[i] for i in stay]
        self.entered = [before.entered[i] for i in stay]
        self._note_carried()
        self._add_all(new)

    def _add_all(self, new: Sequence[EncodedSource]) -> None:
        self.new = 0
        for source in new:
            self.add(source)

    def _note_carried(self) -> None:
        """The sources that are here now are those that were here before any new one."""
        self.carried = [source.__restore_key__ for source in self.sources]
        self.carried_entered = list(self.entered)
        self.carried_digest = self.digest if self.sources else b""

    def read_again(self, sources: Sequence[EncodedSource], entered: Sequence[int]) -> None:
        """Put in the sources that were carried over, which are read again, before any new one."""
        for source, number in zip(sources, entered, strict=True):
            if not len(source):
                self.markers.append(source)
            elif self.passes_over(source):
                # It does not come again.
                self.skip -= Counter([hash_of(source)])
            else:
                self.sources.append(source)
                self.hashed.append(hash_of(source))
                self.entered.append(number)
        self._note_carried()

    def passes_over(self, source: EncodedSource) -> bool:
        """Whether a source that comes was emitted before the data was damaged; it is then done with."""
        if not self.unmet or not self.unmet[hashed := hash_of(source)]:
            return False
        self.unmet[hashed] -= 1
        return True

    def add(self, source: EncodedSource) -> None:
        """A source that is new."""
        self.sources.append(source)
        self.hashed.append(hash_of(source))
        self.entered.append(self.read + self.new)
        self.new += 1

    def remove(self, emitted: Counter[bytes]) -> None:
        """Take out the sources that were emitted; those that are not here are passed over when they come."""
        missing, keep = emitted.copy(), []
        for i, hashed in enumerate(self.hashed):
            if missing[hashed]:
                missing[hashed] -= 1
            else:
                keep.append(i)
        carried = len(self.sources) - self.new
        # Where the buffer is filled again all but those that were carried over come again.
        self.skip += emitted - Counter(self.hashed[:carried])
        self.unmet += missing
        new = [self.sources[i] for i in keep if i >= carried]
        stay = [i for i in keep if i < carried]
        self.sources, self.hashed = [self.sources[i] for i in stay], [self.hashed[i] for i in stay]
        self.entered = [self.entered[i] for i in stay]
        self._note_carried()
        self._add_all(new)

    @property
    def ages(self) -> list[int]:
        """For each source, how many were read after it."""
        return [self.read + self.new - 1 - entered for entered in self.entered]

    @property
    def digest(self) -> bytes:
        """Of the sources, in order."""
        return digest_of(b"".join(self.hashed))

    def position(self, emitted: int = 0, given: bytes = b"") -> StagePosition:
        """After ``emitted`` packs."""
        return StagePosition(
            buffer=self.number,
            emitted=emitted,
            start=self.start,
            carried=self.carried,
            entered=self.carried_entered,
            read=self.read,
            skip=b"".join(sorted(self.skip.elements())),
            given=given,
            digest=self.digest if emitted else self.carried_digest,
        )


class DamagedDataError(ValueError):
    """The data is not what it was when it was indexed, or when a checkpoint was saved."""


def hash_of(source: EncodedSource) -> bytes:
    """Tells a source from others."""
    return digest_of(f"{len(source)} {source.key}".encode())


def digest_of(content: bytes) -> bytes:
    """A hash of :data:`HASH_BYTES`."""
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


def hashes(joined: bytes) -> list[bytes]:
    """The hashes that were joined."""
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]
