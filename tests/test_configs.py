"""Every configuration: the commands of its first lines run, on less data; what it prints parses; what is missing is named."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.strategies import DDPStrategy

from lightning_pack import cli
from lightning_pack.callbacks import PackedAttention
from lightning_pack.lightning_cli import PackCLI, _cli
from tests.config_files import CONFIGS, EVERY_STEP, NARROW, SMALL, commands, furnish, furnish_rows, options, run_on_this_rank
from tests.ranks import on_ranks

#: Files that another test trains with.
ELSEWHERE = {
    "quickstart.yaml": "test_cli:test_quickstart_names_only_what_exists",
    "lora.yaml": "test_lora:test_the_example_learns_and_goes_on_from_adapters_alone",
    "vision_quickstart.yaml": "test_vision_training:test_the_example_learns_and_goes_on",
}
#: Files that are trained with here, and what makes that a matter of seconds.
ALONE: dict[str, dict[str, Any]] = {
    "chat.yaml": NARROW,
    "pretraining.yaml": NARROW,
    "packed_rows.yaml": {"trainer.val_check_interval": 1},
    "vision.yaml": NARROW | {"data.packing.max_media_tokens": 64},
}
#: The same on two ranks. The kernels of TransformerEngine need GPUs, so others stand in; the file itself is built as it is.
ON_RANKS: dict[str, dict[str, Any]] = {
    "ddp.yaml": NARROW,
    "context_parallel.yaml": NARROW
    | {"trainer.devices": 2, "data.parallel.context": 2, "attention.backend": "segments", "attention.probe_memory": False},
}
NAMES = sorted(file.name for file in CONFIGS.glob("*.yaml"))
#: Files in which people put something of theirs.
TO_FILL_IN = sorted(name for name in NAMES if "path/to" in (CONFIGS / name).read_text())

# Lightning calls jsonargparse in a way that it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")


class Built(PackCLI):
    """Makes everything that ``fit`` would, and ends."""

    def _run_subcommand(self, subcommand: str) -> None: ...


def refused(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(args))
    return int(stop.value.code or 0)


def test_every_file_is_trained_with() -> None:
    assert sorted([*ELSEWHERE, *ALONE, *ON_RANKS]) == NAMES
    for name, test in ELSEWHERE.items():
        module, _, function = test.partition(":")
        assert f'"{name}"' in inspect.getsource(getattr(importlib.import_module(f"tests.{module}"), function))


@pytest.mark.parametrize("name", NAMES)
def test_what_it_prints_parses_to_the_same(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused("fit", "--config", str(CONFIGS / name), "--print_config") == 0
    printed = capsys.readouterr().out
    whole = yaml.safe_load(printed)
    assert {"model", "data", "trainer", "attention"} <= whole.keys()
    assert contains(whole, yaml.safe_load((CONFIGS / name).read_text()))
    (tmp_path / "printed.yaml").write_text(printed)
    assert refused("fit", "--config", str(tmp_path / "printed.yaml"), "--print_config") == 0
    assert yaml.safe_load(capsys.readouterr().out) == whole


def contains(whole: Any, part: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and contains(whole[key], part[key]) for key in part)
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part


@pytest.mark.parametrize("name", ALONE)
def test_it_trains_and_goes_on_as_its_first_lines_tell(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "packed_rows.yaml":
        furnish_rows(tmp_path)
    else:
        furnish(tmp_path, images=name == "vision.yaml")
    monkeypatch.chdir(tmp_path)
    *before, fit, again = commands(name)
    assert len(before) == 1
    cli.main([*before[0], "--no-progress"] if before[0][0] == "prepare" else before[0])
    assert (fit[0], again[: len(fit)], again[len(fit)]) == ("fit", fit, "--ckpt_path")
    small = options(SMALL, ALONE[name], EVERY_STEP)
    cli.main([*fit, *small, "--trainer.max_steps", "2"])
    runs = tmp_path / again[-1]
    assert runs.name == "last.ckpt"
    assert torch.load(runs, weights_only=True)["global_step"] == 2
    cli.main([*again, *small, "--trainer.max_steps", "4"])
    checkpoint = torch.load(runs, weights_only=True)
    assert checkpoint["global_step"] == 4
    rows = 4 * int(ALONE[name].get("trainer.accumulate_grad_batches", 1))
    assert checkpoint["callbacks"]["PackingMonitor"]["total"]["packs"] == rows
    assert "val_loss" in (tmp_path / "runs" / Path(name).stem / "logs" / "version_1" / "metrics.csv").read_text()
    printed = capsys.readouterr().out
    assert printed.count("train: no source was left out") == 2
    if name == "pretraining.yaml":
        # A document that is split.
        assert int(re.findall(r"longest ([\d,]+)", printed)[0].replace(",", "")) > ALONE[name]["data.packing.capacity"]
    if name == "vision.yaml":
        with tarfile.open(next((tmp_path / "data" / "images").glob("train*.tar"))) as shard:
            assert any(member.endswith(".png") for member in shard.getnames())
        assert checkpoint["hyper_parameters"]["lora"]["adapters_only"]


def kept(folder: Path) -> dict[str, int]:
    """Checkpoints that are files of their own, and their steps."""
    files = [file for file in folder.glob("*.ckpt") if not file.is_symlink()]
    return {file.name: torch.load(file, weights_only=True)["global_step"] for file in files}


def test_the_newest_and_the_best_checkpoint_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    prepare, fit, _ = commands("chat.yaml")
    cli.main([*prepare, "--no-progress"])
    # Every validation finds a better model.
    faster = {"model.learning_rate": 0.01, "model.schedule": "constant", "trainer.max_steps": 3}
    cli.main([*fit, *options(SMALL, NARROW, EVERY_STEP, faster)])
    folder = tmp_path / "runs" / "chat"
    assert kept(folder) == {"step=3.ckpt": 3, "best-step=3.ckpt": 3}
    assert (folder / "last.ckpt").resolve() == folder / "step=3.ckpt"
    best = torch.load(folder / "best-step=3.ckpt", weights_only=True)
    assert "optimizer_states" not in best
    assert "optimizer_states" in torch.load(folder / "last.ckpt", weights_only=True)
    text = (CONFIGS / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert "best-step=1000.ckpt" in text
    exec(compile(text.replace("step=1000", "step=3"), "README.md", "exec"), {})
    saved = torch.load(folder / "step=3.ckpt", weights_only=True)["state_dict"]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("chat-model")
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, saved[f"model.{key}"]), key
    assert len(AutoTokenizer.from_pretrained("chat-model")) == model.config.vocab_size


def test_those_for_several_devices_train_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    runs = []
    for name, changes in ON_RANKS.items():
        prepare, fit, again = commands(name)
        cli.main([*prepare, "--no-progress"])
        small = options(SMALL, changes, EVERY_STEP)
        runs += [[*fit, *small, "--trainer.max_steps", "2"], [*again, *small, "--trainer.max_steps", "3"]]
    argument = {"folder": str(tmp_path), "runs": runs}
    on_ranks(f"{run_on_this_rank.__module__}:{run_on_this_rank.__name__}", argument, folder=tmp_path / "ranks")
    packs = {}
    for name in ON_RANKS:
        checkpoint = torch.load(tmp_path / "runs" / Path(name).stem / "last.ckpt", weights_only=True)
        assert checkpoint["global_step"] == 3
        packs[name] = checkpoint["callbacks"]["PackingMonitor"]["total"]["packs"]
    # Three steps of two rows: of each rank, or of both together.
    assert packs == {"ddp.yaml": 12, "context_parallel.yaml": 6}


def test_context_parallelism_with_transformer_engine_is_built_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(CONFIGS / "context_parallel.yaml")
    built = _cli(Built, ["fit", "--config", path, "--trainer.accelerator", "cpu"])
    (attention,) = [callback for callback in built.trainer.callbacks if isinstance(callback, PackedAttention)]
    assert attention.backend == "te"
    assert isinstance(built.trainer.strategy, DDPStrategy)
    assert built.trainer.num_devices == built.datamodule.parallel.context == 4
    # Four ranks cut every source in eight.
    assert built.datamodule.packing.multiple == 8
    assert built.datamodule.packing.capacity % 8 == 0
    assert built.model.hparams["gradient_checkpointing"]


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for name in TO_FILL_IN:
        assert refused("fit", "--config", str(CONFIGS / name)) == 1
        assert "trainer.accelerator='gpu': torch finds no GPU on this machine" in (error := capsys.readouterr().err)
        assert "--trainer.accelerator cpu" in error


@pytest.mark.parametrize("name", TO_FILL_IN)
def test_what_has_to_be_given_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    alone = {"trainer.devices": 1, "trainer.strategy": "auto", "data.parallel.context": 1}
    fit = ["fit", "--config", str(CONFIGS / name), *options(SMALL, alone)]
    assert refused(*fit) == 1
    data = yaml.safe_load((CONFIGS / name).read_text())["data"]["path"]
    assert f"there is no dataset at '{data}'" in (error := capsys.readouterr().err)
    assert "make one with 'lightning-pack prepare FILE.jsonl OUT --tokenizer DIR'" in error
    prepare = next(words for words in commands(name) if words[0] == "prepare")
    (tmp_path / prepare[1]).write_text('{"text": "a"}')
    assert refused(*prepare) == 1
    # Of a vision-language model it says that of the image processor.
    assert re.search(r"(tokenizer|image processor) folder 'path/to/model' does not exist", capsys.readouterr().err)
    if name == "chat.yaml":
        furnish(tmp_path)
        cli.main([*prepare, "--no-progress"])
        (tmp_path / "path/to/model/config.json").unlink()
        assert refused(*fit) == 1
        assert "model='path/to/model' is not a local folder with a config.json" in capsys.readouterr().err


def test_settings_are_given_as_the_page_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").symlink_to(CONFIGS)
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "plan.yaml").write_text("data: {packing: {buffer_size: 64}}")
    monkeypatch.chdir(tmp_path)
    block = (CONFIGS / "README.md").read_text().partition("```bash\n")[2].partition("```")[0]
    *lines, last = [shlex.split(line)[1:] for line in block.splitlines()]
    assert last[-1] == "--print_config"
    wider, adapters, planned = (_cli(Built, [*line, "--trainer.accelerator", "cpu"]) for line in lines)
    assert (wider.datamodule.packing.capacity, wider.trainer.max_steps) == (8192, 300)
    assert adapters.model.hparams["lora"]["rank"] == 16
    assert adapters.model.hparams["learning_rate"] == 1e-4
    assert (planned.datamodule.packing.buffer_size, planned.datamodule.packing.overlength) == (64, "split")


def test_the_table_tells_of_every_file_what_the_file_tells() -> None:
    text = (CONFIGS / "README.md").read_text()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("| [`")]
    names = [re.sub(r"\[`(.*)`\]\(\1\)", r"\1", row[0]) for row in rows]
    assert sorted(names) == NAMES
    for name, row in zip(names, rows, strict=True):
        told = " ".join(next(words for words in commands(name) if words[0] == "fit"))
        assert row[-1] == f"`lightning-pack {told}`"
