"""What a first-time user is told: wrong paths, files of another kind, misspelt settings."""

import errno
import gzip
import json
import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from lightning_pack import EnergonPackDataModule, PackingPolicy, cli
from lightning_pack.encoders import RecordEncoder, load_tokenizer
from lightning_pack.energon.dataset import StreamOptions, has_split
from lightning_pack.energon.loader import ExactLoader
from lightning_pack.energon.metadataset import EXAMPLE
from lightning_pack.energon.reader import Workers
from lightning_pack.energon.worker import NoSampleError
from lightning_pack.lightning_cli import _different, _refuse_no_checkpoint
from lightning_pack.location import require_dataset, require_own_tokenizer
from lightning_pack.prepare import PreparedDataset, prepare_jsonl, prepare_stdlib
from lightning_pack.trainer_checks import refuse_to_train

RECORD = {"text": "a plain document"}


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return prepare_stdlib(tmp_path_factory.mktemp("messages") / "stdlib", vocab_size=300, shards=1, progress=False)


def refused(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(args))
    return int(stop.value.code or 0)


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (["fitt"], "'fitt' is no command (is fit meant?)"),
        (["fit", "--data.packing.capacty", "5"], "--data.packing.capacty: --data.packing.capacity may be meant"),
        # A shortened option is one that does not exist: it would mean another one once there are more.
        (["fit", "--trainer.max_step", "5"], "--trainer.max_step: --trainer.max_steps may be meant"),
        (["fit", "--config", "a.yaml"], "data.packing.capacty: data.packing.capacity may be meant"),
        (["fit"], "--config FILE"),
    ],
)
def test_what_was_probably_meant(
    args: list[str], meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("model: {model: m}\ndata: {path: p, packing: {capacity: 4, capacty: 5}}\n")
    needed = ["--model.model", "m", "--data.path", "p", "--data.packing.capacity", "4"] if len(args) > 2 else []
    assert refused(*args, *([] if "a.yaml" in args else needed)) == 2
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (gzip.compress(json.dumps(RECORD).encode(), mtime=0), r"a\.jsonl is compressed: unpack it first \(gunzip\)"),
        (json.dumps(RECORD).encode("utf-16"), r"is UTF-16 text: convert it first \(iconv"),
        (b"PAR1....", "is a Parquet file: write its records as JSON"),
        (b'{"text": "caf\xe9"}\n', r"line 1: not UTF-8(?s:.)*iconv -f LATIN1 -t UTF-8"),
        (json.dumps([RECORD, RECORD], indent=1).encode(), r"one object a line is needed: jq -c '\.\[\]'"),
        (b"", r"holds no records: 0 lines(?s:.)*Needed are lines such as \{\"text\""),
    ],
    ids=["gzip", "utf-16", "parquet", "latin-1", "array", "empty"],
)
def test_a_file_of_another_kind(content: bytes, told: str, tmp_path: Path, stdlib: PreparedDataset) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=told):
        prepare_jsonl(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=stdlib.tokenizer, progress=False)
    assert not (tmp_path / "out").exists()


def test_skipped_lines_that_are_all_there_is_show_what_a_line_is(tmp_path: Path, stdlib: PreparedDataset) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps([RECORD], indent=1))
    with pytest.raises(ValueError, match=r"5 lines, 5 of them bad\nIt looks like one JSON value over several lines"):
        prepare_jsonl(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=stdlib.tokenizer, on_bad_line="skip", progress=False)


