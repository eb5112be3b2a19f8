"""Data and tokenizers are recognised by content: what changes a batch changes the fingerprint, and nothing else does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory
from tokenizers import normalizers, pre_tokenizers, processors
from transformers import CTRLTokenizer, PreTrainedTokenizerFast

from lightning_pack.encoders import tokenizer_fingerprint
from lightning_pack.energon import data_fingerprint, fingerprint
from lightning_pack.energon.fingerprint import changed_files, library_fingerprint
from lightning_pack.prepare.tokenizer import train_tokenizer
from tests.numbers_data import lengths, records_of, write_webdataset


@pytest.fixture
def data(tmp_path: Path) -> Path:
    parts = {"train": records_of(lengths(60, most=40)), "val": records_of([5] * 9)}
    return write_webdataset(tmp_path / "data", parts)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    assert before["split"] == after["split"]
    assert before["blend"] == after["blend"]
    return changed_files(before["files"], after["files"])


def flip(file: Path, at: int) -> None:
    """Change one byte."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_it_names_every_shard_in_order(data: Path) -> None:
    found = data_fingerprint(str(data))
    assert found["split"] == "train"
    assert [line.split(":")[0] for line in found["files"]] == ["train-0.tar", "train-1.tar", "train-2.tar"]
    size = (data / "train-0.tar").stat().st_size
    assert found["files"][0].startswith(f"train-0.tar: samples 20, bytes {size}, ends ")
    assert found == data_fingerprint(str(data))


def test_a_moved_or_copied_folder_is_the_same(data: Path, tmp_path: Path) -> None:
    before = data_fingerprint(str(data))
    shutil.copytree(data, tmp_path / "copy", copy_function=shutil.copyfile)
    data.rename(tmp_path / "elsewhere")
    assert data_fingerprint(str(tmp_path / "copy")) == before
    assert data_fingerprint(str(tmp_path / "elsewhere")) == before


