"""``lightning-pack inspect`` on checkpoints of real runs: whole, cut off, damaged, a stranger's, sharded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_pack import EnergonPackDataModule, PackingPolicy, cli
from lightning_pack.checkpoints.against import ranks_of, verdict_of
from lightning_pack.checkpoints.contents import Contents
from lightning_pack.checkpoints.file import UnreadableCheckpointError, read_checkpoint
from lightning_pack.prepare import prepare_stdlib
from tests.numbers_data import NumberEncoder
from tests.ranks import on_ranks
from tests.test_cli import MODEL, refused, written
from tests.test_topology import Ranks
from tests.training import Options, Recorder, datamodule, trainer

pytestmark = [
    # Lightning 2.6 calls jsonargparse in a way that its newest release calls deprecated.
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
    # Longer sources than the capacity are left out, to be counted.
    pytest.mark.filterwarnings("ignore::lightning_pack.callbacks.monitor.LeftOutWarning"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 8 and 16, and the configuration ``config.yaml`` that the run saved."""
    folder = tmp_path_factory.mktemp("inspect")
    data = prepare_stdlib(folder / "data", vocab_size=300, shards=2, progress=False)
    save = {"dirpath": str(folder), "filename": "{step}", "every_n_train_steps": 8, "save_top_k": -1}
    config = {
        "model": {"model": MODEL},
        "data": {
            "path": str(data.path),
            "num_workers": 2,
            "shuffle_buffer_size": 16,
            "packing": {"capacity": 512, "buffer_size": 16},
        },
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 16,
            "max_epochs": 1,
            "limit_val_batches": 0,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
            "logger": False,
            "callbacks": [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": save}],
        },
    }
    cli.main(["fit", "--config", written(config, folder / "given.yaml")])
    return folder