def test_a_full_disk_leaves_no_folder_behind(tmp_path: Path, stdlib: PreparedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORD))
    write, full = Path.write_text, []

    def write_text(path: Path, text: str) -> int:
        if path.name != ".host":
            return write(path, text)
        full.append(path.parent)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(OSError, match="No space left"):
        prepare_jsonl(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=stdlib.tokenizer, progress=False)
    assert len(full) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_path_at_which_there_is_no_dataset(tmp_path: Path, stdlib: PreparedDataset) -> None:
    require_dataset(str(stdlib.path))
    with pytest.raises(ValueError, match=rf"holds no dataset \(no \.nv-meta\); in it are the datasets {stdlib.path}\."):
        require_dataset(str(stdlib.path.parent))
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORD))
    with pytest.raises(ValueError, match=r"has no index \(a\.jsonl\.idx\).*'energon prepare .*a\.jsonl' writes it"):
        require_dataset(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl.idx").write_bytes(b"")
    require_dataset(str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match=r"train-0000\.tar' is a file that is no dataset: give the folder"):
        require_dataset(f"{stdlib.path}/train-0000.tar")
    with pytest.raises(ValueError, match=r"a file that is no dataset"):
        EnergonPackDataModule(stdlib.path / "train-0000.tar").setup()


@pytest.mark.parametrize(
    ("ranks", "num_workers", "told"),
    [
        (1, 5, r"5 loader workers \(1 data-parallel rank, num_workers=5\), .*: set num_workers=3 or less, or give"),
        (
            2,
            3,
            r"6 loader workers \(2 data-parallel ranks, num_workers=3\), .*: set num_workers=1 or less, use fewer ranks, or",
        ),
        (4, 0, r"4 loader workers \(4 data-parallel ranks, num_workers=0\), .*: use 3 ranks at most, or give more data"),
    ],
)
def test_more_loader_workers_than_samples(
    ranks: int, num_workers: int, told: str, tmp_path: Path, stdlib: PreparedDataset
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORD) + "\n" + json.dumps(RECORD) + "\n" + json.dumps(RECORD) + "\n")
    path = prepare_jsonl(tmp_path / "a.jsonl", tmp_path / "a", tokenizer=stdlib.tokenizer, val_fraction=0, progress=False).path
    encoder = RecordEncoder(load_tokenizer(stdlib.tokenizer))
    policy = PackingPolicy(64, algorithm="concatenative", buffer_size=2)
    options = StreamOptions(path=str(path), encoder=encoder, policy=policy)
    errors = []
    for rank in range(ranks):
        workers = Workers.of_rank(rank, ranks=ranks, num_workers=num_workers, timeout=100)
        loader = ExactLoader(options, workers=workers)
        try:
            # One from each worker.
            assert len(list(islice(loader, len(workers.numbers)))) == len(workers.numbers)
        except NoSampleError as error:
            errors.append(str(error))
        finally:
            loader.stop()
    assert errors
    for error in errors:
        assert re.search(rf"a loader worker has no sample to read: '.*/a' has 3 samples to train on for {told}", error), error


METADATASET = "__module__: megatron.energon\n__class__: MetadatasetV2\n"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", r"'.*a\.yaml' is empty\. Give a dataset folder"),
        ("- 1\n", r"holds a list and no splits"),
        ("model: 1\ndata: {path: x}\n", r"has no 'splits', but model, data \(the configuration of a run is given as --config"),
        ("a:\n\t- b\n", r"is no YAML that can be read \(line 2: found character '\\t'"),
        (METADATASET + "splits:\n", r"has no split in its 'splits'"),
        (METADATASET + "splits: {val: {path: DATA}}\n", r"has no split 'train', but val"),
        (
            METADATASET + "splits: {train: {path: nowhere}}\n",
            r"names a dataset that is not there or was not prepared \(.*nowhere",
        ),
        (METADATASET + "splits: {train: {paths: DATA}}\n", r"has parts that no metadataset has, or lacks some \(.*path\)\."),
        (METADATASET + "splits: {train: {path: a.yaml}}\n", r"leads to itself"),
        ("splits: {train: {path: DATA}}\n", r"lacks some \(.*\), and does not say __class__: MetadatasetV2\."),
    ],
    ids=["empty", "list", "run", "tab", "no-splits", "no-split", "no-data", "no-path", "itself", "no-class"],
)
def test_a_yaml_that_is_no_metadataset(content: str, told: str, tmp_path: Path, stdlib: PreparedDataset) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(content.replace("DATA", str(stdlib.path)))
    looks = r"(?s:.)*looks like this(?s:.)*__class__: MetadatasetV2\nsplits:"
    with pytest.raises(ValueError, match=told + looks):
        has_split(str(file), "train")
    with pytest.raises(ValueError, match=told + looks):
        EnergonPackDataModule(file, tokenizer=stdlib.tokenizer, num_workers=0).setup("fit")


