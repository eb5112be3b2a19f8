"""Training processes and loader workers killed at any moment: ``python -m tests.sweep --kills 200``.

A series is one training that is killed again and again, each time resumed from the newest checkpoint that can be read. All that
its processes did is compared with what a process did that was left alone.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from fsspec.implementations.local import LocalFileOpener
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.conftest import faulty_records
from tests.numbers_data import lengths, records_of, write_webdataset
from tests.sweep import POLICIES, SOURCES_PER_RANK, Piece, Plan, fit, no_differences, steps_in

KILLS_PER_SERIES = 12
#: A folder on another filesystem than the checkpoints.
ELSEWHERE = Path("/dev/shm")
#: Seconds without a batch in which a run ends after the death of a worker, and for workers after that of the run; machines are
#: slow at times.
SECONDS_TO_END, SECONDS_TO_FOLLOW = 90.0, 60.0


class Written(Piece):
    """A piece whose journal is written down at once, with batches that take their time and a state that takes time to save."""

    def __init__(self, file: Path, *, megabytes: int) -> None:
        super().__init__()
        self.journal = _Lines(file)  # type: ignore[assignment]
        self.sleep = 0.01
        self.big = torch.nn.Parameter(torch.zeros(megabytes, 2**18), requires_grad=False)

    def weights(self) -> list[float]:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(self.sleep)
        return super().training_step(batch, batch_idx)


class _Lines:
    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def append(self, entry: Any) -> None:
        os.write(self._file, json.dumps(entry).encode() + b"\n")


def _slow_disk() -> None:
    """Checkpoints take as long to write as large ones do."""

    def write(self: LocalFileOpener, data: bytes) -> int:
        for part in range(0, len(data), step := len(data) // 20 + 1):
            self.f.write(data[part : part + step])
            self.f.flush()
            time.sleep(0.002)
        return len(data)

    LocalFileOpener.write = write


def _read(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _train(
    plan: Plan, data: str, *, folder: Path, journal: Path, callbacks: list[pl.Callback], resume: str | None, megabytes: int
) -> None:
    """Train, as a process's whole life; its result is a file."""
    _slow_disk()
    new = partial(Written, journal, megabytes=megabytes)
    module, datamodule, _ = fit(plan, data, ranks=1, callbacks=callbacks, stop=None, resume=resume, new=new)
    counts = datamodule._stream.progress.counts  # type: ignore[union-attr]
    (folder / "result.json").write_text(json.dumps({"weights": module.weights(), "counts": counts}))


