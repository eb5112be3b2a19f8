"""Rows of one shape: a fixed number of boundaries, whatever sources a pack has."""

from __future__ import annotations

import pickle
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pack.attention import ActivatedModel, BoundariesError, THDInputs, check_boundaries, leaking_sources
from lightning_pack.attention.backends import SegmentsBackend
from lightning_pack.attention.frequencies import refuse_shared_frequencies
from lightning_pack.bench.padding import sources_of
from lightning_pack.callbacks.work import RankWork
from lightning_pack.context import ContextSlice
from lightning_pack.flops import AttentionFlops, ModelFlops
from lightning_pack.layout import RowLayout
from lightning_pack.metrics import PackingMetrics
from lightning_pack.parallel import ParallelLayout
from lightning_pack.policy import PackingPolicy
from lightning_pack.row import PackedBatch
from lightning_pack.source import Pack
from tests.numbers_data import same_batch
from tests.test_exact_position import Run
from tests.tiny_models import forward_inputs, make_sources, tiny_model

FIXED = PackingPolicy(capacity=48, multiple=4, width="fixed", max_sources=6, fixed_boundaries=True)
PLAIN = replace(FIXED, fixed_boundaries=False)
BOUNDARIES = ("cu_seqlens", "cu_seqlens_padded")


def rows(*packs: list[int]) -> tuple[PackedBatch, PackedBatch]:
    """The same packs in a row with a fixed number of boundaries, and in one without."""
    sources = [make_sources(lengths, seed=number) for number, lengths in enumerate(packs)]
    fixed, plain = (PackedBatch.from_packs([p.build(each) for each in sources], pad_id=0) for p in (FIXED, PLAIN))
    assert len(fixed.cu_seqlens) == 6 * len(packs) + 1 > len(plain.cu_seqlens)
    return fixed, plain


@given(packs=st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=5), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_only_the_boundaries_differ(packs: list[list[int]]) -> None:
    fixed, plain = rows(*packs)
    check_boundaries(fixed)
    sources = len(plain.source_keys)
    for name in BOUNDARIES:
        given_, expected = getattr(fixed, name), getattr(plain, name)
        assert given_.shape == (6 * len(packs) + 1,)
        assert given_.dtype == torch.int32
        assert torch.equal(given_[: sources + 1], expected)
        assert given_[sources:].unique().tolist() == [expected[-1]]
    assert same_batch(replace(fixed, **{name: getattr(plain, name) for name in BOUNDARIES}), plain)
    assert (fixed.cu_seqlens is fixed.cu_seqlens_padded) == (plain.cu_seqlens is plain.cu_seqlens_padded)


def test_unpadded_boundaries_stay_one_object_also_between_processes() -> None:
    fixed, _ = rows([8, 12, 28])
    assert fixed.cu_seqlens is fixed.cu_seqlens_padded
    assert fixed.cu_seqlens.tolist() == [0, 8, 20, 48, 48, 48, 48]
    for row in (fixed, rows([5, 3], [7])[0]):
        received = pickle.loads(ForkingPickler.dumps(row))
        assert same_batch(received, row)
        assert [getattr(received, name).tolist() for name in BOUNDARIES] == [getattr(row, name).tolist() for name in BOUNDARIES]
        assert (received.cu_seqlens is received.cu_seqlens_padded) == (row.cu_seqlens is row.cu_seqlens_padded)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sources": 4}, "width='variable' and max_sources=4: .*set both"),
        ({"width": "fixed"}, "width='fixed' and max_sources=None: .*set both"),
        ({"width": 32}, "width=32 and max_sources=None"),
        ({"width": "fixed", "max_sources": 4, "fixed_boundaries": 1}, "fixed_boundaries=1 is not True or False"),
    ],
)
def test_a_setting_without_use_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackingPolicy(capacity=16, **{"fixed_boundaries": True, **options})  # type: ignore[arg-type]


def test_a_number_of_tokens_fixes_the_width_too_and_more_sources_than_boundaries_are_refused() -> None:
    policy = PackingPolicy(capacity=16, width=24, max_sources=2, fixed_boundaries=True)
    assert policy.layout([5]).cu_seqlens_padded.tolist() == [0, 24, 24]
    with pytest.raises(ValueError, match=r"3 sources of \[1, 2, 3\] tokens .* boundaries for 2: .*raise max_sources"):
        policy.layout([1, 2, 3])


def test_the_setting_is_part_of_the_fingerprint() -> None:
    assert FIXED.fingerprint() != PLAIN.fingerprint()
    assert FIXED.fingerprint() | {"fixed_boundaries": False} == PLAIN.fingerprint()


@pytest.mark.parametrize(
    ("real", "physical", "message"),
    [
        ([0, 5, 8, 8, 9], [0, 8, 20, 20, 48], "boundary 4 goes on from 20 to 48, but the row has 2 sources"),
        ([0, 5, 8, 8, 8], [0, 8, 20, 48, 48], "boundary 3 goes on from 20 to 48"),
        ([0, 5, 5, 8, 8], [0, 8, 8, 48, 48], r"source 1 \('s0.1'\) has no tokens"),
    ],
)
def test_boundaries_beyond_the_sources_repeat_the_last_one(real: list[int], physical: list[int], message: str) -> None:
    fixed, _ = rows([5, 3])
    check_boundaries(fixed)
    wrong = {n: torch.tensor(v, dtype=torch.int32) for n, v in zip(BOUNDARIES, (real, physical), strict=True)}
    with pytest.raises(BoundariesError, match=message):
        check_boundaries(replace(fixed, **wrong))


