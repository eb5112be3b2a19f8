"""Context-parallel slices against the vectors, and against attention of the full row in plain formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_pack import ContextSlice, PackedBatch, PackingPolicy, ParallelLayout
from lightning_pack.source import EncodedSource
from tests.conftest import vectors

CONTEXT = vectors("context_parallel")
SLICED = ("input_ids", "labels", "shift_labels", "loss_mask", "position_ids", "segment_ids")


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def pack(lengths: list[int], *, context: int, width: Any = "variable") -> PackedBatch:
    generator = torch.Generator().manual_seed(len(lengths))
    sources = [EncodedSource.of(f"k{i}", torch.randint(1, 99, (n,), generator=generator)) for i, n in enumerate(lengths)]
    policy = PackingPolicy(capacity=128, multiple=ParallelLayout(context=context).multiple, width=width)
    return PackedBatch.from_packs([policy.build(sources)], pad_id=0)


def test_slices_are_those_of_the_vectors() -> None:
    first, second = CONTEXT["cases"]
    layout, lengths = ParallelLayout(context=first["cp"]), first["padded_lengths"]
    assert layout.context_slices(bounds(lengths), width=sum(lengths)).tolist() == first["indices"]
    lengths = second["padded_lengths"]
    slices = ParallelLayout(context=second["cp"]).context_slices(bounds(lengths), width=sum(lengths))
    assert torch.tensor(second["ids"])[slices].tolist() == second["slices"]


@given(
    context=st.integers(1, 5), chunks=st.lists(st.integers(0, 4), max_size=6), dtype=st.sampled_from([torch.int32, torch.int64])
)
@settings(max_examples=80, deadline=None)
def test_slices_hold_every_position_once_and_the_row_comes_back(context: int, chunks: list[int], dtype: torch.dtype) -> None:
    layout = ParallelLayout(context=context)
    lengths = [n * layout.multiple for n in chunks]
    width = sum(lengths)
    slices = layout.context_slices(bounds(lengths).to(dtype), width=width)
    assert (slices.dtype, slices.shape) == (torch.int64, (context, width // context))
    assert sorted(slices.flatten().tolist()) == list(range(width))
    row = torch.arange(100, 100 + width)
    back = torch.empty_like(row)
    back[slices] = row[slices]
    assert torch.equal(back, row)
    # Chunk by chunk, as the split is defined.
    for rank, held in enumerate(slices):
        expected: list[int] = []
        for start, length in zip(bounds(lengths).tolist(), lengths, strict=False):
            size = length // (2 * context)
            for chunk in (rank, 2 * context - 1 - rank) if context > 1 else ():
                expected += range(start + chunk * size, start + (chunk + 1) * size)
        assert held.tolist() == (expected if context > 1 else list(range(width)))
        assert torch.equal(held, layout.context_indices(lengths, rank=rank))


def test_rows_that_cannot_be_cut_are_refused() -> None:
    (case,) = CONTEXT["must_refuse"]
    lengths, layout = case["padded_lengths"], ParallelLayout(context=case["cp"])
    with pytest.raises(
        ValueError, match=r"source 0 .* length of 6, which is not divisible by 2 \* context = 4: pack with multiple=4"
    ):
        layout.context_slices(bounds(lengths), width=10)
    with pytest.raises(
        ValueError, match="the last boundary is 12 and the row is 16 wide: positions after it would be on no rank"
    ):
        layout.context_slices(bounds([8, 4]), width=16)
    for wrong in ([0, 8, 4], [4, 8], []):
        with pytest.raises(ValueError, match="start at 0 and do not fall: pass cu_seqlens_padded"):
            layout.context_slices(torch.tensor(wrong, dtype=torch.int32), width=8)
    with pytest.raises(ValueError, match=r"boundaries are torch\.float32, and offsets are whole numbers"):
        layout.context_slices(torch.tensor([0, 4.5, 8]), width=8)
    batch = pack([6, 3], context=1)
    with pytest.raises(ValueError, match="length of 6, which is not divisible by"):
        ContextSlice.of(batch, layout=layout, rank=0)
    with pytest.raises(ValueError, match="rank 2 does not exist: there are 2"):
        ContextSlice.of(pack([8], context=2), layout=layout, rank=2)


@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("width", ["variable", "fixed"])
def test_a_slice_has_the_tokens_of_its_places_and_global_boundaries(context: int, width: str) -> None:
    batch, layout = pack([13, 1, 9, 22], context=context, width=width), ParallelLayout(context=context)
    batch.position_ids = torch.stack([batch.position_ids, *(batch.position_ids + 10 * axis for axis in (1, 2, 3))])
    assert batch.position_ids.shape == (4, 1, batch.input_ids.shape[1])
    assert batch.segment_ids.all() == (context == 1 and width == "variable")
    parts = [ContextSlice.of(batch, layout=layout, rank=rank) for rank in range(context)]
    for part in parts:
        assert part.cu_seqlens is batch.cu_seqlens
        assert part.model_inputs()["cu_seq_lens_q"] is part.cu_seqlens_padded is batch.cu_seqlens_padded
        assert (part.max_seqlen, part.context) == (batch.max_seqlen, context)
        assert torch.equal(part.loss_mask, part.shift_labels != -100)
        assert torch.equal(part.padding_mask(), batch.padding_mask()[:, part.indices])
    for name in SLICED:
        full = getattr(batch, name)
        back = torch.zeros_like(full)
        for part in parts:
            back[..., part.indices] = getattr(part, name)
        assert torch.equal(back, full)
    # Shifted before it was cut: some target is not the next token of its slice.
    moved = [bool((p.shift_labels[0, :-1] != p.input_ids[0, 1:])[p.loss_mask[0, :-1]].any()) for p in parts]
    assert moved == [context > 1] * context


@pytest.mark.parametrize("lengths", [[8, 16], [7, 16]])
def test_a_slice_is_moved_whole(lengths: list[int]) -> None:
    batch = pack(lengths, context=2)
    # Kernels tell 'no padding' by identity.
    assert (batch.cu_seqlens is batch.cu_seqlens_padded) == (lengths[0] == 8)
    part = ContextSlice.of(batch, layout=ParallelLayout(context=2), rank=1)
    moved = part.to("meta")
    tensors = {name: value for name, value in vars(moved).items() if isinstance(value, Tensor)}
    assert set(SLICED) | {"indices", "cu_seqlens", "cu_seqlens_padded"} == set(tensors)
    assert {str(value.device) for value in tensors.values()} == {"meta"}
    assert (moved.cu_seqlens is moved.cu_seqlens_padded) == (lengths[0] == 8)
    assert (moved.rank, moved.context, moved.max_seqlen) == (1, 2, 16)
    assert part.input_ids.device.type == "cpu"


def attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("context", [2, 4])
def test_local_queries_over_gathered_keys_give_the_rows_of_the_full_row(context: int) -> None:
    batch, layout = pack([13, 1, 9, 22], context=context), ParallelLayout(context=context)
    width = batch.input_ids.shape[1]
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(width, 3, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    # The full row source by source, with nothing but slicing.
    expected = torch.zeros_like(q)
    for start, length in zip(batch.cu_seqlens_padded.tolist(), batch.cu_seqlens.diff().tolist(), strict=False):
        here = slice(start, start + length)
        expected[here] = attention(q[here], k[here], v[here], torch.ones(length, length, dtype=torch.bool).tril())
    parts = [ContextSlice.of(batch, layout=layout, rank=rank) for rank in range(context)]
    order = torch.cat([part.indices for part in parts])
    gathered = {name: torch.cat([getattr(part, name)[0] for part in parts]) for name in ("position_ids", "segment_ids")}
    assert order.tolist() != list(range(width))
    compared = 0
    for part in parts:
        real = part.segment_ids[0] > 0
        local = part.indices[real]
        same = part.segment_ids[0, real][:, None] == gathered["segment_ids"]
        allowed = same & (part.position_ids[0, real][:, None] >= gathered["position_ids"])
        found = attention(q[local], k[order], v[order], allowed)
        assert torch.allclose(found, expected[local], rtol=0, atol=1e-12)
        compared += len(local)
    assert compared == 45
