"""Two runs in one folder: at once, and one after the other."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_pack import cli
from lightning_pack.run_folder import LOCK, own_folders, warn_of_older_checkpoints

# Lightning calls jsonargparse in a way that it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

#: A run with a loader's worker, which says where both are and goes on.
HOLDER = """
import os, sys, time
from pathlib import Path
from lightning_pack.run_folder import _own
with _own(Path(sys.argv[1])):
    worker = os.fork()
    if worker:
        print(os.getpid(), worker, flush=True)
    time.sleep(120)
"""


def trainer(folder: Path | str, root: Path, **options: object) -> Trainer:
    plain = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    # A best and a newest one in the same folder, as in the configurations.
    newest = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, enable_version_counter=False)
    saving = [ModelCheckpoint(folder, filename="best", enable_version_counter=False), newest]
    return Trainer(**{**plain, "callbacks": saving, "default_root_dir": root, **options})  # type: ignore[arg-type]


def config(tmp_path: Path) -> str:
    """Of a run whose data is missing, so that it fails after everything that comes before the data."""
    settings = {"dirpath": str(tmp_path / "run"), "save_last": True, "enable_version_counter": False}
    saving = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": settings}
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "callbacks": [saving]}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(tmp_path / "run")}
    model = {"model_type": "llama", "vocab_size": 30, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    data = {"path": str(tmp_path / "nowhere"), "num_workers": 0, "packing": {"capacity": 8}}
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump({"model": {"model": model}, "data": data, "trainer": options}))
    return str(path)


def refused(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(args))
    return int(stop.value.code or 0)


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    folder, root = tmp_path / "a" / "b", tmp_path / "root"
    with own_folders(trainer(folder, root)):
        assert (folder / LOCK).exists()
        assert (root / LOCK).exists()
        for second in (trainer(folder, tmp_path / "other"), trainer(tmp_path / "other", root)):
            with pytest.raises(ValueError, match=r"another run \(process \d+ on .+\) writes its checkpoints there"):
                own_folders(second).__enter__()
        # Another spelling of the folder is the same one.
        with pytest.raises(ValueError, match=f"^{folder}: .*--trainer.default_root_dir"):
            own_folders(trainer(tmp_path / "a" / "." / "b", tmp_path / "other")).__enter__()
        with own_folders(trainer(tmp_path / "free", tmp_path / "other")):
            assert (tmp_path / "free" / LOCK).exists()
    # Nothing stays: neither the file, nor folders that nothing was saved to.
    assert not list(tmp_path.iterdir())
    with own_folders(trainer(folder, root)):
        (folder / "last.ckpt").touch()
    assert [path.name for path in folder.iterdir()] == ["last.ckpt"]


def test_what_is_nobody_elses_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    other_rank = trainer(folder, tmp_path / "root")
    monkeypatch.setattr(type(other_rank.strategy), "is_global_zero", False)
    with own_folders(other_rank):
        assert not other_rank.is_global_zero
        assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    numbered = trainer(folder, tmp_path / "root", callbacks=[ModelCheckpoint()], logger=CSVLogger(tmp_path / "logs"))
    for free in (trainer(folder, tmp_path / "root", fast_dev_run=True), numbered, trainer("memory://run", tmp_path)):
        with own_folders(free):
            assert free.is_global_zero
            assert not list(tmp_path.iterdir())
    # A folder that cannot be made is told of where something is saved to it.
    (tmp_path / "file").touch()
    with own_folders(trainer(tmp_path / "file" / "run", tmp_path)):
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_killed_run_leaves_the_folder_free_though_its_workers_live(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        assert process.stdout is not None
        holder, worker = map(int, process.stdout.readline().split())
        try:
            with pytest.raises(ValueError, match=rf"\(process {holder} on "):
                own_folders(trainer(tmp_path, tmp_path)).__enter__()
            process.kill()
            process.wait(60)
            assert (tmp_path / LOCK).exists()
            os.kill(worker, 0)
            with own_folders(trainer(tmp_path, tmp_path)):
                assert (tmp_path / LOCK).exists()
        finally:
            process.kill()
            os.kill(worker, signal.SIGKILL)
    assert not (tmp_path / LOCK).exists()


def test_older_checkpoints_are_told_of(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    folder = tmp_path / "run"
    warn_of_older_checkpoints(trainer(folder, tmp_path))
    folder.mkdir()
    warn_of_older_checkpoints(trainer(folder, tmp_path))
    (folder / "step=2.ckpt").write_text("two")
    counted = ModelCheckpoint(folder, save_last=True)
    warn_of_older_checkpoints(trainer(folder, tmp_path, callbacks=[counted]))
    assert not recwarn.list
    warn_of_older_checkpoints(trainer(folder, tmp_path))
    (folder / "last.ckpt").symlink_to("step=2.ckpt")
    warn_of_older_checkpoints(trainer(folder, tmp_path))
    first, second = (str(warning.message) for warning in recwarn.list)
    assert f"{folder} holds checkpoints of an earlier run (step=2.ckpt): a new run begins" in first
    assert f"--ckpt_path {folder / 'step=2.ckpt'} goes on" in first
    assert f"--ckpt_path {folder / 'last.ckpt'} goes on" in second


def test_fit_asks_before_it_looks_at_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, last = config(tmp_path), tmp_path / "run" / "last.ckpt"
    last.parent.mkdir()
    last.write_text("no checkpoint")
    with own_folders(trainer(last.parent, last.parent)):
        assert refused("fit", "--config", path) == 1
        assert f"{last.parent}: another run (process " in (error := capsys.readouterr().err)
        assert "nowhere" not in error
        # What writes no checkpoints is not kept out.
        assert refused("validate", "--config", path) == 1
        assert "nowhere" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=f"a new run begins.* --ckpt_path {last} goes on"):
        assert refused("fit", "--config", path) == 1
    assert "nowhere" in capsys.readouterr().err
    assert [each.name for each in last.parent.iterdir()] == ["last.ckpt"]
