"""Carry-over: full rows, no source too old, groups apart, and the whole of a finite stream; over lengths and over real data."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from lightning_pack import PackingPolicy
from lightning_pack.bench.bins import drawn
from lightning_pack.energon import StreamOptions, sample_sources
from lightning_pack.energon.dataset import open_evaluation_share
from lightning_pack.energon.worker import End, Whereabouts, rows_of_share
from lightning_pack.policy import AUTO
from lightning_pack.resume import ResumeError
from lightning_pack.simulation import simulate
from tests.conftest import vectors
from tests.numbers_data import NumberEncoder, records_of, same_batch, write_webdataset
from tests.test_exact_position import PlainNumbers, Run, through_a_file

STREAMING = vectors("bins")["streaming"]
#: All packers that differ in how sources are chosen to leave, and one that is only packed with.
ALGORITHMS = (*AUTO, "best_fit_decreasing", "concatenative")


@pytest.mark.parametrize("name", ["A", "B", "C"])
@pytest.mark.parametrize("size", [16, 64, 256, 1024])
def test_rows_are_as_full_as_they_can_be(name: str, size: int) -> None:
    lengths, capacity = drawn(name, 20_000)
    policy = PackingPolicy(capacity=capacity, buffer_size=size).settled(lengths[:2048])
    assert policy.algorithm in AUTO
    stream = simulate(policy, lengths)
    assert sorted(i for group in stream.groups for i in group) == list(range(len(lengths)))
    assert stream.fill >= STREAMING["target"][name][str(size)]
    assert stream.fill > STREAMING["flush"][name][str(size)]
    assert 0 < stream.oldest <= 6


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("A", 64), ("B", 64), ("C", 256)])
def test_rows_of_real_data_are_as_full(tmp_path: Path, name: str, size: int) -> None:
    lengths, capacity = drawn(name, 20_000)
    file = tmp_path / f"{name}.jsonl"
    file.write_text("".join(f'{{"n": {n}, "id": {i}}}\n' for i, n in enumerate(lengths)))
    CrudeJsonlDatasetFactory.prepare_dataset(str(file))
    policy = PackingPolicy(capacity=capacity, buffer_size=size)
    options = StreamOptions(path=str(file), encoder=NumberEncoder(), policy=policy)
    options = replace(options, policy=policy.settled(sample_sources(options, evaluation=True).lengths))
    tokens = rows = oldest = 0
    keys: Counter[str] = Counter()
    left_out = []
    for message in rows_of_share(lambda w: open_evaluation_share(options, 0, w, split="train", of=1), Whereabouts(), None):
        if isinstance(message, End):
            break
        rows += 1
        tokens += int(message.batch.cu_seqlens[-1])
        oldest = max(oldest, *message.batch.ages)
        keys.update(message.batch.source_keys)
        left_out += message.batch.left_out
    # A single token has no target.
    assert {gone.reason for gone in left_out} <= {"no_targets"}
    assert keys.total() + len(left_out) == len(lengths)
    assert set(keys.values()) == {1}
    assert tokens / (rows * capacity) >= STREAMING["target"][name][str(size)]
    assert 0 < oldest <= 6 * size


@settings(max_examples=150, deadline=None)
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    lengths=st.lists(st.integers(1, 40), max_size=150),
    size=st.integers(1, 20),
    multiple=st.sampled_from([1, 4]),
    most=st.sampled_from([None, 1, 3]),
    groups=st.integers(1, 3),
    limit=st.sampled_from([2, 3.5, 4, 10]),
)
def test_every_source_leaves_once_in_time_and_with_its_own_kind(
    algorithm: str, lengths: list[int], size: int, multiple: int, most: int | None, groups: int, limit: float
) -> None:
    policy = PackingPolicy(
        capacity=40, algorithm=algorithm, buffer_size=size, multiple=multiple, max_sources=most, age_limit=limit
    )
    keys = [length * 7 % groups for length in lengths]
    stream = simulate(policy, lengths, keys=keys)
    assert sorted(i for group in stream.groups for i in group) == list(range(len(lengths)))
    for group in stream.groups:
        assert 0 < sum(policy.aligned(lengths[i]) for i in group) <= 40
        assert len(group) <= (most or 40)
        assert len({keys[i] for i in group}) == 1
    assert stream.oldest <= 1.5 * limit
    assert stream.groups == simulate(policy, lengths, keys=keys).groups


@pytest.mark.parametrize("algorithm", [*AUTO, "best_fit_decreasing"])
def test_no_source_is_starved(algorithm: str) -> None:
    # Pairs of 20 fill a row exactly; a source of 15 has no partner that does, and is never the longest.
    lengths = [20] * 10 + [15] + [20] * 2000
    stream = simulate(PackingPolicy(capacity=40, algorithm=algorithm, buffer_size=16), lengths)
    assert stream.ages[10] >= 16 * 4, "it was passed over as long as is allowed"
    assert stream.ages[10] <= 16 * 6
    shorter = simulate(PackingPolicy(capacity=40, algorithm=algorithm, buffer_size=16, age_limit=2), lengths)
    assert 16 * 2 <= shorter.ages[10] < stream.ages[10]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("limit", [2, 2.1, 4])
def test_a_source_that_nothing_fits_leaves_in_time(algorithm: str, limit: float) -> None:
    """All of one group but one, so that its row never gets fuller."""
    lengths = [20] * 10 + [15] + [20] * 389
    keys = [0] * 10 + [1] + [0] * 389
    policy = PackingPolicy(capacity=40, algorithm=algorithm, buffer_size=10, age_limit=limit)
    stream = simulate(policy, lengths, keys=keys)
    assert max(stream.ages) == stream.ages[10]
    assert 10 * limit <= stream.ages[10] <= 15 * limit


def test_the_choice_knows_the_groups() -> None:
    lengths, capacity = drawn("A", 2000)
    policy = PackingPolicy(capacity=capacity, buffer_size=64)
    keys = np.random.default_rng(0).integers(8, size=2000).tolist()
    assert policy.settled(lengths).algorithm == "exact_fill"
    assert policy.settled(lengths, keys=keys).algorithm == "minimum_bin_slack"


def test_rows_have_no_length_curriculum() -> None:
    lengths, capacity = drawn("B", 4000)
    policy = PackingPolicy(capacity=capacity, algorithm="best_fit_decreasing", buffer_size=256)
    sources = [PlainNumbers()(str(i), {"n": n, "id": i}) for i, n in enumerate(lengths[:256])]
    chosen = policy.choose([len(source) for source in sources], final=True)
    assert len(chosen) > 32
    longest = [max(len(sources[i]) for i in group) for group in chosen]
    groups = policy.select(sources, final=True, worker=1, index=4)
    shuffled = [max(map(len, group)) for group in groups]
    assert sorted(longest) == sorted(shuffled)
    half = len(longest) // 2
    apart = abs(sum(longest[:half]) / half - sum(longest[half:]) / (len(longest) - half))
    assert abs(sum(shuffled[:half]) / half - sum(shuffled[half:]) / (len(longest) - half)) < apart / 2
    assert groups == policy.select(sources, final=True, worker=1, index=4)
    assert groups != policy.select(sources, final=True, worker=1, index=5)
    assert groups != policy.select(sources, final=True, worker=2, index=4)
    assert groups != replace(policy, seed=1).select(sources, final=True, worker=1, index=4)


@pytest.mark.parametrize("workers", range(4))
def test_groups_stay_apart_to_the_end_of_a_pass(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_exact_position.NumberEncoder", NumberEncoder)
    records = [record | {"group": "ab"[i % 7 == 0]} for i, record in enumerate(records_of([5 + i % 23 for i in range(150)]))]
    path = write_webdataset(tmp_path / "grouped", {"train": records})
    run = Run(path, num_workers=workers, epochs=1, multiple=1)
    batches = []
    for batch in run.data.train_dataloader():
        batches.append(batch)
        run.data._stream.progress.count_batch()  # type: ignore[union-attr]
    run.end()
    kinds = [{int(key.removeprefix("train")) % 7 == 0 for key in batch.source_keys} for batch in batches]
    assert all(len(kind) == 1 for kind in kinds)
    assert len({*map(frozenset, kinds)}) == 2
    assert Counter(key for batch in batches for key in batch.source_keys) == {f"train{i:06d}": 1 for i in range(150)}
    assert any(age > 16 for batch in batches for age in batch.ages), "some were carried over"


def test_the_choice_is_in_the_state(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(numbers, num_workers=0)
    run.train(3)
    state = run.end()
    chosen = state["settings"]["packing.algorithm"]
    assert chosen in AUTO
    assert run.data.packing.algorithm == chosen
    expected = Run(numbers, num_workers=0, algorithm=chosen, state=state).train(4)
    (other,) = set(AUTO) - {chosen}
    with pytest.raises(ResumeError, match=f"packing.algorithm: '{chosen}' in the checkpoint, '{other}' now"):
        Run(numbers, num_workers=0, algorithm=other, state=state)
    with monkeypatch.context() as patch:
        patch.setattr("lightning_pack.training_stream.sample_sources", lambda *_, **__: pytest.fail("it is chosen already"))
        resumed = Run(numbers, num_workers=0, state=state)
        assert all(map(same_batch, resumed.train(4), expected))
        # Also where the dry run would choose the other one.
        swapped = through_a_file(state) | {"settings": state["settings"] | {"packing.algorithm": other}}
        assert Run(numbers, num_workers=0, state=swapped).data.packing.algorithm == other


def test_a_whole_buffer_can_be_made_more_packs() -> None:
    policy = PackingPolicy(capacity=40, carry_over=False, buffer_size=9, min_bins=4, bins_multiple_of=3)
    assert len(policy.pack([10] * 8)) == len(policy.choose([10] * 8)) == 6
    assert len(policy.choose([10] * 5, final=True)) == 2, "too few for six packs"
    with pytest.raises(ValueError, match="5 sources cannot make 6 bins"):
        policy.choose([10] * 5)
    with pytest.raises(ValueError, match="2 different group keys"):
        policy.choose([10] * 8, keys=[0, 1] * 4)


def test_what_is_not_used_is_refused() -> None:
    for settings_, message in (
        ({"carry_over": False, "age_limit": 4.0}, r"age_limit=4.0 is used with carry_over=True only"),
        ({"age_limit": 1.5}, r"age_limit=1.5: a number of turnovers of at least 2"),
        ({"min_bins": 2}, r"min_bins=2 is used with carry_over=False, which packs a buffer as a whole only"),
        ({"bins_multiple_of": 2}, r"bins_multiple_of=2 is used with carry_over=False"),
        ({"window": 8}, r"window=8 is used with balance='quadratic' only"),
        ({"balance": "linear"}, r"balance='linear' is not 'quadratic'"),
        (
            {"carry_over": False, "bins_multiple_of": 12, "buffer_size": 16},
            r"must be a multiple of bins_multiple_of=12: take 24",
        ),
        ({"carry_over": False, "min_bins": 300}, r"min_bins=300 packs cannot be made of buffer_size=256 sources"),
        ({"balance": "quadratic", "algorithm": "concatenative"}, r"balance='quadratic' changes the order of arrival"),
        ({"delta": 1}, r"delta=1 is not used by algorithm='minimum_bin_slack'.* is taken by balanced_greedy_knapsack"),
        ({"max_sources": 0}, r"max_sources=0"),
        ({"carry_over": 1}, r"carry_over=1 is not True or False"),
    ):
        with pytest.raises(ValueError, match=message):
            PackingPolicy(capacity=64, **settings_)


def test_a_source_is_encoded_alike_whenever_it_is_read(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder may draw from the global generators; a source that was carried over is encoded again after a resume."""
    import random

    import numpy as np
    import torch

    class Drawing(NumberEncoder):
        def __call__(self, key: str, record: Any) -> Any:
            source = super().__call__(key, record)
            source.input_ids += random.randrange(100) + int(np.random.randint(100)) + int(torch.randint(100, ()))  # noqa: NPY002
            return source

    monkeypatch.setattr("tests.test_exact_position.NumberEncoder", Drawing)
    run = Run(numbers, num_workers=2, buffer_size=48)
    expected = run.train(60)
    run.end()
    tokens_of = defaultdict(set)
    for batch in expected:
        for key, token in zip(batch.source_keys, batch.input_ids[0, batch.cu_seqlens_padded[:-1].long()].tolist(), strict=True):
            tokens_of[key].add(token)
    assert any(len(tokens) > 1 for tokens in tokens_of.values()), "another pass over the data draws anew"
    run = Run(numbers, num_workers=2, buffer_size=48)
    for k in (24, 27, 28):
        run.train(k - run.data._stream.progress.counts["rows"])  # type: ignore[union-attr]
        state = through_a_file(run.data.state_dict())
        assert all(worker["at"]["carried"] for worker in state["ranks"][0]["loader"]["workers"])
        resumed = Run(numbers, num_workers=2, buffer_size=48, state=state)
        assert all(map(same_batch, resumed.train(20), expected[k:]))
        resumed.end()
    run.end()
