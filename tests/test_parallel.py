from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_pack import ParallelLayout
from tests.conftest import vectors

ALIGNMENT, CONTEXT = vectors("alignment"), vectors("context_parallel")


@pytest.mark.parametrize("case", ALIGNMENT["cases"])
def test_multiple(case: dict[str, Any]) -> None:
    assert ParallelLayout(tensor=case["tp"], context=case["cp"], sequence=case["sp"]).multiple == case["multiple"]


@pytest.mark.parametrize("case", ALIGNMENT["joint"]["cases"])
def test_multiple_over_training_and_evaluation(case: dict[str, Any]) -> None:
    layout = ParallelLayout(tensor=case["tp"], context=case["cp_train"], eval_context=case["cp_eval"], sequence=case["sp"])
    assert layout.multiple == case["multiple"]


@pytest.mark.parametrize("case", ALIGNMENT["row_divisor"])
def test_row_divisor(case: dict[str, Any]) -> None:
    layout = ParallelLayout(tensor=case["tp"], context=case["cp"], sequence=case["sp"])
    assert layout.row_divisor(case["recipe"]) == case["divisor"]


def test_context_indices() -> None:
    first, second = CONTEXT["cases"]
    layout = ParallelLayout(context=first["cp"])
    for rank, expected in enumerate(first["indices"]):
        assert layout.context_indices(first["padded_lengths"], rank=rank).tolist() == expected
    ids = torch.tensor(second["ids"])
    for rank, expected in enumerate(second["slices"]):
        assert (
            ids[ParallelLayout(context=second["cp"]).context_indices(second["padded_lengths"], rank=rank)].tolist() == expected
        )


def test_a_length_that_cannot_be_cut_is_refused() -> None:
    (case,) = CONTEXT["must_refuse"]
    with pytest.raises(ValueError, match=r"source 0 .*length of 6, which is not divisible by 2 \* context = 4"):
        ParallelLayout(context=case["cp"]).context_indices(case["padded_lengths"], rank=0)
    with pytest.raises(ValueError, match="rank 2 does not exist"):
        ParallelLayout(context=2).context_indices([4], rank=2)


@given(context=st.integers(1, 4), chunks=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_the_ranks_hold_every_position_once(context: int, chunks: list[int]) -> None:
    layout = ParallelLayout(context=context)
    lengths = [n * layout.multiple for n in chunks]
    held = torch.cat([layout.context_indices(lengths, rank=rank) for rank in range(context)])
    assert sorted(held.tolist()) == list(range(sum(lengths)))


def test_data_parallel_ranks() -> None:
    layout = ParallelLayout(tensor=2, context=2)
    assert [layout.data_parallel(rank, world_size=8) for rank in range(8)] == [(0, 2)] * 4 + [(1, 2)] * 4
    with pytest.raises(ValueError, match="6 processes cannot hold models of 4 devices"):
        layout.data_parallel(0, world_size=6)


@pytest.mark.parametrize("sizes", [{"tensor": 0}, {"context": -1}, {"tensor": True}, {"eval_context": 0}])
def test_impossible_sizes_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="whole number of at least 1"):
        ParallelLayout(**sizes)


def test_unknown_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match="'int8' is not known; known are fp8"):
        ParallelLayout().row_divisor("int8")


@pytest.mark.parametrize("sequence", ["false", 2, None])
def test_sequence_parallelism_is_on_or_off(sequence: Any) -> None:
    with pytest.raises(ValueError, match=r"ParallelLayout\(sequence=.*\): True or False is needed"):
        ParallelLayout(tensor=2, sequence=sequence)
