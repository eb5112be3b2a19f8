"""Rows that were written ahead, replayed: as they are, once in a pass, resumed exactly, in no other setting than theirs."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pack import EnergonPackDataModule, PackedBatch, PackingMonitor, PackingPolicy, ParallelLayout, ResumeError
from lightning_pack.datamodule import DEFAULT_PACKING
from lightning_pack.encoders import load_tokenizer
from lightning_pack.energon import ExactLoader, StreamOptions, Workers
from lightning_pack.energon.position import DamagedDataError
from lightning_pack.lightning_cli import _cli, _ConfigReader, read_config
from lightning_pack.offline import Manifest, ManifestError, VerificationError, prepack, verify
from lightning_pack.offline.replay import ReplayPolicy, RowEncoder
from lightning_pack.offline.row_file import DamagedRowError, Row
from lightning_pack.offline.shard_file import samples_of
from lightning_pack.prepare import prepare_jsonl, train_tokenizer
from tests.numbers_data import NumberEncoder, lengths, records_of, same_batch, write_webdataset
from tests.packed_rows import CAPACITY, flip, kill_when, pack_rows, rewrite, sources_of, stand_still
from tests.test_exact_position import through_a_file
from tests.training import Recorder, read_record


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = {"train": records_of(lengths(240, most=60)), "val": records_of(lengths(40, most=40, seed=1))}
    return write_webdataset(tmp_path_factory.mktemp("replay") / "numbers", parts)


@pytest.fixture(scope="module")
def rows(data: Path) -> Path:
    return pack_rows(data, data.parent / "rows").path


@pytest.fixture
def copied(rows: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rows, tmp_path / "rows"))


def module(path: Path, **options: Any) -> EnergonPackDataModule:
    settings: dict[str, Any] = {"num_workers": 0, "shuffle_buffer_size": 8, "max_samples_per_sequence": 5}
    made = EnergonPackDataModule(path, **settings | options)
    made.setup("fit")
    return made


def one_pass(path: Path, **options: Any) -> list[PackedBatch]:
    return list(module(path, epochs=1, **options).train_dataloader())


def whole_pass(data: EnergonPackDataModule) -> list[PackedBatch]:
    """A pass that is trained on, so that the next one follows."""
    given = []
    for batch in data.train_dataloader():
        given.append(batch)
        data._stream.progress.count_batch()  # type: ignore[union-attr]
        data._stream.progress.loader.commit()  # type: ignore[union-attr]
    return given


def keys(batches: list[PackedBatch]) -> list[list[str]]:
    return [batch.source_keys for batch in batches]


def stored(path: Path, split: str = "train") -> dict[str, Row]:
    found = [Row.of(parts) for shard in sorted(path.glob(f"{split}-*.tar")) for _, parts in samples_of(shard)]
    return {row.key: row for row in found}


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_come_as_they_were_written_once_in_a_pass(rows: Path, workers: int) -> None:
    written = {tuple(row.keys): row for row in stored(rows).values()}
    batches = one_pass(rows, num_workers=workers)
    assert len(written) > 40
    assert sorted(map(tuple, keys(batches))) == sorted(written)
    for batch in batches:
        row = written[tuple(batch.source_keys)]
        assert batch.cu_seqlens_padded.tolist() == list(row.offsets)
        assert batch.cu_seqlens.diff().tolist() == list(row.lengths)
        assert batch.input_ids.shape[1] <= CAPACITY
        assert batch.input_ids[0, batch.segment_ids[0] > 0].tolist() == row.tokens[0].tolist()
    val = list(module(rows).val_dataloader())
    assert keys(val) == [list(row.keys) for row in stored(rows, "val").values()]


def test_the_order_is_random_by_the_seed(rows: Path) -> None:
    orders = [keys(one_pass(rows, seed=seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    assert orders[0] != [list(row.keys) for row in stored(rows).values()]
    passes = module(rows, epochs=2)
    first, second = (keys(whole_pass(passes)) for _ in range(2))
    assert sorted(first) == sorted(second)
    assert first != second


def train(data: EnergonPackDataModule, batches: Iterator[PackedBatch], steps: int) -> list[PackedBatch]:
    given = []
    for _ in range(steps):
        given.append(next(batches))
        data._stream.progress.count_batch()  # type: ignore[union-attr]
        data._stream.progress.loader.commit()  # type: ignore[union-attr]
    return given


@pytest.mark.parametrize(
    ("workers", "stops", "options"),
    [
        (0, range(0, 30, 3), {}),
        (2, range(0, 20, 5), {}),
        (0, range(0, 30, 6), {"packing": PackingPolicy(CAPACITY, balance="quadratic", window=4)}),
    ],
)
def test_resume_is_exact_at_every_step(rows: Path, workers: int, stops: range, options: dict[str, Any]) -> None:
    whole = module(rows, num_workers=workers, **options)
    batches = iter(whole.train_dataloader())
    states, given = [whole.state_dict()], list[PackedBatch]()
    for _ in range(45):
        given += train(whole, batches, 1)
        states.append(whole.state_dict())
    whole.teardown("fit")
    assert len({tuple(batch.source_keys) for batch in given}) > 30
    for stop in stops:
        again = module(rows, num_workers=workers, **options)
        again.load_state_dict(through_a_file(states[stop]))
        following = train(again, iter(again.train_dataloader()), 6)
        again.teardown("fit")
        assert all(same_batch(a, b) for a, b in zip(following, given[stop : stop + 6], strict=True))


def test_resume_at_every_row_of_a_pass_with_two_ranks(rows: Path) -> None:
    manifest = Manifest.read(rows)
    assert manifest is not None
    options = StreamOptions(
        path=str(rows), encoder=RowEncoder(manifest), policy=ReplayPolicy.of(manifest), shuffle_buffer_size=8
    )
    found: list[list[str]] = []
    for rank in range(2):
        workers = Workers.of_rank(rank, ranks=2, num_workers=0, timeout=60)
        loader = ExactLoader(options, workers=workers, epochs=1)
        states, given = [], []
        for batch in loader:
            states.append(loader.state())
            given.append(batch)
            assert loader.trained().sources == len(batch.source_keys)
            loader.commit()
        assert len(given) > 15
        found += keys(given)
        for stop in range(0, len(given), 6):
            again = ExactLoader(options, workers=workers, epochs=1)
            again.restore(through_a_file(states[stop]))
            assert all(same_batch(a, b) for a, b in zip(again, given[stop:], strict=True))
    assert sorted(found) == sorted(list(row.keys) for row in stored(rows).values())


def fit(rows: Path, folder: Path, *, workers: int, resume: Path | None = None) -> Recorder:
    torch.manual_seed(0)
    recorder = Recorder(folder / "record")
    saving = ModelCheckpoint(folder / "saved", filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=30,
        logger=False,
        limit_val_batches=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving],
    )
    trainer.fit(recorder, EnergonPackDataModule(rows, num_workers=workers), ckpt_path=resume)
    return recorder


@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_that_is_killed_goes_on_exactly(rows: Path, tmp_path: Path, workers: int) -> None:
    whole = fit(rows, tmp_path, workers=workers)
    assert len(whole.trained) == 30
    killed = tmp_path / "killed"
    killed.mkdir()

    def nine_steps() -> bool:
        return Path(f"{killed / 'record'}.0").exists() and len(read_record(killed / "record")) == 9

    def work() -> None:
        stand_still(Recorder, "training_step", when=nine_steps)
        fit(rows, killed, workers=workers)

    kill_when(work, nine_steps)
    last = killed / "saved" / "step=8.ckpt"
    assert max(killed.glob("saved/*.ckpt"), key=lambda path: int(path.stem.partition("=")[2])) == last
    # One of them is not in the checkpoint.
    begun = read_record(killed / "record")
    assert len(begun) == 9
    went_on = fit(rows, killed, workers=workers, resume=last)
    assert went_on.weights() == whole.weights()
    assert {place: seen[0] for place, seen in begun.items()} | went_on.trained == whole.trained


def test_a_damaged_row_is_left_out_and_counted_in_every_pass(copied: Path) -> None:
    whole = sorted(keys(one_pass(copied)))
    # Two rows of different shards, one with tokens that changed, one whose account of itself did.
    tokens = stored(copied)[flip(copied / "train-0001.tar", ".npy")]
    account = flip(copied / "train-0002.tar", ".json")
    for workers in (0, 1):
        data = module(copied, num_workers=workers, epochs=2)
        for _ in range(2):
            batches = whole_pass(data)
            gone = [each for batch in batches for each in batch.left_out]
            assert sorted(gone) == sorted(
                [*((key, "damaged", n) for key, n in zip(tokens.keys, tokens.lengths, strict=True)), (account, "damaged", 0)]
            )
            assert len(batches) == len(whole) - 2
            assert set(map(tuple, keys(batches))) < set(map(tuple, whole))


def test_a_shard_that_cannot_be_read_is_an_error_or_is_left_out(copied: Path) -> None:
    shard = copied / "train-0001.tar"
    content = bytearray(shard.read_bytes())
    content[: len(content) // 2] = b"\x07" * (len(content) // 2)
    shard.write_bytes(content)
    with pytest.raises(DamagedDataError, match=r"train-0001\.tar\[\d+\]: cannot be read"):
        one_pass(copied)
    batches = one_pass(copied, on_damaged="skip")
    assert {each.reason for batch in batches for each in batch.left_out} == {"damaged"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda row: {"keys": row.keys[:-1]}, "keys, .* numbers, .* lengths and .* boundaries"),
        (lambda row: {"lengths": [row.lengths[0] + 1, *row.lengths[1:]]}, r"its sources say int32 \[2, \d+\]"),
        (lambda row: {"offsets": [0, row.offsets[-1], *row.offsets[2:]]}, "must begin at 0, never decrease"),
        (lambda row: {"offsets": [4, *row.offsets[1:]]}, "must begin at 0"),
        (lambda row: {"offsets": [*row.offsets, row.offsets[-1] + 4]}, "repeat the last one"),
        (lambda row: {"offsets": [0, 1, *row.offsets[2:]]}, r"has \d+ tokens in 1 places"),
        (lambda row: {"tokens": np.abs(row.tokens)}, "first token of a source is a target"),
        (lambda row: {"tokens": row.tokens.astype(np.int64)}, None),
    ],
)
def test_a_row_that_says_what_cannot_be_is_left_out(copied: Path, change: Any, text: str | None) -> None:
    wanted: list[Row] = []

    def changed(samples: list[Any]) -> list[Any]:
        row = Row.of(samples[0][1])
        wanted.append(row)
        return [(samples[0][0], Row(**vars(row) | change(row)).parts()), *samples[1:]]

    rewrite(copied / "train-0000.tar", changed)
    (row,) = wanted
    assert len(row.keys) > 2
    if text is None:
        # Written as int32 in any case.
        assert len(one_pass(copied)) == len(stored(copied))
        return
    _, parts = next(samples_of(copied / "train-0000.tar"))
    with pytest.raises(DamagedRowError, match=text):
        Row.of(parts)
    gone = [each for batch in one_pass(copied) for each in batch.left_out]
    assert {each.reason for each in gone} == {"damaged"}
    assert {each.key for each in gone} <= set(row.keys)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _npy(shape: str, *, pickled: bool = False) -> bytes:
    """An array that claims to have this shape."""
    kind = "|O" if pickled else "<i4"
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


def test_values_that_make_no_sense_are_damage_though_their_hashes_are_right(copied: Path) -> None:
    most = 10**9
    changes: list[Any] = [
        (lambda said: {"keys": 5}, "other types than a row has: keys"),
        (lambda said: {"keys": [[1] for _ in said["keys"]], "group": {}}, "other types than a row has: group, keys"),
        (lambda said: {"lengths": [float(length) for length in said["lengths"]]}, "other types than a row has: lengths"),
        (lambda said: {"row": "../../x"}, "other types than a row has: row"),
        (lambda said: {"format": [1]}, r"its format is [1], this version reads"),
        (lambda said: {"format": 2, "media": [[{"name": 3}]]}, "other types than a row has: media"),
        (
            lambda said: {"format": 2, "media": [[{"name": "../x.png", "tokens": 1, "nbytes": 1, "check": ""}]]},
            "other types than a row has: media",
        ),
        (lambda said: {"offsets": [*said["offsets"][:-1], 10**30]}, "go beyond 2147483647"),
        (lambda said: {"offsets": [*said["offsets"][:-1], most]}, f"{most}] are not those of the policy"),
        (_npy("(2, 1000000000000000)"), "no array that can be read (MemoryError)"),
        (_npy("(2, -1)"), "no array that can be read (ValueError)"),
        (_npy("(2, 3)", pickled=True), "no array that can be read (ValueError)"),
    ]
    wanted: list[str] = []

    def changed(samples: list[Any]) -> list[Any]:
        made = []
        for (key, parts), (change, _) in zip(samples, changes, strict=False):
            said = json.loads(parts["json"])
            said.pop("check")
            content = change if isinstance(change, bytes) else parts["npy"]
            said |= {"tokens": _hash(content)} if isinstance(change, bytes) else change(said)
            check = _hash(json.dumps(said, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode())
            made.append((key, {"json": json.dumps(said | {"check": check}).encode(), "npy": content}))
            wanted.append(key)
        return [*made, *samples[len(changes) :]]

    before = len(one_pass(copied))
    rewrite(copied / "train-0000.tar", changed)
    assert len(wanted) == len(changes)
    with pytest.raises(VerificationError) as error:
        verify(copied)
    lines = str(error.value).splitlines()
    for key, (_, text) in zip(wanted, changes, strict=True):
        assert any(f"row {key}: " in line and text in line for line in lines), text
    batches = one_pass(copied)
    assert {gone.reason for batch in batches for gone in batch.left_out} == {"damaged"}
    assert sum(bool(batch.source_keys) for batch in batches) == before - len(changes)


def test_a_link_in_a_shard_is_damage(copied: Path) -> None:
    shard = copied / "train-0000.tar"
    content = bytearray(shard.read_bytes())
    with tarfile.open(shard) as tar:
        member = tar.getmembers()[1]
    info = tarfile.TarInfo(member.name)
    info.type, info.linkname, info.size = tarfile.SYMTYPE, "/etc/hostname", member.size
    content[member.offset : member.offset + 512] = info.tobuf(tarfile.USTAR_FORMAT)
    shard.write_bytes(content)
    with pytest.raises(VerificationError, match=rf"its member '{member.name}' is no file"):
        verify(copied)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_an_empty_source_is_left_out_of_its_row(copied: Path, place: str) -> None:
    changed: list[Row] = []

    def emptied(samples: list[Any]) -> list[Any]:
        """With a source that has no token, but four places, instead of its last one."""
        full = Row.of(samples[0][1])
        row = replace(
            full,
            keys=full.keys[:-1],
            numbers=full.numbers[:-1],
            lengths=full.lengths[:-1],
            offsets=full.offsets[:-1],
            tokens=full.tokens[:, : sum(full.lengths[:-1])],
        )
        at = {"first": 0, "middle": 1, "last": len(row.lengths)}[place]
        offsets = [*row.offsets[: at + 1], *(offset + 4 for offset in row.offsets[at:])]
        other = Row(
            **vars(row)
            | {
                "keys": [*row.keys[:at], "nothing", *row.keys[at:]],
                "numbers": [*row.numbers[:at], 999, *row.numbers[at:]],
                "lengths": [*row.lengths[:at], 0, *row.lengths[at:]],
                "offsets": offsets,
            }
        )
        changed.extend([row, other])
        return [(samples[0][0], other.parts()), *samples[1:]]

    rewrite(copied / "train-0000.tar", emptied)
    row, other = changed
    assert len(row.lengths) > 1
    (batch,) = (batch for batch in one_pass(copied) if batch.source_keys == list(row.keys))
    assert batch.left_out == [("nothing", "empty", 0)]
    assert batch.input_ids.shape[1] == other.offsets[-1] == row.offsets[-1] + 4
    assert batch.cu_seqlens.diff().tolist() == list(row.lengths)
    assert sources_of([batch])[0][1][0] == tuple(row.tokens[0, : row.lengths[0]].tolist())


def test_a_row_of_empty_sources_is_left_out(copied: Path) -> None:
    def emptied(samples: list[Any]) -> list[Any]:
        row = Row.of(samples[0][1])
        nothing = {"lengths": [0] * len(row.lengths), "tokens": row.tokens[:, :0]}
        return [(samples[0][0], Row(**vars(row) | nothing).parts()), *samples[1:]]

    wanted = next(iter(stored(copied).values())).keys
    rewrite(copied / "train-0000.tar", emptied)
    batches = one_pass(copied)
    assert sorted(each for batch in batches for each in batch.left_out) == sorted((key, "empty", 0) for key in wanted)


def test_what_differs_from_the_manifest_is_refused_by_name(rows: Path) -> None:
    for options, lines in (
        ({"packing": PackingPolicy(128)}, ["packing.capacity: 64 in the rows, 128 now"]),
        (
            {"packing": PackingPolicy(64, multiple=8, algorithm="concatenative", overlength="truncate", width="fixed")},
            [
                "packing.algorithm: 'minimum_bin_slack' in the rows, 'concatenative' now",
                "packing.multiple: 4 in the rows, 8 now",
                "packing.width: 'variable' in the rows, 'fixed' now",
                "packing.overlength: 'drop' in the rows, 'truncate' now",
            ],
        ),
        (
            {"packing": PackingPolicy(64, buffer_size=32)},
            ["packing.buffer_size: not used with rows that are decided, 32 now"],
        ),
        ({"encoder": NumberEncoder(salt=5)}, ["encoder.salt: 0 in the rows, 5 now"]),
        ({"packs_per_batch": 2}, ["packs_per_batch: 1 in the rows, 2 now"]),
        ({"group_by": "language"}, ["encoder.group_by: 'not set' in the rows, 'language' now"]),
    ):
        with pytest.raises(ManifestError) as error:
            module(rows, **options)
        said = str(error.value).splitlines()
        assert [line.strip().partition(" (")[0] for line in said[1:-1]] == lines
        assert "Rows are not packed or tokenized again" in said[-1]
    with pytest.raises(ManifestError, match=r"packing\.multiple: 4 in the rows, 16 is what parallel needs"):
        EnergonPackDataModule(rows, parallel=ParallelLayout(context=8)).prepare_data() or module(
            rows, parallel=ParallelLayout(context=8)
        )
    # What agrees may be said, and what says nothing may be left out.
    agreeing = module(rows, packing=PackingPolicy(64, multiple=4), encoder=NumberEncoder(), parallel=ParallelLayout(context=2))
    assert agreeing.packing.capacity == 64


def test_a_policy_that_equals_the_default_is_compared_too(rows: Path) -> None:
    default = PackingPolicy(capacity=2048)
    assert default == DEFAULT_PACKING
    for packing, lines in (
        (default, ["packing.capacity: 64 in the rows, 2048 now"]),
        (PackingPolicy(64, multiple=1), ["packing.multiple: 4 in the rows, 1 now"]),
        (PackingPolicy(64, buffer_size=256), ["packing.buffer_size: not used with rows that are decided, 256 now"]),
        # A policy that was changed says nothing of what has its default.
        (replace(PackingPolicy(64), capacity=128), ["packing.capacity: 64 in the rows, 128 now"]),
    ):
        with pytest.raises(ManifestError) as error:
            module(rows, packing=packing)
        assert [line.strip().partition(" (")[0] for line in str(error.value).splitlines()[1:-1]] == lines
    assert module(rows).packing.capacity == 64
    assert module(rows, packing=PackingPolicy(64, algorithm="auto", overlength="drop", seed=0)).packing.capacity == 64
    assert module(rows, packing=replace(PackingPolicy(64), multiple=4)).packing.multiple == 4


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_the_command_line_compares_what_was_said(rows: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"

    def given(said: dict[str, Any], *options: str) -> EnergonPackDataModule:
        data = {"path": str(rows), "num_workers": 0, "packing": said}
        file.write_text(yaml.safe_dump({"model": {"model": {"model_type": "llama"}}, "data": data}))
        return read_config(str(file), options)[0]

    for said, options, line in (
        ({"multiple": 4}, ["--data.packing.capacity=2048"], "packing.capacity: 64 in the rows, 2048 now"),
        ({"multiple": 1}, [], "packing.multiple: 4 in the rows, 1 now"),
        (asdict(DEFAULT_PACKING), [], "packing.capacity: 64 in the rows, 2048 now"),
    ):
        with pytest.raises(ManifestError, match=re.escape(line)):
            given(said, *options).setup("fit")
    agreeing = given({"multiple": 4}, "--data.packing.balance=quadratic")
    agreeing.setup("fit")
    assert (agreeing.packing.capacity, agreeing.packing.balance) == (64, "quadratic")
    agreeing.teardown("fit")


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize("options", [[], ["--data.packing.multiple=4"]])
def test_a_saved_configuration_of_rows_says_what_was_said(rows: Path, tmp_path: Path, options: list[str]) -> None:
    args = ["fit", "--model.model", '{"model_type": "llama"}', "--data.path", str(rows), *options]
    told = _cli(_ConfigReader, args)
    saved = tmp_path / "saved.yaml"
    told._parser("fit").save(told.config["fit"], saved, skip_none=False, multifile=False)
    assert yaml.safe_load(saved.read_text())["data"]["packing"] == {"capacity": 64} | ({"multiple": 4} if options else {})
    data, _ = read_config(str(saved))
    data.setup("fit")
    assert (data.packing.capacity, data.packing.multiple) == (64, 4)
    data.teardown("fit")


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_a_printed_configuration_of_rows_is_taken_again(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        _cli(_ConfigReader, ["fit", "--data.path", str(rows), "--data.packing.multiple=4", "--print_config"])
    assert not end.value.code
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert yaml.safe_load(printed.read_text())["data"]["packing"] == {"capacity": 64, "multiple": 4}
    data, _ = read_config(str(printed), ["--model.model", '{"model_type": "llama"}'])
    data.setup("fit")
    assert (data.packing.capacity, data.packing.multiple) == (64, 4)
    data.teardown("fit")


def test_another_tokenizer_or_template_is_refused(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(f'{{"prompt": "Why {i}?", "completion": "So."}}' for i in range(30)))
    tokenizer = train_tokenizer(["why and so"] * 5, vocab_size=300)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    prepare_jsonl(chats, tmp_path / "data", tokenizer=tmp_path / "tokenizer", val_fraction=0.2, progress=False)
    rows = prepack(tmp_path / "data", tmp_path / "rows", capacity=128, workers=0).path
    assert len(one_pass(rows)) > 2
    assert one_pass(rows, tokenizer=tmp_path / "tokenizer", encoder=None)
    # The tokenizer comes along.
    assert load_tokenizer(rows / "tokenizer").get_vocab() == tokenizer.get_vocab()
    other = train_tokenizer(["something else entirely"] * 5, vocab_size=300)
    with pytest.raises(ManifestError, match=r"encoder\.tokenizer\.backend: '\w+' in the rows, '\w+' now"):
        module(rows, tokenizer=other)
    other.save_pretrained(tmp_path / "other")
    others = prepack(tmp_path / "data", tmp_path / "others", capacity=128, tokenizer=tmp_path / "other", workers=0).path
    mixed = module(rows, val_path=others, encoder=None)
    with pytest.raises(
        ManifestError, match=r"made with different tokenizers.*\n  encoder\.tokenizer\.backend: '\w+' and '\w+'"
    ):
        mixed.val_dataloader()
    tokenizer.chat_template = tokenizer.chat_template.replace("user", "human") + " "
    with pytest.raises(
        ManifestError, match=r"made with other settings:\n  encoder\.tokenizer\.chat_template: '\w+' in the"
    ) as e:
        module(rows, tokenizer=tokenizer)
    assert len(str(e.value).splitlines()) == 3


def test_a_checkpoint_goes_on_only_in_its_rows(data: Path, rows: Path, tmp_path: Path) -> None:
    there = module(rows)
    batches = iter(there.train_dataloader())
    train(there, batches, 3)
    state = there.state_dict()
    there.teardown("fit")
    others = pack_rows(data, tmp_path / "others", seed=1).path
    other = module(others)
    with pytest.raises(ResumeError, match=r"encoder\.rows: '\w+' in the checkpoint, '\w+' now"):
        other.load_state_dict(through_a_file(state))
    # The same rows in another folder are the same.
    moved = module(Path(shutil.copytree(rows, tmp_path / "moved")))
    moved.load_state_dict(through_a_file(state))


def test_rows_and_other_data_are_not_mixed(data: Path, rows: Path) -> None:
    mixed = module(rows, val_path=data)
    with pytest.raises(ValueError, match="one holds packed rows and the other does not"):
        mixed.val_dataloader()
    assert list(module(rows, val_path=rows).val_dataloader())


def test_the_monitor_shows_what_the_manifest_says(rows: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(rows)
    assert manifest is not None
    split = manifest.splits["train"]
    monitor = PackingMonitor()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[monitor],
    )
    trainer.fit(Recorder(), EnergonPackDataModule(rows, num_workers=0, epochs=1))
    assert float(trainer.callback_metrics["packing/fill_epoch"]) == pytest.approx(split.fill, abs=1e-6)
    assert float(trainer.callback_metrics["packing/gap_to_bound_epoch"]) == pytest.approx(split.gap, abs=1e-6)


def test_a_manifest_that_cannot_be_read_is_an_error(copied: Path) -> None:
    text = (copied / "manifest.json").read_text()
    for changed, said in (
        (text[:-30], "is damaged"),
        (text.replace('"format": 1', '"format": 9'), "has format 9, this version reads 1 and 2"),
        (text.replace('"pad_id"', '"pad"'), r"is damaged \(KeyError: 'pad_id'\)"),
    ):
        assert changed != text
        (copied / "manifest.json").write_text(changed)
        with pytest.raises(ManifestError, match=f"{said}.*remove the folder yourself"):
            module(copied)
    # Someone else's file is none of ours.
    (copied / "manifest.json").write_text('{"name": "an app"}')
    assert Manifest.read(copied) is None
