"""The matrix in which a run may be stopped and continued, swept: ``python -m tests.sweep --all``, or a random sample of it.

Each combination is a run that is stopped and resumed, once or five times. What all its pieces trained and validated, each from
its checkpoint on, must be what the run that never stopped did, in the same order and under the same numbers, with the same
weights at the end. ``--kills`` ends processes by force instead (see :mod:`tests.kills`).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_pack import EnergonPackDataModule, PackedBatch, PackingPolicy
from tests.conftest import faulty_records
from tests.numbers_data import NumberEncoder, lengths, records_of, write_webdataset
from tests.ranks import on_ranks
from tests.training import Recorder, digest

AXES: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2),
    "workers": (0, 1, 2, 3),
    "schedule": ("max_steps", "epochs", "passes"),
    "accumulate": (1, 4),
    "save": ("steps", "validation", "epoch_end", "hand", "exception", "sigterm"),
    "resumes": (1, 5),
}
#: Seconds that a combination may take before it counts as hung; machines are slow at times.
SECONDS_PER_CASE = 120
SOURCES_PER_RANK = 96
HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A combination of the matrix."""

    ranks: int
    workers: int
    schedule: str
    accumulate: int
    save: str
    resumes: int

    def __str__(self) -> str:
        return "-".join(f"{value}" for value in astuple(self))


def left_out(case: Case) -> str | None:
    """Why a combination does not exist."""
    if case.schedule == "max_steps" and case.save == "epoch_end":
        return "an endless stream without limit_train_batches has no epoch that ends before the run does"
    return None


def matrix() -> list[Case]:
    cases = [Case(**dict(zip(AXES, values, strict=True))) for values in product(*AXES.values())]
    return [case for case in cases if left_out(case) is None]


