"""A checkpoint can be saved at any moment: it tells of the last optimizer step, and the run that is resumed is exact."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pack import PackedBatch, StateError, agreement
from lightning_pack.callbacks import PackingMonitor
from lightning_pack.energon import ExactLoader
from lightning_pack.rewind import ResumePoint, SaveRefusedError
from lightning_pack.snapshots import optimizer_version
from tests.journal import HOOKS, Journal, Saves, differences, journal
from tests.ranks import on_ranks
from tests.training import Options, datamodule, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:.*are left out of training so far"),
    pytest.mark.filterwarnings("ignore:source .* is (left out of|cut at)"),
]

#: Windows of 4, 2 batches that are a window of their own at the end of an epoch, validation in the middle of a window.
EPOCHS = {
    "max_epochs": 3,
    "limit_train_batches": 6,
    "val_check_interval": 3,
    "limit_val_batches": 2,
    "accumulate_grad_batches": 4,
}
ENDLESS = {
    "max_steps": 4,
    "val_check_interval": 4,
    "check_val_every_n_epoch": None,
    "limit_val_batches": 2,
    "accumulate_grad_batches": 4,
}
STEPS_AND_EPOCHS = {"max_steps": 6, "limit_train_batches": 6, "limit_val_batches": 2, "accumulate_grad_batches": 4}
WITHOUT_ACCUMULATION = {"max_epochs": 3, "limit_train_batches": 3, "limit_val_batches": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "epochs": EPOCHS,
    "endless": ENDLESS,
    "steps and epochs": STEPS_AND_EPOCHS,
    "without accumulation": WITHOUT_ACCUMULATION,
}

Whole = tuple[Journal, PackingMonitor, pl.Trainer]


def shorter(shape: dict[str, Any]) -> dict[str, Any]:
    """One epoch or step less, so that its last checkpoints have something to go on with."""
    limit = "max_steps" if "max_steps" in shape else "max_epochs"
    return shape | {limit: shape[limit] - 1}


@pytest.fixture(scope="module")
def everywhere(
    numbers: Path, uninterrupted: Callable[..., Whole], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Whole, Path]]:
    """By name of a shape: the whole run, and checkpoints saved in every hook of a shorter one, by two callbacks."""
    made: dict[str, tuple[Whole, Path]] = {}

    def make(name: str) -> tuple[Whole, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp("everywhere")
            short = Options(data=str(numbers), trainer=shorter(SHAPES[name]))
            # Before and after everything else.
            saved, _, _ = journal(short, Saves(folder, first=True), Saves(folder))
            plain, _, _ = journal(short)
            assert (saved.journal, saved.weights()) == (plain.journal, plain.weights()), "saving must change nothing"
            made[name] = uninterrupted(name), folder
        return made[name]

    return make


@pytest.fixture(scope="module")
def uninterrupted(numbers: Path) -> Callable[..., Whole]:
    """The run that never stopped, by name of its shape and number of workers."""
    made: dict[tuple[str, int], Whole] = {}

    def make(name: str, *, workers: int = 0) -> Whole:
        if (name, workers) not in made:
            made[name, workers] = journal(Options(data=str(numbers), workers=workers, trainer=SHAPES[name]))
        return made[name, workers]

    return make


def resumes_exactly(whole: Whole, resumed: Whole) -> list[str]:
    counters = [
        (t.fit_loop.total_batch_idx, t.fit_loop.epoch_loop._batches_that_stepped, t.current_epoch, t.global_step)
        for _, _, t in (whole, resumed)
    ]
    found = differences(*whole[:2], *resumed[:2])
    return found if counters[0] == counters[1] else [*found, f"counters {counters}"]


def the_point(checkpoint: Path) -> ResumePoint:
    (rank,) = torch.load(checkpoint, weights_only=True)["EnergonPackDataModule"]["ranks"]
    return ResumePoint.from_plain(rank["point"])


def check(numbers: Path, name: str, whole: Whole, checkpoint: Path, **options: Any) -> None:
    resumed = journal(Options(data=str(numbers), trainer=SHAPES[name], resume=str(checkpoint), **options))
    assert not (found := resumes_exactly(whole, resumed)), f"{checkpoint.name}, {the_point(checkpoint)}: {found}"


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [
        ("epochs", "on_train_start-0"),
        ("epochs", "on_train_epoch_start-1"),
        ("epochs", "on_after_backward-2"),
        ("epochs", "on_before_optimizer_step-1"),
        ("epochs", "on_train_batch_end-first-3"),
        ("epochs", "on_train_batch_end-5"),
        ("epochs", "on_validation_batch_end-0"),
        ("epochs", "on_validation_end-1"),
        ("epochs", "on_train_epoch_end-0"),
        ("endless", "on_train_batch_end-7"),
        ("endless", "on_train_batch_start-first-6"),
        ("endless", "on_validation_start-1"),
        ("endless", "on_train_end-0"),
        ("steps and epochs", "on_train_epoch_end-first-0"),
        ("steps and epochs", "on_train_epoch_start-first-1"),
        ("without accumulation", "on_before_zero_grad-4"),
    ],
)
def test_a_checkpoint_of_any_hook_resumes_exactly(
    numbers: Path, everywhere: Callable[[str], tuple[Whole, Path]], name: str, checkpoint: str
) -> None:
    whole, folder = everywhere(name)
    check(numbers, name, whole, folder / f"{checkpoint}.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_checkpoint_of_every_hook_resumes_exactly(
    numbers: Path, everywhere: Callable[[str], tuple[Whole, Path]], name: str, hook: str
) -> None:
    whole, folder = everywhere(name)
    found = sorted(folder.glob(f"{hook}-*.ckpt"))
    assert found
    # All of them in the shape that has everything, some of the others.
    for checkpoint in found if name == "epochs" else found[::3]:
        check(numbers, name, whole, checkpoint)


def test_what_a_checkpoint_within_a_window_says(everywhere: Callable[[str], tuple[Whole, Path]]) -> None:
    _, folder = everywhere("epochs")
    for number, trained in ((2, 0), (4, 4), (8, 6), (10, 10)):
        state = torch.load(folder / f"on_after_backward-{number}.ckpt", weights_only=True)["EnergonPackDataModule"]
        assert state["ranks"][0]["counts"]["rows"] == trained
        point = ResumePoint.from_plain(state["ranks"][0]["point"])
        assert (point.total_batches, point.next) == (trained, "epoch" if trained % 6 == 0 else "batch")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_chain_of_saves_within_windows(
    numbers: Path, tmp_path: Path, uninterrupted: Callable[..., Whole], workers: int
) -> None:
    options = {"data": str(numbers), "workers": workers, "trainer": ENDLESS}
    whole = uninterrupted("endless", workers=workers)
    resume, entries = None, []
    for piece, number in enumerate((2, 1, 6)):
        saves = Saves(tmp_path / str(piece), ("on_after_backward",), number=number)
        with pytest.raises(PlannedError):
            journal(Options(**options, resume=resume), saves, Stops("on_after_backward", number, fault))
        resume = str(tmp_path / str(piece) / f"on_after_backward-{number}.ckpt")
        entries.append(the_point(Path(resume)).total_batches)
    assert entries == [0, 0, 4]
    assert not resumes_exactly(whole, journal(Options(**options, resume=resume)))


class PlannedError(Exception):
    """Raised by a test."""


class Stops(pl.Callback):
    """Ends the run in the ``number``-th call of a hook (0 is the first), by ``how``."""

    def __init__(self, hook: str, number: int, how: Callable[[], None]) -> None:
        self.number, self.how, self.calls = number, how, 0
        setattr(self, hook, self._stop)

    def _stop(self, trainer: pl.Trainer, *_: Any) -> None:
        self.calls += 1
        if self.calls == self.number + 1:
            self.how()


def fault() -> None:
    raise PlannedError("as planned")


def interrupt() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("hook", "number", "how", "error", "workers"),
    [
        ("on_after_backward", 6, fault, PlannedError, 0),
        ("on_after_backward", 6, fault, PlannedError, 2),
        ("on_before_optimizer_step", 1, fault, PlannedError, 0),
        ("on_train_batch_end", 6, fault, PlannedError, 0),
        ("on_validation_batch_end", 4, fault, PlannedError, 0),
        ("on_train_epoch_end", 0, fault, PlannedError, 0),
        ("on_before_backward", 9, interrupt, SystemExit, 2),
        ("on_train_batch_start", 8, terminate, SIGTERMException, 0),
        ("on_train_batch_start", 8, terminate, SIGTERMException, 2),
        ("on_train_batch_end", 5, terminate, SIGTERMException, 0),
        ("on_validation_start", 2, terminate, SIGTERMException, 0),
    ],
)
def test_an_exception_or_a_signal_at_any_moment(
    numbers: Path,
    tmp_path: Path,
    uninterrupted: Callable[..., Whole],
    hook: str,
    number: int,
    how: Callable[[], None],
    error: type[BaseException],
    workers: int,
) -> None:
    interrupted = signal.getsignal(signal.SIGINT)
    options = Options(data=str(numbers), trainer=EPOCHS, workers=workers)
    save = ModelCheckpoint(tmp_path, filename="saved", save_on_exception=True, every_n_train_steps=1000)
    try:
        with pytest.raises(error):
            journal(options, Stops(hook, number, how), save)
    finally:
        signal.signal(signal.SIGINT, interrupted)
    whole = uninterrupted("epochs", workers=workers)
    check(numbers, "epochs", whole, tmp_path / "saved.ckpt", workers=workers)


class Pressed(pl.Callback):
    """Ctrl-C when an optimizer step has changed the weights and Lightning does not know it yet."""

    def __init__(self, step: int) -> None:
        self.step, self.steps = step, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.optimizers[0].register_step_post_hook(self._press)

    def _press(self, *_: Any) -> None:
        self.steps += 1
        if self.steps == self.step:
            os.kill(os.getpid(), signal.SIGINT)


# In the midst of an epoch, before a validation, and at the end of an epoch.
@pytest.mark.parametrize(("step", "workers"), [(1, 2), (2, 0), (4, 0)])
def test_ctrl_c_while_the_weights_change(
    numbers: Path, tmp_path: Path, uninterrupted: Callable[..., Whole], step: int, workers: int
) -> None:
    former = signal.getsignal(signal.SIGINT)
    save = ModelCheckpoint(tmp_path, filename="saved", save_on_exception=True, every_n_train_steps=1000)
    try:
        with pytest.raises(SystemExit):
            journal(Options(data=str(numbers), trainer=EPOCHS, workers=workers), Pressed(step), save)
    finally:
        signal.signal(signal.SIGINT, former)
    assert torch.load(tmp_path / "saved.ckpt", weights_only=True)["global_step"] == step
    check(numbers, "epochs", uninterrupted("epochs", workers=workers), tmp_path / "saved.ckpt", workers=workers)


@pytest.mark.filterwarnings("ignore:.*ckpt_path=None.* was called without a model")
@pytest.mark.filterwarnings("ignore:.*ckpt_path=.last.. is set, but there is no last checkpoint")
def test_an_error_of_the_loader(
    numbers: Path, tmp_path: Path, uninterrupted: Callable[..., Whole], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, fetched = ExactLoader._fetch, [0]

    def fails(self: ExactLoader) -> PackedBatch:
        fetched[0] += 1
        if fetched[0] == 12:
            raise PlannedError("the disk is gone")
        return fetch(self)

    options = Options(data=str(numbers), trainer=EPOCHS)
    with monkeypatch.context() as patched:
        patched.setattr(ExactLoader, "_fetch", fails)
        with pytest.raises(PlannedError):
            journal(options, OnExceptionCheckpoint(tmp_path))
    assert the_point(tmp_path / "on_exception.ckpt").total_batches == 10
    check(numbers, "epochs", uninterrupted("epochs"), tmp_path / "on_exception.ckpt")


class Hurries(pl.Callback):
    """Lets the time interval of a checkpoint callback be over in one batch."""

    def __init__(self, save: ModelCheckpoint, batch: int) -> None:
        self.save, self.batch = save, batch

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.save._last_time_checked = float("-inf") if trainer.fit_loop.total_batch_idx == self.batch else float("inf")


@pytest.mark.parametrize(
    ("settings", "name", "trained"),
    [
        # Within a window, at validation end within one, and at the end of an epoch.
        ({"train_time_interval": timedelta(days=1)}, "epoch=0-step=1", 4),
        ({"save_on_train_epoch_end": False}, "epoch=0-step=2", 6),
        ({"save_on_train_epoch_end": True}, "epoch=1-step=4", 12),
        ({"every_n_train_steps": 2}, "epoch=1-step=4", 12),
        ({"monitor": "val_loss"}, "epoch=0-step=2", 6),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_triggers_of_model_checkpoint(
    numbers: Path, tmp_path: Path, settings: dict[str, Any], name: str, trained: int
) -> None:
    save = ModelCheckpoint(tmp_path, save_top_k=-1, **settings)
    options = Options(data=str(numbers), trainer=EPOCHS)
    whole = journal(options, Hurries(save, 4), save)
    assert the_point(tmp_path / f"{name}.ckpt").total_batches == trained
    check(numbers, "epochs", whole, tmp_path / f"{name}.ckpt")


class SavesInside(Journal):
    """Saves where weights are changed already and the batch does not count yet."""

    def __init__(self, path: Path, *, hook: str) -> None:
        super().__init__()
        self.path, self.hook = path, hook

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.hook == "optimizer_step":
            self.trainer.save_checkpoint(self.path)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.hook == "lr_scheduler_step":
            self.trainer.save_checkpoint(self.path)
        super().lr_scheduler_step(scheduler, metric)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("optimizer_step", "while the optimizer changes the weights.*save in on_train_batch_end instead"),
        ("lr_scheduler_step", "while the learning rate is being changed.*save in on_train_batch_end instead"),
    ],
)
def test_a_save_inside_the_step_is_refused(numbers: Path, tmp_path: Path, hook: str, message: str) -> None:
    module = SavesInside(tmp_path / "inside.ckpt", hook=hook)
    with pytest.raises(SaveRefusedError, match=message):
        journal(Options(data=str(numbers), trainer=EPOCHS), module=module)
    assert len(module.trained) == 4
    assert not (tmp_path / "inside.ckpt").exists()


class InterruptedStep(torch.optim.AdamW):
    """Is interrupted when it has changed a part of its state."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if all(state["step"] == 4 for state in self.state.values()):
            raise KeyboardInterrupt
        return loss


