"""Where a worker's stream stands between two rows.

The position is the state of the stages below from before the buffer was filled, and the number of its packs that were emitted
since. Whoever starts from it fills the same buffer again and leaves those packs out, so that a start from a position takes as
long as a start from the beginning, and the buffer itself is never stored.

That holds while the data is the same. If a part of it cannot be read any more, the buffer is another one: hashes of the sources
tell, and those that were emitted are passed over one by one, wherever they come now.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

from megatron.energon.state import FlexState

from lightning_pack.row import EncodedSource

#: Bytes of the hash of a source.
HASH_BYTES = 8


@dataclass(frozen=True)
class StagePosition:
    """Where a stage stands between two rows.

    Args:
        buffer: number of the buffer whose packs come next.
        emitted: how many of its packs were emitted.
        start: state of the stages below before that buffer was filled; the same object for all positions in a buffer.
        skip: hashes of sources that are passed over while it is filled, :data:`HASH_BYTES` each.
        given: hashes of the sources that were emitted of it.
        digest: hash of all its sources in order; none where none was emitted.
    """

    buffer: int
    emitted: int
    start: FlexState
    skip: bytes = b""
    given: bytes = b""
    digest: bytes = b""


@dataclass
class Buffer:
    """Sources that packs are chosen from."""

    number: int
    #: State of the stages below before the first source.
    start: FlexState
    sources: list[EncodedSource] = field(default_factory=list)
    #: Markers of sources that are left out; they take no place in the buffer.
    markers: list[EncodedSource] = field(default_factory=list)
    #: Hashes of sources to be passed over, since they were emitted before the data was damaged.
    skip: Counter[bytes] = field(default_factory=Counter)
    #: What of ``skip`` has not come yet.
    unmet: Counter[bytes] = field(default_factory=Counter)

    @property
    def digest(self) -> bytes:
        """Of the sources, in order."""
        return _hash(b"".join(map(hash_of, self.sources)))

    def position(self, emitted: int = 0, given: bytes = b"", digest: bytes = b"") -> StagePosition:
        """After ``emitted`` packs."""
        return StagePosition(self.number, emitted, self.start, b"".join(sorted(self.skip.elements())), given, digest)


class DamagedDataError(ValueError):
    """The data is not what it was when it was indexed, or when a checkpoint was saved."""


def hash_of(source: EncodedSource) -> bytes:
    """Tells a source from others."""
    return _hash(f"{len(source)} {source.key}".encode())


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


def hashes(joined: bytes) -> list[bytes]:
    """The hashes that were joined."""
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]
