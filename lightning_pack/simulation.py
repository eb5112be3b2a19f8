"""Simulation: the packs that a policy makes of a stream of lengths, without data, model or loader."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from lightning_pack.media_budget import MediaBudget, MediaCost
from lightning_pack.policy import PackingPolicy


@dataclass(frozen=True, kw_only=True)
class SimulatedStream:
    """What one loader worker makes of a finite stream of sources.

    Args:
        policy: the packing rules.
        lengths: real tokens of the sources, in order of arrival.
        groups: indices into ``lengths``, pack by pack, in the order in which their packs were chosen.
        ages: for each source, how many sources had been read after it when its pack was chosen.
        choices: how often groups were chosen from the buffer.
    """

    policy: PackingPolicy
    lengths: Sequence[int]
    groups: list[list[int]]
    ages: list[int]
    choices: int

    @property
    def packs(self) -> int:
        """Number of packs."""
        return len(self.groups)

    @property
    def fill(self) -> float:
        """Real tokens / (packs x capacity)."""
        return sum(self.lengths) / (self.packs * self.policy.capacity) if self.groups else 0.0

    @property
    def oldest(self) -> float:
        """The greatest age of a source, in turnovers of the buffer."""
        return max(self.ages, default=0) / self.policy.buffer_size

    @property
    def squares(self) -> list[int]:
        """Sum of squared real lengths of each pack: what its attention costs."""
        return [sum(self.lengths[i] ** 2 for i in group) for group in self.groups]


def simulate(
    policy: PackingPolicy,
    lengths: Sequence[int],
    *,
    keys: Sequence[Hashable] | None = None,
    media: Sequence[MediaCost] | None = None,
) -> SimulatedStream:
    """Pack a finite stream as a loader worker does, its end included.

    Args:
        policy: the packing rules.
        lengths: real tokens of the sources, in order of arrival; those that a policy leaves out are not among them.
        keys: sources with different keys do not share a pack.
        media: of each source, within the limits of a pack; None means none, and that no limit of media is reached.

    Raises:
        ValueError: for a source without tokens.
        OverlengthError: for a source that fits in no row.
    """
    policy = policy.settled(lengths, keys=keys, media=media)
    lengths = [int(length) for length in lengths]
    groups: list[list[int]] = []
    ages = [0] * len(lengths)
    buffer: list[int] = []
    read = choices = 0
    while buffer or read < len(lengths):
        more = min(policy.buffer_size - len(buffer), len(lengths) - read)
        if media is not None:
            more = _within_limits(policy, [media[i] for i in buffer], media[read : read + more])
        buffer += range(read, read + more)
        read += more
        leaving = policy.choose(
            [lengths[i] for i in buffer],
            ages=[read - 1 - i for i in buffer],
            keys=None if keys is None else [keys[i] for i in buffer],
            media=None if media is None else [media[i][:2] for i in buffer],
            final=read == len(lengths),
        )
        choices += 1
        gone = {i for group in leaving for i in group}
        groups += [[buffer[i] for i in group] for group in leaving]
        for i in gone:
            ages[buffer[i]] = read - 1 - buffer[i]
        buffer = [source for i, source in enumerate(buffer) if i not in gone]
    return SimulatedStream(policy=policy, lengths=lengths, groups=groups, ages=ages, choices=choices)


def _within_limits(policy: PackingPolicy, waiting: Sequence[MediaCost], new: Sequence[MediaCost]) -> int:
    """How many of the new sources a buffer takes before it is full of media; one more is always taken."""
    if (policy.buffer_media_tokens, policy.buffer_media_bytes) == (None, None):
        return len(new)
    limits = MediaBudget(tokens=policy.buffer_media_tokens, nbytes=policy.buffer_media_bytes)
    tokens, held = sum(cost.tokens for cost in waiting), sum(cost.held for cost in waiting)
    for number, cost in enumerate(new):
        # Full once a limit is reached.
        if number and not limits.allows(tokens + 1, held + 1):
            return number
        tokens, held = tokens + cost.tokens, held + cost.held
    return len(new)
