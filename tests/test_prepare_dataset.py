import json
import multiprocessing
import os
import platform
import signal
import time
from pathlib import Path

import pytest

from lightning_pack.prepare import prepare_jsonl, prepared, train_tokenizer
from lightning_pack.prepare.dataset import DatasetWriter
from tests.packed_rows import stand_still
from tests.prepared_files import digests, members

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def tokenizer(tmp_path):
    train_tokenizer(["some text"], vocab_size=260).save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def texts(path, count, word="text"):
    path.write_text("".join(json.dumps({"text": f"{word} {i}"}) + "\n" for i in range(count)))
    return path


def hidden(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def killed(process):
    process.join(60)
    return process.exitcode == -signal.SIGKILL


def kill_self(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def prepare_some(file, out, tokenizer):
    """Stands still as soon as something is written."""
    shard = out.with_name(f".out.partial-{os.getpid()}") / "train-0000.tar"
    stand_still(DatasetWriter, "add", when=lambda: shard.exists() and shard.stat().st_size)
    prepare_jsonl(file, out, tokenizer=tokenizer, progress=False)


def test_killed_while_writing_it_never_looks_finished(tmp_path, tokenizer):
    file, out = texts(tmp_path / "a.jsonl", 30_000), tmp_path / "out"
    process = FORK.Process(target=prepare_some, args=(file, out, tokenizer))
    process.start()
    partial = tmp_path / f".out.partial-{process.pid}"
    deadline = time.monotonic() + 120
    while not (partial / "train-0000.tar").exists() or not (partial / "train-0000.tar").stat().st_size:
        assert time.monotonic() < deadline
        assert process.is_alive()
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert killed(process)
    assert (partial / "train-0000.tar").exists()
    assert not (partial / "lightning_pack.json").exists()
    assert not out.exists()
    assert prepared(out) is None
    dataset = prepare_jsonl(texts(file, 20), out, tokenizer=tokenizer, progress=False)
    assert dataset.train + dataset.val == 20 == len(members(out, "train")) + len(members(out, "val"))
    assert hidden(tmp_path) == []


def test_killed_just_before_the_end_it_does_not_look_finished(tmp_path, tokenizer, monkeypatch):
    file, out = texts(tmp_path / "a.jsonl", 20), tmp_path / "out"
    monkeypatch.setattr(DatasetWriter, "_move", kill_self)
    process = FORK.Process(target=prepare_jsonl, args=(file, out), kwargs={"tokenizer": tokenizer, "progress": False})
    process.start()
    assert killed(process)
    assert (tmp_path / f".out.partial-{process.pid}" / "lightning_pack.json").exists()
    assert prepared(out) is None
    monkeypatch.undo()
    assert prepare_jsonl(file, out, tokenizer=tokenizer, progress=False).fresh
    assert hidden(tmp_path) == []


def test_killed_between_the_renames_of_an_overwrite_the_old_dataset_comes_back(tmp_path, tokenizer, monkeypatch):
    file, out = texts(tmp_path / "a.jsonl", 20), tmp_path / "out"
    prepare_jsonl(file, out, tokenizer=tokenizer, progress=False)
    before = digests(out)
    rename = Path.rename

    def rename_out_only(path, target):
        return rename(path, target) if path == out else kill_self()

    monkeypatch.setattr(Path, "rename", rename_out_only)
    options = {"tokenizer": tokenizer, "progress": False, "overwrite": True}
    process = FORK.Process(target=prepare_jsonl, args=(texts(tmp_path / "b.jsonl", 30), out), kwargs=options)
    process.start()
    assert killed(process)
    monkeypatch.undo()
    assert not out.exists()
    assert hidden(tmp_path) == [f".out.partial-{process.pid}", f".out.replaced-{process.pid}"]
    with DatasetWriter(out, shards=1, val_fraction=0):
        assert digests(out) == before
    assert hidden(tmp_path) == []


def test_failure_in_the_process_leaves_nothing_and_keeps_the_old(tmp_path, tokenizer, monkeypatch):
    file, out = texts(tmp_path / "a.jsonl", 20), tmp_path / "out"
    prepare_jsonl(file, out, tokenizer=tokenizer, progress=False)
    before = digests(out)
    rename = Path.rename

    def interrupted(path, target):
        if ".partial-" in path.name:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_jsonl(texts(tmp_path / "b.jsonl", 30), out, tokenizer=tokenizer, overwrite=True, progress=False)
    assert digests(out) == before
    assert hidden(tmp_path) == []


def prepare_at(moment, file, out, tokenizer, overwrite):
    time.sleep(max(0.0, moment - time.time()))
    prepare_jsonl(file, out, tokenizer=tokenizer, overwrite=overwrite, progress=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_processes_at_once_end_with_one_good_dataset(tmp_path, tokenizer, overwrite):
    file, out = texts(tmp_path / "a.jsonl", 300), tmp_path / "out"
    if overwrite:
        prepare_jsonl(texts(tmp_path / "b.jsonl", 30), out, tokenizer=tokenizer, progress=False)
    args = (time.time() + 0.5, file, out, tokenizer, overwrite)
    processes = [FORK.Process(target=prepare_at, args=args) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(members(out, "train")) + len(members(out, "val")) == 300
    assert hidden(tmp_path) == []
    prepare_jsonl(file, tmp_path / "alone", tokenizer=tokenizer, progress=False)
    assert digests(out) == digests(tmp_path / "alone")


def test_other_process_with_other_settings_is_not_overwritten(tmp_path, tokenizer, monkeypatch):
    file, out = texts(tmp_path / "a.jsonl", 20), tmp_path / "out"
    move = DatasetWriter._move

    def after_another(writer, recipe, options):
        monkeypatch.setattr(DatasetWriter, "_move", move)
        process = FORK.Process(
            target=prepare_jsonl, args=(file, out), kwargs={"tokenizer": tokenizer, "shards": 2, "progress": False}
        )
        process.start()
        process.join(60)
        assert process.exitcode == 0
        return move(writer, recipe, options)

    monkeypatch.setattr(DatasetWriter, "_move", after_another)
    with pytest.raises(ValueError, match="  shards: 2 there, 3 asked for"):
        prepare_jsonl(file, out, tokenizer=tokenizer, shards=3, progress=False)
    assert prepared(out).options["shards"] == 2
    assert hidden(tmp_path) == []


def test_partial_folder_of_a_living_process_or_another_machine_stays(tmp_path, tokenizer):
    file, out = texts(tmp_path / "a.jsonl", 5), tmp_path / "out"
    dead = FORK.Process(target=int)
    dead.start()
    dead.join()
    living, remote = tmp_path / f".out.partial-{os.getppid()}", tmp_path / f".out.partial-{dead.pid}"
    for folder, host in ((living, platform.node()), (remote, "elsewhere")):
        folder.mkdir()
        (folder / ".host").write_text(host)
    (tmp_path / ".out.partial-notes").mkdir()
    prepare_jsonl(file, out, tokenizer=tokenizer, progress=False)
    assert hidden(tmp_path) == sorted([living.name, remote.name, ".out.partial-notes"])
    (remote / ".host").write_text(platform.node())
    prepare_jsonl(file, out, tokenizer=tokenizer, overwrite=True, progress=False)
    assert hidden(tmp_path) == sorted([living.name, ".out.partial-notes"])


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_others_wrote_is_never_deleted(tmp_path, tokenizer, overwrite):
    file, out = texts(tmp_path / "a.jsonl", 5), tmp_path / "out"
    options = {"tokenizer": tokenizer, "overwrite": overwrite, "progress": False}
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"is not empty and was not prepared by lightning-pack.*even with --overwrite"):
        prepare_jsonl(file, out, **options)
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    (out / "thesis.tex").unlink()
    assert prepare_jsonl(file, out, **options).fresh  # an empty folder is free
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds thesis\.tex besides the dataset: move that away"):
        prepare_jsonl(texts(file, 6), out, **options)
    assert (out / "thesis.tex").read_text() == "years of work"
    with pytest.raises(ValueError, match="is a file, not a folder"):
        prepare_jsonl(file, tmp_path / "a.jsonl", **options)


def test_damage_is_told_and_can_be_overwritten(tmp_path, tokenizer):
    file, out = texts(tmp_path / "a.jsonl", 5), tmp_path / "out"
    dataset = prepare_jsonl(file, out, tokenizer=tokenizer, progress=False)
    (out / "train-0001.tar").unlink()
    with pytest.raises(ValueError, match=r"is damaged, train-0001\.tar is missing: prepare it again with --overwrite"):
        prepare_jsonl(file, out, tokenizer=tokenizer, progress=False)
    assert prepare_jsonl(file, out, tokenizer=tokenizer, overwrite=True, progress=False) == dataset
    state = json.loads((out / "lightning_pack.json").read_text())
    (out / "lightning_pack.json").write_text(json.dumps({**state, "format": 2}))
    with pytest.raises(ValueError, match="has format 2, this version reads 1"):
        prepared(out)
    (out / "lightning_pack.json").write_text("{")
    with pytest.raises(ValueError, match=r"is damaged .JSONDecodeError"):
        prepared(out)


def test_destination_through_a_link(tmp_path, tokenizer):
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    dataset = prepare_jsonl(texts(tmp_path / "a.jsonl", 5), tmp_path / "link", tokenizer=tokenizer, progress=False)
    assert (tmp_path / "link").is_symlink()
    assert dataset.path == tmp_path / "disk" / "out"
    assert prepared(tmp_path / "link").train == dataset.train


@pytest.mark.parametrize("key", ["", "a.b", "a/b", "x" * 91])
def test_keys_that_energon_would_read_otherwise_are_refused(tmp_path, key):
    with DatasetWriter(tmp_path / "out", shards=1, val_fraction=0) as writer, pytest.raises(ValueError, match="90 bytes"):
        writer.add(key, {"text": "a"})
    assert hidden(tmp_path) == []
