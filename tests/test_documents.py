"""The pages: every block of code runs, or is checked as far as it can be, and so is the code in the sentences.

New pages and new blocks are found by themselves. Blocks of Python run one after the other in the namespace of their page, in a
folder that has what :func:`workshop` puts there; those that need several devices, or are an excerpt (with a line ``...`` or a
``self`` of their own), have every call of ours compared with its signature. Blocks of YAML are parts of a configuration of
``fit``. Command lines are parsed by the command, and run where that takes no training and no download.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_pack import EnergonPackDataModule, PackedAttention, PackedCausalLM, SourceOutput, unpack
from lightning_pack.cli import _COMMANDS, _LIGHTNING, main
from lightning_pack.encoders import MediaRecord, read_record
from lightning_pack.encoders.image_parts import read_image_chat
from lightning_pack.prepare import train_tokenizer
from tests.code_checks import faults
from tests.command_parsers import options_of, refusal
from tests.documents import FOLDERS, ROOT, Block, anchors, code_in, commands, pages, program_arguments, read
from tests.padded_batches import pad
from tests.tiny_models import make_sources, tiny_model

PAGES = pages()
BLOCKS = [block for page in PAGES for block in read(page)[0]]
SHELL = ("bash", "sh", "shell", "console")
#: What each language is checked by; another one fails until it has a check.
KNOWN = {"python", "yaml", "json", "jsonl", "text", "", *SHELL}
#: Commands that run here: no training, nothing downloaded, a second each.
CHEAP = ("prepare", "plan", "prepack", "convert", "check-model")
#: Pages whose blocks are all parts of more: several devices, a class. Their calls are checked, and other tests run them.
EXCERPTS_ONLY = ("lightning_pack/attention/README.md", "lightning_pack/callbacks/README.md")
#: Those that write a folder, their second argument.
WRITERS = ("prepare", "prepack", "convert")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed"),
    # torchdata 0.11 with torch 2.13.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    # Lightning 2.6 calls jsonargparse in a way that its newest release calls deprecated.
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def by_page(*languages: str) -> list[Any]:
    found: dict[Path, list[Block]] = {}
    for block in of(*languages):
        found.setdefault(block.page, []).append(block)
    return [pytest.param(blocks, id=str(page.relative_to(ROOT))) for page, blocks in found.items()]


def named(pages_: list[Path]) -> list[Any]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages_]


def test_every_block_has_a_check() -> None:
    assert {"README.md", "MIGRATING.md"} <= {page.name for page in PAGES}
    assert {"python", "yaml", "bash"} <= {block.language for block in BLOCKS}
    unknown = [f"{block}: {block.language}" for block in BLOCKS if block.language not in KNOWN]
    assert not unknown, f"teach this test what a block of this language is checked by: {unknown}"


# --- a place to run them in --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that pages speak of: chats, a tokenizer, a model, a dataset, rows of other systems."""
    folder = tmp_path_factory.mktemp("workshop")
    texts = [f"What is {n} and {n}? It is {2 * n}, " + "and so on, " * (n % 7) for n in range(60)]
    tokenizer = train_tokenizer(texts, vocab_size=300)
    for name in ("tokenizer", "model"):
        tokenizer.save_pretrained(folder / "path/to" / name)
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder / "path/to/model")
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in texts]
    system = {"role": "system", "content": "Be brief."}
    lines = {
        "chats.jsonl": [{"messages": chat} for chat in chats],
        "packed_chats.jsonl": [{"messages": [system, *chats[n], system, *chats[n + 1]]} for n in range(0, 60, 2)],
    }
    for name, records in lines.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    with inside(folder), redirect_stdout(StringIO()):
        main(["prepare", "chats.jsonl", "data/mine", "--tokenizer", "path/to/tokenizer", "--no-progress"])
        main(["plan", "data/mine", "--capacity", "256", "--sources", "64", "--out", "plan"])
        main(["prepack", "data/mine", "rows", "--capacity", "256"])
        main(["convert", "rows", "theirs", "--to", "megatron-bridge"])
        for split, name in (("train", "packed"), ("val", "packed_val")):
            (written,) = Path("theirs").glob(f"*{split}*.parquet")
            shutil.copy(written, f"{name}.idx.parquet")
        shutil.copytree("data/mine", "data/stdlib")
        shutil.rmtree("rows")
        shutil.rmtree("theirs")
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