class StepsWithAdam(Journal):
    def configure_optimizers(self) -> Any:
        return InterruptedStep(self.parameters())


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupt_within_the_optimizer_leaves_the_older_checkpoint(numbers: Path, tmp_path: Path, workers: int) -> None:
    interrupted = signal.getsignal(signal.SIGINT)
    options = Options(data=str(numbers), checkpoints=str(tmp_path), every_n_steps=2, trainer=ENDLESS, workers=workers)
    try:
        with pytest.raises(SaveRefusedError, match="resume from an older checkpoint"):
            journal(options, module=StepsWithAdam())
    finally:
        signal.signal(signal.SIGINT, interrupted)
    assert [p.name for p in tmp_path.glob("step=*.ckpt")] == ["step=2.ckpt"]
    assert not multiprocessing.active_children()


class HasBuffers(Journal):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(600)

    def loss(self, batch: PackedBatch) -> torch.Tensor:
        logits = self.norm(self.model(batch.input_ids)[0])
        return torch.nn.functional.cross_entropy(logits, batch.shift_labels[0])


def test_buffers_that_cannot_be_taken_back_are_named(numbers: Path, tmp_path: Path) -> None:
    options = Options(data=str(numbers), trainer=ENDLESS | {"max_steps": 2, "limit_val_batches": 0})
    with pytest.warns(UserWarning, match=r"buffers of the module have seen them already \(norm\.num_batches_tracked"):
        journal(options, Saves(tmp_path, ("on_train_batch_end",), number=5), module=HasBuffers())
    # None at a step boundary.
    journal(options, Saves(tmp_path, ("on_train_batch_end",), number=3), module=HasBuffers())


