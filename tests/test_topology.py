"""Ranks times workers unchanged: the rows of all ranks together go on in the same order; anything else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_pack import EnergonPackDataModule, PackedBatch
from lightning_pack.resume import ResumeError
from tests.numbers_data import same_batch
from tests.ranks import on_ranks
from tests.test_exact_position import Run, through_a_file
from tests.training import Options, run

#: Data-parallel ranks and loader workers of each.
TOPOLOGIES = [(1, 4), (2, 2), (4, 1), (4, 0)]


class Ranks:
    """All ranks of a run, one after the other in this process."""

    def __init__(
        self, numbers: Path, ranks: int, workers: int, monkeypatch: pytest.MonkeyPatch, state: Any = None, **options: Any
    ) -> None:
        self.runs = []
        for rank in range(ranks):
            monkeypatch.setattr(EnergonPackDataModule, "_data_parallel", lambda *_, rank=rank: (rank, ranks))
            self.runs.append(Run(numbers, num_workers=workers, state=state, **options))

    def train(self, rows: int) -> list[PackedBatch]:
        """So many rows over all ranks, in the order of steps and ranks."""
        assert rows % len(self.runs) == 0
        return [run.train(1)[0] for _ in range(rows // len(self.runs)) for run in self.runs]

    def end(self) -> Any:
        """The state as the ranks gather it."""
        states = [run.end() for run in self.runs]
        return through_a_file(states[0] | {"ranks": [state["ranks"][0] for state in states]})


@pytest.mark.slow
@pytest.mark.parametrize("old", TOPOLOGIES)
def test_the_rows_of_all_ranks_go_on(numbers: Path, old: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"balance": "quadratic", "window": 3} if old == (2, 2) else {}
    reference = Ranks(numbers, 1, 4, monkeypatch, **options)
    expected = reference.train(64)
    reference.end()
    for new in TOPOLOGIES:
        # Not at the beginning of a turn of the workers, where that is possible.
        for rows in (4, 12 + old[0]):
            ranks = Ranks(numbers, *old, monkeypatch, **options)
            got = ranks.train(rows)
            resumed = Ranks(numbers, *new, monkeypatch, state=ranks.end(), **options)
            got += resumed.train(24)
            back = Ranks(numbers, *old, monkeypatch, state=resumed.end(), **options)
            got += back.train(8)
            counts = [state["counts"]["rows"] for state in back.end()["ranks"]]
            assert all(map(same_batch, got, expected)), f"{old} -> {new} after {rows} rows"
            assert sum(counts) == rows + 24 + 8


@pytest.mark.parametrize(
    ("old", "new"), [((1, 4), (1, 3)), ((2, 2), (1, 2)), ((1, 4), (2, 4)), ((1, 1), (2, 0)), ((2, 3), (3, 1))]
)
def test_another_product_is_refused(
    numbers: Path, old: tuple[int, int], new: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(numbers, *old, monkeypatch)
    ranks.train(2 * old[0])
    state = ranks.end()
    with pytest.raises(ResumeError) as e:
        Ranks(numbers, *new, monkeypatch, state=state)
    text = str(e.value)
    for name, before, now in (("data-parallel ranks", old[0], new[0]), ("num_workers", old[1], new[1])):
        assert (f"{name}: {before} in the checkpoint, {now} now" in text) == (before != now)
    streams = old[0] * max(old[1], 1)
    choices = [f"{n} rank" for n in range(1, streams + 1) if streams % n == 0]
    assert "legal: " in text
    assert all(choice in text for choice in choices)


def test_passes_stay_on_their_ranks(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(numbers, 2, 2, monkeypatch, epochs=1)
    state = through_a_file(ranks.end())
    with pytest.raises(ResumeError, match="passes over the data end at another row on other ranks"):
        Ranks(numbers, 1, 4, monkeypatch, state=state, epochs=1)


def train(argument: dict[str, Any]) -> dict[str, Any]:
    ranks = argument.pop("ranks")
    steps = argument.pop("steps")
    settings = {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto", "max_steps": steps}
    module = run(Options(**argument, trainer=settings | {"accumulate_grad_batches": 4 // ranks}))
    return {
        "rows": [[epoch, index, seen] for (epoch, index), seen in module.trained.items()],
        "step": module.trainer.global_step,
    }


@pytest.mark.slow
def test_real_checkpoints_of_two_ranks_go_on_on_one_and_on_four(numbers: Path, tmp_path: Path) -> None:
    def rows(results: list[dict[str, Any]]) -> list[str]:
        """In the order of steps and ranks."""
        assert {result["step"] for result in results} == {steps}
        return [seen for turn in zip(*(result["rows"] for result in results), strict=True) for _, _, seen in turn]

    steps = 8
    base = {"data": str(numbers), "steps": steps, "checkpoints": str(tmp_path / "c")}
    first = on_ranks("tests.test_topology:train", base | {"ranks": 2, "workers": 2}, folder=tmp_path / "2")
    expected = rows(first)[12:]
    base |= {"resume": str(tmp_path / "c" / "step=3.ckpt"), "checkpoints": None}
    for ranks, workers in ((1, 4), (4, 1)):
        argument = base | {"ranks": ranks, "workers": workers}
        results = on_ranks("tests.test_topology:train", argument, folder=tmp_path / f"then{ranks}", ranks=ranks)
        # A step of four rows, however many ranks take part; the place in the epoch is that of a rank.
        assert results[0]["rows"][0][1] == 3 * 4 // ranks
        assert rows(results) == expected
