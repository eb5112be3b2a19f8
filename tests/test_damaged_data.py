"""Data that cannot be read any more: an error that names shard and sample, or the run goes on and the losses are counted."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_pack import EnergonPackDataModule, PackedBatch, PackingPolicy
from lightning_pack.energon.position import DamagedDataError
from lightning_pack.resume import ResumeError
from tests.numbers_data import same_batch
from tests.test_exact_position import PlainNumbers, Run, through_a_file
from tests.test_passes import rest


@pytest.fixture
def data(numbers: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(numbers, tmp_path / "data"))


def truncate(data: Path) -> None:
    shard = data / "train-1.tar"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def delete(data: Path) -> None:
    (data / "train-1.tar").unlink()


def scramble(data: Path) -> None:
    shard = data / "train-1.tar"
    content = bytearray(shard.read_bytes())
    content[: len(content) // 2] = b"\x07" * (len(content) // 2)
    shard.write_bytes(content)


DAMAGES = [truncate, delete, scramble]


def lost(batches: list[PackedBatch]) -> list[str]:
    return [gone.key for batch in batches for gone in batch.left_out if gone.reason == "damaged"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", [truncate, scramble])  # An open file can be read after it is deleted.
def test_a_sample_that_cannot_be_read_ends_the_run_by_name(data: Path, damage: Any, workers: int) -> None:
    run = Run(data, num_workers=workers)
    given = run.train(1)
    damage(data)
    with pytest.raises(DamagedDataError, match=r'train-1\.tar\[\d+\]: cannot be read .*on_damaged="skip"'):
        given.extend(run.train(1)[0] for _ in range(200))
    assert given
    assert run.end()["ranks"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_resume_names_the_shard_that_changed(data: Path, damage: Any) -> None:
    run = Run(data, num_workers=0)
    run.train(3)
    state = through_a_file(run.end())
    damage(data)
    with pytest.raises(ValueError, match=r"train-1\.tar") as e:
        Run(data, num_workers=0, state=state)
    assert isinstance(e.value, ResumeError) or "on_damaged='skip'" in str(e.value)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_goes_on_without_what_is_lost(data: Path, damage: Any, workers: int) -> None:
    run = Run(data, num_workers=workers, epochs=1)
    before = run.train(4)
    state = through_a_file(run.end())
    damage(data)
    with pytest.warns(UserWarning, match=r"on_damaged='skip': .*\n.*train-1\.tar"):
        resumed = Run(data, num_workers=workers, epochs=1, state=state, on_damaged="skip")
    (after,) = rest(resumed)
    resumed.end()
    damaged = lost(after)
    assert damaged
    assert all("train-1.tar[" in key for key in damaged)
    trained = Counter(key for batch in before + after for key in batch.source_keys)
    others = [gone.key for batch in before + after for gone in batch.left_out if gone.reason != "damaged"]
    assert len(before[-1].source_keys), "the checkpoint lies inside a buffer"
    # Nothing twice, nothing lost without being counted; a sample trained on before the damage may be counted as damaged too.
    assert set(trained.values()) == {1}
    assert len(trained) + len(others) + len(damaged) in range(200, 200 + sum(len(b.source_keys) for b in before) + 1)
    intact = {f"train{i:06d}" for i in range(200) if i % 3 != 1}
    assert intact <= set(trained) | set(others)
    again = Run(data, num_workers=workers, epochs=1, on_damaged="skip")
    states, given = [], []
    for _ in range(10):
        states.append(through_a_file(again.data.state_dict()))
        given += again.train(1)
    again.end()
    assert lost(given)
    for k in (3, 7):
        resumed = Run(data, num_workers=workers, epochs=1, state=states[k], on_damaged="skip")
        assert all(map(same_batch, resumed.train(10 - k), given[k:])), "the losses are part of the stream"
        resumed.end()


@pytest.mark.parametrize("shuffled", [0, 8])
@pytest.mark.parametrize(
    "options",
    [
        {"balance": "quadratic", "window": 5},
        {"overlength": "split", "capacity": 20},
        {"overlength": "split", "capacity": 20, "balance": "quadratic", "window": 5},
    ],
    ids=["balance", "split", "both"],
)
def test_what_was_emitted_is_passed_over_under_other_policies(
    data: Path, options: dict[str, Any], shuffled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.test_exact_position.NumberEncoder", PlainNumbers)
    monkeypatch.setattr(
        "tests.test_exact_position.EnergonPackDataModule",
        lambda *args, **settings: EnergonPackDataModule(*args, **settings | {"shuffle_buffer_size": shuffled}),
    )
    run = Run(data, num_workers=0, epochs=1, **options)
    before, states = [], []
    for _ in range(13):
        before += run.train(1)
        states.append(through_a_file(run.data.state_dict()))
    run.end()
    truncate(data)
    in_window = False
    for k in (7, 10, 13):
        at = states[k - 1]["ranks"][0]["loader"]["workers"][0]["at"]
        assert at["carried"]
        in_window |= at["window_emitted"] > 0
        with pytest.warns(UserWarning, match="on_damaged='skip'"):
            resumed = Run(data, num_workers=0, epochs=1, state=states[k - 1], on_damaged="skip", **options)
        (after,) = rest(resumed)
        resumed.end()
        assert lost(after)
        trained = Counter(key for batch in before[:k] + after for key in batch.source_keys)
        assert set(trained.values()) == {1}
        gone = {each.key for batch in before[:k] + after for each in batch.left_out}
        seen = {key.split("#")[0] for key in set(trained) | gone}
        assert {f"train{i:06d}" for i in range(200) if i % 3 != 1} <= seen
    assert in_window == ("balance" in options)


def test_an_endless_stream_of_which_nothing_can_be_read_ends(data: Path) -> None:
    run = Run(data, num_workers=0, on_damaged="skip", algorithm="exact_fill")
    run.end()
    for shard in data.glob("*.tar"):
        shard.write_bytes(b"\x07" * shard.stat().st_size)
    with pytest.warns(UserWarning, match="on_damaged='skip'"):
        resumed = Run(
            data, num_workers=0, on_damaged="skip", algorithm="exact_fill", state=through_a_file(run.data.state_dict())
        )
    with pytest.raises(DamagedDataError, match=r"\d+ samples in a row cannot be read, which is all that a loader worker has"):
        resumed.train(1)
    resumed.end()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"on_damaged": "ignore"}, r"on_damaged='ignore' is not one of 'error', 'skip'"),
        ({"worker_timeout": "5"}, r"worker_timeout='5': a number of seconds above 0"),
    ],
)
def test_a_mistaken_option_is_refused(numbers: Path, option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Run(numbers, num_workers=0, **option)


def test_a_retry_of_another_kind_is_refused(numbers: Path) -> None:
    with pytest.raises(ValueError, match=r"storage_retry=60: a StorageRetry is needed"):
        EnergonPackDataModule(str(numbers), packing=PackingPolicy(capacity=64), storage_retry=60)  # type: ignore[arg-type]
