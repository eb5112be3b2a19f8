"""A sample of the sweep, the same in every run, so that a failure is one for everybody; ``SWEEP_SEED`` draws another one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.conftest import faulty_records, sweep_seed
from tests.numbers_data import records_of, write_webdataset
from tests.sweep import AXES, Case, Plan, StoppedError, fit, left_out, matrix, sample, sweep


@pytest.fixture
def seed() -> int:
    return sweep_seed()


@pytest.mark.slow
def test_a_sample_has_every_setting(seed: int) -> None:
    assert len(matrix()) == 544
    for ranks, number in ((1, 6), (2, 4)):
        cases = sample(number, seed=seed, ranks=ranks)
        assert len(set(cases)) == number
        assert not any(map(left_out, cases))
        for name in ("workers", "schedule", "accumulate", "resumes"):
            assert {getattr(case, name) for case in cases} == set(AXES[name])
    assert {case.save for case in sample(6, seed=seed, ranks=1)} == set(AXES["save"])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "number"), [(1, 4), (2, 3)])
def test_stopped_and_resumed_runs_do_what_the_uninterrupted_one_does(
    seed: int, tmp_path: Path, ranks: int, number: int
) -> None:
    cases = sample(number, seed=seed, ranks=ranks)
    said = sweep(cases, seed=seed, folder=tmp_path)
    assert [Case(**line["case"]) for line in said] == cases
    for line in said:
        assert "mismatch" not in line, f"seed {seed}, {Case(**line['case'])}: {line.get('trace', line['mismatch'])}"
    assert [line["resumes"] for line in said] == [case.resumes for case in cases]


@pytest.mark.slow
def test_killed_at_random_moments(seed: int) -> None:
    command = [sys.executable, "-m", "tests.sweep", "--kills", "6", "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, f"seed {seed}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    found = re.search(r"^\{.*\}\s*\Z", done.stdout, re.DOTALL | re.MULTILINE)
    assert found is not None
    figures = json.loads(found[0])
    assert figures["kills"] == 6
    assert figures["resumes"] > 0


class SaveAndStop(pl.Callback):
    """Saves in a call of a hook, before or after the datamodule's own callback has heard of it, and stops."""

    def __init__(self, hook: str, path: Path, *, first: bool = False, calls: int = 1) -> None:
        self.path, self.first, self.calls = path, first, calls
        setattr(self, hook, self._save)

    def on_fit_start(self, trainer: pl.Trainer, *_: object) -> None:
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *others] if self.first else [*others, self]  # type: ignore[attr-defined]

    def _save(self, trainer: pl.Trainer, *_: object) -> None:
        self.calls -= 1
        if not self.calls:
            trainer.save_checkpoint(self.path)
            raise StoppedError("on purpose")


@pytest.mark.parametrize(("hook", "first"), [("on_train_start", False), ("on_train_batch_start", True)])
@pytest.mark.parametrize("schedule", ["max_steps", "epochs", "passes"])
def test_a_resumed_run_saved_before_its_first_batch_stands_where_it_stood(
    tmp_path: Path, hook: str, first: bool, schedule: str
) -> None:
    data = str(write_webdataset(tmp_path / "data", {"train": faulty_records(40), "val": records_of([5, 6, 7])}))
    settings: dict[str, Any] = {"max_steps": {"max_steps": 8}, "epochs": {"max_epochs": 2, "limit_train_batches": 4}}.get(
        schedule, {"max_epochs": -1}
    )
    plan = Plan(workers=0, accumulate=1, trainer=tuple(settings.items()), passes=2 if schedule == "passes" else None)
    whole, _, _ = fit(plan, data, ranks=1, callbacks=[], stop=None, resume=None)
    assert len(whole.journal) > 8
    resume = None
    for number, callback in enumerate(
        [
            SaveAndStop("on_train_batch_start", tmp_path / "0.ckpt", calls=4),
            *(SaveAndStop(hook, tmp_path / f"{again}.ckpt", first=first) for again in (1, 2)),
        ]
    ):
        _, _, ended = fit(plan, data, ranks=1, callbacks=[callback], stop=None, resume=resume)
        assert not ended
        resume = str(tmp_path / f"{number}.ckpt")
    module, _, ended = fit(plan, data, ranks=1, callbacks=[], stop=None, resume=resume)
    assert ended
    assert module.journal[0][0] == "batch", "it stands within an epoch"
    assert module.journal == whole.journal[-len(module.journal) :]
    assert module.weights() == whole.weights()
