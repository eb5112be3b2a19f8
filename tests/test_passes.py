"""Finite training passes: every source once in each, in an order of its own, exactly resumable to the last row and beyond."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_pack import PackedBatch
from tests.numbers_data import records_of, same_batch, write_webdataset
from tests.test_exact_position import Run, through_a_file
from tests.training import Options, Recorder, datamodule, trainer


def rest(run: Run) -> list[list[PackedBatch]]:
    """What each remaining pass gives, trained."""
    passes = []
    while not run.data._stream.progress.loader.finished:  # type: ignore[union-attr]
        given = []
        for batch in run.data.train_dataloader():
            given.append(batch)
            run.data._stream.progress.count_batch()  # type: ignore[union-attr]
            run.data._stream.progress.loader.commit()  # type: ignore[union-attr]
        passes.append(given)
        assert given, "no pass is empty"
    return passes


@pytest.fixture(scope="module")
def uninterrupted(numbers: Path) -> dict[int, list[list[PackedBatch]]]:
    given = {}
    for workers in range(4):
        run = Run(numbers, num_workers=workers, epochs=2)
        given[workers] = rest(run)
        run.end()
    return given


def flat(passes: list[list[PackedBatch]]) -> list[PackedBatch]:
    return [batch for batches in passes for batch in batches]


def seen(batches: list[PackedBatch]) -> Counter[str]:
    return Counter([key for b in batches for key in b.source_keys] + [gone.key for b in batches for gone in b.left_out])


@pytest.mark.parametrize("workers", range(4))
def test_every_source_comes_once_per_pass_or_is_reported(
    uninterrupted: dict[int, list[list[PackedBatch]]], workers: int
) -> None:
    passes = uninterrupted[workers]
    assert len(passes) == 2
    everything = {f"train{i:06d}": 1 for i in range(200)}
    assert [seen(batches) for batches in passes] == [everything, everything]
    assert any(batch.left_out for batch in passes[0])
    orders = [[key for batch in batches for key in batch.source_keys] for batches in passes]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


@pytest.mark.slow
@pytest.mark.parametrize("workers", range(4))
def test_restored_after_every_row_the_rest_is_the_same(
    numbers: Path, uninterrupted: dict[int, list[list[PackedBatch]]], workers: int
) -> None:
    first, second = uninterrupted[workers]
    run = Run(numbers, num_workers=workers, epochs=2)
    states = [through_a_file(run.data.state_dict())]
    for _ in first:
        run.train(1)
        states.append(through_a_file(run.data.state_dict()))
    run.end()
    # Around the last buffers of the workers a pass has its traps; in the middle some will do.
    picked = [k for k in range(len(states)) if k % 7 == 0 or k > len(first) - 14]
    for k in picked:
        resumed = Run(numbers, num_workers=workers, state=states[k], epochs=2)
        got = rest(resumed)
        resumed.end()
        expected = [first[k:], second] if k < len(first) else [second]
        assert [len(batches) for batches in got] == [len(batches) for batches in expected], f"restored after {k} rows"
        assert all(map(same_batch, flat(got), flat(expected))), f"restored after {k} rows"


@pytest.mark.parametrize("workers", [0, 3])
def test_a_chain_of_resumes_through_both_passes(
    numbers: Path, uninterrupted: dict[int, list[list[PackedBatch]]], workers: int
) -> None:
    expected = flat(uninterrupted[workers])
    got: list[PackedBatch] = []
    state: Any = None
    steps = 0
    while len(got) < len(expected):
        steps = steps % 9 + 1
        run = Run(numbers, num_workers=workers, state=state, epochs=2)
        taken = 0
        while taken < steps and not run.data._stream.progress.loader.finished:  # type: ignore[union-attr]
            for batch in run.data.train_dataloader():
                got.append(batch)
                run.data._stream.progress.count_batch()  # type: ignore[union-attr]
                run.data._stream.progress.loader.commit()  # type: ignore[union-attr]
                taken += 1
                if taken == steps:
                    break
        state = through_a_file(run.end())
    assert len(got) == len(expected)
    assert all(map(same_batch, got, expected))
    finished = Run(numbers, num_workers=workers, state=state, epochs=2)
    assert list(finished.data.train_dataloader()) == []
    finished.end()


@pytest.mark.parametrize("workers", [0, 3])
def test_a_share_without_a_sample_ends_at_once(tmp_path: Path, workers: int) -> None:
    path = write_webdataset(tmp_path / "two", {"train": [*records_of([5, 6]), b"{"][: 2 if workers else 3]}, shards=1)
    run = Run(path, num_workers=workers, epochs=2)
    passes = rest(run)
    run.end()
    assert [sorted(seen(batches)) for batches in passes] == [[f"train{i:06d}" for i in range(2 if workers else 3)]] * 2


def test_blends_are_read_in_whole(tmp_path: Path) -> None:
    paths = [write_webdataset(tmp_path / name, {"train": records_of([5 + i] * 40)}) for i, name in enumerate("ab")]
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend_epochized:\n"
        f"      - {{path: {paths[0]}, repetitions: 2}}\n      - {{path: {paths[1]}, repetitions: 1}}\n"
    )
    run = Run(blend, num_workers=2, epochs=1)
    states, batches = [], []
    for batch in run.data.train_dataloader():
        batches.append(batch)
        run.data._stream.progress.count_batch()  # type: ignore[union-attr]
        run.data._stream.progress.loader.commit()  # type: ignore[union-attr]
        states.append(through_a_file(run.data.state_dict()))
    run.end()
    lengths = Counter(int(n) for batch in batches for n in batch.cu_seqlens.diff())
    assert lengths == {5: 80, 6: 40}
    for k in range(2, len(states), 3):
        resumed = Run(blend, num_workers=2, state=states[k], epochs=1)
        got = flat(rest(resumed))
        resumed.end()
        assert len(got) == len(batches) - k - 1
        assert all(map(same_batch, got, batches[k + 1 :]))


def test_a_weighted_blend_has_no_end(tmp_path: Path) -> None:
    paths = [write_webdataset(tmp_path / name, {"train": records_of([5] * 40)}) for name in "ab"]
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        f"      - {{path: {paths[0]}, weight: 2}}\n      - {{path: {paths[1]}, weight: 1}}\n"
    )
    with pytest.raises(ValueError, match=r"weights.*blend_epochized.*epochs"):
        Run(blend, num_workers=0, epochs=1)


@pytest.mark.parametrize("asks", [{"min_steps": 10_000}, {"min_epochs": 4}])
def test_a_trainer_that_asks_for_more_than_the_passes_is_refused(numbers: Path, asks: dict[str, int]) -> None:
    options = Options(data=str(numbers), epochs=2, trainer={"max_epochs": -1} | asks)
    with pytest.raises(ValueError, match=r"epochs=2 passes over the data, but min_steps=.* asks for more"):
        trainer(options).fit(Recorder(), datamodule(options))


@pytest.mark.parametrize(("max_epochs", "told"), [(3, True), (2, False), (-1, False)])
def test_a_trainer_whose_epochs_are_more_than_the_passes_says_why_it_ends(
    numbers: Path, caplog: pytest.LogCaptureFixture, max_epochs: int, told: bool
) -> None:
    options = Options(data=str(numbers), epochs=2, trainer={"max_epochs": max_epochs})
    running = trainer(options)
    with caplog.at_level(logging.INFO):
        running.fit(Recorder(), datamodule(options))
    assert running.current_epoch == 2
    assert ("training ends before max_epochs=3" in caplog.text) == told