def test_a_byte_in_the_middle_is_seen_and_its_shard_named(data: Path) -> None:
    before = data_fingerprint(str(data))
    shard = data / "train-1.tar"
    flip(shard, shard.stat().st_size // 2)
    (line,) = differences(before, data_fingerprint(str(data)))
    assert line.startswith("train-1.tar has content ")
    assert " in the checkpoint, content " in line


def test_an_index_that_changed_is_named(data: Path) -> None:
    before = data_fingerprint(str(data))
    flip(data / "train-2.tar.idx", 9)
    (line,) = differences(before, data_fingerprint(str(data)))
    assert line.startswith("train-2.tar has index ")


def test_shards_that_are_missing_new_or_cut_are_named(data: Path) -> None:
    before = data_fingerprint(str(data))
    split = data / ".nv-meta" / "split.yaml"
    parts = yaml.safe_load(split.read_text())
    parts["split_parts"]["train"] = ["train-0.tar", "train-1.tar", "val-0.tar"]
    split.write_text(yaml.safe_dump(parts))
    size = (data / "train-0.tar").stat().st_size
    os.truncate(data / "train-0.tar", size - 512)
    cut, missing, new = differences(before, data_fingerprint(str(data)))
    assert cut.startswith(f"train-0.tar has {size} bytes and content ")
    assert f" in the checkpoint, {size - 512} bytes and content " in cut
    assert (missing, new) == ("train-2.tar is missing now", "val-0.tar is new")


def test_the_order_of_shards_counts(data: Path) -> None:
    before = data_fingerprint(str(data))
    split = data / ".nv-meta" / "split.yaml"
    parts = yaml.safe_load(split.read_text())
    parts["split_parts"]["train"] = ["train-2.tar", "train-1.tar", "train-0.tar"]
    split.write_text(yaml.safe_dump(parts))
    (line,) = differences(before, data_fingerprint(str(data)))
    assert line == "file 1 is train-0.tar in the checkpoint, train-2.tar now"


def test_the_split_and_what_is_left_out_of_it_count(data: Path) -> None:
    before = data_fingerprint(str(data))
    assert data_fingerprint(str(data), split="val") != before
    split = data / ".nv-meta" / "split.yaml"
    parts = yaml.safe_load(split.read_text())
    parts["exclude"] = [f"train-0.tar/train{i:06d}" for i in range(0, 30, 3)]
    split.write_text(yaml.safe_dump(parts))
    after = data_fingerprint(str(data))
    assert after["files"] == before["files"]
    assert after["blend"] != before["blend"]
    # Energon keeps them in a set, whose order is another one in each process.
    code = f"from lightning_pack.energon import data_fingerprint; print(repr(data_fingerprint({str(data)!r})))"
    for seed in "12":
        environment = os.environ | {"PYTHONHASHSEED": seed}
        said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
        assert said.strip().splitlines()[-1] == repr(after)


def test_a_missing_shard_is_named(data: Path) -> None:
    (data / "train-1.tar").unlink()
    with pytest.raises(ValueError, match=r"the file 'train-1\.tar' of the dataset .* cannot be read .*bring it back"):
        data_fingerprint(str(data))


def test_weights_and_each_dataset_of_a_blend_count(data: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(f'{{"n": {n}, "id": 300}}\n' for n in range(10, 20)))
    CrudeJsonlDatasetFactory.prepare_dataset(str(lines))
    blend = tmp_path / "blend.yaml"

    def of(weight: int) -> dict[str, Any]:
        blend.write_text(
            "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
            f"      - weight: {weight}\n        path: {data}\n      - weight: 1\n        path: {lines}\n"
        )
        return data_fingerprint(str(blend))

    before = of(2)
    assert [line.split(":")[0] for line in before["files"]] == [
        "dataset 1/train-0.tar",
        "dataset 1/train-1.tar",
        "dataset 1/train-2.tar",
        "dataset 2/lines.jsonl",
    ]
    assert of(3)["files"] == before["files"]
    assert of(3)["blend"] != before["blend"]
    assert of(2) == before
    lines.write_text(lines.read_text().replace('"n": 14', '"n": 15'))
    (line,) = differences(before, of(2))
    assert line.startswith("dataset 2/lines.jsonl has content ")


def test_large_files_are_read_at_their_ends_and_in_blocks(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = data / "train-0.tar"
    with shard.open("ab") as file:
        # Past the end of a tar file anything may stand.
        file.write(bytes(2 << 20))
    size = shard.stat().st_size
    whole = data_fingerprint(str(data))
    monkeypatch.setattr(fingerprint, "READ_IN_FULL", 1 << 20)
    before = data_fingerprint(str(data))
    assert "whole" in whole["files"][0]
    assert "whole" not in before["files"][0]
    assert not differences(whole, before), "data that grew past the limit elsewhere is no other data here"
    block = (size - 4096) * 7 // 32
    unseen = block + 4096 + 1000
    for at, seen in ((100, True), (size - 100, True), (block + 5, True), (unseen, False)):
        flip(shard, at)
        after = data_fingerprint(str(data))
        assert len(differences(before, after)) == seen, at
        flip(shard, at)
    # What the blocks do not show, reading all of it does.
    flip(shard, unseen)
    monkeypatch.undo()
    assert len(differences(whole, data_fingerprint(str(data)))) == 1


def test_files_that_are_not_local_are_read_at_their_ends(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = data_fingerprint(str(data))
    monkeypatch.setattr(EPath, "is_local", lambda self: False)
    there = data_fingerprint(str(data))
    assert [line.split(", ends")[0] for line in there["files"]] == [line.split(", ends")[0] for line in here["files"]]
    assert all("spread" not in line and "index" not in line for line in there["files"])
    assert not differences(here, there), "data that moved into an object store is the same"
    flip(data / "train-0.tar", 700)
    (line,) = differences(here, data_fingerprint(str(data)))
    assert line.startswith("train-0.tar has content ")


def test_many_files_are_grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_webdataset(tmp_path / "many", {"train": records_of([5] * 40)}, shards=10)
    monkeypatch.setattr(fingerprint, "MOST_LISTED", 4)
    before = data_fingerprint(str(data))
    assert [line.split(":")[0] for line in before["files"]] == [
        "train-0.tar to train-2.tar (3 files)",
        "train-3.tar to train-5.tar (3 files)",
        "train-6.tar to train-8.tar (3 files)",
        "train-9.tar to train-9.tar (1 files)",
    ]
    flip(data / "train-4.tar", 600)
    (line,) = differences(before, data_fingerprint(str(data)))
    assert line.startswith("train-3.tar to train-5.tar (3 files) has content ")


def test_unchanged_files_are_read_once_in_a_process(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = data_fingerprint(str(data))
    read = []
    ends = fingerprint._ends
    monkeypatch.setattr(fingerprint, "_ends", lambda stream, size: read.append(stream.name) or ends(stream, size))
    assert data_fingerprint(str(data)) == before
    assert not read
    flip(data / "train-1.tar", 600)
    assert data_fingerprint(str(data)) != before
    assert [Path(name).name for name in read] == ["train-1.tar"]


def test_libraries_are_told_by_what_they_do() -> None:
    state = torch.get_rng_state()
    found = library_fingerprint()
    assert found == library_fingerprint()
    assert torch.equal(torch.get_rng_state(), state)
    assert set(found) == {"lightning-pack's stream", "megatron-energon", "numpy's random order", "torch's random order"}
    assert len(set(found["numpy's random order"].split())) == 16


# Tokenizers.

TEXTS = ["First question? First answer. What does the function do? It returns a value.\n\n"] * 20


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, vocab_size=320)


def rebuilt(tokenizer: PreTrainedTokenizerFast, change: Callable[[dict[str, Any]], None]) -> PreTrainedTokenizerFast:
    """The tokenizer with its description changed."""
    from tokenizers import Tokenizer

    description = json.loads(tokenizer.backend_tokenizer.to_str())
    change(description)
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(description)),
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
    )
    other.chat_template = tokenizer.chat_template
    return other


def swap_merges(description: dict[str, Any]) -> None:
    merges = description["model"]["merges"]
    i = next(i for i in range(len(merges) - 1) if merges[i] != merges[i + 1])
    merges[i], merges[i + 1] = merges[i + 1], merges[i]


def swap_vocabulary(description: dict[str, Any]) -> None:
    vocab = description["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


@pytest.mark.parametrize("change", [swap_merges, swap_vocabulary])
def test_merges_and_vocabulary_are_part_of_a_tokenizer(
    tokenizer: PreTrainedTokenizerFast, change: Callable[[dict[str, Any]], None]
) -> None:
    same = rebuilt(tokenizer, lambda description: None)
    other = rebuilt(tokenizer, change)
    assert len(other) == len(same)
    assert tokenizer_fingerprint(rebuilt(tokenizer, lambda description: None)) == tokenizer_fingerprint(same)
    assert tokenizer_fingerprint(other)["backend"] != tokenizer_fingerprint(same)["backend"]


def set_normalizer(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()


def set_pre_tokenizer(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def set_post_processor(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )


def set_template(tokenizer: Any) -> None:
    tokenizer.chat_template += " "


def set_eos(tokenizer: Any) -> None:
    tokenizer.eos_token = "<|im_start|>"


def set_pad(tokenizer: Any) -> None:
    tokenizer.pad_token = "<|im_start|>"


def set_bos(tokenizer: Any) -> None:
    tokenizer.bos_token = "<|im_start|>"


@pytest.mark.parametrize(
    "change",
    [
        set_normalizer,
        set_pre_tokenizer,
        set_post_processor,
        set_template,
        set_eos,
        set_pad,
        set_bos,
        lambda tokenizer: tokenizer.add_tokens(["returns"]),
        lambda tokenizer: tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "value"]}),
        lambda tokenizer: setattr(tokenizer, "split_special_tokens", True),
    ],
)
def test_whatever_changes_tokens_changes_the_fingerprint(
    tokenizer: PreTrainedTokenizerFast, change: Callable[[Any], Any]
) -> None:
    before = tokenizer_fingerprint(tokenizer)
    assert tokenizer_fingerprint(train_tokenizer(TEXTS, vocab_size=320)) == before
    change(tokenizer)
    assert tokenizer_fingerprint(tokenizer) != before


def test_a_tokenizer_written_in_python_is_known_by_its_files(tmp_path: Path) -> None:
    def made(merges: str, **options: Any) -> CTRLTokenizer:
        (tmp_path / "vocab.json").write_text(
            json.dumps({"a": 0, "b": 1, "ab</w>": 2, "<unk>": 3, "a@@": 4, "b</w>": 5, "ba</w>": 6})
        )
        (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
        return CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"), **options)

    one = made("a b</w>")
    assert not one.is_fast
    before = tokenizer_fingerprint(one)
    assert one("ab")["input_ids"] != made("b a</w>")("ab")["input_ids"], "the vocabulary is the same"
    assert tokenizer_fingerprint(made("b a</w>")) != before
    assert tokenizer_fingerprint(made("a b</w>", extra_setting=True)) != before
    added = made("a b</w>")
    added.add_tokens(["bab"])
    assert tokenizer_fingerprint(added) != before
    assert tokenizer_fingerprint(made("a b</w>")) == before
