from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pack import PackingPolicy
from lightning_pack.bench.bins import drawn
from lightning_pack.binning import (
    Groups,
    best_fit_decreasing,
    bin_slack,
    fit,
    fullest,
    get_packer,
    lower_bound,
    minimum_bin_slack,
    pack,
    packer_options,
    packers,
    register_packer,
    registry,
    with_bin_count,
)
from lightning_pack.cli import main
from tests.conftest import vectors

BINS = vectors("bins")
PACKERS = (
    "balanced_greedy_knapsack",
    "best_fit_decreasing",
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "greedy_knapsack",
    "minimum_bin_slack",
    "modified_first_fit_decreasing",
)
LENGTHS = st.lists(st.integers(1, 40), max_size=60)
LIMITS = st.none() | st.integers(1, 6)


def by_multiset(groups: Groups, lengths: list[int]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(sorted(lengths[i] for i in group)) for group in groups)


# Plain definitions, quadratic or worse, to compare with.


def loads_of(bins: Groups, lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in group) for group in bins]


def longest_first(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def any_fit(order: list[int], lengths: list[int], capacity: int, most: int, prefer: Callable[[int, int], Any]) -> Groups:
    bins: Groups = []
    for i in order:
        loads = loads_of(bins, lengths)
        fits = [b for b, load in enumerate(loads) if load + lengths[i] <= capacity and len(bins[b]) < most]
        if not fits:
            bins.append([])
            fits = [len(bins) - 1]
            loads.append(0)
        bins[min(fits, key=lambda b: prefer(loads[b], b))].append(i)
    return bins


def plain_first_fit_decreasing(lengths: list[int], capacity: int, most: int) -> Groups:
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], -i))
    return any_fit(order, lengths, capacity, most, lambda load, b: b)


def plain_best_fit_decreasing(lengths: list[int], capacity: int, most: int) -> Groups:
    return any_fit(longest_first(lengths), lengths, capacity, most, lambda load, b: (-load, b))


def plain_first_fit_shuffle(lengths: list[int], capacity: int, most: int) -> Groups:
    order = np.random.default_rng(0).permutation(len(lengths)).tolist()
    return any_fit(order, lengths, capacity, most, lambda load, b: b)


def plain_greedy_knapsack(lengths: list[int], capacity: int, most: int) -> Groups:
    left = longest_first(lengths)
    bins: Groups = []
    while left:
        bins.append([])
        while len(bins[-1]) < most:
            room = capacity - sum(lengths[i] for i in bins[-1])
            index = next((i for i in left if lengths[i] <= room), None)
            if index is None:
                break
            left.remove(index)
            bins[-1].append(index)
    return bins


