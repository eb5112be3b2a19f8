"""The loader's state says what was trained on: restored at any step, the next batches are the same in every field."""

from __future__ import annotations

import dataclasses
import gc
import io
import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_pack import EnergonPackDataModule, PackedBatch, PackingPolicy
from lightning_pack.tracked import LEAST_KEPT
from tests.numbers_data import NumberEncoder, records_of, same_batch, write_webdataset
from tests.training import digest


class PlainNumbers(NumberEncoder):
    """Sources that may be split."""

    def __call__(self, key: str, record: Any) -> Any:
        return dataclasses.replace(super().__call__(key, record), splittable=True)


class Run:
    """A datamodule and what it has given, without a Trainer."""

    def __init__(self, path: Path, *, num_workers: int, state: Any = None, **options: Any) -> None:
        packs_per_batch = options.pop("packs_per_batch", 1)
        settings = {name: options.pop(name) for name in ("epochs", "worker_timeout", "on_damaged") if name in options}
        policy = PackingPolicy(**{"capacity": 64, "buffer_size": 16, "multiple": 4} | options)
        self.data = EnergonPackDataModule(
            path,
            encoder=NumberEncoder(),
            packing=policy,
            num_workers=num_workers,
            shuffle_buffer_size=8,
            max_samples_per_sequence=10,
            packs_per_batch=packs_per_batch,
            **settings,
        )
        self.data.setup("fit")
        if state is not None:
            self.data.load_state_dict(through_a_file(state))
        self.batches: Iterator[PackedBatch] = iter(self.data.train_dataloader())

    def train(self, steps: int) -> list[PackedBatch]:
        given = []
        for _ in range(steps):
            given.append(next(self.batches))
            self.data._stream.progress.count_batch()
            self.data._stream.progress.loader.commit()
        return given

    @property
    def pids(self) -> list[int]:
        return list(self.data._stream.progress.loader._reader.pids)  # type: ignore[union-attr]

    def end(self) -> Any:
        """The state, after the workers have ended."""
        self.data.teardown("fit")
        return self.data.state_dict()


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def comparable(value: Any) -> Any:
    """The value with tensors as numbers, so that == works."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    return value


@pytest.fixture(scope="module")
def uninterrupted(numbers: Path) -> dict[int, list[PackedBatch]]:
    given = {}
    for workers in (0, 2):
        run = Run(numbers, num_workers=workers)
        given[workers] = run.train(80)
        run.end()
    return given


@pytest.mark.slow
@pytest.mark.parametrize("prefetched", [0, 1])
@pytest.mark.parametrize("workers", [0, 2])
def test_restored_at_every_step_the_next_batches_are_the_same(
    numbers: Path,
    uninterrupted: dict[int, list[PackedBatch]],
    workers: int,
    prefetched: int,
) -> None:
    expected = uninterrupted[workers]
    assert any(batch.left_out for batch in expected[:25]), "the case is only interesting if sources are left out on the way"
    assert len({key for batch in expected for key in batch.source_keys}) < sum(len(b.source_keys) for b in expected)
    run = Run(numbers, num_workers=workers)
    states = [through_a_file(run.data.state_dict())]
    for k in range(26):
        if k:
            run.train(1)
        if prefetched:
            # As Lightning does: one more batch is fetched than trained. The iterator then starts again with it.
            next(run.batches)
            states.append(through_a_file(run.data.state_dict()))
            run.batches = iter(run.data.train_dataloader())
        else:
            states.append(through_a_file(run.data.state_dict()))
    run.end()
    for k, state in enumerate(states[1:]):
        resumed = Run(numbers, num_workers=workers, state=state)
        got = resumed.train(12)
        assert all(map(same_batch, got, expected[k : k + 12])), f"restored after {k} batches"
        resumed.end()
    fresh = Run(numbers, num_workers=workers, state=states[0])
    assert all(map(same_batch, fresh.train(3), expected[:3]))
    fresh.end()


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_a_chain_of_resumes_shortly_after_each_other(numbers: Path, workers: int) -> None:
    reference = Run(numbers, num_workers=workers)
    expected = reference.train(30)
    reference.end()
    got: list[PackedBatch] = []
    state = None
    for steps in (1, 2, 1, 3, 1, 1, 2, 4, 1, 5):
        run = Run(numbers, num_workers=workers, state=state)
        got += run.train(steps)
        state = run.data.state_dict()
        assert comparable(run.end()) == comparable(state)
    assert len(got) == 21
    assert all(map(same_batch, got, expected))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"overlength": "truncate", "capacity": 32},
        {"overlength": "split", "capacity": 20},
        {"packs_per_batch": 3, "width": "fixed"},
        {"algorithm": "concatenative", "buffer_size": 2},
        {"buffer_size": 300},
        {"carry_over": False},
        {"algorithm": "exact_fill", "buffer_size": 48},
        {"balance": "quadratic", "window": 4, "buffer_size": 8, "packs_per_batch": 2},
    ],
    ids=lambda options: ",".join(map(str, options.values())),
)
def test_chains_under_other_policies(
    numbers: Path, options: dict[str, Any], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.test_exact_position.NumberEncoder", PlainNumbers)
    reference = Run(numbers, num_workers=workers, **options)
    expected = reference.train(80)
    reference.end()
    left_out = {gone.reason for batch in expected for gone in batch.left_out}
    assert "corrupt" in left_out
    assert ("truncated" in left_out) == (options.get("overlength") == "truncate")
    assert any("#" in key for batch in expected for key in batch.source_keys) == (options.get("overlength") == "split")
    got: list[PackedBatch] = []
    state = None
    for steps in (1, 2, 4, 3):
        run = Run(numbers, num_workers=workers, state=state, **options)
        got += run.train(steps)
        state = run.end()
    assert all(map(same_batch, got, expected[: len(got)]))


@pytest.mark.parametrize("workers", [0, 2])
def test_restoring_and_saving_again_without_a_step_changes_nothing(
    numbers: Path, uninterrupted: dict[int, list[PackedBatch]], workers: int
) -> None:
    run = Run(numbers, num_workers=workers)
    run.train(7)
    state = run.end()
    for _ in range(3):
        run = Run(numbers, num_workers=workers, state=state)
        state = run.end()
    run = Run(numbers, num_workers=workers, state=state)
    assert all(map(same_batch, run.train(8), uninterrupted[workers][7:15]))
    run.end()


def test_counts_say_what_was_trained(numbers: Path) -> None:
    run = Run(numbers, num_workers=0)
    given = run.train(9)
    next(run.batches)
    (mine,) = run.end()["ranks"]
    mine = mine["counts"]
    assert mine["rows"] == 9
    assert mine["sources"] == sum(len(batch.source_keys) for batch in given)
    assert mine["real_tokens"] == sum(int(batch.cu_seqlens[-1]) for batch in given)
    again = Run(numbers, num_workers=0, state=run.data.state_dict())
    again.train(1)
    assert again.end()["ranks"][0]["counts"]["rows"] == 10


def test_state_needs_no_pickled_classes_and_is_small(numbers: Path) -> None:
    run = Run(numbers, num_workers=2)
    run.train(5)
    file = io.BytesIO()
    torch.save(run.end(), file)
    assert file.tell() < 150_000


def test_workers_end_and_the_state_stays(numbers: Path) -> None:
    run = Run(numbers, num_workers=2)
    run.train(3)
    workers = run.pids
    assert len(workers) == 2
    assert all(map(psutil.pid_exists, workers))
    before = run.data.state_dict()
    assert comparable(run.end()) == comparable(before)
    assert not any(map(psutil.pid_exists, workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_left_out_before_a_row_can_be_made_is_reported_with_it(tmp_path: Path, workers: int) -> None:
    # Buffers of two hold nothing but bad samples now and then, so no pack of theirs can carry the news.
    records = [record if i % 5 == 0 else b"{" for i, record in enumerate(records_of([5] * 50))]
    path = write_webdataset(tmp_path / "bad", {"train": records})
    run = Run(path, num_workers=workers, buffer_size=2)
    batches = run.train(40)
    run.end()
    assert all(batch.source_keys for batch in batches)
    assert max(len(batch.left_out) for batch in batches) > 2, "more than one buffer's worth rides with a row"
    assert {gone.key for batch in batches for gone in batch.left_out} == {f"train{i:06d}" for i in range(50) if i % 5}


def test_batches_that_are_never_counted_are_an_error(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_pack.tracked.MOST_UNTRAINED", 5)
    run = Run(numbers, num_workers=0)
    fetched = [next(run.batches) for _ in range(5)]
    with pytest.raises(RuntimeError, match="give the Trainer the datamodule itself and not its loader"):
        next(run.batches)
    assert len(fetched) == 5


@pytest.mark.parametrize(("workers", "epochs"), [(0, None), (2, None), (0, 2)])
def test_rows_that_are_never_counted_do_not_stay_in_memory(
    numbers: Path, monkeypatch: pytest.MonkeyPatch, workers: int, epochs: int | None
) -> None:
    monkeypatch.setattr("lightning_pack.tracked.MOST_KEPT_BYTES", 1)
    run = Run(numbers, num_workers=workers, epochs=epochs, algorithm="best_fit_decreasing")
    first = run.train(3)
    loader = run.data.train_dataloader()
    digests, alive = [], []
    for row in loader:
        digests.append(digest(row))
        alive.append(weakref.ref(row))
        del row
        if len(digests) == 20:
            break
    gc.collect()
    # The last one is still in hand of who gave it.
    assert sum(ref() is not None for ref in alive[:-1]) == LEAST_KEPT
    before = comparable(run.data.state_dict())
    # They come again all the same, and nothing that was not counted moves the position.
    run.batches = iter(loader)
    again = [digest(next(run.batches)) for _ in range(26)]
    assert again[:20] == digests
    assert len(set(again)) == 26
    assert comparable(run.data.state_dict()) == before
    run.batches = iter(loader)
    trained = [digest(row) for row in run.train(26)]
    assert trained == again
    state = run.end()
    assert state["ranks"][0]["counts"]["rows"] == 29
    resumed = Run(numbers, num_workers=workers, epochs=epochs, algorithm="best_fit_decreasing", state=state)
    whole = Run(numbers, num_workers=workers, epochs=epochs, algorithm="best_fit_decreasing")
    expected = [digest(row) for row in whole.train(32)]
    assert [digest(row) for row in first] + trained == expected[:29]
    assert [digest(row) for row in resumed.train(3)] == expected[29:]
    resumed.end()
    whole.end()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_is_an_error_that_names_it_and_the_position_stays(numbers: Path, workers: int) -> None:
    reference = Run(numbers, num_workers=workers)
    expected = reference.train(30)
    reference.end()
    run = Run(numbers, num_workers=workers)
    got = run.train(2)
    os.kill(run.pids[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"loader worker 0 \(process \d+\) was killed by SIGKILL. .*train-\d.tar\[\d+\]"):
        got.extend(run.train(1)[0] for _ in range(50))
    resumed = Run(numbers, num_workers=workers, state=run.end())
    got += resumed.train(10)
    resumed.end()
    assert all(map(same_batch, got, expected))


def test_a_worker_that_does_not_answer_is_an_error_in_bounded_time(numbers: Path) -> None:
    run = Run(numbers, num_workers=2, worker_timeout=5.0)
    run.train(4)
    stopped = run.pids[1]
    os.kill(stopped, signal.SIGSTOP)
    # The position does not depend on its answer.
    before = run.data.state_dict()
    with pytest.raises(RuntimeError, match=r"loader worker 1 .* for 5 seconds it has read no further sample. .*train-\d.tar"):
        run.train(50)
    assert run.end()["ranks"]
    assert before["ranks"]
    assert not psutil.pid_exists(stopped)
