"""Packed rows of other systems: the same tokens, targets and boundaries, checked, and nothing guessed or run."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pack import EnergonPackDataModule, PackedBatch, PackingPolicy
from lightning_pack.cli import main
from lightning_pack.encoders import RecordEncoder
from lightning_pack.offline import GivenRowError, Manifest, ManifestError, convert, verify
from lightning_pack.offline.collated import boundaries
from lightning_pack.offline.megatron_bridge import _objects
from lightning_pack.prepare import train_tokenizer
from lightning_pack.source import IGNORE
from tests.conftest import vectors
from tests.numbers_data import lengths, records_of, write_webdataset
from tests.packed_rows import pack_rows, sources_of

parquet = pytest.importorskip("pyarrow.parquet")
pyarrow = pytest.importorskip("pyarrow")


def replay(rows: Path, **options: Any) -> list[PackedBatch]:
    """The rows in the order in which they are stored."""
    data = EnergonPackDataModule(rows, num_workers=0, shuffle_buffer_size=0, max_samples_per_sequence=None, epochs=1, **options)
    data.setup("fit")
    return sorted(data.train_dataloader(), key=lambda batch: batch.source_keys)


#: Two sources of 4 and 3 tokens; the loss counts the predictions of 12, 13 and 22. Entries at the ends of sources mean nothing.
ROW = {"input_ids": [10, 11, 12, 13, 20, 21, 22], "loss_mask": [0, 1, 1, 1, 0, 1, 0], "seq_start_id": [0, 4]}
LABELS = [IGNORE, IGNORE, 12, 13, IGNORE, IGNORE, 22]


def write_parquet(path: Path, rows: list[dict[str, list[int]]]) -> Path:
    kinds = {"input_ids": pyarrow.int32(), "loss_mask": pyarrow.int8(), "seq_start_id": pyarrow.int32()}
    schema = pyarrow.schema([(name, pyarrow.list_(kind)) for name, kind in kinds.items() if name in rows[0]])
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path)
    return path


def write_npy(path: Path, rows: list[Any]) -> Path:
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    np.save(path, array, allow_pickle=True)
    return path


@pytest.mark.parametrize("form", ["data.idx.parquet", "data.npy", "arrays.npy"])
def test_megatron_bridge_rows(tmp_path: Path, form: str) -> None:
    second = {"input_ids": [5, 6, 99, 99], "loss_mask": [1, 0, 0, 0], "seq_start_id": [0]}
    rows: list[Any] = [ROW, second]
    if form == "arrays.npy":
        rows = [{name: np.array(value) for name, value in row.items()} | {"note": [1.5, None, "x"]} for row in rows]
    file = (write_parquet if form.endswith("parquet") else write_npy)(tmp_path / form, rows)
    made = convert(file, tmp_path / "rows", multiple=4)
    assert made.manifest.origin == "megatron-bridge"
    first, other = replay(tmp_path / "rows")
    assert first.input_ids.tolist() == [[*ROW["input_ids"], 0]]
    assert first.labels.tolist() == [[*LABELS, IGNORE]]
    assert first.cu_seqlens.tolist() == [0, 4, 7]
    assert first.cu_seqlens_padded.tolist() == [0, 4, 8]
    assert first.source_keys == [f"{form}[0]#0", f"{form}[0]#1"]
    # Pads inside of a source are tokens of it: they are not looked for.
    assert (other.cu_seqlens.tolist(), other.labels.tolist()) == ([0, 4], [[IGNORE, 6, IGNORE, IGNORE]])
    assert verify(tmp_path / "rows").sources == 3
    assert not convert(file, tmp_path / "rows", multiple=4).fresh
    with pytest.raises(ValueError, match=r"packing\.multiple: 4 there, 1 asked for"):
        convert(file, tmp_path / "rows")
    # One that is no power of two.
    assert convert(file, tmp_path / "sixes", multiple=6).manifest.packing["capacity"] == 12
    with pytest.raises(ValueError, match="multiple=0: a whole number of at least 1"):
        convert(file, tmp_path / "none", multiple=0)


def test_what_the_other_system_feeds_is_what_is_trained_here(tmp_path: Path) -> None:
    """Inputs without the last token and targets without the first, as its reader makes them, give the same pairs."""
    convert(write_parquet(tmp_path / "data.parquet", [ROW]), tmp_path / "rows")
    (batch,) = replay(tmp_path / "rows")
    bounds = [*ROW["seq_start_id"], len(ROW["input_ids"])]
    pairs = []
    for start, end in pairwise(bounds):
        ids, mask = ROW["input_ids"][start:end], ROW["loss_mask"][start:end]
        pairs += [(ids[: t + 1], ids[t + 1]) for t in range(len(ids) - 1) if mask[t]]
    found = []
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        for t in range(start, end):
            if batch.loss_mask[0, t]:
                found.append((batch.input_ids[0, start : t + 1].tolist(), int(batch.shift_labels[0, t])))
    assert found == pairs
    assert len(pairs) == 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seq_start_id": [1, 4]}, r"seq_start_id is \[1, 4\] and must begin at 0"),
        ({"seq_start_id": []}, r"seq_start_id is \[\] and must begin at 0"),
        ({"seq_start_id": [0, 5, 4]}, r"seq_start_id \[0, 5, 4\] decreases"),
        ({"seq_start_id": [0, 9]}, "goes beyond the row of 7 tokens"),
        ({"loss_mask": [1, 1]}, "loss_mask has 2 values for 7 tokens"),
        ({"loss_mask": [0, 2, 0, 0, 0, 0, 0]}, "loss_mask holds 0 to 2: 0 and 1 are known"),
        ({"input_ids": [-5, 1, 1, 1, 1, 1, 1]}, "has the token ids -5 to 1"),
    ],
)
def test_a_row_that_is_wrong_is_named_or_skipped(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    file = write_parquet(tmp_path / "data.parquet", [ROW, ROW | change, ROW])
    with pytest.raises(GivenRowError, match=rf"data\.parquet\[1\].*{text}|{text}"):
        convert(file, tmp_path / "rows")
    assert not (tmp_path / "rows").exists()
    made = convert(file, tmp_path / "rows", on_bad_row="skip")
    (gone,) = made.manifest.splits["train"].left_out.items()
    assert (gone[0], gone[1].sources, list(gone[1].examples)) == ("corrupt", 1, ["data.parquet[1]"])
    assert len(replay(tmp_path / "rows")) == 2


def test_an_empty_source_is_left_out_and_counted(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "data.parquet", [ROW | {"seq_start_id": [0, 4, 4]}])
    made = convert(file, tmp_path / "rows")
    assert made.manifest.splits["train"].left_out["empty"].examples == ["data.parquet[0]#1"]
    (batch,) = replay(tmp_path / "rows")
    assert batch.source_keys == ["data.parquet[0]#0", "data.parquet[0]#2"]
    assert batch.labels.tolist() == [LABELS]


def test_rows_longer_than_the_capacity_are_refused(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "data.parquet", [ROW])
    with pytest.raises(GivenRowError, match=r"data\.parquet\[0\] takes up 8 places, more than capacity=4"):
        convert(file, tmp_path / "rows", capacity=4, multiple=4)
    made = convert(file, tmp_path / "rows", capacity=100)
    assert made.manifest.packing["capacity"] == 100
    with pytest.raises(ManifestError, match=r"packing\.capacity: 100 in the rows, 64 now"):
        replay(tmp_path / "rows", packing=PackingPolicy(64))
    with pytest.raises(ManifestError, match=r"encoder: not known for these rows, which were converted"):
        replay(tmp_path / "rows", tokenizer=train_tokenizer(["a b"], vocab_size=270))


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


class Sly:
    """Asks for a built-in function."""

    def __reduce__(self) -> Any:
        return builtins.eval, ("__import__('pathlib').Path('ran').touch()",)


@pytest.mark.parametrize("harm", [Harmful(), Sly()])
def test_a_pickle_is_not_run(tmp_path: Path, harm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_npy(tmp_path / "data.npy", [ROW, harm])
    pickle.loads(file.read_bytes()[128:])
    assert Path("ran").exists(), "it would run"
    shutil.rmtree("ran") if Path("ran").is_dir() else Path("ran").unlink()
    with pytest.raises(
        ValueError, match=r"is not read: its pickle holds more than dicts.*it asks for \w+\.\w+.*Nothing of it was"
    ):
        convert(file, tmp_path / "rows")
    assert not Path("ran").exists()


ADDRESS = b"\x01" * 8


class Called:
    """An array whose object is an address."""

    def __reduce__(self) -> Any:
        return np.ndarray, ((1,), np.dtype("O"), ADDRESS)


class Hidden:
    """A dtype that hides that it holds objects."""

    def __reduce__(self) -> Any:
        return np.dtype, ("V8", False, True), (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)


class Filled:
    """An array that is filled with other content than it says."""

    def __init__(self, kind: Any, content: Any) -> None:
        self.kind, self.content = kind, content

    def __reduce__(self) -> Any:
        make, given, _ = np.empty(0, dtype=object).__reduce__()  # type: ignore[misc]
        return make, given, (1, (3,), self.kind, False, self.content)


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (Called(), r"not callable"),
        (Filled(Hidden(), ADDRESS * 3), r"it asks for the dtype 'V8'"),
        (Filled(np.dtype([("a", "O")]), [(1,)] * 3), r"it asks for the dtype 'V8'"),
        (Filled(np.dtype("O"), ADDRESS * 3), r"it holds an array of 3 objects that are no such list"),
        (Filled(np.dtype("O"), []), r"it holds an array of 3 objects that are no such list"),
        (Filled(np.dtype("i8"), ADDRESS), r"it holds an array of 3 int64 in another number of bytes"),
    ],
)
def test_a_pickle_cannot_name_addresses(tmp_path: Path, harm: Any, text: str) -> None:
    file = write_npy(tmp_path / "data.npy", [ROW, harm])
    # Where an address is read, the process ends.
    with pytest.raises(ValueError, match=rf"data\.npy is not read.*{text}"):
        convert(file, tmp_path / "rows")


def test_arrays_of_every_plain_kind_are_read(tmp_path: Path) -> None:
    fortran = np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3))
    held = [fortran, np.array([1.5]), np.array(["ä"]), np.int64(7), np.bool_(True), np.array([{"a": [1]}, None]), b"ab"]
    file = write_npy(tmp_path / "data.npy", [held, {"x": 1}])
    found, other = _objects(file)
    assert other == {"x": 1}
    for before, after in zip(held, found, strict=True):
        assert np.array_equal(before, after)


def test_files_of_no_known_format_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "plain.npy", np.zeros((2, 3)))
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    (tmp_path / "broken.parquet").write_bytes(b"nothing")
    (tmp_path / "text.jsonl").write_text('{"text": "a"}')
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "x.csv").write_text("1,2")
    write_parquet(tmp_path / "columns.parquet", [{"input_ids": [1]}])
    parquet.write_table(pyarrow.Table.from_pylist([dict.fromkeys(ROW, 1)]), tmp_path / "numbers.parquet")
    for name, text in (
        ("plain.npy", "packed rows are an array of dicts"),
        ("broken.npy", r"is no \.npy file"),
        ("broken.parquet", "cannot be read as Parquet"),
        ("columns.parquet", "has the columns input_ids; packed rows need input_ids, loss_mask, seq_start_id"),
        ("numbers.parquet", r"the column input_ids of .* is int64; packed rows hold a list of whole numbers in each row"),
        ("text.jsonl", "neither a packed chat"),
        ("empty.jsonl", r"empty\.jsonl holds no rows"),
        ("x.csv", "is of no known format"),
        ("missing.npy", "there is no file or folder"),
    ):
        with pytest.raises(ValueError, match=text):
            convert(tmp_path / name, tmp_path / "rows")


@pytest.mark.parametrize("multiple", [1, 8])
def test_parquet_files_are_written_and_read_again(tmp_path: Path, multiple: int, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_webdataset(tmp_path / "data", {"train": records_of(lengths(120, most=30)), "val": records_of([5, 6, 7])})
    rows = pack_rows(data, tmp_path / "rows", multiple=multiple, shards=2).path
    main(["convert", str(rows), str(tmp_path / "theirs"), "--to", "megatron-bridge"])
    files = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert files == [f"{split}-000{i}.idx.parquet" for split in ("train", "val") for i in range(2)][: len(files)]
    table = parquet.read_table(tmp_path / "theirs" / files[0])
    assert {field.name: str(field.type.value_type) for field in table.schema} == {
        "input_ids": "int32",
        "loss_mask": "int8",
        "seq_start_id": "int32",
    }
    train = tmp_path / "train"
    train.mkdir()
    for path in (tmp_path / "theirs").glob("train-*"):
        path.rename(train / path.name)
    back = convert(train, tmp_path / "back")
    assert back.manifest.splits["train"].rows == Manifest.read(rows).splits["train"].rows  # type: ignore[union-attr]
    ours, theirs = (sources_of(replay(folder)) for folder in (rows, tmp_path / "back"))
    assert len(ours) == 120
    # Here a source begins with its number: keys are not kept, and the rest is the same, but for pads where they were asked for.
    ours_by_id, theirs_by_id = ({source[0][0]: source for _, source in each} for each in (ours, theirs))
    assert set(ours_by_id) == set(theirs_by_id)
    for number, source in ours_by_id.items():
        n = len(source[0])
        other = theirs_by_id[number]
        assert tuple(part[:n] for part in other) == source
        assert other[0][n:] == (0,) * (len(other[0]) - n)
        assert (len(other[0]) - 1) % multiple == 0
        assert len(other[0]) == n or multiple > 1
        assert set(other[1][n:]) <= {IGNORE}
    assert "written" in capsys.readouterr().out


SYSTEM = {"role": "system", "content": "be brief"}
TURN = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so it is"}]


def test_packed_chats(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["why so it is be brief"] * 5, vocab_size=300)
    encoder = RecordEncoder(tokenizer)
    long = [SYSTEM, {"role": "user", "content": "why"}, {"role": "assistant", "content": "so it is " * 30}]
    rows = [[*TURN, SYSTEM, *TURN, *TURN], [SYSTEM, *TURN, SYSTEM, TURN[0], *long]]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": messages}) for messages in rows) + "\n\n")
    parts = [TURN, [SYSTEM, *TURN, *TURN], [SYSTEM, *TURN], long]
    sources = [encoder("k", {"messages": part}) for part in parts]
    capacity = 100
    assert len(sources[3]) > capacity > sum(map(len, sources[:2]))
    made = convert(file, tmp_path / "rows", capacity=capacity, tokenizer=tokenizer)
    first, second = replay(tmp_path / "rows", tokenizer=tokenizer)
    assert first.source_keys == ["chats.jsonl[1]#0", "chats.jsonl[1]#1"]
    assert first.input_ids[0].tolist() == [*sources[0].input_ids.tolist(), *sources[1].input_ids.tolist()]
    assert first.labels[0].tolist() == [*sources[0].labels.tolist(), *sources[1].labels.tolist()]
    assert second.source_keys == ["chats.jsonl[2]#0"]
    gone = made.manifest.splits["train"].left_out
    assert {reason: (each.sources, list(each.examples)) for reason, each in gone.items()} == {
        "no_targets": (1, ["chats.jsonl[2]#1"]),
        "overlength": (1, ["chats.jsonl[2]#2"]),
    }
    cut = convert(file, tmp_path / "cut", capacity=capacity, multiple=4, overlength="truncate", tokenizer=tokenizer)
    _, second = replay(tmp_path / "cut")
    room = capacity - -(-len(sources[2]) // 4) * 4
    assert second.cu_seqlens.diff().tolist() == [len(sources[2]), room]
    assert cut.manifest.splits["train"].left_out["truncated"].tokens == len(sources[3]) - room
    with pytest.raises(ValueError, match=r"row of 'chats\.jsonl\[2\]#2': the row has \d+ tokens, more than capacity=100"):
        convert(file, tmp_path / "no", capacity=capacity, overlength="error", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="need a capacity"):
        convert(file, tmp_path / "no", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="give --tokenizer DIR"):
        convert(file, tmp_path / "no", capacity=64)
    file.write_text(file.read_text() + '{"messages": "none"}\n')
    with pytest.raises(GivenRowError, match=r"chats\.jsonl\[4\]: a row is"):
        convert(file, tmp_path / "no", capacity=64, tokenizer=tokenizer)


def test_a_chat_that_cannot_be_understood_is_an_error_or_is_counted(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["why so it is be brief"] * 5, vocab_size=300)
    file = tmp_path / "chats.jsonl"
    bad = [SYSTEM, {"role": "user", "content": 5}, TURN[1]]
    rows = [[*TURN, *bad, SYSTEM, *TURN], TURN]
    file.write_text("\n".join(json.dumps({"messages": messages}) for messages in rows) + "\n")
    with pytest.raises(GivenRowError, match=r"chats\.jsonl\[1\]#1 is no conversation .*: .+\. Mend it, or .*on-bad-row skip"):
        convert(file, tmp_path / "rows", capacity=200, tokenizer=tokenizer)
    assert not (tmp_path / "rows").exists()
    made = convert(file, tmp_path / "rows", capacity=200, tokenizer=tokenizer, on_bad_row="skip")
    gone = made.manifest.splits["train"].left_out
    assert {reason: (each.sources, list(each.examples)) for reason, each in gone.items()} == {
        "corrupt": (1, ["chats.jsonl[1]#1"])
    }
    first, second = replay(tmp_path / "rows")
    assert first.source_keys == ["chats.jsonl[1]#0", "chats.jsonl[1]#2"]
    assert second.source_keys == ["chats.jsonl[2]#0"]


def test_files_without_a_row_that_can_be_trained_on_say_why(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["why so it is be brief"] * 5, vocab_size=300)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [TURN[0], TURN[0]]}))
    with pytest.raises(ValueError, match=r"1 rows or sources of it are left out, such as chats\.jsonl\[1\]#0 \(no_targets\)"):
        convert(tmp_path / "chats.jsonl", tmp_path / "rows", capacity=64, tokenizer=tokenizer)
    none = {name: pyarrow.array([], pyarrow.list_(pyarrow.int32())) for name in ROW}
    parquet.write_table(pyarrow.table(none), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="no row for the split 'train' can be trained on: its files hold no rows"):
        convert(tmp_path / "none.parquet", tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_collated_boundaries_are_read() -> None:
    cases = vectors("offline")["collate"]
    assert any(-1 in each for case in cases for each in case["packed_cu_seqlens"])
    for case in cases:
        for i, expected in enumerate(case["cu"]):
            row = {name: case[name][i] for name in ("packed_cu_seqlens", "packed_cu_seqlens_lengths")}
            assert boundaries(row, "row") == expected
            assert boundaries({"packed_cu_seqlens": row["packed_cu_seqlens"]}, "row") == expected
            assert max(np.diff(expected)) == case["packed_max_seqlen"][i]


def vector_row() -> dict[str, Any]:
    row = vectors("offline")["row"]
    names = ("input_ids", "position_ids", "packed_cu_seqlens", "packed_max_seqlen", "token_mask")
    return {name: row[name] for name in names}


def batch_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize("form", ["jsonl", "npz", "pt"])
def test_a_row_that_is_padded_for_context_parallelism(tmp_path: Path, form: str) -> None:
    said = vectors("offline")["row"]
    row = vector_row()
    wide = row | {
        "packed_cu_seqlens": [0, 2, 4, 8],
        "position_ids": [0, 1, 0, 1, 0, 1, 2, 3],
        "token_mask": [1, 0, 1, 0, 1, 1, 0, 0],
    }
    narrow = row | {"packed_cu_seqlens": [0, 4, 8, -1]}
    batch = batch_of([narrow, wide]) | {"packed_cu_seqlens_lengths": [3, 4]}
    file = tmp_path / f"batch.{form}"
    if form == "jsonl":
        file.write_text(json.dumps(batch) + "\n" + json.dumps(row) + "\n")
    elif form == "npz":
        np.savez(file, **{name: np.array(value) for name, value in batch.items()})
    else:
        torch.save([{name: torch.tensor(value) for name, value in batch.items()}, row], file)
    convert(file, tmp_path / "rows", multiple=2)
    batches = replay(tmp_path / "rows")
    assert len(batches) == (2 if form == "npz" else 3)
    for found in [batches[0], *batches[2:]]:
        assert found.input_ids.tolist() == [said["input_ids"]]
        assert found.position_ids.tolist() == [said["position_ids"]]
        assert found.cu_seqlens_padded.tolist() == said["packed_cu_seqlens"]
        assert found.max_seqlen == said["packed_max_seqlen"]
        assert found.loss_mask.int().tolist() == [said["token_mask"]]
        # Targets are moved already, and none crosses the inner boundary.
        a, b = said["conversations"]
        assert found.shift_labels.tolist() == [[*a[1:], IGNORE, IGNORE, *b[1:], IGNORE, IGNORE]]
    assert batches[1].cu_seqlens_padded.tolist() == [0, 2, 4, 8]


def test_real_lengths_are_taken_where_they_are_said(tmp_path: Path) -> None:
    said = vectors("offline")["row"]
    file = tmp_path / "row.jsonl"
    file.write_text(json.dumps(vector_row() | {"packed_cu_seqlens_unpadded": [0, 3, 6]}))
    convert(file, tmp_path / "rows", multiple=4, pad_id=said["pad_id"])
    (batch,) = replay(tmp_path / "rows")
    assert (batch.cu_seqlens.tolist(), batch.cu_seqlens_padded.tolist()) == ([0, 3, 6], [0, 4, 8])
    assert batch.input_ids.tolist() == [said["input_ids"]]
    assert [list(source[0]) for _, source in sources_of([batch])] == said["conversations"]


def test_a_batch_that_is_none_is_named_or_skipped(tmp_path: Path) -> None:
    row = vector_row()
    file = tmp_path / "row.jsonl"
    for line, text in (("{bad", r"row\.jsonl\[1\]: the line is no JSON"), ("[1]", r"row\.jsonl\[1\] is a list, a batch is a")):
        file.write_text("\n".join([json.dumps(row), line, json.dumps(row)]))
        with pytest.raises(GivenRowError, match=text):
            convert(file, tmp_path / "rows")
        found = convert(file, tmp_path / "rows", on_bad_row="skip", overwrite=True).manifest.splits["train"]
        assert (found.rows, found.left_out["corrupt"].examples) == (2, ["row.jsonl[1]"])
        shutil.rmtree(tmp_path / "rows")


@pytest.mark.parametrize("pad_id", [-1, True, "0"])
def test_a_pad_id_is_a_token_id(tmp_path: Path, pad_id: Any) -> None:
    file = write_parquet(tmp_path / "data.parquet", [ROW])
    with pytest.raises(ValueError, match=rf"pad_id={pad_id!r}: a token id is needed"):
        convert(file, tmp_path / "rows", pad_id=pad_id)


def test_labels_of_a_collated_row_are_moved_already(tmp_path: Path) -> None:
    row = vector_row()
    shifted = [20, 2, IGNORE, IGNORE, 50, 2, IGNORE, IGNORE]
    file = tmp_path / "row.jsonl"
    file.write_text(json.dumps(row | {"labels": shifted}))
    convert(file, tmp_path / "rows")
    (batch,) = replay(tmp_path / "rows")
    assert batch.shift_labels.tolist() == [shifted]
    # A row that is full: the target of its last place is a token that the row does not hold, so it comes with it.
    full = row | {"token_mask": [1, 1, 0, 0, 1, 1, 1, 1], "labels": [20, 2, IGNORE, IGNORE, 50, 2, 99, 77]}
    file.write_text(json.dumps(full))
    convert(file, tmp_path / "full")
    (batch,) = replay(tmp_path / "full")
    assert batch.input_ids.tolist() == [[*row["input_ids"], 77]]
    assert batch.shift_labels.tolist() == [[*full["labels"], IGNORE]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"packed_cu_seqlens": [0, 4, -1, 8]}, "-1 fills up to the end and stands nowhere else"),
        ({"packed_cu_seqlens": [0, 4, 8, -1], "packed_cu_seqlens_lengths": 2}, "packed_cu_seqlens_lengths says 2"),
        (
            {"packed_cu_seqlens": [0, 4, 7]},
            "the last boundary is 7 and the row has 8 places; .* give the tail to the last source",
        ),
        ({"packed_cu_seqlens": [0, 5, 4, 8]}, "must begin at 0, never decrease"),
        ({"packed_cu_seqlens": [-1, -1]}, "must begin at 0, never decrease"),
        ({"packed_max_seqlen": 8}, "packed_max_seqlen is 8, the longest source takes up 4 places"),
        ({"position_ids": list(range(8))}, "position_ids do not begin at 0 with each source"),
        ({"token_mask": [1, 1, 0, 1, 1, 1, 0, 0]}, "a target that crosses a boundary is predicted from another source"),
        ({"token_mask": [1, 1, 0]}, "loss_mask has 3 values for 8 tokens"),
        ({"labels": [10, 20, 2, 99, 40, 50, 2, 99]}, "labels of a collated row are moved by one place"),
        ({"tokens": [1] * 8}, "has input_ids and tokens: keep one"),
        ({"token_mask": None}, r"loss_mask \(or token_mask\) is missing: give 1 where the loss counts the prediction"),
        ({"packed_cu_seqlens_unpadded": [0, 5, 6]}, r"#0 has 5 tokens in 4 places"),
    ],
)
def test_a_collated_row_that_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(each) for each in (vector_row(), vector_row() | change)))
    with pytest.raises(GivenRowError, match=text) as error:
        convert(file, tmp_path / "out")
    assert "rows.jsonl[1]" in str(error.value)
    assert convert(file, tmp_path / "out", on_bad_row="skip").manifest.splits["train"].left_out["corrupt"].sources == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_parquet(tmp_path / "data.parquet", [ROW] * 3)
    main(["convert", str(file), str(tmp_path / "rows"), "--val", str(file), "--capacity", "16"])
    said = capsys.readouterr().out
    assert "train: 6 sources in 3 rows" in said
    assert "pads that were put into a source before it was packed cannot be told" in said
    for args in (["--to", "megatron-bridge", "--capacity", "5"], ["--to", "other"]):
        with pytest.raises(SystemExit) as code:
            main(["convert", str(tmp_path / "rows"), str(tmp_path / "x"), *args])
        assert code.value.code == 2
    with pytest.raises(SystemExit) as code:
        main(["convert", str(file), str(tmp_path / "y"), "--overlength", "drop"])
    assert code.value.code == 1
    assert "overlength='drop' is not used" in capsys.readouterr().err