def test_a_layout_for_other_sources_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        PackedBatch.from_packs([Pack(make_sources([5, 3]), RowLayout.of([8], width=8, fixed_sources=3))], pad_id=0)


# --- what counts sources by their boundaries ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, FIXED], ids=["without policy", "with policy"])
def test_counts_are_those_of_the_sources(policy: PackingPolicy | None) -> None:
    fixed, plain = rows([5, 3, 9]) if policy is None else rows([5, 3, 9], [1, 2])
    counts = []
    for row in (fixed, plain):
        metric = PackingMetrics(policy)
        metric.update(row)
        counts.append(metric.counts.tolist())
    assert counts[0] == counts[1]
    # Three of 5 to 8 and one of 3 to 4, without the last tail.
    assert metric.compute().alignment_padding == (4 if policy is None else 4 + 3 + 3 + 2)


def test_work_is_that_of_the_sources() -> None:
    flops = ModelFlops(per_position=10, attention=(AttentionFlops(None, 2), AttentionFlops(4, 3)))
    squares, work = [], []
    for row in rows([5, 3, 9]):
        squares.append(flops.squared_lengths(row.cu_seqlens.diff()).tolist())
        counted = RankWork()
        counted.add(row)
        work.append(counted._sums[0].item())
    assert squares[0] == squares[1] == [115, 115 - 1 - 25]
    assert work == [115, 115]


def test_sources_are_taken_from_a_row_by_their_keys() -> None:
    fixed, plain = (sources_of(row) for row in rows([5, 3], [7]))
    assert [len(source) for source in fixed] == [5, 3, 7]
    for one, other in zip(fixed, plain, strict=True):
        assert one.key == other.key
        assert torch.equal(one.input_ids, other.input_ids)


def test_repeats_are_no_short_sources_for_rotary_frequencies() -> None:
    config = type("Config", (), {"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 8})()
    refuse_shared_frequencies(config, [12, 12, 0, 0])
    with pytest.raises(ValueError, match="sources of 5 and 12 tokens"):
        refuse_shared_frequencies(config, [12, 5, 0])


@pytest.mark.parametrize("context", [2, 4])
def test_slices_of_context_ranks_are_the_same(context: int) -> None:
    layout = ParallelLayout(context=context)
    policy = replace(FIXED, multiple=layout.multiple, capacity=64)
    packs = [make_sources([13, 1, 9])]
    fixed, plain = (
        PackedBatch.from_packs([each.build(packs[0])], pad_id=0) for each in (policy, replace(policy, fixed_boundaries=False))
    )
    for rank in range(context):
        one, other = (ContextSlice.of(row, layout=layout, rank=rank) for row in (fixed, plain))
        assert one.cu_seqlens_padded is fixed.cu_seqlens_padded
        assert len(one.cu_seqlens_padded) == 7 > len(other.cu_seqlens_padded)
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.input_ids, other.input_ids)


# --- attention -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boundaries", ["physical", "real"])
def test_attention_passes_over_repeats(boundaries: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(48, heads, 8, generator=generator) for heads in (4, 2, 2))
    fixed, plain = (THDInputs.of(row, boundaries=boundaries) for row in rows([5, 3, 9]))  # type: ignore[arg-type]
    assert fixed.lengths == [8, 4, 36, 0, 0, 0]
    assert fixed.pad_between_seqs == (boundaries == "real")
    outputs = [SegmentsBackend()(query, key, value, inputs=inputs) for inputs in (fixed, plain)]
    assert outputs[0].abs().sum() > 0
    assert torch.equal(*outputs)


def test_a_model_gives_the_same_logits_and_sources_stay_apart() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    ActivatedModel.of(model)
    fixed, plain = rows([5, 3, 9])
    assert torch.equal(*(model(**forward_inputs(row)).logits for row in (fixed, plain)))
    assert leaking_sources(model, fixed) == []


# --- the loader ----------------------------------------------------------------------------------------------------------


def test_rows_of_the_loader_have_one_shape_and_go_on_from_a_checkpoint(numbers: Path) -> None:
    options: dict[str, Any] = {"num_workers": 1, "packs_per_batch": 2, "width": "fixed", "max_sources": 5}
    plain = Run(numbers, **options)
    expected = plain.train(6)
    plain.end()
    run = Run(numbers, **options, fixed_boundaries=True)
    rows = run.train(3)
    state = run.end()
    resumed = Run(numbers, state=state, **options, fixed_boundaries=True)
    rows += resumed.train(3)
    resumed.end()
    assert len({len(row.source_keys) for row in rows}) > 1
    assert {row.cu_seqlens.shape for row in rows} == {row.cu_seqlens_padded.shape for row in rows} == {(11,)}
    assert {row.input_ids.shape for row in rows} == {expected[0].input_ids.shape}
    for row, other in zip(rows, expected, strict=True):
        assert same_batch(replace(row, **{name: getattr(other, name) for name in BOUNDARIES}), other)
