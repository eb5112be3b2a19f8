"""What packing made of a stream: fill, padding by cause, sources, targets, and what was left out.

Every slot of a row is one of three things::

    | real token | alignment padding (up to the policy's multiple) | tail padding (no source was short enough) |

so ``real_tokens + alignment_padding + tail_padding == slots``, exactly. Counts are whole numbers in one int64 state, histograms
of ages and lengths included, so a sum over ranks is one reduction and a resumed run adds to what it counted before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_pack.histogram import (
    AGE_BINS,
    LENGTH_COUNTS,
    AgeHistogram,
    LengthHistogram,
    add_lengths,
    age_counts,
    length_edges,
)
from lightning_pack.policy import PackingPolicy
from lightning_pack.row import PackedBatch

#: Why a source is dropped or cut; any other reason is counted as ``other``.
REASONS = (
    *("overlength", "truncated", "no_targets", "empty", "corrupt", "encoder_error", "damaged", "uneven_ranks"),
    *("image", "media_budget", "other"),
)
#: Those that mean that a source, or its end, was too long for a row.
_TOO_LONG = ("overlength", "truncated")
#: Names of the first elements of :attr:`PackingMetrics.counts`, in order.
COUNTERS = (
    *("packs", "sources", "real_tokens", "target_tokens", "slots", "alignment_padding"),
    *(f"left_out/{reason}" for reason in REASONS),
    *(f"left_out_tokens/{reason}" for reason in REASONS),
)
_PACKS, _SOURCES, _REAL, _TARGETS, _SLOTS, _ALIGNMENT, _LEFT_OUT = range(7)
#: Where the histograms are in it.
AGES = slice(len(COUNTERS), len(COUNTERS) + AGE_BINS)
LENGTHS = slice(AGES.stop, AGES.stop + LENGTH_COUNTS)
#: Length of :attr:`PackingMetrics.counts`.
COUNTS = LENGTHS.stop


def counted_reason(reason: str) -> str:
    """The one of :data:`REASONS` that ``reason`` is counted under."""
    return reason if reason in REASONS else "other"


class PackingStats(NamedTuple):
    """Counts of packing; what is a share or a mean is 0 where nothing was counted."""

    packs: int
    #: Sources in those packs; pieces of a split source count one by one.
    sources: int
    real_tokens: int
    #: Tokens that the loss counts.
    target_tokens: int
    #: Places for tokens: packs x capacity, or x width where rows have a fixed width.
    slots: int
    #: Pads up to the multiple of each source.
    alignment_padding: int
    #: Sources dropped or cut, by those reasons that occurred.
    left_out: dict[str, int]
    #: Their real tokens that are not trained on, by the same reasons.
    left_out_tokens: dict[str, int]
    #: How long the sources waited for their packs; None where the size of the buffer is not known.
    ages: AgeHistogram | None = None
    #: Their aligned lengths; None where the capacity is not known.
    lengths: LengthHistogram | None = None

    @classmethod
    def of(cls, counts: Sequence[int], *, capacity: int | None = None) -> PackingStats:
        """The statistics of numbers in the order of :attr:`PackingMetrics.counts`.

        Args:
            counts: all of them, or only those of :data:`COUNTERS`.
            capacity: of the policy that the histograms were counted with; None where they were not.
        """
        head, tail = counts[:_LEFT_OUT], counts[_LEFT_OUT : len(COUNTERS)]
        sources, tokens = tail[: len(REASONS)], tail[len(REASONS) :]
        occurred = [i for i, number in enumerate(sources) if number]
        packs, packed, real, targets, slots, alignment = head
        return cls(
            packs=packs,
            sources=packed,
            real_tokens=real,
            target_tokens=targets,
            slots=slots,
            alignment_padding=alignment,
            left_out={REASONS[i]: sources[i] for i in occurred},
            left_out_tokens={REASONS[i]: tokens[i] for i in occurred},
            ages=None if capacity is None else AgeHistogram(tuple(counts[AGES])),
            lengths=None if capacity is None else LengthHistogram.of(counts[LENGTHS], capacity=capacity),
        )

    @property
    def tail_padding(self) -> int:
        """Slots that hold neither a real token nor alignment padding."""
        return self.slots - self.real_tokens - self.alignment_padding

    @property
    def fill(self) -> float:
        """Real tokens per slot."""
        return self.real_tokens / self.slots if self.slots else 0.0

    @property
    def alignment_fraction(self) -> float:
        """Alignment padding per slot."""
        return self.alignment_padding / self.slots if self.slots else 0.0

    @property
    def tail_fraction(self) -> float:
        """Tail padding per slot."""
        return self.tail_padding / self.slots if self.slots else 0.0

    @property
    def tokens_read(self) -> int:
        """Real tokens and all that were left out; a piece of a split source counts the token that it repeats, too."""
        return self.real_tokens + sum(self.left_out_tokens.values())

    @property
    def overlength_fraction(self) -> float:
        """Tokens left out because a source was longer than the capacity, dropped whole or cut, per token read."""
        too_long = sum(self.left_out_tokens.get(reason, 0) for reason in _TOO_LONG)
        return too_long / self.tokens_read if too_long else 0.0

    @property
    def sources_per_pack(self) -> float:
        """Mean number of sources in a pack."""
        return self.sources / self.packs if self.packs else 0.0

    def ratios(self) -> dict[str, float]:
        """Names for a logger -> shares, means, percentiles; those of ages and lengths only where they are known.

        ``fill``, ``alignment_padding`` and ``tail_padding`` are per slot and add up to 1, ``overlength`` is per token read,
        ages are in turnovers of the buffer, ``gap_to_bound`` is in packs per pack of the bound.
        """
        values = {
            "fill": self.fill,
            "alignment_padding": self.alignment_fraction,
            "tail_padding": self.tail_fraction,
            "overlength": self.overlength_fraction,
            "sources_per_pack": self.sources_per_pack,
        }
        if self.ages is not None:
            values |= {"age_p50": self.ages.percentile(50), "age_p95": self.ages.percentile(95), "age_max": self.ages.largest}
        if self.lengths is not None:
            values["gap_to_bound"] = self.lengths.gap
        return values


class PackingMetrics(Metric):
    """Counts packs, sources, tokens and padding of packed batches; :meth:`compute` gives :class:`PackingStats`.

    Under a process group :meth:`compute` sums over its ranks (all ranks, or those of the keyword ``process_group``).

    Args:
        policy: what the rows were packed with; gives capacity, width, multiple and the size of the buffer. Without one every
            batch counts as one pack whose slots are its physical width; pads between sources then count as alignment, those
            after the last as tail; ages and lengths are not counted.
        packs_per_batch: packs that the loader puts in one batch, where there is a policy. A batch counts as no more packs than
            it has sources and no fewer than its width needs.
        **kwargs: of :class:`torchmetrics.Metric`.

    Raises:
        ValueError: for ``packs_per_batch`` below 1, or above 1 without a policy.

    Example:
        >>> from lightning_pack.source import EncodedSource
        >>> policy = PackingPolicy(capacity=16, multiple=4)
        >>> sources = [EncodedSource.of(key, torch.arange(n)) for key, n in (("a", 5), ("b", 3))]
        >>> metric = PackingMetrics(policy)
        >>> metric.update(PackedBatch.from_packs([policy.build(sources)], pad_id=0))
        >>> stats = metric.compute()
        >>> stats.real_tokens, stats.alignment_padding, stats.tail_padding, stats.slots, stats.fill
        (8, 4, 4, 16, 0.5)
    """

    full_state_update = False
    is_differentiable = False
    #: int64 ``[COUNTS]``: :data:`COUNTERS`, then the histograms.
    counts: Tensor
    _length_edges: Tensor

    def __init__(self, policy: PackingPolicy | None = None, *, packs_per_batch: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if packs_per_batch < 1:
            raise ValueError(f"packs_per_batch={packs_per_batch}: a batch holds at least one pack")
        if policy is None and packs_per_batch != 1:
            raise ValueError(f"packs_per_batch={packs_per_batch} is not used without a policy: pass the policy too")
        self.policy = policy
        self.packs_per_batch = packs_per_batch
        self.add_state("counts", torch.zeros(COUNTS, dtype=torch.int64), dist_reduce_fx="sum")
        edges = torch.empty(0, dtype=torch.int64) if policy is None else length_edges(policy.capacity)
        self.register_buffer("_length_edges", edges, persistent=False)

    def update(self, batch: PackedBatch) -> None:
        """Count one batch. Reads nothing back from the device."""
        width = batch.width
        sources = len(batch.source_keys)
        packs = self._packs(width, sources) if sources else 0
        # What the host knows goes to the device in one piece; what only the device knows is added there.
        known = np.zeros(COUNTS, dtype=np.int64)
        known[[_PACKS, _SOURCES, _SLOTS]] = packs, sources, self._slots(width, packs) if sources else 0
        for gone in batch.left_out:
            reason = _LEFT_OUT + REASONS.index(counted_reason(gone.reason))
            known[reason] += 1
            known[reason + len(REASONS)] += gone.tokens
        if not sources:
            # A blank row, which only carries news.
            self.counts.add_(torch.from_numpy(known).to(self.counts.device, non_blocking=True))
            return
        real = batch.cu_seqlens.diff().long()
        if self.policy is None:
            # Without the last source, whose tail fills the row, and without the repeats of a fixed number of boundaries.
            alignment = (batch.cu_seqlens_padded.diff() - real)[: max(sources - 1, 0)]
        else:
            known[AGES] = age_counts(batch.ages, buffer_size=self.policy.buffer_size)
            known[LENGTHS.start] = packs
            alignment = (-real).remainder(self.policy.multiple)
            add_lengths(self.counts[LENGTHS], real + alignment, edges=self._length_edges)
        self.counts.add_(torch.from_numpy(known).to(self.counts.device, non_blocking=True))
        self.counts[_REAL].add_(batch.cu_seqlens[-1])
        self.counts[_TARGETS].add_(batch.target_tokens())
        self.counts[_ALIGNMENT].add_(alignment.sum())

    def stats(self, counts: Sequence[int]) -> PackingStats:
        """The statistics of other numbers that were counted with the same policy, in the order of :attr:`counts`."""
        return PackingStats.of(counts, capacity=None if self.policy is None else self.policy.capacity)

    def compute(self) -> PackingStats:
        """The statistics of everything counted so far."""
        return self.stats(self.counts.tolist())

    def _packs(self, width: int, sources: int) -> int:
        if self.policy is None:
            return min(sources, 1)
        if self.policy.row_width is not None:
            return width // self.policy.row_width
        return min(max(self.packs_per_batch, -(-width // self.policy.capacity)), sources)

    def _slots(self, width: int, packs: int) -> int:
        if self.policy is None or self.policy.row_width is not None:
            return width
        return packs * self.policy.capacity
