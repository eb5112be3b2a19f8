"""Position and accounting on two data-parallel ranks, each a real process with gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import on_ranks
from tests.training import Options, datamodule, run

pytestmark = pytest.mark.slow

TRAINER = {"devices": 2, "strategy": "ddp"}


def trained(options: dict[str, Any]) -> list[str]:
    trainer = TRAINER | {"max_steps": options.pop("steps")}
    module = run(Options(**options, trainer=trainer))
    return list(module.trained.values())


def run_and_resume(argument: dict[str, Any]) -> dict[str, Any]:
    """The whole run, then from several of its checkpoints, all in one group of processes."""
    data, workers, folder = argument["data"], argument["workers"], argument["folder"]
    base: dict[str, Any] = {"data": data, "workers": workers}
    whole = trained(base | {"checkpoints": folder, "steps": 10})
    resumed = {
        k: trained(base | {"resume": f"{folder}/step={k}.ckpt", "steps": 10, "checkpoints": f"{folder}/from{k}"})
        for k in argument["at"]
    }
    again = {k: trained(base | {"resume": f"{folder}/from{k}/step={k + 1}.ckpt", "steps": k + 4}) for k in argument["at"]}
    return {"whole": whole, "resumed": resumed, "again": again}


def a_pass(argument: dict[str, Any]) -> list[list[str]]:
    """Keys that this rank validates, in a Trainer's two passes."""
    settings = TRAINER | {"max_steps": 2, "val_check_interval": 1, "limit_val_batches": 1.0, "num_sanity_val_steps": 0}
    return run(Options(data=argument["data"], workers=argument["workers"], trainer=settings)).validated


@pytest.mark.parametrize("workers", [2])
def test_two_ranks_resume_with_the_same_batches(numbers: Path, tmp_path: Path, workers: int) -> None:
    at = [1, 4, 6]
    argument = {"data": str(numbers), "workers": workers, "folder": str(tmp_path / "checkpoints"), "at": at}
    results = on_ranks("tests.test_two_ranks:run_and_resume", argument, folder=tmp_path)
    first, second = (result["whole"] for result in results)
    assert len(first) == len(second) == 10
    assert not set(first) & set(second), "the ranks must read different samples for the test to show a mix-up"
    for result in results:
        for k in at:
            assert result["resumed"][str(k)] == result["whole"][k:]
            # A second resume, one step after the first.
            assert result["again"][str(k)] == result["whole"][k + 1 : k + 4]


def test_two_ranks_share_a_validation_pass(numbers: Path, tmp_path: Path) -> None:
    first, second = on_ranks("tests.test_two_ranks:a_pass", {"data": str(numbers), "workers": 1}, folder=tmp_path)
    assert len(first) == len(second) == 2
    assert first[0] == first[1]
    assert first[0]
    assert second[0]
    assert sorted(first[0] + second[0]) == [f"val{i:06d}" for i in range(30)]


def test_a_changed_number_of_ranks_is_refused(numbers: Path, tmp_path: Path) -> None:
    run(Options(data=str(numbers), checkpoints=str(tmp_path / "c"), trainer={"max_steps": 2}))
    with pytest.raises(AssertionError, match="data-parallel ranks: 1 in the checkpoint, 2 now"):
        on_ranks(
            "tests.test_two_ranks:trained",
            {"data": str(numbers), "resume": str(tmp_path / "c" / "last.ckpt"), "steps": 4},
            folder=tmp_path,
        )


def test_ranks_without_a_trainer_do_not_see_each_other(numbers: Path) -> None:
    data = datamodule(Options(data=str(numbers)))
    assert data._data_parallel(data.parallel) == (0, 1)