class inside:  # noqa: N801 - a context manager that reads as one
    """Work in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        self.before = Path.cwd()
        os.chdir(self.folder)

    def __exit__(self, *error: object) -> None:
        os.chdir(self.before)


@pytest.fixture
def place(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the workshop, which is the working folder; a Trainer of a page is quiet and on the CPU."""
    folder = Path(shutil.copytree(workshop, tmp_path / "here", symlinks=True))
    monkeypatch.chdir(folder)
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for name, value in settings.items():
        monkeypatch.setenv(f"PL_TRAINER_{name.upper()}", str(value))
    return folder


# --- Python ------------------------------------------------------------------------------------------------------------------


def is_excerpt(block: Block) -> bool:
    """Whether a block cannot run by itself: a part of a class, or it asks for devices that are not here."""
    tree = ast.parse(block.text)
    several = re.search(r"devices=([2-9]|\d\d)|strategy=", block.text) is not None
    owner = any(
        isinstance(node, ast.Name) and node.id == "self"
        for statement in tree.body
        if not isinstance(statement, (ast.ClassDef, ast.FunctionDef))
        for node in ast.walk(statement)
    )
    return several or owner or any(line.strip() == "..." for line in block.text.splitlines())


@pytest.mark.parametrize("blocks", by_page("python"))
def test_python_runs(blocks: list[Block], place: Path) -> None:
    sources = make_sources((7, 3, 12, 5))
    names: dict[str, Any] = {
        "model": tiny_model("llama", vocab_size=300),
        "loader": StatefulDataLoader(sources, batch_size=2, collate_fn=pad),
        "prompts": [{name: value for name, value in pad(sources).items() if name != "labels"}],
        "my_module": Plain(),
    }
    run = 0
    for block in blocks:
        if is_excerpt(block):
            continue
        # As it stands, but for the number of steps.
        text = re.sub(r"max_steps=\d+", "max_steps=2", block.text)
        supply(text)
        exec(compile("\n" * (block.line - 1) + text, str(block.page), "exec"), names)
        run += 1
    assert run or str(blocks[0].page.relative_to(ROOT)) in EXCERPTS_ONLY, "no block of this page runs"


def supply(text: str) -> None:
    """Datasets and checkpoints that a block names, of the workshop's data and model."""
    for name in re.findall(r"\"(data/[^\"]+)\"", text):
        if not Path(name).exists():
            shutil.copytree("data/mine", name)
    for name in re.findall(r"\"([^\"]+\.ckpt)\"", text):
        if not Path(name).exists():
            trainer = Trainer(max_steps=1, limit_val_batches=0, callbacks=[PackedAttention()])
            trainer.fit(PackedCausalLM("path/to/model"), EnergonPackDataModule("data/mine", num_workers=0))
            trainer.save_checkpoint(name)


