from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pack import PackingPolicy
from lightning_pack.binning import packers
from lightning_pack.policy import OverlengthError
from lightning_pack.source import EncodedSource
from tests.conftest import vectors

ROWS = vectors("rows")


def source(key: str, length: int, **fields: Any) -> EncodedSource:
    return dataclasses.replace(EncodedSource.of(key, torch.arange(length) + 1), **fields)


def policy_of(case: dict[str, Any]) -> PackingPolicy:
    width = case["width"]
    capacity = width or sum(-(-n // case["multiple"]) * case["multiple"] for n in case["lengths"]) or case["multiple"]
    return PackingPolicy(capacity=capacity, multiple=case["multiple"], width="fixed" if width else "variable")


@pytest.mark.parametrize("case", ROWS["cases"], ids=lambda case: case["id"])
def test_layout_of_known_rows(case: dict[str, Any]) -> None:
    layout = policy_of(case).layout(case["lengths"])
    assert layout.cu_seqlens.tolist() == case["cu_seqlens"]
    assert layout.cu_seqlens_padded.tolist() == case["cu_seqlens_padded"]
    assert layout.max_seqlen == case["max_seqlen"]
    assert (layout.cu_seqlens is layout.cu_seqlens_padded) == case["equal"]
    assert layout.width == case["cu_seqlens_padded"][-1]
    assert layout.cu_seqlens.dtype == layout.cu_seqlens_padded.dtype == torch.int32


@pytest.mark.parametrize(
    ("case", "message"),
    list(
        zip(
            ROWS["must_refuse"],
            ("need a width of 20", "18 is not a multiple", "source 1.* 0 tokens", "at least one source"),
            strict=True,
        )
    ),
    ids=lambda value: value["id"] if isinstance(value, dict) else "",
)
def test_impossible_rows_are_refused(case: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_of(case).layout(case["lengths"])


def test_layout_refuses_more_than_capacity_even_in_a_wide_row() -> None:
    with pytest.raises(ValueError, match="more than capacity=8"):
        PackingPolicy(capacity=8, width=16).layout([5, 5])


@pytest.mark.parametrize("algorithm", packers())
@given(
    lengths=st.lists(st.integers(1, 40), max_size=60),
    multiple=st.sampled_from([1, 2, 4, 8]),
)
@settings(max_examples=60, deadline=None)
def test_every_source_is_packed_once_and_no_pack_is_too_long(algorithm: str, lengths: list[int], multiple: int) -> None:
    policy = PackingPolicy(capacity=40, algorithm=algorithm, multiple=multiple)
    groups = policy.pack(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(0 < sum(policy.aligned(lengths[i]) for i in group) <= 40 for group in groups)
    assert len(groups) >= -(-sum(map(policy.aligned, lengths)) // 40)
    assert groups == policy.pack(lengths)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": 8.5}, "capacity=8.5"),
        ({"capacity": 10**12}, "capacity=1000000000000: a row has at most 2147483647 tokens, as cu_seqlens"),
        ({"capacity": 8, "width": 2**31}, "width=2147483648: a row has at most 2147483647 tokens"),
        ({"capacity": 10, "multiple": 4}, "capacity=10 is not a multiple of multiple=4: take 8"),
        ({"capacity": 8, "algorithm": "best"}, "'best' is not known; known are auto, balanced_greedy_knapsack, best_fit"),
        ({"capacity": 8, "overlength": "skip"}, "overlength='skip' is not one of"),
        ({"capacity": 1, "overlength": "split"}, "at least 2 tokens"),
        ({"capacity": 8, "width": 4}, "width=4 is less than capacity=8"),
        ({"capacity": 8, "multiple": 4, "width": 10}, "width=10 is not a multiple"),
        ({"capacity": 8, "width": "wide"}, "width='wide' is not"),
        ({"capacity": 8, "algorithm": "concatenative", "seed": 3}, "seed=3 is not used"),
        ({"capacity": 8, "buffer_size": 0}, "buffer_size=0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackingPolicy(**settings)


def test_overlength_rules() -> None:
    long = source("chat", 25)
    (gone,) = PackingPolicy(capacity=10).admit(long)
    assert (len(gone), gone.left_out) == (0, ("chat", "overlength", 25))
    (cut,) = PackingPolicy(capacity=10, overlength="truncate").admit(long)
    assert (cut.input_ids.tolist(), cut.left_out) == (list(range(1, 11)), ("chat", "truncated", 15))
    with pytest.raises(OverlengthError, match=r"sample 'chat' has 25 tokens, more than capacity=10: .*overlength='drop' or"):
        PackingPolicy(capacity=10, overlength="error").admit(long)
    seen = dataclasses.replace(long, media_tokens=4)
    assert seen.has_media
    with pytest.raises(OverlengthError, match=r"'chat' has 25 tokens, .* shorten the data, or choose overlength='drop'$"):
        PackingPolicy(capacity=10, overlength="error").admit(seen)
    # A chat is never split, only a plain text.
    (gone,) = PackingPolicy(capacity=10, overlength="split").admit(long)
    assert gone.left_out == ("chat", "overlength", 25)


@given(length=st.integers(2, 60), capacity=st.integers(2, 20))
@settings(max_examples=100, deadline=None)
def test_split_keeps_every_token_a_target_once(length: int, capacity: int) -> None:
    text = source("text", length, splittable=True)
    pieces = PackingPolicy(capacity=capacity, overlength="split").admit(text)
    assert all(2 <= len(piece) <= capacity for piece in pieces)
    targets = [token for piece in pieces for token in piece.labels.tolist() if token != -100]
    assert targets == list(range(2, length + 1))
    assert len({piece.key for piece in pieces}) == len(pieces)


def test_sources_that_teach_nothing_are_left_out_with_their_reason() -> None:
    policy = PackingPolicy(capacity=10, overlength="truncate")
    (empty,) = policy.admit(source("e", 0))
    assert empty.left_out == ("e", "empty", 0)
    (silent,) = policy.admit(EncodedSource.of("s", torch.arange(4), torch.full((4,), -100)))
    assert silent.left_out == ("s", "no_targets", 4)
    labels = torch.full((20,), -100)
    labels[15:] = 1
    (beyond,) = policy.admit(EncodedSource.of("b", torch.arange(20), labels))
    assert beyond.left_out == ("b", "no_targets", 20)


def test_select_loses_nothing_and_carries_the_markers() -> None:
    policy = PackingPolicy(capacity=16, buffer_size=8)
    buffer = [source(str(i), 3 + i) for i in range(6)] + [
        EncodedSource.dropped("x", "corrupt"),
        EncodedSource.dropped("y", "empty"),
    ]
    groups = policy.select(buffer, final=True, worker=1, index=5)
    assert sorted(map(id, buffer)) == sorted(id(s) for group in groups for s in group)
    packs = [policy.build(group) for group in groups]
    assert [gone.key for gone in packs[0].left_out] == ["x", "y"]
    assert not any(pack.left_out for pack in packs[1:])
    (only,) = policy.select(buffer[6:])
    assert (policy.build(only).layout, len(policy.build(only).left_out)) == (None, 2)
    assert policy.select([]) == []


def test_packs_of_a_buffer_come_in_an_order_of_their_own() -> None:
    policy = PackingPolicy(capacity=10, buffer_size=64)
    buffer = [source(str(i), 1 + i % 9) for i in range(64)]

    def order(**draw: int) -> list[str]:
        return [group[0].key for group in policy.select(buffer, **draw)]

    assert order() == order()
    assert len({tuple(order(worker=w, index=i)) for w in range(2) for i in range(2)}) == 4
    by_length = [group[0].key for group in PackingPolicy(capacity=10, algorithm="concatenative").select(buffer)]
    assert by_length == sorted(by_length, key=int)


def test_fingerprint_names_every_setting() -> None:
    assert set(PackingPolicy(capacity=8).fingerprint()) == {
        "capacity", "algorithm", "buffer_size", "carry_over", "age_limit", "multiple", "width", "overlength", "max_sources",
        "fixed_boundaries", "min_bins", "bins_multiple_of", "delta", "balance", "window", "seed",
        "max_media_tokens", "max_media_bytes", "buffer_media_tokens", "buffer_media_bytes",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "given"), [("ages", [1]), ("keys", ["a", "b", "c"]), ("media", [])])
def test_what_is_told_of_the_sources_of_a_buffer_is_one_for_each(name: str, given: list[Any]) -> None:
    with pytest.raises(ValueError, match=rf"{name} of {len(given)} sources were given with lengths of 2"):
        PackingPolicy(capacity=8).choose([3, 4], **{name: given})
