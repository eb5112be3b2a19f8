"""The command line as people use it; the fast parts in this process, whole runs in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_pack import cli
from lightning_pack.prepare import PreparedDataset, prepare_stdlib

ROOT = Path(__file__).parents[1]
MODEL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return prepare_stdlib(tmp_path_factory.mktemp("cli") / "stdlib", vocab_size=300, shards=2, progress=False)


@pytest.fixture
def config(tmp_path: Path, stdlib: PreparedDataset) -> dict[str, Any]:
    return {
        "model": {"model": MODEL, "learning_rate": 0.01},
        "data": {"path": str(stdlib.path), "num_workers": 0, "packing": {"capacity": 512, "buffer_size": 32}},
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 4,
            "max_epochs": 1,
            "limit_val_batches": 2,
            "val_check_interval": 2,
            "check_val_every_n_epoch": None,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(tmp_path),
            "logger": False,
        },
    }


def written(config: dict[str, Any], path: Path) -> str:
    path.write_text(yaml.safe_dump(config))
    return str(path)


def run(*args: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    full = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "120", **environment}
    command = [sys.executable, "-m", "lightning_pack", *args]
    return subprocess.run(command, cwd=cwd, env=full, capture_output=True, text=True, timeout=200, check=False)


def refused(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(args))
    return int(stop.value.code or 0)


def test_help_lists_every_command_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused("--help") == 0
    out = capsys.readouterr().out
    for command in ("fit", "validate", "test", "prepare", "plan", "check-model", "inspect", "bench"):
        (line,) = (line for line in out.splitlines() if line.split()[:1] == [command])
        assert len(line.split()) > 3
    assert refused() == 2
    assert "usage: lightning-pack" in capsys.readouterr().err


def test_an_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused("train") == 2
    error = capsys.readouterr().err
    known = "fit, validate, test, prepare, prepack, convert, plan, check-model, inspect, bench"
    assert f"'train' is no command; the commands are {known}" in error


def test_prepare_passes_options_on_and_prints_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    cli.main(["prepare", "stdlib", str(out), "--vocab-size", "300", "--shards", "2", "--val-fraction", "0.2", "--no-progress"])
    printed = capsys.readouterr().out
    assert "prepared:" in printed
    described = json.loads((out / "lightning_pack.json").read_text())
    options = described["options"]
    assert (options["vocab_size"], options["shards"], options["val_fraction"]) == (300, 2, 0.2)
    # The same again changes nothing, another option is refused, and --overwrite does it.
    cli.main(["prepare", "stdlib", str(out), "--vocab-size", "300", "--shards", "2", "--val-fraction", "0.2", "--no-progress"])
    assert "already prepared" in capsys.readouterr().out
    assert refused("prepare", "stdlib", str(out), "--vocab-size", "310", "--no-progress") == 1
    error = capsys.readouterr().err
    assert "vocab_size" in error
    assert "Traceback" not in error


def test_prepare_a_file_with_bad_lines(tmp_path: Path, stdlib: PreparedDataset, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"prompt": f"say {i}", "completion": str(i)}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:7], "{not json", *lines[7:]]))
    args = ["prepare", str(tmp_path / "a.jsonl"), str(tmp_path / "out"), "--tokenizer", str(stdlib.tokenizer), "--no-progress"]
    assert refused(*args) == 1
    error = capsys.readouterr().err
    assert "8" in error
    assert "--on-bad-line skip" in error
    assert not (tmp_path / "out").exists()
    cli.main([*args, "--on-bad-line", "skip"])
    assert "skipped 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["stdlib", "out", "--tokenizer", "t"],
            "--tokenizer is not used here: it goes with a file, and the source is 'stdlib'",
        ),
        (["stdlib", "out", "--on-bad-line", "skip"], "--on-bad-line is not used here"),
        (["a.jsonl", "out", "--tokenizer", "t", "--vocab-size", "9"], "--vocab-size is not used here: it goes with 'stdlib'"),
        (["a.jsonl", "out"], "--tokenizer DIR is needed with a file"),
        (["stdlib", "out", "--shards", "many"], "--shards: invalid int value: 'many'"),
        (["stdlib", "out", "--shard", "2"], "unrecognized arguments: --shard"),
    ],
)
def test_prepare_refuses_what_it_does_not_use(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused("prepare", *args) == 2
    assert message in capsys.readouterr().err


def test_fit_resume_and_validate(tmp_path: Path, config: dict[str, Any]) -> None:
    save = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}
    save["init_args"] = {"dirpath": str(tmp_path / "c"), "filename": "{step}", "every_n_train_steps": 2, "save_top_k": -1}  # type: ignore[assignment]
    config["trainer"]["callbacks"] = [save]
    path = written(config, tmp_path / "a.yaml")
    whole = run("fit", "--config", path, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert "Packing" in whole.stdout
    assert "validation" in whole.stdout
    for chatter in ("GPU available", "TPU available", "litlogger", "LeafSpec", "not resumable", "many workers"):
        assert chatter not in whole.stdout + whole.stderr
    two, four = tmp_path / "c" / "step=2.ckpt", tmp_path / "c" / "step=4.ckpt"
    done = torch.load(four, weights_only=True)
    assert done["global_step"] == 4
    four.unlink()
    resumed = run("fit", "--config", path, "--ckpt_path", str(two), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "not resumable" not in resumed.stderr
    again = torch.load(four, weights_only=True)
    for name, weight in done["state_dict"].items():
        assert torch.equal(weight, again["state_dict"][name]), name
    for state in (done, again):
        # How long steps took.
        del state["callbacks"]["PackingMonitor"]["history"]["times"]
    assert done["callbacks"]["PackingMonitor"] == again["callbacks"]["PackingMonitor"]
    assert done["callbacks"]["PackingMonitor"]["total"]["packs"] == 4

    validated = run("validate", "--config", path, "--ckpt_path", str(four), cwd=tmp_path)
    assert validated.returncode == 0, validated.stderr
    assert "val_loss" in validated.stdout

    # Another model setting than the checkpoint's would be lost silently otherwise.
    other = run("fit", "--config", path, "--ckpt_path", str(two), "--model.learning_rate", "0.5", cwd=tmp_path)
    assert other.returncode == 1
    assert "model.learning_rate: 0.01 in the checkpoint, 0.5 now" in other.stderr
    assert "Traceback" not in other.stderr


def test_two_ranks_started_by_the_command(tmp_path: Path, config: dict[str, Any]) -> None:
    config["trainer"] |= {"devices": 2, "strategy": "ddp", "max_steps": 2}
    config["attention"] = {"monitor": True}
    result = run("fit", "--config", written(config, tmp_path / "a.yaml"), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Starting with 2 processes" in result.stderr
    (row,) = [line for line in result.stdout.splitlines() if " packs " in line]  # once, and of both ranks
    assert row.split("│")[2].strip() == "4"


def test_the_forced_callback_is_configurable(tmp_path: Path, config: dict[str, Any]) -> None:
    config["trainer"]["max_steps"] = 1
    config["attention"] = {"monitor": False}
    result = run("fit", "--config", written(config, tmp_path / "a.yaml"), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Packing" not in result.stdout


def test_configuration_errors_name_the_key(tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    path = written(config, tmp_path / "a.yaml")
    for extra, named in (
        (["--data.packing.capactiy", "5"], "data.packing.capactiy"),
        (["--data.num_workers", "many"], "data.num_workers"),
        (["--data.packing.overlength", "shorten"], "overlength"),
        (["--attention.moniter", "true"], "attention.moniter"),
    ):
        assert refused("fit", "--config", path, *extra) == 2
        error = capsys.readouterr().err
        assert named in error
        assert "Traceback" not in error
    assert refused("fit", "--data.path", "x") == 2
    assert "model.model" in capsys.readouterr().err
    (tmp_path / "empty.yaml").write_text("")
    assert refused("fit", "--config", str(tmp_path / "empty.yaml")) == 2
    assert "A configuration file holds settings by their names" in capsys.readouterr().err


def test_an_option_changes_one_value_inside_a_part_of_the_model(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [2, 1, 1]}
    parts = {"text_config": {"hidden_size": 32, "rope_parameters": rope}, "vision_config": {"depth": 2, "hidden_act": "silu"}}
    config["model"]["model"] = {"model_type": "qwen3_vl", "image_token_id": 5, **parts}
    path = written(config, tmp_path / "a.yaml")
    given = ["--model.model.vision_config.depth", "3", "--model.model.text_config.rope_parameters.rope_theta=3e4"]
    more = ["--model.model.vision_config.fullatt", "[1, 2]", "--model.model.image_token_id", "6", "--model.model.more.a.b", "x"]
    assert refused("fit", "--config", path, *given, *more, "--print_config") == 0
    printed = yaml.safe_load(capsys.readouterr().out)["model"]["model"]
    assert printed == {
        "model_type": "qwen3_vl",
        "image_token_id": 6,
        "text_config": {"hidden_size": 32, "rope_parameters": {**rope, "rope_theta": 30000.0}},
        "vision_config": {"depth": 3, "hidden_act": "silu", "fullatt": [1, 2]},
        "more": {"a": {"b": "x"}},
    }
    # And what goes wrong in what follows is said as ever.
    assert refused("fit", "--config", path, *given, "--data.num_workers", "many") == 2
    assert "data.num_workers" in capsys.readouterr().err


def test_errors_are_one_message_and_the_traceback_is_there_on_request(tmp_path: Path, config: dict[str, Any]) -> None:
    config["data"]["path"] = str(tmp_path / "nowhere")
    path = written(config, tmp_path / "a.yaml")
    plain = run("fit", "--config", path, cwd=tmp_path)
    assert plain.returncode == 1
    assert "nowhere" in plain.stderr
    assert "lightning-pack: error: " in plain.stderr
    assert "Traceback" not in plain.stderr
    shown = run("fit", "--config", path, "--traceback", cwd=tmp_path)
    assert shown.returncode == 1
    assert "Traceback (most recent call last)" in shown.stderr


def test_an_error_in_a_loader_worker_is_one_message_too(tmp_path: Path, config: dict[str, Any]) -> None:
    config["data"] |= {"num_workers": 1, "packing": {"capacity": 16, "overlength": "error"}}
    result = run("fit", "--config", written(config, tmp_path / "a.yaml"), cwd=tmp_path)
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if "lightning-pack: error:" in line]
    assert "tokens, more than capacity=16: raise the capacity" in line
    assert "Original Traceback" not in result.stderr


def test_a_file_that_is_no_checkpoint(tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "no.ckpt").write_text("hello")
    path = written(config, tmp_path / "a.yaml")
    assert refused("fit", "--config", path, "--ckpt_path", str(tmp_path / "no.ckpt")) == 1
    assert "no.ckpt is no checkpoint that torch.save wrote" in capsys.readouterr().err


def test_bench_compares_in_one_run(tmp_path: Path, config: dict[str, Any]) -> None:
    path = written(config, tmp_path / "a.yaml")
    result = run("bench", "-c", path, "--rows", "2", "--turns", "1", "--sources", "200", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    ratios = {words[0]: float(words[1].removesuffix("x")) for words in lines[1:]}
    assert list(ratios) == ["training/fixed-rows", "training/fitted-rows", "lightning", "loader"]
    assert all(ratio > 0 for ratio in ratios.values())
    assert refused("bench", "-c", path, "--rows", "0") == 2


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_cleanly(tmp_path: Path, config: dict[str, Any], sent: signal.Signals, code: int) -> None:
    config["trainer"] |= {"max_steps": 100_000, "val_check_interval": 100_000}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    save = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"}
    save["init_args"] = {"dirpath": str(tmp_path / "c"), "every_n_train_steps": 1}  # type: ignore[assignment]
    config["trainer"]["callbacks"] = [save]
    command = [sys.executable, "-m", "lightning_pack", "fit", "--config", written(config, tmp_path / "a.yaml")]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 100
        while not list((tmp_path / "c").glob("*.ckpt")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert list((tmp_path / "c").glob("*.ckpt")), "training never began"
        process.send_signal(sent)
        _, error = process.communicate(timeout=150)
    assert process.returncode == code
    assert "Traceback" not in error


def test_quickstart_names_only_what_exists(tmp_path: Path, stdlib: PreparedDataset) -> None:
    path = ROOT / "configs" / "quickstart.yaml"
    # Its own model and packing, for two steps on data that is there.
    options = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "1", "--trainer.val_check_interval", "2"]
    options += ["--model.warmup_steps", "1", "--data.path", str(stdlib.path), "--data.num_workers", "0"]
    result = run("fit", "--config", str(path), *options, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Packing" in result.stdout
    metrics = (tmp_path / "runs" / "quickstart" / "logs" / "version_0" / "metrics.csv").read_text()
    assert "packing/val_fill" in metrics