class Plain(LightningModule):
    """A module of a page's reader."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model("llama", vocab_size=300)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, batch_size=1)

    def predict_step(self, batch: Any, batch_idx: int) -> list[SourceOutput]:
        return unpack(self.model(**batch), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_calls_of_python_blocks_fit(block: Block) -> None:
    assert not list(faults(ast.parse(block.text), whole=True))


# --- configurations and data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml_is_a_part_of_a_configuration(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)
    file = tmp_path / "part.yaml"
    file.write_text(block.text)
    # What the block does not say comes from a configuration that is whole.
    args = ["fit", "--config", str(ROOT / "configs/quickstart.yaml"), "--config", str(file)]
    assert not refusal(args, monkeypatch, capsys)


@pytest.mark.parametrize("block", of("json", "jsonl"), ids=str)
def test_json_samples_are_read(block: Block) -> None:
    try:
        records = [json.loads(block.text)]
    except ValueError:
        records = [json.loads(line) for line in block.text.splitlines() if line.strip()]
    assert records
    for record in records:
        if not {"messages", "prompt", "text"} & set(record):
            continue
        images = re.findall(r'"image": "([^"]+)"', json.dumps(record))
        assert read_image_chat(MediaRecord(record, files=dict.fromkeys(images, picture()))) if images else read_record(record)


def picture() -> bytes:
    image = pytest.importorskip("PIL.Image")
    made = BytesIO()
    image.new("RGB", (64, 64)).save(made, "JPEG")
    return made.getvalue()


# --- command lines -----------------------------------------------------------------------------------------------------------


def lines_of(block: Block) -> list[list[str]]:
    """The command lines of a block; in a block of output, those after a ``$``."""
    if block.language in SHELL:
        return commands(block.text)
    return [words for line in block.text.splitlines() if line.startswith("$ ") for words in commands(line)]


@pytest.mark.parametrize("blocks", by_page("text", "", *SHELL))
def test_commands_are_understood(
    blocks: list[Block], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for block in blocks:
        lines = lines_of(block)
        assert lines or block.language not in SHELL, f"{block}: no command"
        for words in lines:
            args = program_arguments(words)
            if args is not None:
                said = refusal(args, monkeypatch, capsys)
                assert not said, f"{block}: {' '.join(words)}\n{said}"
                continue
            program = [word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)]
            assert Path(program[0]).name in ("python", "python3", "pip", "source", "git", "cd", "pytest", "check", "jupyter"), (
                f"{block}: {words}"
            )


@pytest.mark.parametrize("blocks", by_page(*SHELL))
def test_cheap_commands_run(blocks: list[Block], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks:
        for words in lines_of(block):
            args = program_arguments(words)
            if args is None or args[0] not in CHEAP or {"stdlib", "skimage", "--vision"} & set(args):
                continue
            if args[0] in WRITERS and not args[2].startswith("-"):
                shutil.rmtree(args[2], ignore_errors=True)
            if args[0] == "prepare":
                args = [*args, "--no-progress"]
            if args[0] == "plan" and "--sources" not in args:
                args = [*args, "--sources", "300"]
            main(args)
            assert capsys.readouterr().out.strip(), f"{block}: {' '.join(words)} says nothing"


def comments() -> Iterator[tuple[str, str]]:
    for config in sorted((ROOT / "configs").glob("*.yaml")):
        text = re.sub(r"\\\n# *", " ", config.read_text())
        for line in re.findall(r"^# +(lightning-pack .*)", text, flags=re.M):
            yield config.name, line


@pytest.mark.slow
def test_commands_in_the_comments_of_configurations(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [(name, args) for name, line in comments() if (args := program_arguments(commands(line)[0])) is not None]
    assert len(found) > 3
    for name, args in found:
        assert not refusal(args, monkeypatch, capsys), f"{name}: {args}"


# --- the code in sentences ---------------------------------------------------------------------------------------------------


def extras() -> set[str]:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return set(re.findall(r"^(\w+) = \[", section, flags=re.M))


@pytest.mark.parametrize("page", named([*PAGES, *sorted((ROOT / "configs").glob("*.yaml"))]))
def test_extras_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    assert {"lora", "vision", "test"} <= extras()
    asked = {each for group in re.findall(r"(?:\.|lightning-pack)\[([\w,]+)\]", text) for each in group.split(",")}
    assert asked <= extras()
    for module in re.findall(r"python3? -m ([\w.]+)", text):
        assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize("page", named(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read(page)[1]):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page if not name else page.parent / name
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text()), target


def is_path(code: str, page: Path) -> bool | None:
    """Whether a file or folder of this project that is named exists; None for other names."""
    if not re.fullmatch(r"[\w./*-]+(\.(py|md|yaml|toml|txt|ipynb)|/)", code) or "*" in code:
        return None
    first, deep, _ = code.partition("/")
    own = [path.name for path in (ROOT / "lightning_pack").iterdir()]
    if (not deep and not code.endswith(".py")) or (deep and first not in {*FOLDERS, ".ci", *own}):
        return None
    bases = (ROOT, page.parent, ROOT / "lightning_pack", ROOT / "tests")
    return any((base / code).exists() for base in bases) or (not deep and any(ROOT.glob(f"lightning_pack/**/{code}")))


@pytest.mark.parametrize("page", named(PAGES))
def test_named_files_and_tests_exist(page: Path) -> None:
    said = code_in(read(page)[1])
    missing = [code for code in said if is_path(code.partition("::")[0], page) is False]
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    missing += [code for code in said if re.fullmatch(r"test(_[a-z0-9]+){3,}", code) and f"def {code}(" not in tests]
    assert not missing


@pytest.mark.parametrize("page", named(PAGES))
def test_code_in_sentences_is_right(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[str] = []
    for code in code_in(read(page)[1]):
        if code.startswith("lightning-pack "):
            args = code.split()[1:]
            if args[0] not in _COMMANDS:
                wrong += [f"{code}: no such command"] if args[0] != "COMMAND" else []
            elif args[0] not in _LIGHTNING:
                unknown = {arg.partition("=")[0] for arg in args if arg.startswith("--")} - options_of(args, monkeypatch)
                wrong += [f"{code}: no option {option}" for option in unknown]
            continue
        try:
            tree = ast.parse(code, mode="eval")
        except SyntaxError:
            continue
        wrong += [f"{code}: {fault}" for fault in faults(tree, whole=False)]
    assert not wrong


def test_the_checks_find_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = ast.parse(
        "PackingPolicy(capacity=8); PackedBatch.input_ids; lightning_pack.attention.THDInputs; policy.anything(1)"
    )
    assert not list(faults(right, whole=True))
    wrong = "PackingPolicy(8, size=1); PackingPolicy(); ParallelLayout(context=2).multiples; lightning_pack.attention.THD"
    assert list(faults(ast.parse(wrong), whole=True)) == [
        "PackingPolicy takes no size",
        "PackingPolicy: missing a required argument: 'capacity'",
        "ParallelLayout has no multiples",
        "no lightning_pack.attention.THD",
    ]
    monkeypatch.chdir(ROOT)
    for line, said in {
        "lightning-pack pack data": "no command",
        "lightning-pack plan data --capacity 8 --sort": "unrecognized arguments: --sort",
        "lightning-pack prepare chats.jsonl": "required: out",
        "lightning-pack fit --config configs/quickstart.yaml --data.packing.size 8": "size",
        "lightning-pack fit --config configs/quickstart.yaml --data.packing.capacity 0": "capacity",
    }.items():
        (words,) = commands(line)
        assert said in refusal(program_arguments(words) or [], monkeypatch, capsys), line
    page = ROOT / "README.md"
    assert [is_path(name, page) for name in ("lightning_pack/row.py", "row.py", "binning/")] == [True] * 3
    assert [is_path(name, page) for name in ("lightning_pack/rows.py", "rows.py", "tests/test_none.py")] == [False] * 3
    assert [is_path(name, page) for name in ("data/rows", "plan.yaml", "runs/quickstart/last.ckpt")] == [None] * 3
    assert commands("A=1 x --a \\\n  b && .venv/bin/lightning-pack fit  # why") == [
        ["A=1", "x", "--a", "b"],
        [".venv/bin/lightning-pack", "fit"],
    ]
