"""One algorithm with one buffer size, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_pack.binning import lower_bound, packers
from lightning_pack.planner.balance import drawn_imbalance
from lightning_pack.planner.stream import OverLength, SourceMedia, Stream
from lightning_pack.policy import AUTO, BYTES_PER_TOKEN, PackingPolicy
from lightning_pack.simulation import simulate

#: Rows whose pixels a loader worker holds: the one that it makes, two that are ready, and the one that is sent, twice.
ROWS_UNDER_WAY = 5


@dataclass(frozen=True, kw_only=True)
class Combination:
    """What one loader worker makes of a stream of sources under one policy.

    Args:
        policy: the packing rules.
        sources: how many were packed.
        packs: how many they became, those at the end included.
        bound: packs that no packer can do without, had it all sources before it at once.
        real_tokens: of the sources.
        aligned_tokens: that they take up in rows.
        overlength: what was longer than the capacity.
        oldest: the longest wait of a source in the buffer, in turnovers of the buffer.
        imbalance: of the ranks that train on such packs, see :func:`drawn_imbalance`; 1 on one rank.
        media: of a source of the mean; None where there is none.
    """

    policy: PackingPolicy
    sources: int
    packs: int
    bound: int
    real_tokens: int
    aligned_tokens: int
    overlength: OverLength
    oldest: float
    imbalance: float
    media: SourceMedia | None = None

    @classmethod
    def measured(cls, policy: PackingPolicy, stream: Stream, *, bound: int, ranks: int = 1) -> Combination:
        """Pack a stream; ``bound`` is that of :func:`bound_of`."""
        made = simulate(policy, stream.lengths, keys=stream.keys, media=stream.costs)
        return cls(
            policy=made.policy,
            sources=len(stream.lengths),
            packs=made.packs,
            bound=bound,
            real_tokens=sum(stream.lengths),
            aligned_tokens=sum(map(policy.aligned, stream.lengths)),
            overlength=stream.overlength,
            oldest=made.oldest,
            imbalance=drawn_imbalance(made.squares, ranks=ranks, seed=policy.seed),
            media=stream.media,
        )

    @property
    def name(self) -> str:
        """The algorithm, and whether the buffer is flushed."""
        return self.policy.algorithm + ("" if self.policy.carry_over else ", flushed")

    @property
    def slots(self) -> int:
        """Tokens that the packs could hold."""
        return self.packs * self.policy.capacity

    @property
    def fill(self) -> float:
        """Real tokens per slot."""
        return self.real_tokens / self.slots

    @property
    def gap(self) -> float:
        """Packs per pack of the bound, less 1."""
        return self.packs / self.bound - 1

    @property
    def alignment(self) -> float:
        """Share of the slots that pad sources to the multiple."""
        return (self.aligned_tokens - self.real_tokens) / self.slots

    @property
    def tail(self) -> float:
        """Share of the slots after the last source of a pack."""
        return 1 - self.aligned_tokens / self.slots

    @property
    def rows_per_buffer(self) -> float:
        """Packs that a full buffer becomes."""
        return self._held_sources * self.packs / self.sources

    @property
    def memory(self) -> int:
        """Most bytes of ids, labels and media that a loader worker holds, estimated for sources of the mean.

        Two buffers, for the next one is filled while the packs of one are emitted, and with balance a window of packs. Images
        wait in them, within the limits of media, and in the shuffle buffer, as they are in the data; as pixels they are only in
        the rows under way.
        """
        held = self._held_sources
        buffers = -(-BYTES_PER_TOKEN * 2 * held * self.real_tokens // self.sources)
        memory = buffers + BYTES_PER_TOKEN * self.policy.window_tokens
        if self.media is None:
            return memory
        in_window = (self.policy.window_size + 1) * self.sources / self.packs if self.policy.balance else 0
        waiting = self.media.held * (2 * held + in_window + self.media.shuffled)
        return memory + int(waiting + ROWS_UNDER_WAY * self.media.nbytes * self.sources / self.packs)

    @property
    def _held_sources(self) -> int:
        """That a full buffer holds, of the mean; its limits of media let in one beyond."""
        policy, size = self.policy, self.policy.buffer_size
        if self.media is None:
            return size
        for limit, each in (
            (policy.buffer_media_tokens, self.media.tokens),
            (policy.buffer_media_bytes, self.media.encoded),
        ):
            if limit is not None and each:
                size = min(size, int(limit / each) + 1)
        return size


def bound_of(policy: PackingPolicy, stream: Stream) -> int:
    """The lower bound of the packs of a stream; sources with different keys need packs of their own."""
    apart: dict[str | None, list[int]] = {}
    for i, key in enumerate(stream.keys):
        apart.setdefault(key, []).append(i)
    return sum(_bound(policy, stream, of) for of in apart.values())


def _bound(policy: PackingPolicy, stream: Stream, of: Sequence[int]) -> int:
    bound = lower_bound([policy.aligned(stream.lengths[i]) for i in of], policy.capacity)
    if stream.costs is None:
        return bound
    budget = policy.media_budget
    for limit, total in (
        (budget.tokens, sum(stream.costs[i].tokens for i in of)),
        (budget.nbytes, sum(stream.costs[i].nbytes for i in of)),
    ):
        if limit is not None:
            bound = max(bound, -(-total // limit))
    return bound


def choices(base: PackingPolicy, buffer_sizes: Sequence[int]) -> list[PackingPolicy]:
    """What a plan compares: every registered algorithm with every buffer size, and a buffer that is emitted whole."""
    others = [name for name in packers() if name not in AUTO]
    kinds = [*((name, True) for name in (*AUTO, *others)), ("best_fit_decreasing", False)]
    return [
        replace(base, algorithm=algorithm, carry_over=carry_over, buffer_size=size)
        for algorithm, carry_over in kinds
        for size in buffer_sizes
    ]
