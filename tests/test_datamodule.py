"""The datamodule under a real Trainer, in one process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch

from lightning_pack import EnergonPackDataModule, PackedBatch, PackingPolicy, ParallelLayout
from tests.numbers_data import NumberEncoder, records_of, write_webdataset
from tests.training import Options, Recorder, datamodule, read_record, run, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

ENDLESS = {"max_steps": 12}
EPOCHS = {"max_epochs": 3, "limit_train_batches": 5}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("shape", [ENDLESS, EPOCHS], ids=["max_steps", "epochs"])
def test_a_resumed_run_trains_the_same_batches(
    numbers: Path, tmp_path: Path, shape: dict[str, Any], accumulate: int, workers: int
) -> None:
    shape = shape | {"accumulate_grad_batches": accumulate}
    base: dict[str, Any] = {"data": str(numbers), "workers": workers, "checkpoints": str(tmp_path), "trainer": shape}
    whole = run(Options(**base))
    assert len(set(whole.trained.values())) == len(whole.trained) > 10, "the batches must differ for the order to show"
    steps = sorted(int(p.stem.split("=")[1]) for p in tmp_path.glob("step=*.ckpt"))
    for step in {steps[0], steps[len(steps) // 2]}:
        resumed = run(Options(**base | {"resume": str(tmp_path / f"step={step}.ckpt"), "checkpoints": None}))
        assert resumed.trained
        assert len(resumed.trained) < len(whole.trained)
        assert resumed.trained == {at: whole.trained[at] for at in resumed.trained}
        assert max(resumed.trained) == max(whole.trained)
        # Dropout draws the same numbers too.
        assert resumed.weights() == whole.weights()


def test_resuming_twice_shortly_after_each_other(numbers: Path, tmp_path: Path) -> None:
    base: dict[str, Any] = {"data": str(numbers), "workers": 2}
    whole = run(Options(**base, trainer={"max_steps": 9}))
    pieces: dict[tuple[int, int], str] = {}
    resume = None
    for step in (3, 4, 5, 9):
        folder = tmp_path / str(step)
        pieces |= run(Options(**base, resume=resume, checkpoints=str(folder), trainer={"max_steps": step})).trained
        resume = str(folder / "last.ckpt")
    assert pieces == whole.trained


def test_validation_starts_afresh_every_time(numbers: Path) -> None:
    settings = {"max_steps": 6, "val_check_interval": 3, "limit_val_batches": 1.0, "num_sanity_val_steps": 2}
    module = run(Options(data=str(numbers), trainer=settings))
    sanity, *passes = module.validated
    assert len(passes) == 2
    assert passes[0] == passes[1]
    assert passes[0][: len(sanity)] == sanity
    assert sorted(passes[0]) == [f"val{i:06d}" for i in range(30)]
    # The sanity check must not move the training stream.
    assert module.trained == run(Options(data=str(numbers), trainer={"max_steps": 6})).trained


@pytest.mark.parametrize(
    "settings",
    [
        {"fast_dev_run": 2},
        {"max_steps": 4, "val_check_interval": 2, "limit_val_batches": 2},
        {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 2, "reload_dataloaders_every_n_epochs": 1},
        {"max_epochs": 1, "limit_train_batches": 3, "check_val_every_n_epoch": 1, "limit_val_batches": 2},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_trainer_settings(numbers: Path, settings: dict[str, Any]) -> None:
    module = run(Options(data=str(numbers), workers=2, trainer=settings))
    expected = (
        settings.get("fast_dev_run") or settings.get("max_steps") or settings["max_epochs"] * settings["limit_train_batches"]
    )
    assert len(module.trained) == expected
    assert module.validated
    assert all(0 < len(keys) < 30 for keys in module.validated)
    whole = run(Options(data=str(numbers), workers=2, trainer={"max_steps": expected}))
    assert list(module.trained.values()) == list(whole.trained.values()), "no batch may be lost between epochs"


def test_overfit_batches_is_refused(numbers: Path) -> None:
    with pytest.raises(ValueError, match="overfit_batches repeats the same batches"):
        run(Options(data=str(numbers), trainer={"overfit_batches": 2, "max_epochs": 1}))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("buffer_size", [16, 300])
def test_a_finite_pass_accounts_for_every_sample(tmp_path: Path, numbers: Path, workers: int, buffer_size: int) -> None:
    options = Options(data=str(numbers), workers=workers, policy={"buffer_size": buffer_size})
    data = datamodule(options)
    data.val_path = str(numbers)
    data.setup("validate")
    one_pass = data._pass("train")
    read = [f"train{i:06d}" for i in range(200)]
    for _ in range(2):
        batches = list(one_pass)
        trained = [key for batch in batches for key in batch.source_keys]
        left_out = {gone.key: gone.reason for batch in batches for gone in batch.left_out}
        assert len(left_out) == sum(len(batch.left_out) for batch in batches)
        assert {left_out[f"train{i:06d}"] for i in (7, 11, 13, 15, 17, 19, 23)} == {
            "corrupt", "encoder_error", "empty", "no_targets", "overlength",
        }  # fmt: skip
        assert sorted(trained + list(left_out)) == read


def test_what_is_left_out_after_the_last_pack_is_reported(tmp_path: Path) -> None:
    records: list[Any] = [*records_of([5, 6]), *([b"{"] * 5)]
    data = datamodule(
        Options(data=str(write_webdataset(tmp_path / "d", {"train": records}, shards=1)), policy={"buffer_size": 2})
    )
    data.setup()
    batches = list(data._pass("train"))
    assert [gone.reason for batch in batches for gone in batch.left_out] == ["corrupt"] * 5
    assert sum(len(batch.source_keys) for batch in batches) == 2


def test_a_dataset_without_a_usable_source_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_pack.energon.packs.MOST_LEFT_OUT_IN_A_ROW", 50)
    data = datamodule(Options(data=str(write_webdataset(tmp_path / "d", {"train": records_of([100] * 9)}))))
    data.setup("fit")
    with pytest.raises(
        ValueError,
        match=r"sources in a row cannot be trained on \(\d+ overlength; the last is 'train[^']*' of \d+ tokens\): check",
    ):
        next(iter(data.train_dataloader()))
    with pytest.raises(
        ValueError,
        match=r"no row to train on in this pass over the data: all 9 sources that this one has read are left out: raise the "
        r"policy's capacity, or let overlength='truncate' cut what is longer; left out: train\d+ \(overlength\)",
    ):
        run(Options(data=data.path, epochs=1, trainer={"max_epochs": 1}))
    # Which is a way out.
    assert run(Options(data=data.path, epochs=1, policy={"overlength": "truncate"}, trainer={"max_epochs": 1})).trained
    data.setup("validate")
    with pytest.warns(UserWarning, match="no source of the pass is usable: 9 are left out"):
        assert list(data._pass("train")) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_an_overlong_source_can_stop_the_run(tmp_path: Path, workers: int) -> None:
    path = write_webdataset(tmp_path / "d", {"train": records_of([5, 100, 7])})
    with pytest.raises(ValueError, match=r"sample 'train000001' has 100 tokens, more than capacity=64"):
        run(Options(data=str(path), workers=workers, policy={"overlength": "error"}, trainer={"max_steps": 5}))


def test_more_workers_than_samples_is_refused(tmp_path: Path) -> None:
    path = write_webdataset(tmp_path / "d", {"train": records_of([5])}, shards=1)
    with pytest.raises(
        ValueError, match=r"1 sample to train on for 2 loader workers .*: set num_workers=1 or less, or give more data"
    ):
        run(Options(data=str(path), workers=2, trainer={"max_steps": 5}))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_saved_after_fit_holds_the_position(numbers: Path, tmp_path: Path, workers: int) -> None:
    options = Options(data=str(numbers), workers=workers, trainer={"max_steps": 3})
    run_it, module = trainer(options), Recorder()
    run_it.fit(module, datamodule(options))
    run_it.save_checkpoint(tmp_path / "after.ckpt")
    resumed = run(Options(data=str(numbers), workers=workers, resume=str(tmp_path / "after.ckpt"), trainer={"max_steps": 6}))
    whole = run(Options(data=str(numbers), workers=workers, trainer={"max_steps": 6}))
    # Lightning ends the epoch when fit ends, so the resumed batches are counted under the next one.
    assert len(resumed.trained) == 3
    assert [*module.trained.values(), *resumed.trained.values()] == list(whole.trained.values())


def test_a_trainer_that_fits_again_goes_on_in_the_data(numbers: Path) -> None:
    whole = run(Options(data=str(numbers), trainer={"max_steps": 8}))
    options = Options(data=str(numbers), trainer={"max_steps": 3})
    run_it, module, data = trainer(options), Recorder(), datamodule(options)
    run_it.fit(module, data)
    run_it.fit_loop.epoch_loop.max_steps = 8
    run_it.fit(module, data)
    assert list(module.trained.values()) == list(whole.trained.values())
    # Another trainer begins at the beginning.
    again = Recorder()
    trainer(options).fit(again, data)
    assert list(again.trained.values()) == list(whole.trained.values())[:3]


class Fails(Recorder):
    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise ZeroDivisionError("a fault of the module")
        return super().training_step(batch, batch_idx)


def test_an_error_in_training_ends_the_workers_and_saves_the_batch_before(numbers: Path, tmp_path: Path) -> None:
    options = Options(data=str(numbers), workers=2, checkpoints=str(tmp_path), every_n_steps=100, trainer={"max_steps": 9})
    data, run_it, module = datamodule(options), trainer(options), Fails()
    with pytest.raises(ZeroDivisionError):
        run_it.fit(module, data)
    assert not multiprocessing.active_children()
    assert data._stream.progress not in run_it.callbacks  # type: ignore[attr-defined]
    (saved,) = tmp_path.glob("step=*.ckpt")
    resumed = run(Options(data=str(numbers), workers=2, resume=str(saved), trainer={"max_steps": 6}))
    whole = run(Options(data=str(numbers), workers=2, trainer={"max_steps": 6}))
    assert module.trained | resumed.trained == whole.trained
    assert len(resumed.trained) == 3


class Pulls(Recorder):
    def training_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        raise AssertionError("must be refused before")


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_a_step_that_pulls_batches_itself_is_refused(numbers: Path) -> None:
    options = Options(data=str(numbers), trainer={"max_steps": 2})
    with pytest.raises(ValueError, match=r"Pulls\.training_step takes dataloader_iter"):
        trainer(options).fit(Pulls(), datamodule(options))


class SavesAtStart(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def test_a_checkpoint_saved_after_a_resume_and_before_a_step_is_the_one_resumed_from(numbers: Path, tmp_path: Path) -> None:
    base: dict[str, Any] = {"data": str(numbers), "checkpoints": str(tmp_path), "trainer": {"max_steps": 6}}
    whole = run(Options(**base))
    options = Options(**base | {"resume": str(tmp_path / "step=3.ckpt"), "checkpoints": str(tmp_path / "again")})
    run_it = trainer(options)
    run_it.callbacks.append(SavesAtStart(tmp_path / "start.ckpt"))  # type: ignore[attr-defined]
    run_it.fit(Recorder(), datamodule(options), ckpt_path=options.resume)
    resumed = run(Options(**base | {"resume": str(tmp_path / "start.ckpt")}))
    assert len(resumed.trained) == 3
    assert resumed.trained.items() <= whole.trained.items()
    assert resumed.weights() == whole.weights(), "dropout must draw the same numbers"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_saved_before_the_first_step_is_the_beginning(numbers: Path, tmp_path: Path, workers: int) -> None:
    options = Options(data=str(numbers), workers=workers, trainer={"max_steps": 3})
    run_it, module = trainer(options), Recorder()
    run_it.callbacks.append(SavesAtStart(tmp_path / "start.ckpt"))  # type: ignore[attr-defined]
    run_it.fit(module, datamodule(options))
    again = run(Options(data=str(numbers), workers=workers, resume=str(tmp_path / "start.ckpt"), trainer={"max_steps": 3}))
    assert again.trained == module.trained


@pytest.mark.parametrize("workers", [2])
def test_a_run_killed_with_signal_9_continues_with_the_same_batches(numbers: Path, tmp_path: Path, workers: int) -> None:
    record, checkpoints = tmp_path / "record", tmp_path / "checkpoints"
    base = Options(
        data=str(numbers),
        workers=workers,
        checkpoints=str(checkpoints),
        record=str(record),
        every_n_steps=3,
        trainer={"max_steps": 40},
    )
    command = [sys.executable, "-m", "tests.training"]
    # It stands still in the second step after the third checkpoint.
    victim = subprocess.Popen([*command, as_json(base, stands_after=11)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_steps(victim, record, 11)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert Path(newest(checkpoints)).name == "step=9.ckpt"
    subprocess.run([*command, as_json(base, resume=newest(checkpoints))], check=True, capture_output=True, timeout=200)
    whole = run(Options(data=str(numbers), workers=workers, trainer={"max_steps": 40}))
    seen = read_record(record)
    assert sum(len(digests) > 1 for digests in seen.values()) == 2, "the steps since the last checkpoint are trained again"
    assert {at: set(digests) for at, digests in seen.items()} == {at: {d} for at, d in whole.trained.items()}


@pytest.mark.parametrize("workers", [2])
def test_ctrl_c_saves_the_position(numbers: Path, tmp_path: Path, workers: int) -> None:
    record, checkpoints = tmp_path / "record", tmp_path / "checkpoints"
    options = Options(
        data=str(numbers),
        workers=workers,
        record=str(record),
        sleep=0.1,
        checkpoints=str(checkpoints),
        every_n_steps=1000,
        trainer={"max_steps": 500},
    )
    # A terminal sends the signal to the whole group, workers included.
    victim = subprocess.Popen(
        [sys.executable, "-m", "tests.training", as_json(options)], stderr=subprocess.DEVNULL, start_new_session=True
    )
    wait_for_steps(victim, record, 6)
    os.killpg(victim.pid, signal.SIGINT)
    victim.wait(timeout=120)
    (saved,) = checkpoints.glob("step=*.ckpt")
    done = int(saved.stem.split("=")[1])
    assert 5 <= done < 500
    assert torch.load(saved, weights_only=True)["EnergonPackDataModule"]["ranks"][0]["counts"]["rows"] == done
    resumed = run(Options(data=str(numbers), workers=workers, resume=str(saved), trainer={"max_steps": done + 4}))
    whole = run(Options(data=str(numbers), workers=workers, trainer={"max_steps": done + 4}))
    assert list(resumed.trained.values()) == list(whole.trained.values())[done:]


def wait_for_steps(victim: subprocess.Popen[bytes], record: Path, steps: int) -> None:
    log = Path(f"{record}.0")
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") >= steps):
        assert time.monotonic() < deadline, "the run did not get going"
        assert victim.poll() is None, "the run ended by itself"
        time.sleep(0.05)


def test_workers_do_not_outlive_a_killed_run(tmp_path: Path) -> None:
    # Rows that do not fit into a pipe at once: their worker is blocked in sending when the run is killed.
    path = write_webdataset(tmp_path / "long", {"train": records_of([9000] * 60)})
    options = Options(
        data=str(path),
        workers=2,
        sleep=0.3,
        record=str(tmp_path / "record"),
        policy={"capacity": 36_000},
        trainer={"max_steps": 400},
    )
    victim = subprocess.Popen([sys.executable, "-m", "tests.training", as_json(options)], stderr=subprocess.DEVNULL)
    wait_for_steps(victim, tmp_path / "record", 3)
    workers = psutil.Process(victim.pid).children(recursive=True)
    assert len(workers) == 2
    victim.kill()
    victim.wait()
    gone, alive = psutil.wait_procs(workers, timeout=60)
    assert len(gone) == 2, alive


def as_json(options: Options, **changes: Any) -> str:
    import dataclasses
    import json

    return json.dumps(dataclasses.asdict(dataclasses.replace(options, **changes)))


def newest(folder: Path) -> str:
    return str(max(folder.glob("step=*.ckpt"), key=lambda p: int(p.stem.split("=")[1])))


def test_a_missing_dataset_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no dataset at .*nothing.*lightning-pack prepare"):
        EnergonPackDataModule(tmp_path / "nothing").setup("fit")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"is a folder that holds no dataset .*lightning-pack prepare"):
        EnergonPackDataModule(tmp_path / "empty", encoder=NumberEncoder()).setup("fit")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": -1}, "num_workers=-1"),
        ({"packs_per_batch": 0}, "packs_per_batch=0"),
        ({"encoder": NumberEncoder(), "tokenizer": "somewhere"}, "not both"),
        ({"packing": PackingPolicy(capacity=10), "parallel": ParallelLayout(context=2)}, "capacity=10 is not a multiple of"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnergonPackDataModule("data", **settings)


def test_a_weighted_metadataset_and_a_jsonl_file(numbers: Path, tmp_path: Path) -> None:
    from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"n": 11, "id": 300}\n{not json}\n{"n": 12, "id": 301}\n{"n": 13, "id": 302}\n')
    CrudeJsonlDatasetFactory.prepare_dataset(str(lines))
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        f"      - weight: 2\n        path: {numbers}\n      - weight: 1\n        path: {lines}\n"
    )
    for path in (lines, blend):
        options = Options(data=str(path), trainer={"max_steps": 10}, checkpoints=str(tmp_path / path.stem))
        data = datamodule(options)
        data.setup("fit")
        assert data.val_dataloader() == []
        stream = iter(data.train_dataloader())
        batches = [next(stream) for _ in range(30)]
        reasons = {gone.reason for batch in batches for gone in batch.left_out}
        assert "corrupt" in reasons
        assert (path == blend) == (len(reasons) > 1)
        values = {int(token) - 1 for batch in batches for token in batch.input_ids.unique() if token}
        assert {300, 301, 302} <= values
        assert (path == blend) == bool(values - {300, 301, 302})
        data.teardown("fit")
        whole = run(options)
        resumed = run(Options(data=str(path), resume=str(tmp_path / path.stem / "step=4.ckpt"), trainer={"max_steps": 10}))
        assert len(resumed.trained) == 6
        assert resumed.trained.items() <= whole.trained.items()


def test_a_file_for_validation_does_not_make_the_training_file_a_test_split(numbers: Path, tmp_path: Path) -> None:
    from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

    files = [tmp_path / name for name in ("train.jsonl", "val.jsonl")]
    for i, file in enumerate(files):
        file.write_text("".join(f'{{"n": {5 + i}, "id": {100 * i + k}}}\n' for k in range(6)))
        CrudeJsonlDatasetFactory.prepare_dataset(str(file))
    data = EnergonPackDataModule(files[0], val_path=files[1], encoder=NumberEncoder(), num_workers=0)
    data.setup()
    (batch,) = data.val_dataloader()
    assert batch.cu_seqlens.diff().tolist() == [6] * 6
    assert data.test_dataloader() == []


def test_no_threads_of_the_tokenizer_before_the_fork(numbers: Path) -> None:
    datamodule(Options(data=str(numbers))).setup("fit")
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
