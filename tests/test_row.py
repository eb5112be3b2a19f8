from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities import move_data_to_device

from lightning_pack import PackedBatch, PackingPolicy
from lightning_pack.source import EncodedSource
from tests.numbers_data import same_batch


def packed(lengths: list[int], *, multiple: int = 1, width: object = "variable", pad_id: int = 0) -> PackedBatch:
    policy = PackingPolicy(capacity=1024, multiple=multiple, width=width)  # type: ignore[arg-type]
    sources = [EncodedSource.of(f"k{i}", torch.arange(n) + 100 * (i + 1)) for i, n in enumerate(lengths)]
    return PackedBatch.from_packs([policy.build(sources)], pad_id=pad_id)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), multiple=st.sampled_from([1, 4, 8]), fixed=st.booleans())
@settings(max_examples=80, deadline=None)
def test_every_field_of_a_row(lengths: list[int], multiple: int, fixed: bool) -> None:
    batch = packed(lengths, multiple=multiple, width="fixed" if fixed else "variable", pad_id=7)
    width = batch.input_ids.shape[1]
    assert batch.cu_seqlens_padded[-1] == width
    assert all(
        t.shape == (1, width)
        for t in (batch.labels, batch.shift_labels, batch.loss_mask, batch.position_ids, batch.segment_ids)
    )
    bounds = batch.cu_seqlens_padded.tolist()
    for i, n in enumerate(lengths):
        real, gap = slice(bounds[i], bounds[i] + n), slice(bounds[i] + n, bounds[i + 1])
        ids = list(range(100 * (i + 1), 100 * (i + 1) + n))
        assert batch.input_ids[0, real].tolist() == ids
        assert batch.labels[0, real].tolist() == [-100, *ids[1:]]
        assert batch.shift_labels[0, real].tolist() == [*ids[1:], -100]
        assert batch.position_ids[0, real].tolist() == list(range(n))
        assert batch.segment_ids[0, real].tolist() == [i + 1] * n
        assert batch.input_ids[0, gap].eq(7).all()
        assert batch.labels[0, gap].eq(-100).all()
        assert batch.shift_labels[0, gap].eq(-100).all()
        assert batch.position_ids[0, gap].tolist() == list(range(gap.stop - gap.start))
        assert not batch.segment_ids[0, gap].any()
    assert torch.equal(batch.loss_mask, batch.shift_labels != -100)
    assert batch.cu_seqlens.diff().tolist() == lengths
    assert batch.max_seqlen == int(batch.cu_seqlens_padded.diff().max())
    assert (batch.cu_seqlens is batch.cu_seqlens_padded) == (bounds == batch.cu_seqlens.tolist())


def test_no_target_crosses_a_boundary_whatever_an_encoder_says() -> None:
    ids = [torch.arange(n) + 100 * n for n in (3, 2)]
    sources = [EncodedSource(key=str(i), input_ids=t, labels=t) for i, t in enumerate(ids)]
    batch = PackedBatch.from_packs([PackingPolicy(capacity=8).build(sources)], pad_id=0)
    assert batch.labels.tolist() == [[-100, 301, 302, -100, 201]]
    assert batch.shift_labels.tolist() == [[301, 302, -100, 201, -100]]


def test_packs_are_joined_end_to_end() -> None:
    policy = PackingPolicy(capacity=16, multiple=4, width="fixed")
    packs = [policy.build([EncodedSource.of(f"{p}{i}", torch.arange(5)) for i in range(2)]) for p in "ab"]
    packs.insert(1, policy.build([EncodedSource.dropped("gone", "empty")]))
    batch = PackedBatch.from_packs(packs, pad_id=0)
    assert batch.cu_seqlens.tolist() == [0, 5, 10, 15, 20]
    assert batch.cu_seqlens_padded.tolist() == [0, 8, 16, 24, 32]
    assert batch.source_keys == ["a0", "a1", "b0", "b1"]
    assert batch.segment_ids.unique().tolist() == [0, 1, 2, 3, 4]
    assert batch.left_out == [("gone", "empty", 0)]


def test_a_pack_of_markers_is_an_empty_row() -> None:
    batch = PackedBatch.from_packs([PackingPolicy(capacity=4).build([EncodedSource.dropped("x", "corrupt")])], pad_id=0)
    assert (batch.input_ids.shape, batch.cu_seqlens.tolist(), batch.max_seqlen) == ((1, 0), [0], 0)


def test_the_boundary_tensor_stays_one_object() -> None:
    batch = packed([4, 3])
    assert batch.cu_seqlens is batch.cu_seqlens_padded
    moved = move_data_to_device(batch, torch.device("meta"))
    assert isinstance(moved, PackedBatch)
    assert moved is not batch
    assert moved.input_ids.device.type == "meta"
    assert moved.cu_seqlens is moved.cu_seqlens_padded
    sent = pickle.loads(pickle.dumps(batch))
    assert sent.cu_seqlens is sent.cu_seqlens_padded


@pytest.mark.parametrize("lengths", [[4, 3], [5, 3, 1], []])
@pytest.mark.parametrize("multiple", [1, 4])
def test_what_a_worker_sends_arrives_equal(lengths: list[int], multiple: int) -> None:
    policy = PackingPolicy(capacity=64, multiple=multiple)
    sources = [EncodedSource.of(f"k{i}", torch.arange(n) + 100 * (i + 1)) for i, n in enumerate(lengths)]
    pack = policy.build([*sources, EncodedSource.dropped("gone", "corrupt")])
    batch = PackedBatch.from_packs([pack], pad_id=3)
    batch.__restore_key__ = ("Batch", 3, ("Pack", 1))
    sent = pickle.loads(bytes(ForkingPickler.dumps(batch)))
    assert same_batch(sent, batch)
    assert sent.left_out[0].reason == "corrupt"


def test_a_batch_unpacks_to_the_arguments_of_a_model() -> None:
    batch = packed([5, 3], multiple=4)
    inputs = dict(**batch)
    assert set(inputs) == {
        "input_ids", "position_ids", "labels", "shift_labels", "use_cache",
        "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    }  # fmt: skip
    assert inputs["use_cache"] is False
    assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"] is batch.cu_seqlens_padded
    assert inputs["max_length_q"] == 8
    assert isinstance(inputs["max_length_q"], int)
    assert batch["labels"] is batch.labels