def _fork(run: Callable[[], None], *, log: Path, temporary: Path) -> int:
    """Run in a process in a session of its own; what is imported here need not be imported there again."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        tempfile.tempdir = str(temporary)
        warnings.simplefilter("ignore")
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
    raise AssertionError


def _ended(pid: int) -> int | None:
    """The exit status of a process that has ended."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _wait(pid: int, seconds: float) -> int | None:
    until = time.monotonic() + seconds
    while (code := _ended(pid)) is None and time.monotonic() < until:
        time.sleep(0.005)
    return code


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Series:
    """One training, its many processes, and what they were found to do."""

    folder: Path
    data: str
    draw: random.Random
    kills: int
    number: int
    faults: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    #: Seconds that a run took to end after its worker's death, and workers after their run's.
    slowest: float = 0.0
    slowest_to_follow: float = 0.0

    def __post_init__(self) -> None:
        draw, number = self.draw, self.number
        self.workers = number % 4
        self.accumulate = draw.choice([1, 1, 4])
        schedule: dict[str, Any] = {
            0: {"max_steps": 36, "max_epochs": -1},
            1: {"max_epochs": 9, "limit_train_batches": 4 if self.accumulate == 1 else 14},
            2: {"max_epochs": -1},
        }[number % 3]
        if draw.random() < 0.4:
            schedule |= {"val_check_interval": 7, "check_val_every_n_epoch": 1 if number % 3 == 2 else None}
        if number % 3 == 1:
            schedule |= {"check_val_every_n_epoch": schedule.get("check_val_every_n_epoch", 2)}
        passes = 2 if number % 3 == 2 else None
        self.plan = Plan(
            workers=self.workers,
            accumulate=self.accumulate,
            trainer=tuple(schedule.items()),
            passes=passes,
            policy=tuple(draw.choice(POLICIES).items()),
        )
        # Half of them write to another filesystem than that of temporary files, so that the last move is a copy.
        self.copies = draw.random() < 0.5 and ELSEWHERE.is_dir()
        self.keep = draw.choice([{"save_top_k": -1}, {"save_top_k": 1}, {"save_top_k": 1, "save_last": True}])
        self.every = draw.choice([1, 2])
        # A copy is made in one go, so it must be large to be caught in between.
        self.megabytes = 48 if self.copies else draw.choice([0, 4])

    def __str__(self) -> str:
        settings = (self.number, self.plan, self.keep, f"every {self.every}", f"{self.megabytes} MB", f"copies {self.copies}")
        return "series " + ", ".join(map(str, settings))

    def run(self) -> None:
        """Train, be killed, resume, until the end; compare."""
        checkpoints = self.folder / "checkpoints"
        checkpoints.mkdir(parents=True)
        with self._temporary() as temporary:
            whole = self._whole(temporary)
            if whole is None:
                return
            reached, left, had, number = 0, self.kills, False, 0
            while True:
                checkpoint, step = self._newest_readable(checkpoints)
                had = had or checkpoint is not None
                if had and checkpoint is None:
                    self.faults.append(f"{self}: no checkpoint can be read any more: {sorted(checkpoints.iterdir())}")
                    return
                journal = self.folder / f"journal{number}"
                saver = ModelCheckpoint(
                    checkpoints,
                    filename="{epoch}-{step}",
                    every_n_train_steps=self.every,
                    save_on_exception=self.draw.random() < 0.5,
                    **self.keep,  # type: ignore[arg-type]
                )
                run = partial(
                    _train,
                    self.plan,
                    self.data,
                    folder=self.folder,
                    journal=journal,
                    callbacks=[saver],
                    resume=checkpoint,
                    megabytes=self.megabytes,
                )
                pid = _fork(run, log=self.folder / "log", temporary=temporary)
                if left == 1 and not had:
                    # At least once there is something to resume from.
                    self._await_checkpoint(pid, checkpoints)
                ended = self._kill(pid, journal, temporary, kind=None if left == 0 else self._kind())
                left -= not ended and left > 0
                try:
                    reached = no_differences(_read(journal), whole["journal"], step=step, before=reached)
                except AssertionError as e:
                    self.faults.append(f"{self}, process {number}, from {checkpoint}: {e}")
                    return
                self.counts["resumes"] += checkpoint is not None
                for file in temporary.iterdir():
                    self.counts["unfinished files"] += 1
                    file.unlink()
                if ended or self.faults:
                    break
                number += 1
            self.counts["kills"] += self.kills - left
            if not self.faults:
                self._compare_ends(whole, reached)
                shutil.rmtree(checkpoints)

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        """A folder for temporary files."""
        folder = Path(tempfile.mkdtemp(dir=ELSEWHERE if self.copies else self.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def _whole(self, temporary: Path) -> dict[str, Any] | None:
        journal = self.folder / "whole"
        run = partial(
            _train,
            self.plan,
            self.data,
            folder=self.folder,
            journal=journal,
            callbacks=[],
            resume=None,
            megabytes=self.megabytes,
        )
        code = _wait(pid := _fork(run, log=self.folder / "log", temporary=temporary), 200)
        if code != 0:
            self.faults.append(f"{self}: the whole run ended with {code}: {(self.folder / 'log').read_text()[-2000:]}")
            if code is None:
                os.kill(pid, signal.SIGKILL)
            return None
        return {"journal": _read(journal)} | self._result()

    def _result(self) -> dict[str, Any]:
        file = self.folder / "result.json"
        result = json.loads(file.read_text())
        file.unlink()
        return result

    def _compare_ends(self, whole: dict[str, Any], reached: int) -> None:
        if reached != len(whole["journal"]):
            self.faults.append(f"{self}: the run ends early, {whole['journal'][reached]} should follow")
        self.faults += [f"{self}: other {name} at the end" for name, value in self._result().items() if whole[name] != value]

    def _newest_readable(self, folder: Path) -> tuple[str | None, int | None]:
        for path in sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, reverse=True):
            try:
                step = steps_in(path)
            except Exception:
                self.counts["truncated checkpoints"] += 1
                path.unlink()
            else:
                return str(path), step
        return None, None

    def _kind(self) -> str:
        return self.draw.choice(["main", "main", "writing", "worker" if self.workers else "main"])

    def _kill(self, pid: int, journal: Path, temporary: Path, *, kind: str | None) -> bool:
        """Kill the process at a random moment, or let it be; whether it came to its end by itself."""
        process = psutil.Process(pid)
        if kind is not None:
            self._await_moment(pid, journal, temporary, kind)
        workers = process.children(recursive=True) if _alive(process) else []
        if kind == "worker" and workers:
            victim = self.draw.choice(workers)
            began = time.monotonic()
            victim.kill()
            # What the worker had sent is still trained on, which may be all that is needed of it.
            while (code := _wait(pid, SECONDS_TO_END)) is None and time.time() - journal.stat().st_mtime < SECONDS_TO_END:
                pass
            self.counts["workers killed" if code else "workers killed when not needed any more"] += 1
            if code:
                self.slowest = max(self.slowest, time.monotonic() - began)
            if code is None:
                self.faults.append(f"{self}: a run stands still {SECONDS_TO_END} seconds after its worker was killed")
                process.kill()
                os.waitpid(pid, 0)
            elif code != 0 and "was killed by SIGKILL" not in (said := (self.folder / "log").read_text()[-6000:]):
                self.faults.append(f"{self}: a killed worker is not named: {said}")
        elif kind is not None:
            code = _ended(pid)
            if code is None:
                # What was forked since the list was made is in the session, too.
                process.kill()
                os.waitpid(pid, 0)
                self.counts["killed in writing" if any(temporary.iterdir()) else "killed elsewhere"] += 1
        else:
            code = _wait(pid, 200)
            if code is None:
                self.faults.append(f"{self}: the last process does not end")
                process.kill()
                os.waitpid(pid, 0)
        self._await_workers(pid)
        if kind is None and code != 0:
            self.faults.append(f"{self}: the last process ended with {code}: {(self.folder / 'log').read_text()[-2000:]}")
        elif code not in (None, 0) and kind != "worker":
            self.faults.append(f"{self}: a process ended with {code} by itself: {(self.folder / 'log').read_text()[-2000:]}")
        return code == 0

    def _await_checkpoint(self, pid: int, folder: Path) -> None:
        """Until one can be read."""
        until = time.monotonic() + 60
        while _alive(psutil.Process(pid)) and time.monotonic() < until:
            for path in folder.glob("*.ckpt"):
                with suppress(Exception):
                    steps_in(path)
                    return
            time.sleep(0.01)

    def _await_moment(self, pid: int, journal: Path, temporary: Path, kind: str) -> None:
        batches = self.draw.randint(0, 3 * self.accumulate)
        if kind != "writing" and self.draw.random() < 0.25:
            # While it starts.
            _sleep_while_alive(pid, self.draw.uniform(0, 1.5))
            return
        until = time.monotonic() + 60
        while sum(entry[0] == "batch" for entry in _read(journal)) <= batches:
            if not _alive(psutil.Process(pid)) or time.monotonic() > until:
                return
            time.sleep(0.003)
        if kind != "writing":
            _sleep_while_alive(pid, self.draw.uniform(0, 0.05))
            return
        checkpoints = self.folder / "checkpoints"
        size = _size(checkpoints)
        copied = self.copies and self.draw.random() < 0.6
        while time.monotonic() < until and _alive(psutil.Process(pid)):
            # In the temporary file, or in the copy to its place.
            if _size(checkpoints) > size if copied else any(temporary.iterdir()):
                _sleep_while_alive(pid, 0.0 if copied else self.draw.uniform(0, 0.04))
                return
            size = min(size, _size(checkpoints))

    def _await_workers(self, session: int) -> None:
        """No process of the session survives its first one for long."""
        began = time.monotonic()
        while left := _of_session(session):
            if time.monotonic() - began > SECONDS_TO_FOLLOW:
                self.faults.append(f"{self}: {left} go on without their run")
                for process in left:
                    process.kill()
                return
            time.sleep(0.05)
        self.slowest_to_follow = max(self.slowest_to_follow, time.monotonic() - began)


def _of_session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and _alive(process):
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def _size(folder: Path) -> int:
    total = 0
    for entry in os.scandir(folder):
        try:
            total += entry.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _sleep_while_alive(pid: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and _alive(psutil.Process(pid)):
        time.sleep(0.002)


def kill(number: int, *, seed: int, folder: Path) -> dict[str, Any]:
    """Kill so many processes; what was found, in numbers and in words."""
    parts = {"train": faulty_records(SOURCES_PER_RANK), "val": records_of(lengths(9, most=40, seed=1))}
    data = str(write_webdataset(folder / "data", parts))
    counts: Counter[str] = Counter()
    faults: list[str] = []
    slowest = follow = 0.0
    series = 0
    most = min(KILLS_PER_SERIES, -(-number // 2))
    while counts["kills"] < number and len(faults) < 10:
        kills = min(most, number - counts["kills"])
        one = Series(folder / f"series{series}", data, random.Random(f"{seed} {series}"), kills, (seed + series) % 12)
        one.run()
        counts += one.counts
        faults += one.faults
        slowest, follow = max(slowest, one.slowest), max(follow, one.slowest_to_follow)
        series += 1
        print(one, dict(one.counts), *one.faults, flush=True)
    return {
        "series": series,
        **counts,
        "slowest end after a worker's death, seconds": round(slowest, 1),
        "slowest end of workers after their run's death, seconds": round(follow, 1),
        "faults": faults,
    }