def plain_balanced_greedy_knapsack(lengths: list[int], capacity: int, most: int) -> Groups:
    bins: Groups = [[] for _ in range(max(-(-sum(lengths) // capacity), -(-len(lengths) // most)))]
    for i in longest_first(lengths):
        loads = loads_of(bins, lengths)
        least = min((b for b in range(len(bins)) if len(bins[b]) < most), key=lambda b: (loads[b], b), default=None)
        if least is None or loads[least] + lengths[i] > capacity:
            bins.append([])
            least = len(bins) - 1
        bins[least].append(i)
    return [group for group in bins if group]


def plain_modified_first_fit_decreasing(lengths: list[int], capacity: int, most: int) -> Groups:
    left = longest_first(lengths)
    bins: Groups = [[i] for i in left if 2 * lengths[i] > capacity]
    left = left[len(bins) :]

    def room(group: list[int]) -> int:
        return capacity - sum(lengths[i] for i in group) if len(group) < most else 0

    def add(group: list[int], candidates: list[int]) -> bool:
        index = next((i for i in candidates if lengths[i] <= room(group)), None)
        if index is not None:
            left.remove(index)
            group.append(index)
        return index is not None

    for group in bins:
        add(group, [i for i in left if 3 * lengths[i] > capacity])
    for group in reversed(bins):
        small = [i for i in left if capacity < 6 * lengths[i] <= 2 * capacity]
        if len(group) > 1 or most < 3 or len(small) < 2:
            continue
        least = next(i for i in small if lengths[i] == lengths[small[-1]])
        beside = [i for i in small if i != least and lengths[i] + lengths[least] <= room(group)]
        if beside:
            add(group, [least])
            add(group, beside)
    for group in bins:
        while add(group, left):
            pass
    rest = [lengths[i] for i in left]
    return bins + [[left[i] for i in group] for group in plain_greedy_knapsack(rest, capacity, most)]


PLAIN = {
    "balanced_greedy_knapsack": plain_balanced_greedy_knapsack,
    "best_fit_decreasing": plain_best_fit_decreasing,
    "first_fit_decreasing": plain_first_fit_decreasing,
    "first_fit_shuffle": plain_first_fit_shuffle,
    "greedy_knapsack": plain_greedy_knapsack,
    "modified_first_fit_decreasing": plain_modified_first_fit_decreasing,
}


@pytest.mark.parametrize("case", BINS["cases"], ids=lambda case: case["id"])
def test_known_groups(case: dict[str, Any]) -> None:
    groups = get_packer(case["algorithm"])(case["lengths"], case["capacity"])
    if "groups_by_index" in case:
        assert groups == case["groups_by_index"]
    else:
        assert [[case["lengths"][i] for i in group] for group in groups] == case["groups_by_length"]


def test_the_adversary_of_the_decreasing_packers() -> None:
    case = BINS["adversary"]
    lengths = [int(length) for length, count in case["counts"].items() for _ in range(count)]
    bins = dict(case["bins"])
    optimum = bins.pop("optimum")
    assert lower_bound(lengths, case["capacity"]) == optimum == sum(lengths) // case["capacity"]
    assert len(bins) == 6
    assert {name: len(get_packer(name)(lengths, case["capacity"])) for name in bins} == bins


def check_numbers(name: str, count: int) -> None:
    lengths, capacity = drawn(name, count)
    known = {
        key: values[name][str(count)]
        for key, values in BINS["sets"].items()
        if isinstance(values, dict) and "A" in values and key not in "ABC"
    }
    assert set(known) == {"lower_bound_L2", "best_fit_decreasing", "best_known", "next_fit_in_arrival_order"}
    assert lower_bound(lengths, capacity) == known["lower_bound_L2"]
    assert len(best_fit_decreasing(lengths, capacity)) == known["best_fit_decreasing"]
    assert len(minimum_bin_slack(lengths, capacity)) == known["best_known"]
    assert len(get_packer("concatenative")(lengths, capacity)) == known["next_fit_in_arrival_order"]


@pytest.mark.parametrize("name", ["A", "B", "C"])
@pytest.mark.parametrize("count", [1_000, 10_000])
def test_known_numbers_of_bins(name: str, count: int) -> None:
    check_numbers(name, count)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_known_numbers_of_bins_of_many_lengths(name: str) -> None:
    check_numbers(name, 100_000)


@pytest.mark.parametrize("name", PACKERS)
@given(lengths=LENGTHS, max_sources=LIMITS)
@settings(max_examples=50, deadline=None)
def test_every_index_comes_out_once_and_no_bin_is_over_its_limits(
    name: str, lengths: list[int], max_sources: int | None
) -> None:
    packer = get_packer(name)
    groups = packer(lengths, 40, max_sources=max_sources)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in group) <= 40 for group in groups)
    assert all(len(group) <= (max_sources or 60) for group in groups)
    assert len(groups) >= lower_bound(lengths, 40) >= -(-sum(lengths) // 40)
    assert (
        groups
        == packer(tuple(lengths), 40, max_sources=max_sources)
        == packer(np.array(lengths, dtype=int), 40, max_sources=max_sources)
    )
    assert all(type(i) is int for group in groups for i in group)


@pytest.mark.parametrize("name", PLAIN)
@given(lengths=LENGTHS, capacity=st.integers(40, 90), max_sources=LIMITS)
@settings(max_examples=50, deadline=None)
def test_packers_give_what_their_plain_definition_gives(
    name: str, lengths: list[int], capacity: int, max_sources: int | None
) -> None:
    groups = get_packer(name)(lengths, capacity, max_sources=max_sources)
    assert groups == PLAIN[name](lengths, capacity, max_sources or len(lengths) or 1)
    if name == "greedy_knapsack":
        same = get_packer("first_fit_decreasing")(lengths, capacity, max_sources=max_sources)
        assert by_multiset(groups, lengths) == by_multiset(same, lengths)


@pytest.mark.parametrize("name", PLAIN)
def test_packers_give_what_their_plain_definition_gives_for_lengths_of_all_kinds(name: str) -> None:
    packer = get_packer(name)
    pairs = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        # Distinct and equal lengths, most of them below 1/8, 1/4, 1/2 or 1/1 of the capacity; a third of the cases limited.
        capacity = int(rng.integers(12, 200))
        spread = np.concatenate([rng.integers(1, max(capacity // 2**k, 2), 12) for k in range(4)])
        lengths = rng.permutation(spread)[: int(rng.integers(1, 49))].tolist()
        most = int(rng.integers(1, 5)) if seed % 3 == 0 else len(lengths)
        groups = packer(lengths, capacity, max_sources=most)
        assert groups == PLAIN[name](lengths, capacity, most), seed
        pairs += sum(len(group) > 1 for group in groups)
    assert pairs > 300


@given(lengths=st.lists(st.integers(1, 60), max_size=150), capacity=st.integers(60, 200))
@settings(max_examples=80, deadline=None)
def test_best_fit_is_the_same_by_lengths_as_by_sources(lengths: list[int], capacity: int) -> None:
    one_by_one = best_fit_decreasing(lengths, capacity, max_sources=len(lengths) + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "_FEW", 0)
        assert best_fit_decreasing(lengths, capacity) == one_by_one


def test_bins_with_the_same_room_are_served_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # Bins 0 and 1 have room for 6; bins 2 to 4 have it too, once they got a 3 or a 2.
    lengths = [14, 14, 11, 12, 12, 3, 2, 2, 6, 6, 6, 6, 6]
    groups = best_fit_decreasing(lengths, 20, max_sources=99)
    monkeypatch.setattr(fit, "_FEW", 0)
    assert best_fit_decreasing(lengths, 20) == groups
    for seed in range(60):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, int(rng.integers(3, 40)), 300).tolist()
        capacity = int(rng.integers(40, 120))
        assert best_fit_decreasing(lengths, capacity) == best_fit_decreasing(lengths, capacity, max_sources=300)


def test_best_fit_of_many_equal_lengths_is_the_same_by_lengths_as_by_sources() -> None:
    lengths, capacity = drawn("C", 12_000)
    assert len(lengths) > fit._FEW
    assert len(lengths) > 5 * len(set(lengths))
    assert best_fit_decreasing(lengths, capacity) == best_fit_decreasing(lengths, capacity, max_sources=12_000)


def best_sum(lengths: list[int], room: int, most: int) -> int:
    sums = [{0}] + [set() for _ in range(most)]
    for length in lengths:
        for count in range(most, 0, -1):
            sums[count] |= {total + length for total in sums[count - 1] if total + length <= room}
    return max(set().union(*sums))


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    capacity=st.integers(30, 70),
    unit=st.sampled_from([1, 4]),
    max_sources=LIMITS,
)
@settings(max_examples=120, deadline=None)
def test_minimum_bin_slack_fills_each_bin_as_well_as_possible(
    lengths: list[int], capacity: int, unit: int, max_sources: int | None
) -> None:
    lengths = [length * unit for length in lengths]
    capacity = capacity * unit + unit // 2
    remaining = Counter(range(len(lengths)))
    taken: dict[int, int] = {}
    for group in minimum_bin_slack(lengths, capacity, max_sources=max_sources):
        left = [lengths[i] for i in remaining]
        assert lengths[group[0]] == max(left)
        left.remove(max(left))
        most = (max_sources or len(lengths)) - 1
        assert sum(lengths[i] for i in group[1:]) == best_sum(left, capacity - lengths[group[0]], most)
        for index in group:
            assert taken.get(lengths[index], -1) < index
            taken[lengths[index]] = index
            del remaining[index]
    assert not remaining


@given(lengths=st.lists(st.integers(1, 30), max_size=20), room=st.integers(0, 80), most=st.none() | st.integers(0, 6))
@settings(max_examples=200, deadline=None)
def test_fullest_is_fullest_and_takes_early_sources(lengths: list[int], room: int, most: int | None) -> None:
    used = fullest(lengths, room, most=most)
    assert used == sorted(set(used))
    assert len(used) <= (len(lengths) if most is None else most)
    total = sum(lengths[i] for i in used)
    assert total == best_sum(lengths, room, len(lengths) if most is None else most)
    if used:
        # Without the last of them the room cannot be filled so well from what came before.
        assert best_sum(lengths[: used[-1]], room, len(lengths) if most is None else most) < total


def test_fullest_prefers_more_early_sources_to_fewer_late_ones() -> None:
    lengths = [4, 9, 9, 9, 19, 19, 28]
    assert 28 + 19 + 9 == 9 + 9 + 19 + 19 == best_sum(lengths, 59, 4)
    assert fullest(lengths, 59, most=4) == [1, 2, 4, 5]


def test_subsets_of_limited_size_are_fullest() -> None:
    full = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        room = int(rng.integers(8, 40))
        most = int(rng.integers(2, 9))
        lengths = rng.integers(1, room + 1, int(rng.integers(5, 25))).tolist()
        used = bin_slack._at_most(lengths, room, [1] * len(lengths), most)
        assert used == sorted(set(used))
        assert len(used) <= most
        total = sum(lengths[i] for i in used)
        assert total == best_sum(lengths, room, most)
        full += total == room
        if total == room:
            assert best_sum(lengths[: used[-1]], room, most) < room
    assert 150 < full < 300


@pytest.mark.parametrize("most", [None, 3])
def test_fullest_of_a_wide_room_is_that_of_a_narrow_one(most: int | None) -> None:
    lengths = np.random.default_rng(0).integers(1, 400, 60).tolist()
    narrow = fullest(lengths, 1_000, most=most)
    assert sum(lengths[i] for i in narrow) == 1_000
    assert fullest([64 * length for length in lengths], 64_063, most=most) == narrow


def test_fullest_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="source 1 has 0 tokens"):
        fullest([3, 0], 9)
    with pytest.raises(ValueError, match="room=-1: a whole number of at least 0"):
        fullest([3], -1)
    with pytest.raises(ValueError, match="most=-2"):
        fullest([3], 9, most=-2)


def test_lower_bound() -> None:
    assert lower_bound([], 10) == 0
    # The sum alone says 2.
    assert lower_bound([6, 6, 6], 10) == 3
    # Those above half and the sum alone say 3; with K = 4, the three of 7 leave no room for the others.
    assert lower_bound([7, 7, 7, 4, 4], 10) == 4
    with pytest.raises(ValueError, match="source 1 has 11 tokens, more than capacity=10"):
        lower_bound([5, 11], 10)


@given(lengths=st.lists(st.integers(1, 20), max_size=25), capacity=st.integers(20, 31))
@settings(max_examples=100, deadline=None)
def test_lower_bound_is_the_best_over_all_classes(lengths: list[int], capacity: int) -> None:
    best = 0
    for least in range(capacity // 2 + 1):
        alone = [n for n in lengths if n > capacity - least]
        half = [n for n in lengths if capacity < 2 * n and n <= capacity - least]
        rest = [n for n in lengths if least <= n and 2 * n <= capacity]
        over = sum(rest) - (len(half) * capacity - sum(half))
        best = max(best, len(alone) + len(half) + max(0, -(-over // capacity)))
    assert lower_bound(lengths, capacity) == best


def test_options_of_packers() -> None:
    assert {
        name: sorted(packer_options(name) - {"max_sources"}) for name in PACKERS if packer_options(name) != {"max_sources"}
    } == {
        "balanced_greedy_knapsack": ["delta"],
        "first_fit_shuffle": ["seed"],
    }
    lengths = drawn("A", 300)[0]
    drawn_orders = [pack(lengths, 4096, algorithm="first_fit_shuffle", seed=seed) for seed in (0, 1, 1)]
    assert drawn_orders[0] != drawn_orders[1] == drawn_orders[2]
    assert pack([2] * 6, 6, algorithm="balanced_greedy_knapsack") == [[0, 2, 4], [1, 3, 5]]
    assert pack([2] * 6, 6, algorithm="balanced_greedy_knapsack", delta=1) == [[0, 3], [1, 4], [2, 5]]
    assert pack([2, 2], 6, algorithm="balanced_greedy_knapsack", delta=5) == [[0], [1]]


@pytest.mark.parametrize(
    ("lengths", "arguments", "message"),
    [
        ([3, 9], {}, "source 1 has 9 tokens, more than capacity=8: raise the capacity"),
        ([3, 0], {}, "source 1 has 0 tokens"),
        ([3, 2.5], {}, "length 1=2.5: a whole number"),
        ([3, "4"], {}, "length 1='4': a whole number"),
        (np.ones((2, 2), dtype=int), {}, r"length 0=\[1, 1\]: a whole number"),
        (
            [3],
            {"seed": 1},
            r"seed=1 is not used by algorithm='concatenative', which takes max_sources; .* by first_fit_shuffle",
        ),
        ([3], {"speed": 1}, "speed is taken by no packer"),
        ([3], {"max_sources": 0}, "max_sources=0: a whole number of at least 1"),
        ([3], {"max_sources": 2.5}, "max_sources=2.5"),
        ([3], {"min_bins": 0}, "min_bins=0"),
        ([3], {"bins_multiple_of": True}, "bins_multiple_of=True"),
        ([3], {"algorithm": "first_fit_shuffle", "seed": -1}, "seed=-1: a whole number of at least 0"),
        ([3], {"algorithm": "balanced_greedy_knapsack", "delta": -1}, "delta=-1"),
        ([3], {"algorithm": "greedy"}, "'greedy' is not known; known are balanced_greedy_knapsack"),
        ([3, 3], {"min_bins": 3, "bins_multiple_of": 2}, r"2 sources cannot make 4 bins \(the packer made 1, min_bins=3"),
        ([], {"min_bins": 1}, "0 sources cannot make 1 bins"),
    ],
)
def test_impossible_requests_are_refused(lengths: list[int], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(lengths, 8, **{"algorithm": "concatenative", **arguments})


@pytest.mark.parametrize("name", PACKERS)
def test_lengths_may_be_numbers_of_numpy_and_torch(name: str) -> None:
    plain = [5, 3, 6, 2, 2, 7]
    expected = get_packer(name)(plain, 8)
    for lengths in (np.array(plain), [np.int32(length) for length in plain], torch.tensor(plain), [*torch.tensor(plain)]):
        assert get_packer(name)(lengths, 8) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PACKERS)
def test_packers_refuse_what_fits_no_bin(name: str) -> None:
    with pytest.raises(ValueError, match="source 0 has 9 tokens, more than capacity=8"):
        get_packer(name)([9, 1], 8)
    with pytest.raises(ValueError, match="max_sources=0"):
        get_packer(name)([1], 8, max_sources=0)


@pytest.fixture
def own_packers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PACKERS", dict(registry._PACKERS))


@pytest.mark.usefixtures("own_packers")
def test_a_packer_can_be_registered_once() -> None:
    @register_packer("one_by_one")
    def one_by_one(lengths: Any, capacity: int, *, stride: int = 1) -> Groups:
        return [[i] for i in range(0, len(lengths), stride)]

    assert "one_by_one" in packers()
    assert packer_options("one_by_one") == {"stride"}
    assert PackingPolicy(capacity=9, algorithm="one_by_one").pack([1, 2]) == [[0], [1]]
    assert pack([1, 2], 9, algorithm="one_by_one", max_sources=None) == [[0], [1]]
    with pytest.raises(ValueError, match="registered already: choose another name"):
        register_packer("one_by_one")(one_by_one)
    with pytest.raises(
        ValueError, match=r"max_sources=1 is not used by algorithm='one_by_one', which takes stride; .*balanced"
    ):
        pack([1, 2], 9, algorithm="one_by_one", max_sources=1)
    with pytest.raises(ValueError, match="packer 'one_by_one' left out index 1"):
        pack([1, 2], 9, algorithm="one_by_one", stride=2)


@pytest.mark.usefixtures("own_packers")
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[0, 1], [1, 2]], "index 1 twice, the second time in bin 1"),
        ([[0, 1], [3]], "index 3 in bin 1, where there are 3 sources"),
        ([[0, -1]], "index -1 in bin 0"),
        ([[0], [], [1, 2]], "bin 1 without a source"),
        ([[0, 1, 2]], r"bin 0 12 tokens, indices \[0, 1, 2\]: more than capacity=9"),
        ([[0, 1], [2]], r"bin 0 2 sources, indices \[0, 1\]: more than max_sources=1"),
        ([[0], [2]], "left out index 1"),
    ],
)
def test_what_own_packers_give_is_checked(groups: Groups, message: str) -> None:
    @register_packer("own")
    def own(lengths: Any, capacity: int, *, max_sources: int | None = None) -> Groups:
        return groups

    with pytest.raises(ValueError, match=f"packer 'own' .*{message}"):
        pack([3, 4, 5], 9, algorithm="own", max_sources=1 if "max_sources" in message else None)


@pytest.mark.usefixtures("own_packers")
def test_packers_that_cannot_be_called_are_not_registered() -> None:
    for packer, message in (
        (lambda lengths: [], "cannot be called as packer"),
        (lambda lengths, capacity, **options: [], "takes any option"),
        (lambda lengths, capacity, *, least: [], "option 'least' of packer 'own' has no default"),
        (lambda lengths, capacity, *, min_bins=1: [], "option 'min_bins', which pack.. has itself"),
    ):
        with pytest.raises(ValueError, match=message):
            register_packer("own")(packer)
    assert "own" not in packers()


def most_even(lengths: list[int], count: int) -> int:
    """What the least filled of ``count`` bins can hold at most, whatever the others hold."""
    sums = [0] * (1 << len(lengths))
    for subset in range(1, len(sums)):
        low = subset & -subset
        sums[subset] = sums[subset ^ low] + lengths[low.bit_length() - 1]
    best = sums
    for _ in range(count - 1):
        following = [0] * len(sums)
        for subset in range(len(sums)):
            part = subset
            while part:
                following[subset] = max(following[subset], min(sums[part], best[subset ^ part]))
                part = (part - 1) & subset
        best = following
    return best[-1]


@pytest.mark.parametrize("seed", range(40))
def test_more_bins_hold_at_least_half_of_what_they_can(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(2.5, 1.0, 8).astype(int), 1, 40).tolist()
    made = best_fit_decreasing(lengths, 40)
    count = int(rng.integers(len(made) + 1, 8)) if len(made) < 7 else len(made) + 1
    groups = with_bin_count(made, lengths, min_bins=count)
    assert len(groups) == count > len(made)
    assert 2 * min(loads_of(groups, lengths)) >= most_even(lengths, count)


@pytest.mark.parametrize("name", PACKERS)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=24, max_size=60),
    min_bins=st.none() | st.integers(1, 20),
    multiple=st.integers(1, 8),
    max_sources=LIMITS,
)
@settings(max_examples=30, deadline=None)
def test_more_bins_keep_every_source_and_all_limits(
    name: str, lengths: list[int], min_bins: int | None, multiple: int, max_sources: int | None
) -> None:
    made = pack(lengths, 40, algorithm=name, max_sources=max_sources)
    needed = -(-max(len(made), min_bins or 0) // multiple) * multiple
    if needed > len(lengths):
        with pytest.raises(ValueError, match="sources cannot make"):
            pack(lengths, 40, algorithm=name, min_bins=min_bins, bins_multiple_of=multiple, max_sources=max_sources)
        return
    groups = pack(lengths, 40, algorithm=name, min_bins=min_bins, bins_multiple_of=multiple, max_sources=max_sources)
    assert len(groups) == needed
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(0 < load <= 40 for load in loads_of(groups, lengths))
    assert all(len(group) <= (max_sources or 60) for group in groups)
    if needed == len(made):
        assert groups == made
    elif max_sources is None and max(lengths) <= 0.5 * sum(lengths) / needed:
        assert min(loads_of(groups, lengths)) >= 0.5 * sum(lengths) / needed


@pytest.mark.parametrize(("name", "least"), [("A", 0.94), ("B", 0.85), ("C", 0.9)])
def test_new_bins_are_nearly_as_full_as_the_others(name: str, least: float) -> None:
    lengths, capacity = drawn(name, 1_000)
    made = pack(lengths, capacity, algorithm="best_fit_decreasing")
    groups = pack(lengths, capacity, algorithm="best_fit_decreasing", bins_multiple_of=64)
    assert len(groups) % 64 == 0
    assert len(groups) > len(made)
    assert min(loads_of(groups, lengths)) >= least * sum(lengths) / len(groups)
    # One more bin takes from a few others only.
    one_more = with_bin_count(made, lengths, min_bins=len(made) + 1)
    assert min(loads_of(one_more, lengths)) >= least * sum(lengths) / len(one_more)
    assert sum(group in one_more for group in made) > 0.5 * len(made)


def test_bins_without_a_place_exchange_sources() -> None:
    lengths = [1, 1, 6, 5, 5, 5]
    made = [[0, 1], [2, 3], [4, 5]]
    groups = with_bin_count(made, lengths, min_bins=4, max_sources=2)
    # The bin of 1 and 1 has no place for a third source, so one of them goes where the 5 came from.
    assert groups == [[1, 4], [2], [5, 0], [3]]
    # Where no exchange helps either, the bin stays as it is.
    lengths = [1, 1, 1, 8, 8, 8]
    groups = with_bin_count(made, lengths, min_bins=4, max_sources=2)
    assert groups == [[0, 1], [2, 3], [4], [5]]
    assert made == [[0, 1], [2, 3], [4, 5]]


PACK_ALL = """
import json, sys
from lightning_pack.binning import get_packer, pack, packers
lengths, capacity = json.load(sys.stdin)
groups = {name: get_packer(name)(lengths, capacity) for name in packers()}
groups["more"] = pack(lengths, capacity, algorithm="best_fit_decreasing", min_bins=70)
groups["fewer sources"] = pack(lengths, capacity, algorithm="minimum_bin_slack", max_sources=9)
print(json.dumps(groups))
"""


def test_packers_give_the_same_in_every_process() -> None:
    lengths, capacity = drawn("A", 600)
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PACK_ALL],
            env={**os.environ, "PYTHONHASHSEED": seed},
            input=json.dumps([lengths, capacity]),
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    groups = json.loads(outputs[0])
    assert set(PACKERS) < set(groups)
    assert {name: groups[name] for name in PACKERS} == {name: get_packer(name)(lengths, capacity) for name in PACKERS}


def test_bench_bins_compares_every_packer(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "bins", "--sets", "A", "C", "--counts", "50", "1000", "--turns", "1"])
    lines = capsys.readouterr().out.splitlines()
    *lines, adversary, long_tailed, mixture = lines
    assert len(lines) == 5 * (2 + len(packers()))
    assert adversary.startswith("bins/adversary ")
    assert [line.split()[:2] for line in (long_tailed, mixture)] == [["bins/A", "0.00%"], ["bins/C", "0.00%"]]
    assert "best_fit_decreasing 0.73%, next fit 23.72%; 1,000 lengths" in mixture
    assert lines[0] == "the adversary, 300 lengths, capacity 4,096: at least 90 bins"
    heads = [line for line in lines if line.startswith("set ")]
    assert [head.split(",")[0] for head in heads] == ["set A", "set A", "set C", "set C"]
    assert heads[3] == "set C, 1,000 lengths, capacity 2,048: at least 274 bins"
    last = lines[lines.index(heads[3]) + 1 :]
    assert last[0].split()[:4] == ["next", "fit", "339", "bins,"]
    (best,) = [line for line in last if "best_fit_decreasing" in line]
    assert "276 bins,   0.73% above the bound,  18.6% fewer than next fit" in best
    (fullest_bins,) = [line for line in last if "minimum_bin_slack" in line]
    assert "274 bins,   0.00% above the bound,  19.2% fewer" in fullest_bins


@pytest.mark.parametrize("option", [["--counts", "0"], ["--turns", "0"]])
def test_bench_bins_refuses_what_it_cannot_measure(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "bins", *option])
    assert stop.value.code == 2
    assert f"{option[0]} {option[1]}: at least" in capsys.readouterr().err


def test_an_own_packer_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._PACKERS, "test_gives_nothing", lambda lengths, capacity: None)
    with pytest.raises(ValueError, match=r"packer 'test_gives_nothing' failed for 2 lengths and capacity=8 \(TypeError"):
        pack([1, 2], 8, algorithm="test_gives_nothing")


def test_exact_fill_packs_a_long_list_through_a_buffer() -> None:
    lengths, capacity = drawn("A", 5000)
    groups = pack(lengths, capacity, algorithm="exact_fill")
    assert sorted(index for group in groups for index in group) == list(range(5000))
    assert len(groups) <= lower_bound(lengths, capacity) * 1.01
