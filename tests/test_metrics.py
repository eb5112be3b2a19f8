"""PackingMetrics against counts written down by hand or recomputed source by source."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pack.layout import RowLayout
from lightning_pack.metrics import COUNTERS, COUNTS, REASONS, PackingMetrics, PackingStats
from lightning_pack.policy import PackingPolicy
from lightning_pack.row import PackedBatch
from lightning_pack.source import EncodedSource, LeftOut, Pack

RATIOS = ("fill", "alignment_padding", "tail_padding", "overlength", "sources_per_pack")


def source(key: str, length: int, targets: int | None = None) -> EncodedSource:
    labels = torch.arange(length)
    if targets is not None:
        labels[: length - targets] = -100
    return EncodedSource.of(key, torch.arange(length), labels)


def batch_of(policy: PackingPolicy, *packs: list[int]) -> PackedBatch:
    built = [policy.build([source(f"{i}.{j}", length) for j, length in enumerate(pack)]) for i, pack in enumerate(packs)]
    return PackedBatch.from_packs(built, pad_id=0)


def test_padding_is_told_apart_by_cause() -> None:
    policy = PackingPolicy(capacity=16, multiple=4)
    metric = PackingMetrics(policy)
    metric.update(PackedBatch.from_packs([policy.build([source("a", 5, targets=2), source("b", 3)])], pad_id=0))
    metric.update(batch_of(policy, [16]))
    stats = metric.compute()
    assert stats[:8] == (2, 3, 24, 2 + 2 + 15, 32, 4, {}, {})
    assert (stats.tail_padding, stats.fill, stats.alignment_fraction, stats.tail_fraction) == (4, 0.75, 0.125, 0.125)
    assert stats.sources_per_pack == 1.5


def test_slots_of_fixed_rows_are_the_row_width() -> None:
    policy = PackingPolicy(capacity=16, multiple=4, width=32)
    metric = PackingMetrics(policy, packs_per_batch=3)
    batch = batch_of(policy, [5, 3], [7])
    assert batch.input_ids.shape == (1, 64)
    metric.update(batch)
    stats = metric.compute()
    # Two packs, though the loader makes three where it can: the width tells.
    assert (stats.packs, stats.slots, stats.real_tokens, stats.alignment_padding, stats.tail_padding) == (2, 64, 15, 5, 44)


def test_several_packs_in_a_batch_have_several_capacities() -> None:
    policy = PackingPolicy(capacity=16, multiple=4)
    metric = PackingMetrics(policy, packs_per_batch=2)
    metric.update(batch_of(policy, [5, 3], [7]))
    assert metric.compute()[:6] == (2, 3, 15, 12, 32, 5)
    metric.reset()
    metric.update(batch_of(policy, [5]))  # the end of a finite pass: one source cannot be two packs
    assert metric.compute().slots == 16
    metric.reset()
    metric.update(batch_of(policy, [16], [16], [16]))  # more than announced: the width needs three
    assert (metric.compute().packs, metric.compute().slots) == (3, 48)


def test_without_a_policy_slots_are_the_physical_width() -> None:
    metric = PackingMetrics()
    layout = RowLayout.of([5, 3], multiple=4, width=20)
    metric.update(PackedBatch.from_packs([Pack([source("a", 5), source("b", 3)], layout)], pad_id=0))
    stats = metric.compute()
    assert (stats.packs, stats.slots, stats.real_tokens, stats.alignment_padding, stats.tail_padding) == (1, 20, 8, 3, 9)


def test_left_out_is_counted_by_reason_and_unknown_reasons_as_other() -> None:
    policy = PackingPolicy(capacity=8, overlength="truncate")
    admitted = [a for s in (source("long", 11), source("mute", 4, targets=0), source("ok", 2)) for a in policy.admit(s)]
    (truncated, mute, ok) = admitted
    assert truncated.left_out is not None
    assert mute.left_out == LeftOut("mute", "no_targets", 4)
    metric = PackingMetrics(policy)
    metric.update(PackedBatch.from_packs([policy.build([truncated, mute]), policy.build([ok])], pad_id=0))
    odd = PackedBatch.from_packs([Pack([], None, [LeftOut("x", "sunspots", 7)])], pad_id=0)
    assert odd.input_ids.shape == (1, 0)
    metric.update(odd)
    stats = metric.compute()
    assert stats.left_out == {"truncated": 1, "no_targets": 1, "other": 1}
    assert stats.left_out_tokens == {"truncated": 3, "no_targets": 4, "other": 7}
    assert stats.tokens_read == 11 + 4 + 2 + 7
    # Only the end of the truncated source is lost to its length.
    assert stats.overlength_fraction == stats.ratios()["overlength"] == 3 / 24
    assert stats.sources == 2
    assert stats.real_tokens == 10


def test_nothing_counted_gives_zeros_not_a_division() -> None:
    metric = PackingMetrics(PackingPolicy(capacity=8))
    metric.update(PackedBatch.from_packs([Pack([], None, [LeftOut("x", "empty", 0)])], pad_id=0))
    stats = metric.compute()
    assert stats.packs == 0
    assert set(stats.ratios()) == {*RATIOS, "age_p50", "age_p95", "age_max", "gap_to_bound"}
    assert set(stats.ratios().values()) == {0.0}
    assert set(PackingStats.of([0] * COUNTS).ratios()) == set(RATIOS), "without a policy nobody knows the others"


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 32), min_size=1, max_size=40),
    multiple=st.sampled_from([1, 2, 4, 8]),
    width=st.sampled_from(["variable", "fixed", 64]),
    packs_per_batch=st.integers(1, 3),
)
def test_counts_are_those_of_the_sources(lengths: list[int], multiple: int, width: str | int, packs_per_batch: int) -> None:
    policy = PackingPolicy(capacity=32, multiple=multiple, width=width)
    groups = policy.pack(lengths)
    metric = PackingMetrics(policy, packs_per_batch=packs_per_batch)
    # Whole batches only: a shorter last one of several packs says too little to tell how many it holds.
    whole = len(groups) // packs_per_batch * packs_per_batch
    used = [lengths[i] for group in groups[:whole] for i in group]
    for start in range(0, whole, packs_per_batch):
        metric.update(batch_of(policy, *([lengths[i] for i in group] for group in groups[start : start + packs_per_batch])))
    stats = metric.stats(metric.counts.tolist())
    assert (stats.packs, stats.sources, stats.real_tokens) == (whole, len(used), sum(used))
    assert stats.target_tokens == sum(length - 1 for length in used)
    assert stats.alignment_padding == sum(policy.aligned(length) - length for length in used)
    assert stats.slots == whole * (policy.row_width or policy.capacity)
    assert stats.real_tokens + stats.alignment_padding + stats.tail_padding == stats.slots
    assert stats.tail_padding >= 0
    assert stats.lengths is not None
    assert stats.lengths.packs == whole >= stats.lengths.lower_bound
    assert sum(stats.lengths.counts) == len(used)
    assert sum(stats.lengths.tokens) == sum(map(policy.aligned, used))


def test_ages_are_turnovers_of_the_buffer_and_the_gap_is_to_the_fewest_packs() -> None:
    policy = PackingPolicy(capacity=16, multiple=4, buffer_size=8)
    metric = PackingMetrics(policy, packs_per_batch=2)
    batch = batch_of(policy, [5, 3], [4])  # aligned 8 + 4 + 4, so one pack would do
    batch.ages[:] = [0, 4, 20]
    metric.update(batch)
    ratios = metric.compute().ratios()
    assert (ratios["age_p50"], ratios["age_p95"], ratios["age_max"]) == (0.5, 2.5, 2.5)
    assert ratios["gap_to_bound"] == 1.0


def test_states_of_ranks_add_up() -> None:
    policy = PackingPolicy(capacity=16, multiple=4)
    both, ranks = PackingMetrics(policy), [PackingMetrics(policy), PackingMetrics(policy)]
    for rank, pack in enumerate(([5, 3], [7, 2, 1])):
        ranks[rank].update(batch_of(policy, pack))
        both.update(batch_of(policy, pack))
    merged = ranks[0]
    merged.merge_state(ranks[1])
    assert merged.compute() == both.compute()
    assert merged.counts.dtype == torch.int64
    assert len(COUNTERS) == 6 + 2 * len(REASONS)
    assert len(merged.counts) == COUNTS


def test_update_reads_nothing_back_from_the_device() -> None:
    # The meta device has no data: any read of a value fails there.
    policy = PackingPolicy(capacity=16, multiple=4)
    metric = PackingMetrics(policy).to("meta")
    batch = batch_of(policy, [5, 3]).to("meta")
    batch.left_out.append(LeftOut("x", "overlength", 99))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        batch.cu_seqlens[-1].item()
    metric.update(batch)
    assert metric.counts.device.type == "meta"


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"packs_per_batch=0: a batch holds at least one pack"):
        PackingMetrics(PackingPolicy(capacity=8), packs_per_batch=0)
    with pytest.raises(ValueError, match=r"packs_per_batch=2 is not used without a policy"):
        PackingMetrics(packs_per_batch=2)