def test_weights_are_noted_in_every_kind_of_optimizer() -> None:
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, foreach=False),
        lambda p: torch.optim.Adagrad(p),
    ):
        parameter = torch.nn.Parameter(torch.ones(3))
        trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
        trainer.strategy.optimizers = [make([parameter])]
        parameter.grad = torch.ones(3)
        for _ in range(2):
            before = optimizer_version(trainer)
            assert before == optimizer_version(trainer)
            trainer.optimizers[0].step()
            assert before != optimizer_version(trainer)


class Tuned(Journal):
    """Has what Lightning's searches change."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.1, 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize(
    "search",
    [
        lambda: LearningRateFinder(num_training_steps=30, early_stop_threshold=None, attr_name="lr"),
        lambda: BatchSizeFinder(steps_per_trial=9, max_trials=3),
    ],
    ids=["LearningRateFinder", "BatchSizeFinder"],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_searches_do_not_move_the_position(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: Callable[[], pl.Callback], workers: int
) -> None:
    monkeypatch.setattr("lightning_pack.tracked.MOST_UNTRAINED", 20)
    shape = {"max_steps": 4, "accumulate_grad_batches": 2, "limit_val_batches": 0, "default_root_dir": str(tmp_path)}
    options = Options(data=str(numbers), workers=workers, trainer=shape)
    module = Tuned()
    searched, _, _ = journal(options, search(), module=module)
    assert len(searched.journal) > 2 * 9, "the search must have trained"
    whole, _, _ = journal(options, module=Tuned())
    (*_, begin) = (i for i, entry in enumerate(searched.journal) if entry == ("epoch", 0))
    batches = [[entry[:4] for entry in entries] for entries in (searched.journal[begin:], whole.journal)]
    assert batches[0] == batches[1]


#: Passes of a few wide rows.
PASSES: dict[str, Any] = {"epochs": 3, "policy": {"capacity": 512, "buffer_size": 64, "carry_over": False}}
FINITE = {"max_epochs": 3, "limit_val_batches": 2, "accumulate_grad_batches": 4}


@pytest.mark.parametrize(
    "shape", [FINITE, pytest.param(FINITE | {"max_steps": 1000}, marks=pytest.mark.slow)], ids=["epochs", "steps and epochs"]
)
def test_passes_that_end(numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    monkeypatch.setitem(SHAPES, "finite", shape)
    whole = journal(Options(data=str(numbers), trainer=shape, **PASSES))
    rows = [entry[1] for entry in whole[0].journal if entry[0] == "batch"]
    ends = [rows.count(epoch) for epoch in range(3)]
    assert all(end > 4 for end in ends)
    assert any(end % 4 for end in ends), "a pass ends within a window"
    assert whole[2].global_step == sum(-(-end // 4) for end in ends)
    shorter_run = Options(data=str(numbers), trainer=shape | {"max_epochs": 2}, **PASSES)
    journal(shorter_run, Saves(tmp_path, first=True), Saves(tmp_path))
    last = ends[0] - 1
    for name in (
        "on_train_batch_end-3",
        f"on_train_batch_end-first-{last}",
        f"on_train_batch_end-{last}",
        f"on_after_backward-{last}",
        "on_validation_start-0",
        "on_validation_end-0",
        "on_train_epoch_end-first-0",
        "on_train_epoch_end-0",
        "on_train_epoch_start-1",
        f"on_after_backward-{last + 2}",
        "on_train_end-0",
        "on_fit_end-0",
    ):
        check(numbers, "finite", whole, tmp_path / f"{name}.ckpt", **PASSES)


class SkipsTheRest(Journal):
    """Skips the rest of an epoch within a window."""

    def on_train_batch_start(self, batch: PackedBatch, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


@pytest.mark.parametrize(
    "name", ["on_train_epoch_end-0", "on_train_epoch_start-1", "on_after_backward-4", "on_after_backward-8"]
)
def test_a_module_that_skips_the_rest_of_an_epoch(numbers: Path, tmp_path: Path, name: str) -> None:
    shape = {"max_epochs": 3, "limit_train_batches": 9, "limit_val_batches": 0, "accumulate_grad_batches": 4}
    saved = journal(Options(data=str(numbers), trainer=shape), Saves(tmp_path), module=SkipsTheRest())
    resume = str(tmp_path / f"{name}.ckpt")
    resumed = journal(Options(data=str(numbers), trainer=shape, resume=resume), module=SkipsTheRest())
    assert saved[2].global_step == 3
    assert not differences(*saved[:2], *resumed[:2])


def test_the_same_trainer_fits_again_after_an_error(numbers: Path) -> None:
    options = Options(data=str(numbers), trainer=ENDLESS | {"limit_val_batches": 0})
    whole, _, _ = journal(options)
    module, data = Journal(), datamodule(options)
    pl.seed_everything(1, verbose=False)
    run_it = trainer(options)
    stops = Stops("on_after_backward", 6, fault)
    run_it.callbacks.insert(0, stops)  # type: ignore[attr-defined]
    with pytest.raises(PlannedError):
        run_it.fit(module, data)
    assert data._stream.progress is not None
    assert run_it.global_step == 1
    module.journal.clear()
    run_it.fit(module, data)
    digests = [[entry[3] for entry in entries if entry[0] == "batch"] for entries in (module.journal, whole.journal)]
    assert digests[0] == digests[1][4:], "the batches of the window are trained again"
    assert data._stream.progress.counts["rows"] == 16


def test_a_damaged_place_is_refused(numbers: Path, tmp_path: Path) -> None:
    options = Options(data=str(numbers), trainer=ENDLESS | {"max_steps": 2})
    journal(options, Saves(tmp_path, ("on_train_batch_end",), number=4))
    (path,) = tmp_path.iterdir()
    for change in ({"next": "lunch"}, {"batch": -1}, {"epoch": 2.0}, {"last": 1}, {"more": 1}):
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["EnergonPackDataModule"]["ranks"][0]["point"] |= change
        torch.save(checkpoint, tmp_path / "changed.ckpt")
        with pytest.raises(StateError, match=r"position is damaged: ranks\[0\]\.point: .*resume from another checkpoint"):
            journal(Options(data=str(numbers), trainer=ENDLESS, resume=str(tmp_path / "changed.ckpt")))


def on_two_ranks(argument: dict[str, Any]) -> list[str]:
    """Save within a window and on SIGTERM, and resume both, in one group of processes."""
    shape = EPOCHS | {"devices": 2, "strategy": "ddp"}
    options = {"data": argument["data"], "workers": argument["workers"], "trainer": shape}
    folder = Path(argument["folder"])
    whole = journal(Options(**options), Saves(folder, ("on_after_backward", "on_validation_batch_end"), number=2))
    save = ModelCheckpoint(folder, filename="terminated", save_on_exception=True, every_n_train_steps=1000)
    try:
        journal(Options(**options), Stops("on_after_backward", 10, terminate), save)
    except SIGTERMException:
        print("terminated")
    found = []
    for name in ("on_after_backward-2", "on_validation_batch_end-2", "terminated"):
        resumed = journal(Options(**options, resume=str(folder / f"{name}.ckpt")))
        found += [f"{name}: {difference}" for difference in resumes_exactly(whole, resumed)]
        found += [f"{name}: nothing was left to train"] * (not resumed[0].trained)
    return found


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_two_ranks(numbers: Path, tmp_path: Path, workers: int) -> None:
    argument = {"data": str(numbers), "workers": workers, "folder": str(tmp_path)}
    assert on_ranks("tests.test_saves:on_two_ranks", argument, folder=tmp_path / "logs") == [[], []]
    assert "terminated" in (tmp_path / "logs" / "rank0.log").read_text()
    assert {rank["counts"]["rows"] for rank in torch.load(tmp_path / "terminated.ckpt")["EnergonPackDataModule"]["ranks"]} == {
        10
    }


def alone(argument: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 fails, with an error or within the optimizer's step, while rank 0 goes on."""
    agreement.SECONDS_TO_ANSWER = 10.0
    shape = ENDLESS | {"devices": 2, "strategy": "ddp", "max_steps": 50, "limit_val_batches": 0}
    options = Options(data=argument["data"], trainer=shape, checkpoints=argument["folder"], every_n_steps=2)
    began = []

    def fail() -> None:
        began.append(time.monotonic())
        fault()

    callbacks = [Stops("on_before_backward", 14, fail)] if os.environ["RANK"] == "1" else []
    try:
        journal(options, *callbacks)
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}", "seconds": [time.monotonic() - moment for moment in began]}
    return {"error": None}