def test_a_metadataset_is_one_with_the_ending_that_energon_knows(tmp_path: Path, stdlib: PreparedDataset) -> None:
    text = EXAMPLE.replace("chats", str(stdlib.path)).replace("texts", str(stdlib.path))
    assert text.count(str(stdlib.path)) == 3
    for name in ("a.yaml", "a.yml"):
        (tmp_path / name).write_text(text)
    assert has_split(str(tmp_path / "a.yaml"), "train")
    assert has_split(str(tmp_path / "a.yaml"), "val")
    assert not has_split(str(tmp_path / "a.yaml"), "test")
    with pytest.raises(ValueError, match=r"ends with \.yml, and Energon knows a metadataset by the ending \.yaml: rename it"):
        has_split(str(tmp_path / "a.yml"), "train")


def test_data_that_brings_no_tokenizer(tmp_path: Path, stdlib: PreparedDataset) -> None:
    require_own_tokenizer(str(stdlib.path))
    with pytest.raises(ValueError, match=r"a\.yaml' brings no tokenizer along .*--data\.tokenizer DIR"):
        EnergonPackDataModule(tmp_path / "a.yaml").tokenizer  # noqa: B018 - loads it
    with pytest.raises(ValueError, match=r"or let 'lightning-pack prepare FILE\.jsonl OUT --tokenizer DIR'"):
        require_own_tokenizer(str(tmp_path / "a.jsonl"))


def test_a_checkpoint_path_that_names_none(tmp_path: Path) -> None:
    for fine in (None, "last", "best", "s3://bucket/a.ckpt"):
        _refuse_no_checkpoint(fine)
    with pytest.raises(ValueError, match=r"there is no such file; there is no checkpoint in .* either\. Leave ckpt_path out"):
        _refuse_no_checkpoint(str(tmp_path / "a.ckpt"))
    (tmp_path / "b.ckpt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"there is no such file; the newest checkpoint in .* is .*b\.ckpt"):
        _refuse_no_checkpoint(str(tmp_path / "a.ckpt"))
    with pytest.raises(ValueError, match=r"is a folder of checkpoints: name one of them; .*b\.ckpt"):
        _refuse_no_checkpoint(str(tmp_path))
    _refuse_no_checkpoint(str(tmp_path / "b.ckpt"))


def test_of_a_model_with_other_settings_only_those_that_differ_are_named() -> None:
    saved = {"hidden_size": 64, "vision_config": {"depth": 2, "rope": {"theta": 1.0}, "act": "gelu"}}
    now = {"hidden_size": 64, "vision_config": {"depth": 3, "rope": {"theta": 1.0}, "window": None}}
    assert list(_different("model.model", saved, saved)) == []
    assert list(_different("model.model", saved, now)) == [
        "model.model.vision_config.depth: 2 in the checkpoint, 3 now",
        "model.model.vision_config.act: 'gelu' in the checkpoint, not set now",
        "model.model.vision_config.window: not set in the checkpoint, None now",
    ]
    assert list(_different("model.lora", None, {"rank": 4})) == ["model.lora: None in the checkpoint, {'rank': 4} now"]


def test_errors_of_the_operating_system_say_what_to_do() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/runs/a.ckpt")
    assert cli._message(full) == (
        "/runs/a.ckpt: No space left on device (make room there and where the output goes, or choose a folder on another disk)"
    )
    gone = FileNotFoundError(errno.ENOENT, "No such file or directory", "/runs/a")
    assert cli._message(gone).startswith("/runs/a: No such file or directory (correct the path: ")
    assert cli._message(OSError("our own words")) == "our own words"
    assert cli._message(OSError(errno.EIO, "Input/output error")) == "Input/output error"


def test_a_reader_that_goes_away_is_no_error() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "lightning_pack", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    result = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, env=environment, timeout=100, check=False)
    os.close(writes)
    assert (result.returncode, result.stderr) == (141, b"")


def test_an_accumulation_of_no_rows() -> None:
    trainer = Trainer(accelerator="cpu", accumulate_grad_batches=0, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="accumulate_grad_batches=0: rows of a step, and a step needs at least one"):
        refuse_to_train(trainer, epochs=None)


def test_packing_that_is_no_policy() -> None:
    with pytest.raises(ValueError, match=r"packing=\{'capacity': 4\}: a PackingPolicy is needed"):
        EnergonPackDataModule("data", packing={"capacity": 4})  # type: ignore[arg-type]