def inspected(*args: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and what was printed."""
    code = 0
    try:
        cli.main(["inspect", *map(str, args)])
    except SystemExit as e:
        code = int(e.code or 0)
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return code, printed.out + printed.err


def copied(trained: Path, folder: Path) -> Path:
    return Path(shutil.copy(trained / "step=16.ckpt", folder / "copy.ckpt"))


def test_a_checkpoint_is_described(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trained / "step=16.ckpt"
    code, out = inspected(path, "--verify", capsys=capsys)
    assert code == 0
    saved = torch.load(path, weights_only=True)
    state = saved["EnergonPackDataModule"]
    counts, workers = state["ranks"][0]["counts"], state["ranks"][0]["loader"]["workers"]
    assert counts["rows"] == 16
    assert counts["sources"] > 16
    assert all(worker["at"]["buffer"] > 0 for worker in workers), "a buffer has been left behind"
    carried = sum(len(worker["at"]["carried"]) for worker in workers)
    assert carried
    for text in (
        "step 16, epoch 0",
        "state of EnergonPackDataModule, version 3",
        f"16 rows, {counts['sources']} sources, {counts['real_tokens']:,} real tokens; {counts['left_out']} source",
        "1 data-parallel rank, num_workers 2 on each",
        "resumes with: 1 rank x 2 workers, 2 ranks x 1 worker or 0",
        f"30 sources in shuffle buffers, {carried} carried over in packing buffers",
        "parts are as they were written",
        *(
            f"rank 0, worker {worker['worker']}: buffer {worker['at']['buffer']}, {worker['at']['emitted']} pack"
            for worker in workers
        ),
    ):
        assert text in out
    for name in state["settings"]:
        assert f"    {name}: " in out
    assert "train-0000.tar: samples" in out

    code, out = inspected(path, "--json", capsys=capsys)
    found = json.loads(out)["checkpoint"]
    assert (code, found["step"], found["bytes"]) == (0, 16, path.stat().st_size)
    position = found["data"]["position"]
    assert position["counts"] == counts
    # A full shuffle buffer gives a sample before it takes the next one.
    assert [place["buffered"] for place in position["places"]] == [15, 15]
    assert sum(place["carried"] for place in position["places"]) == carried
    # What was read before the buffer that is filled up again: sources, what was left out, and the shuffle buffer.
    for place in position["places"]:
        (at,) = (worker["at"] for worker in workers if worker["worker"] == place["worker"])
        assert place["samples_read"] >= at["read"] + 15 > 15
    assert position["settings"]["data.files"] == state["settings"]["data.files"]
    assert 0 < found["data"]["bytes"] < path.stat().st_size


def test_against_the_same_and_other_configurations(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trained / "step=8.ckpt"
    for config in ("given.yaml", "config.yaml"):
        code, out = inspected(path, "--against", trained / config, capsys=capsys)
        assert (code, "WOULD RESUME" in out) == (0, True), out
        assert "on 1 data-parallel rank (trainer.devices=1, num_nodes=1)" in out
    against = (path, "--against", trained / "given.yaml")

    other = inspected(*against, "--data.packing.capacity", "256", "--data.seed", "3", capsys=capsys)
    assert other[0] == 1
    assert "WOULD NOT RESUME" in other[1]
    # The words of fit itself, line by line.
    capsys.readouterr()
    fit = ("fit", "--config", str(trained / "given.yaml"), "--ckpt_path", str(path))
    assert refused(*fit, "--data.packing.capacity", "256", "--data.seed", "3") == 1
    said = capsys.readouterr().err.partition("lightning-pack: error: ")[2].partition("\n(--traceback")[0]
    assert "packing.capacity: 512 in the checkpoint, 256 now" in said
    assert "seed: 0 in the checkpoint, 3 now" in said
    assert said in other[1]

    code, out = inspected(*against, "--ranks", "2", capsys=capsys)
    assert (code, "legal: 1 rank x 2 workers, 2 ranks x 1 worker or 0" in out) == (1, True)
    assert inspected(*against, "--ranks", "2", "--data.num_workers", "1", capsys=capsys)[0] == 0
    code, out = inspected(*against, "--data.seed", "3", "--data.on_mismatch", "restart", capsys=capsys)
    assert (code, "WOULD START THE DATA OVER" in out) == (1, True)
    code, out = inspected(*against, "--data.seed", "3", "--json", capsys=capsys)
    verdict = json.loads(out)["against"]
    assert (code, verdict["resumes"], "seed: 0 in the checkpoint, 3 now" in verdict["problem"]) == (1, False, True)

    # Data that is not there, or changed.
    code, out = inspected(*against, "--data.path", tmp_path / "nowhere", capsys=capsys)
    assert (code, "WOULD NOT RESUME\nthere is no dataset at" in out) == (1, True)
    moved = tmp_path / "moved"
    shutil.copytree(trained / "data", moved)
    assert inspected(*against, "--data.path", moved, capsys=capsys)[0] == 0
    shard = moved / "train-0001.tar"
    content = bytearray(shard.read_bytes())
    content[2000] ^= 1
    shard.write_bytes(content)
    code, out = inspected(*against, "--data.path", moved, capsys=capsys)
    assert (code, "data: train-0001.tar has content" in out) == (1, True)
    code, out = inspected(*against, "--data.path", moved, "--data.on_damaged", "skip", capsys=capsys)
    assert (code, "WOULD RESUME, but not exactly\non_damaged='skip'" in out, "never stopped" in out) == (0, True, False)
    assert "data: train-0001.tar has content" in out
    code, out = inspected(*against, "--data.path", trained / "data", "--data.on_damaged", "skip", capsys=capsys)
    assert (code, "WOULD RESUME: the next batches are those of the run that never stopped" in out) == (0, True)


def test_wrong_usage(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trained / "step=8.ckpt"
    config = yaml.safe_load((trained / "given.yaml").read_text())
    config["trainer"] |= {"devices": "auto", "accelerator": "auto"}
    auto = written(config, trained / "auto.yaml")
    for args, text in (
        ((path, "--ranks", "2"), "go with --against"),
        ((path, "--data.seed", "2"), "unrecognized arguments: --data.seed 2"),
        ((path, "--against", trained / "given.yaml", "--ranks", "0"), "at least 1"),
        ((path, "--against", trained / "given.yaml", "--data.sed", "0"), "data.sed"),
        ((path, "--against", trained / "nowhere.yaml"), "nowhere.yaml"),
        ((path, "--against", auto), "give --ranks N"),
        ((trained, "--against", auto), "take one of them"),
        (("s3://bucket/a.ckpt",), "copy the checkpoint here"),
    ):
        code, out = inspected(*args, capsys=capsys)
        assert (code, text in out) == (2, True), out
        assert "Traceback" not in out


def test_the_check_against_the_data_runs_too(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = torch.load(trained / "step=16.ckpt", weights_only=True)
    (worker, _) = saved["EnergonPackDataModule"]["ranks"][0]["loader"]["workers"]
    assert worker["at"]["emitted"] <= 16
    worker["at"]["emitted"] = 17
    torch.save(saved, tmp_path / "tampered.ckpt")
    code, out = inspected(tmp_path / "tampered.ckpt", "--against", trained / "given.yaml", capsys=capsys)
    assert (code, "17 is not a whole number from 0 to 16" in out) == (1, True)
    saved["EnergonPackDataModule"]["ranks"][0]["counts"]["rows"] = "many"
    torch.save(saved, tmp_path / "tampered.ckpt")
    code, out = inspected(tmp_path / "tampered.ckpt", capsys=capsys)
    assert (code, "cannot be read: the checkpoint's data position is damaged: ranks[0].counts.rows" in out) == (0, True)
    saved["EnergonPackDataModule"]["version"] = 1
    torch.save(saved, tmp_path / "tampered.ckpt")
    code, out = inspected(tmp_path / "tampered.ckpt", capsys=capsys)
    assert (code, "version 1" in out, "another form than this release reads" in out) == (0, True, True)


@pytest.mark.parametrize("left", [0.0, 0.001, 0.5, 0.999])
def test_a_file_that_was_cut_off_names_an_older_one(
    trained: Path, tmp_path: Path, left: float, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(trained / "step=8.ckpt", tmp_path / "older.ckpt")
    path = copied(trained, tmp_path)
    os.truncate(path, int(path.stat().st_size * left))
    with pytest.raises((EOFError, RuntimeError, OSError, ValueError)):
        torch.load(path, weights_only=True)
    way_out = f"the newest in this folder that can be read is {tmp_path / 'older.ckpt'}"
    code, out = inspected(path, capsys=capsys)
    assert (code, "copy.ckpt is " in out, way_out in out, "Traceback" in out) == (1, True, True, False)
    assert refused("fit", "--config", str(trained / "given.yaml"), "--ckpt_path", str(path)) == 1
    error = capsys.readouterr().err
    assert f"{path} is {'cut off' if left else 'empty'}: its writing was" in error
    assert way_out in error
    assert "Traceback" not in error
    code, out = inspected(tmp_path, capsys=capsys)
    assert code == 0
    lines = out.splitlines()[:3]
    assert lines[0].endswith("2 checkpoints, newest first")
    # The report is of the one that can be read.
    assert f"older.ckpt was taken: it has the most steps, 8, of the 2 checkpoints in {tmp_path} (1 of which cannot" in out
    assert "CANNOT BE READ" in next(line for line in lines if "copy.ckpt" in line)
    assert "step 8" in next(line for line in lines if "older.ckpt" in line)


def test_the_last_checkpoint_is_cut_off(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lightning looks for it itself, after the command line was read."""
    config = yaml.safe_load((trained / "given.yaml").read_text())
    save = config["trainer"]["callbacks"][0]["init_args"]
    save |= {"dirpath": str(tmp_path), "save_last": True}
    path = copied(trained, tmp_path).rename(tmp_path / "last.ckpt")
    os.truncate(path, path.stat().st_size // 2)
    assert refused("fit", "--config", written(config, tmp_path / "a.yaml"), "--ckpt_path", "last") == 1
    error = capsys.readouterr().err
    assert f"{path} is cut off" in error
    assert "there is no other in this folder that can be read" in error


def test_a_changed_byte_is_found_by_its_checksum(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied(trained, tmp_path)
    content = bytearray(path.read_bytes())
    weights = torch.load(path, weights_only=True)["state_dict"]
    at = content.find(next(iter(weights.values())).numpy().tobytes()[:64])
    assert at > 0
    content[at] ^= 1
    path.write_bytes(content)
    assert inspected(path, capsys=capsys)[0] == 0
    code, out = inspected(path, "--verify", capsys=capsys)
    assert (code, "its checksum differs" in out) == (1, True)


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["ATTACKED"],)


def test_a_strangers_file_runs_no_code(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTACKED", str(tmp_path / "attacked"))
    path = tmp_path / "stranger.ckpt"
    torch.save({"state_dict": {}, "lr_schedulers": [], "x": Attack()}, path)
    code, out = inspected(path, capsys=capsys)
    assert (code, "mkdir, and reading those could run code" in out, "Traceback" in out) == (1, True, False)
    assert refused("fit", "--config", str(trained / "given.yaml"), "--ckpt_path", str(path)) == 1
    assert "mkdir, and reading those could run code" in capsys.readouterr().err
    assert not (tmp_path / "attacked").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "attacked").exists(), "the file is an attack"


def test_files_that_are_no_checkpoint_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.ckpt").write_text("hello")
    torch.save([1, 2], tmp_path / "list.ckpt")
    (tmp_path / "empty").mkdir()
    for name, text in (
        ("text.ckpt", "no checkpoint that torch.save wrote"),
        ("list.ckpt", "holds a list"),
        ("empty", "holds no checkpoint"),
        ("nowhere.ckpt", "name one, or the folder that a run saved to"),
    ):
        code, out = inspected(tmp_path / name, capsys=capsys)
        assert (code, text in out, "Traceback" in out) == (1, True, False), out
    torch.save({"state_dict": {}, "lr_schedulers": [], "global_step": 7, "\x1b[31mred": 1}, tmp_path / "other.ckpt")
    code, out = inspected(tmp_path / "other.ckpt", capsys=capsys)
    assert (code, "data       none" in out, "step 7" in out, "\x1b" in out) == (0, True, True, False)
    torch.save({"state_dict": {}}, tmp_path / "weights.ckpt")
    assert "weights only" in inspected(tmp_path / "weights.ckpt", capsys=capsys)[1]


class OwnDataModule(EnergonPackDataModule):
    pass


def numbers_module(numbers: Path, cls: type[EnergonPackDataModule], workers: int) -> EnergonPackDataModule:
    return cls(
        numbers,
        encoder=NumberEncoder(),
        packing=PackingPolicy(capacity=64, buffer_size=16, multiple=4),
        num_workers=workers,
        shuffle_buffer_size=8,
        max_samples_per_sequence=10,
    )


def test_ranks_and_the_state_of_a_subclass(
    numbers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(numbers, 2, 2, monkeypatch)
    ranks.train(24)
    path = tmp_path / "own.ckpt"
    torch.save({"global_step": 12, "epoch": 0, "lr_schedulers": [], "OwnDataModule": ranks.end()}, path)
    monkeypatch.undo()
    code, out = inspected(path, capsys=capsys)
    assert (code, "state of OwnDataModule" in out, "24 rows" in out) == (0, True, True)
    position = Contents.read(path).data.position  # type: ignore[union-attr]
    assert position is not None
    assert [(place.rank, place.worker) for place in position.places] == [(0, 0), (0, 2), (1, 1), (1, 3)]
    checkpoint = read_checkpoint(path)

    def problem(cls: type[EnergonPackDataModule], workers: int, ranks: int) -> str | None:
        return verdict_of(checkpoint, path, numbers_module(numbers, cls, workers), ranks=ranks).problem

    assert problem(OwnDataModule, 2, 2) is None
    assert problem(OwnDataModule, 1, 4) is None
    assert "legal: 1 rank x 4 workers, 2 ranks x 2 workers, 4 ranks x 1 worker or 0" in str(problem(OwnDataModule, 2, 1))
    other = str(problem(EnergonPackDataModule, 2, 2))
    assert "holds no position in the data for EnergonPackDataModule" in other
    assert "It holds one for 'OwnDataModule'" in other


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({"devices": 2, "num_nodes": 3}, 6),
        ({"devices": "2"}, 2),
        ({"devices": [0, 1, 5]}, 3),
        ({"devices": "0,3"}, 2),
        ({"devices": "auto", "accelerator": "cpu"}, 1),
        ({"devices": "auto", "accelerator": "gpu"}, None),
        ({"devices": -1}, None),
        ({}, None),
    ],
)
def test_ranks_by_the_trainers_settings(numbers: Path, settings: dict[str, Any], ranks: int | None) -> None:
    found = ranks_of(settings, numbers_module(numbers, EnergonPackDataModule, 0))
    assert (None if found is None else found[0]) == ranks


class Sharded(Recorder):
    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def train_sharded(argument: dict[str, Any]) -> None:
    pl.seed_everything(0)
    options = Options(**argument, trainer={"max_steps": 3, "strategy": ModelParallelStrategy(), "devices": 1})
    trainer(options).fit(Sharded(), datamodule(options))


def test_a_sharded_checkpoint(numbers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"data": str(numbers), "checkpoints": str(tmp_path / "c"), "every_n_steps": 2}
    on_ranks("tests.test_inspect:train_sharded", options, folder=tmp_path / "ranks", ranks=1)
    path = tmp_path / "c" / "step=2.ckpt"
    assert (path / "meta.pt").is_file()
    code, out = inspected(path, capsys=capsys)
    assert code == 0
    for text in (", sharded", "step 2", "2 rows"):
        assert text in out
    assert verdict_of(read_checkpoint(path), path, numbers_module(numbers, EnergonPackDataModule, 0), ranks=1).resumes
    (path / "meta.pt").unlink()
    with pytest.raises(UnreadableCheckpointError, match=r"sharded checkpoint without its meta\.pt, so its writing was cut off"):
        read_checkpoint(path)