def test_a_rank_that_fails_alone_does_not_wait_for_ever(numbers: Path, tmp_path: Path) -> None:
    argument = {"data": str(numbers), "folder": str(tmp_path / "c")}
    first, second = on_ranks("tests.test_saves:alone", argument, folder=tmp_path / "logs")
    message = "another rank does not answer, so no checkpoint can be saved"
    assert f"{message} after PlannedError: as planned" in second["error"]
    assert message in first["error"]
    assert 9 <= second["seconds"][0] < 200
    assert [p.name for p in (tmp_path / "c").glob("step=*.ckpt")] == ["step=2.ckpt"]


def test_a_short_step_after_another_accumulation_is_told(numbers: Path, tmp_path: Path) -> None:
    shape = {"max_steps": 3, "accumulate_grad_batches": 3, "limit_val_batches": 0}
    journal(Options(data=str(numbers), trainer=shape), Saves(tmp_path, ("on_train_batch_end",), number=8))
    (path,) = tmp_path.glob("*.ckpt")
    again = shape | {"max_steps": 5, "accumulate_grad_batches": 2}
    with pytest.warns(UserWarning, match=r"first optimizer step after this resume has 1 batches instead of .*=2: 9 batches"):
        journal(Options(data=str(numbers), trainer=again, resume=str(path)))


def test_a_restart_of_the_data_keeps_the_steps_whole(numbers: Path, tmp_path: Path) -> None:
    journal(Options(data=str(numbers), trainer=ENDLESS), Saves(tmp_path, ("on_after_backward",), number=5))
    (path,) = tmp_path.glob("*.ckpt")
    assert the_point(path).batch == 4, "the save lies within a window"
    module = Journal()
    data = datamodule(Options(data=str(numbers), policy={"seed": 1}))
    data.on_mismatch = "restart"
    with pytest.warns(UserWarning, match="THE DATA STARTS OVER"):
        trainer(Options(data="", trainer=ENDLESS)).fit(module, data, ckpt_path=str(path))
    first = next(entry for entry in module.journal if entry[0] == "batch")
    assert first[2] == 4, "the batches of the open window come again"