#: Policies that draw in different ways on what a position holds; the first twice as often as each of the others.
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"carry_over": False},
    {"buffer_size": 24, "algorithm": "exact_fill"},
    {"balance": "quadratic", "window": 4},
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What decides about the uninterrupted run of a case."""

    workers: int
    accumulate: int
    trainer: tuple[tuple[str, Any], ...]
    passes: int | None = None
    policy: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, case: Case, draw: random.Random) -> Plan:
        often = case.save == "validation" and case.resumes > 1
        # In mid-window, in mid-epoch, or at the end of each epoch.
        every = {"val_check_interval": 4 if case.accumulate == 1 else 6, "check_val_every_n_epoch": None}
        passes = None
        if case.schedule == "max_steps":
            settings = {"max_steps": 18, "max_epochs": -1} | every
        elif case.schedule == "epochs":
            # With a window at the end of each epoch that is not complete.
            settings = {"max_epochs": 7, "limit_train_batches": 3 if case.accumulate == 1 else 10}
        else:
            passes = 6 if case.save == "epoch_end" and case.resumes > 1 else 2
            settings = {"max_epochs": -1}
            every["check_val_every_n_epoch"] = 1
        if often or draw.random() < 0.5:
            settings |= every
        return cls(
            workers=case.workers,
            accumulate=case.accumulate,
            trainer=tuple(settings.items()),
            passes=passes,
            policy=tuple(draw.choice(POLICIES).items()),
        )


class StoppedError(Exception):
    """The run is stopped on purpose."""


class Piece(Recorder):
    """Keeps a journal of batches, validations and epochs with Lightning's counts; stops when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.journal: list[tuple[Any, ...]] = []
        #: In each epoch, sources trained on or reported.
        self.sources: defaultdict[int, list[str]] = defaultdict(list)
        self.stop: Stop | None = None

    def _counts(self) -> tuple[int, ...]:
        loop = self.trainer.fit_loop.epoch_loop
        return self.global_step, self.current_epoch, loop.total_batch_idx, loop._batches_that_stepped

    def on_train_epoch_start(self) -> None:
        self.journal.append(("epoch", self._counts()))

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        stop = self.stop if self.stop is not None and self.stop.now(self) else None
        if stop is not None and stop.early:
            stop()
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.journal.append(("batch", self._counts(), batch_idx, digest(batch), rate))
        self.sources[self.current_epoch] += [*batch.source_keys, *(gone.key for gone in batch.left_out)]
        loss = self.loss(batch)
        if stop is not None and not stop.early:
            stop()
        return loss

    def on_validation_epoch_end(self) -> None:
        self.journal.append(("validation", self._counts(), tuple(self.validated[-1])))

    def on_train_epoch_end(self) -> None:
        self.journal.append(("end", self._counts()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Stop(pl.Callback):
    """Stops the run some steps on, as soon as there is something to resume from, at any micro-batch."""

    def __init__(self, case: Case, draw: random.Random, *, waits: bool) -> None:
        self.sigterm = case.save == "sigterm"
        self.waits = waits
        self.steps = draw.randint(1, 3)
        self.batches = draw.randint(0, case.accumulate)
        self.early = draw.random() < 0.5
        self.saved = self.done = False
        self._from: int | None = None

    def on_save_checkpoint(self, *_: Any) -> None:
        self.saved = True

    def now(self, module: Piece) -> bool:
        if self._from is None:
            self._from = module.global_step
        if self.done or module.global_step - self._from < self.steps or (self.waits and not self.saved):
            return False
        self.batches -= 1
        return self.batches < 0

    def __call__(self) -> None:
        self.done = True
        if self.sigterm:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise StoppedError("on purpose")


class SaveByHand(pl.Callback):
    """Saves once, in a hook, some steps on."""

    def __init__(self, folder: Path, draw: random.Random, *, case: Case, resumed: bool) -> None:
        self.folder = folder
        self._from: int | None = None
        self._first = draw.random() < 0.5
        hooks = list(HOOKS)
        if case.schedule == "max_steps":
            # A single epoch, which ends when there is nothing left to resume.
            hooks.remove("on_train_epoch_end")
            if resumed:
                hooks.remove("on_train_epoch_start")
        self.hook = draw.choice(hooks)
        comes_once = self.hook == "on_train_start" or (self.hook, case.schedule) == ("on_train_epoch_start", "max_steps")
        self.steps = 0 if comes_once else draw.randint(0, 2)
        setattr(self, self.hook, self._save)

    def on_sanity_check_start(self, trainer: pl.Trainer, *_: Any) -> None:
        raise AssertionError("these runs have no sanity check")

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._first:
            # Before the datamodule's own.
            trainer.callbacks = [self, *(c for c in trainer.callbacks if c is not self)]  # type: ignore[attr-defined]

    def _save(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._from is None:
            self._from = trainer.global_step
        if trainer.global_step - self._from >= self.steps:
            trainer.save_checkpoint(self.folder / f"{self.hook}.ckpt")
            self.steps = 10**9


def saver(case: Case, folder: Path, draw: random.Random, *, resumed: bool) -> pl.Callback:
    if case.save == "hand":
        return SaveByHand(folder, draw, case=case, resumed=resumed)
    how: dict[str, Any] = {
        "steps": {"every_n_train_steps": draw.randint(1, 3)},
        "validation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
        "epoch_end": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    }.get(case.save, {"every_n_train_steps": 10**6, "save_on_exception": True})
    return ModelCheckpoint(folder, filename="{epoch}-{step}", save_top_k=-1, **how)


def fit(
    plan: Plan,
    data: str,
    *,
    ranks: int,
    callbacks: list[pl.Callback],
    stop: Stop | None,
    resume: str | None,
    new: Callable[[], Piece] = Piece,
) -> tuple[Piece, EnergonPackDataModule, bool]:
    """Train; whether the run came to its end."""
    pl.seed_everything(1, verbose=False)
    module = new()
    module.stop = stop
    torch.manual_seed((99 if resume else 10) + int(os.environ.get("RANK", "0")))
    datamodule = EnergonPackDataModule(
        data,
        encoder=NumberEncoder(),
        packing=PackingPolicy(**{"capacity": 64, "buffer_size": 6, "multiple": 4} | dict(plan.policy)),
        num_workers=plan.workers,
        shuffle_buffer_size=8,
        max_samples_per_sequence=10,
        epochs=plan.passes,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        accumulate_grad_batches=plan.accumulate,
        num_sanity_val_steps=0,
        callbacks=[*callbacks, *([] if stop is None else [stop])],
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **dict(plan.trainer),
    )
    try:
        trainer.fit(module, datamodule, ckpt_path=resume)
    except (StoppedError, SIGTERMException):
        assert stop is None or stop.done
        return module, datamodule, False
    return module, datamodule, True


def no_differences(got: list[Any], expected: list[Any], *, step: int | None, before: int) -> int:
    """Check that a piece did what the whole run did from some entry of its journal on.

    Args:
        got: the piece's journal.
        expected: that of the whole run.
        step: optimizer steps in the checkpoint from which the piece went on; None if there was none.
        before: number of the entry before which the piece must begin.

    Returns:
        The number of the entry after its last.
    """
    if not got:
        return before
    assert got[0] in expected, f"the piece begins with {got[0]}, which the whole run never did"
    start = expected.index(got[0])
    for a, b in zip(got, expected[start:], strict=False):
        assert a == b, f"{a} instead of {b}"
    assert start + len(got) <= len(expected), f"the piece goes on after the end, with {got[len(expected) - start]}"
    assert start <= before, f"{expected[before]} and what follows is missing"
    if step is None:
        assert start == 0
    elif first := next((entry for entry in got if entry[0] == "batch"), None):
        due = next(entry for entry in expected if entry[0] == "batch" and entry[1][0] == step)
        assert first == due, f"batches are repeated from {first}, though the checkpoint's last step is before {due}"
    return start + len(got)


def _each_source_once(whole: Piece, passes: int, *, ranks: int) -> None:
    everyone: list[Any] = [dict(whole.sources)]
    if ranks > 1:
        everyone *= ranks
        torch.distributed.all_gather_object(everyone, dict(whole.sources))
    expected = {f"train{i:06d}": 1 for i in range(SOURCES_PER_RANK * ranks)}
    for number in range(passes):
        seen = Counter(key for sources in everyone for key in sources[number])
        assert seen == expected, f"pass {number}: {seen}"


def steps_in(checkpoint: str | Path) -> int:
    """Optimizer steps in a checkpoint that can be read."""
    return torch.load(checkpoint, weights_only=True)["global_step"]


def _all_ranks_here() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def run_case(case: Case, *, data: str, folder: Path, seed: int, wholes: dict[Any, Any]) -> dict[str, Any]:
    """Stop and resume; what there is to say about it."""
    draw = random.Random(f"{seed} {case}")
    plan = Plan.of(case, draw)
    if plan not in wholes:
        module, datamodule, _ = fit(plan, data, ranks=case.ranks, callbacks=[], stop=None, resume=None)
        if plan.passes is not None:
            _each_source_once(module, plan.passes, ranks=case.ranks)
        wholes[plan] = module, datamodule._stream.progress.counts  # type: ignore[union-attr]
    whole, counts = wholes[plan]
    checkpoint: str | None = None
    step: int | None = None
    reached = resumes = in_window = 0
    for number in range(case.resumes + 1):
        its_folder = folder / str(number)
        its_folder.mkdir(parents=True, exist_ok=True)
        last = number == case.resumes
        # A hook may come late, or not at all in what is left: the piece before runs on for it.
        waits = case.save not in ("exception", "sigterm")
        stop = None if last else Stop(case, draw, waits=waits)
        callbacks = [] if last else [saver(case, its_folder, draw, resumed=checkpoint is not None)]
        piece, datamodule, ended = fit(plan, data, ranks=case.ranks, callbacks=callbacks, stop=stop, resume=checkpoint)
        _all_ranks_here()
        reached = no_differences(piece.journal, whole.journal, step=step, before=reached)
        resumes += checkpoint is not None
        if ended:
            assert reached == len(whole.journal), f"the run ends early, {whole.journal[reached]} should follow"
            assert piece.weights() == whole.weights(), "other weights at the end"
            assert datamodule._stream.progress.counts == counts, "other counts at the end"  # type: ignore[union-attr]
        else:
            batches = [entry for entry in piece.journal if entry[0] == "batch"]
            in_window += len(batches) > 1 and batches[-1][1][0] == batches[-2][1][0]
        found = sorted(its_folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        if found:
            checkpoint = str(draw.choice(found) if ended else found[-1])
            step = steps_in(checkpoint)
        if last:
            assert ended
        elif checkpoint is None:
            assert case.save == "hand", "no checkpoint was saved"
    _all_ranks_here()
    if os.environ["RANK"] == "0":
        shutil.rmtree(folder)
    return {"resumes": resumes, "in_window": in_window}


def run_cases(argument: dict[str, Any]) -> None:
    """Run cases in this process, which may be one of several ranks; a line of the result file for each."""
    rank = int(os.environ["RANK"])
    wholes: dict[Any, Any] = {}
    result = Path(argument["folder"]) / f"results{rank}"
    for fields in argument["cases"]:
        case, began = Case(**fields), time.monotonic()
        folder = Path(argument["folder"]) / str(case)
        faulthandler.dump_traceback_later(SECONDS_PER_CASE - 10)
        try:
            said = run_case(case, data=argument["data"], folder=folder, seed=argument["seed"], wholes=wholes)
        except Exception as e:
            said = {"mismatch": f"{type(e).__name__}: {e}", "trace": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        with result.open("a") as file:
            file.write(json.dumps({"case": fields, "seconds": round(time.monotonic() - began, 2)} | said) + "\n")
        if "mismatch" in said and case.ranks > 1:
            # The other rank may be elsewhere by now.
            return


def sweep(cases: list[Case], *, seed: int, folder: Path, processes: int = 1) -> list[dict[str, Any]]:
    """Run cases, those of one rank in so many processes at a time; what each said, on its first rank that disagrees."""
    data = {}
    for ranks in {case.ranks for case in cases}:
        parts = {"train": faulty_records(SOURCES_PER_RANK * ranks), "val": records_of(lengths(9 * ranks, most=40, seed=1))}
        data[ranks] = str(write_webdataset(folder / f"data{ranks}", parts))

    def several(number: int, cases: list[Case]) -> list[dict[str, Any]]:
        found, tries = [], 0
        while cases:
            its_folder = folder / f"group{number}-{tries}"
            argument = {"cases": [*map(asdict, cases)], "data": data[cases[0].ranks], "folder": str(its_folder), "seed": seed}
            error, limit = "", 60 + SECONDS_PER_CASE * len(cases) / (1 if len(cases) < 4 else 4)
            try:
                on_ranks("tests.sweep:run_cases", argument, folder=its_folder, ranks=cases[0].ranks, timeout=limit)
            except subprocess.TimeoutExpired:
                error = "hang"
            except AssertionError as e:
                error = str(e)
            said = [_lines(its_folder / f"results{rank}") for rank in range(cases[0].ranks)]
            done = min(map(len, said))
            found += [max((lines[i] for lines in said), key=lambda line: "mismatch" in line) for i in range(done)]
            if done < len(cases) and not any("mismatch" in line for line in found[-1:]):
                lines = next((lines for lines in said if len(lines) > done), None)
                what = {"mismatch": error or "no result"} if lines is None else lines[done]
                found.append({"case": asdict(cases[done]), "seconds": 0.0, "hang": error == "hang"} | what)
                found[-1].setdefault("mismatch", error)
                done += 1
            cases, tries = cases[done:], tries + 1
        print(f"group {number}: {len(found)} done, {sum('mismatch' in line for line in found)} mismatches", flush=True)
        return found

    # Two ranks compute on two cores.
    singles, doubles = ([case for case in cases if case.ranks == ranks] for ranks in (1, 2))
    with ThreadPoolExecutor(processes) as pool:
        found = [*pool.map(several, range(100), _groups(singles, processes))]
    return [line for lines in found for line in lines] + [
        line for number, cases in enumerate(_groups(doubles, 1)) for line in several(100 + number, cases)
    ]


def _groups(cases: list[Case], at_least: int, *, most: int = 24) -> list[list[Case]]:
    """Neighbours in the matrix share their uninterrupted runs."""
    size = max(1, min(most, -(-len(cases) // at_least)))
    return [cases[i : i + size] for i in range(0, len(cases), size)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sample(number: int, *, seed: int, ranks: int | None = None) -> list[Case]:
    """Cases drawn at random, each setting of each axis among them equally often as far as that goes."""
    draw = random.Random(seed)
    cases = [case for case in matrix() if ranks in (None, case.ranks)]
    draw.shuffle(cases)
    counts: Counter[tuple[str, Any]] = Counter()
    chosen: list[Case] = []
    while len(chosen) < min(number, len(matrix())) and cases:
        case = min(cases, key=lambda case: sum(counts[item] * len(AXES[item[0]]) ** 2 for item in asdict(case).items()))
        cases.remove(case)
        counts.update(asdict(case).items())
        chosen.append(case)
    return sorted(chosen, key=lambda case: astuple(case)[:4])


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep:
        Path(keep).mkdir(parents=True)
        yield Path(keep)
    else:
        with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
            yield Path(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--runs", type=int, default=24, help="combinations drawn at random")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument("--only", help="combinations whose name is like this, e.g. '1-2-passes-*'")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--kills", type=int, default=0, help="so many processes are killed, instead of combinations")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", help="folder for data, logs and results")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    began = time.monotonic()
    with _folder(options.keep) as folder:
        if options.kills:
            from tests.kills import kill

            figures = kill(options.kills, seed=options.seed, folder=folder)
            print(json.dumps(figures, indent=1))
            return bool(figures["faults"])
        cases = matrix() if options.all or options.only else sample(options.runs, seed=options.seed)
        cases = [case for case in cases if options.only is None or fnmatch(str(case), options.only)]
        said = sweep(cases, seed=options.seed, folder=folder, processes=options.processes)
    wrong = [line for line in said if "mismatch" in line]
    for line in wrong:
        print("MISMATCH", Case(**line["case"]), line["mismatch"], line.get("trace", ""), sep="\n")
    impossible = len([*product(*AXES.values())]) - len(matrix())
    resumes, in_window, hangs = (sum(line.get(name, 0) for line in said) for name in ("resumes", "in_window", "hang"))
    print(
        f"{len(said)} combinations of {len(matrix())} ({impossible} more do not exist), {resumes} resumes, {in_window} stops "
        f"within an accumulation window, {len(wrong)} mismatches, {hangs} hangs, {time.monotonic() - began:.0f} seconds"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
