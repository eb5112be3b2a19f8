"""Histograms of ages and lengths against sorted lists, packers and the exact bound over every split of the lengths."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_pack.binning import best_fit_decreasing
from lightning_pack.histogram import (
    AGE_BINS,
    LENGTH_COUNTS,
    AgeHistogram,
    LengthHistogram,
    add_lengths,
    age_counts,
    length_edges,
)


def ages_of(ages: list[int], buffer_size: int) -> AgeHistogram:
    return AgeHistogram(tuple(age_counts(ages, buffer_size=buffer_size).tolist()))


@settings(max_examples=100, deadline=None)
@given(
    ages=st.lists(st.integers(0, 3000), min_size=1, max_size=60),
    buffer_size=st.sampled_from([1, 7, 64, 256]),
    percent=st.integers(1, 100),
)
def test_percentiles_are_at_most_a_bin_above_those_of_the_sorted_list(ages: list[int], buffer_size: int, percent: int) -> None:
    found = ages_of(ages, buffer_size).percentile(percent)
    exact = sorted(ages)[-(-len(ages) * percent // 100) - 1] / buffer_size
    if exact > 1024:
        assert found == 1024
    else:
        assert exact <= found
        assert found < exact + 1 / 8 if exact <= 8 else found < 2 * exact


def test_ages_at_the_edges_of_bins() -> None:
    for age, turnovers in (
        (0, 0.0),
        (1, 0.125),
        (2, 0.125),
        (3, 0.25),
        (15, 1.0),
        (16, 1.0),
        (17, 1.125),
        (128, 8.0),
        (129, 16.0),
    ):
        assert ages_of([age], 16).largest == turnovers, age
    assert ages_of([16 * 1024, 16 * 1024 + 1, 10**9], 16).counts[-2:] == (1, 2)
    assert ages_of([], 16) == AgeHistogram((0,) * AGE_BINS)
    assert ages_of([], 16).percentile(50) == 0.0


def length_counts(lengths: Tensor, *, capacity: int, packs: int) -> Tensor:
    numbers = torch.zeros(LENGTH_COUNTS, dtype=torch.int64)
    numbers[0] = packs
    add_lengths(numbers, lengths, edges=length_edges(capacity))
    return numbers


def lengths_of(lengths: list[int], capacity: int, packs: int = 1) -> LengthHistogram:
    counts = length_counts(torch.tensor(lengths, dtype=torch.int64), capacity=capacity, packs=packs)
    return LengthHistogram.of(counts.tolist(), capacity=capacity)


def martello_toth(lengths: list[int], capacity: int, at: list[float]) -> int:
    """The largest L(a) over these a, each from its definition."""
    best = 0
    for a in at:
        one = [w for w in lengths if w > capacity - a]
        two = [w for w in lengths if capacity - a >= w > capacity / 2]
        three = [w for w in lengths if capacity / 2 >= w >= a]
        more = max(0, -((len(two) * capacity - sum(two) - sum(three)) // capacity))
        best = max(best, len(one) + len(two) + more)
    return best


@settings(max_examples=150, deadline=None)
@given(data=st.data(), capacity=st.sampled_from([1, 2, 7, 63, 64, 96, 100, 128, 200]))
def test_the_bound_is_what_its_definition_says_at_the_edges_and_below_every_packing(data: st.DataObject, capacity: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    bound = lengths_of(lengths, capacity).lower_bound
    assert bound == martello_toth(lengths, capacity, [edge * capacity / 64 for edge in range(32)])
    assert bound <= martello_toth(lengths, capacity, list(range(capacity // 2 + 1)))
    assert -(-sum(lengths) // capacity) <= bound <= len(best_fit_decreasing(lengths, capacity))


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.lists(st.integers(0, 90), max_size=20), min_size=2, max_size=4))
@example(parts=[[0, 48, 49], [96, 0]])
def test_histograms_add_up_and_hold_every_token(parts: list[list[int]]) -> None:
    counts = [length_counts(torch.tensor(part, dtype=torch.int64), capacity=96, packs=1) for part in parts]
    flat = [length for part in parts for length in part]
    assert torch.equal(
        torch.stack(counts).sum(0), length_counts(torch.tensor(flat, dtype=torch.int64), capacity=96, packs=len(parts))
    )
    histogram = LengthHistogram.of(torch.stack(counts).sum(0).tolist(), capacity=96)
    assert sum(histogram.counts) == sum(length > 0 for length in flat)
    assert sum(histogram.tokens) == sum(flat)


def test_a_length_beyond_the_capacity_has_a_bin_too() -> None:
    # Of rows that another policy made: no index may leave the histogram, which would end a run on a GPU.
    assert lengths_of([10_000, 5], 96).counts[-1] == 1
    assert lengths_of([10_000, 5], 96).counts[5 * 64 // 96] == 1


def draw(name: str, number: int) -> tuple[np.ndarray, int]:
    rng = np.random.default_rng(0)
    if name == "A":
        return np.clip(rng.lognormal(5.5, 1.0, number).astype(np.int64), 16, 4096), 4096
    if name == "B":
        return rng.integers(1, 2049, number), 2048
    large = rng.random(number) < 0.30
    lengths = np.where(large, rng.normal(1500, 300, number), rng.normal(200, 50, number))
    return np.clip(np.rint(lengths).astype(np.int64), 1, 2048), 2048


@pytest.mark.parametrize(
    ("name", "number", "exact"),
    [("A", 1000, 91), ("A", 10000, 976), ("B", 1000, 539), ("B", 10000, 5032), ("C", 1000, 274), ("C", 10000, 2883)],
)
def test_the_bound_is_close_to_the_exact_one(name: str, number: int, exact: int) -> None:
    lengths, capacity = draw(name, number)
    histogram = LengthHistogram.of(
        length_counts(torch.from_numpy(lengths), capacity=capacity, packs=exact).tolist(), capacity=capacity
    )
    # The bins cost set B, whose lengths are spread evenly, at most two packs.
    assert exact - 2 * (name == "B") <= histogram.lower_bound <= exact
    assert histogram.gap == exact / histogram.lower_bound - 1
    if name == "B":
        assert histogram.lower_bound > -(-lengths.sum() // capacity) + 10, "more than a division finds"
