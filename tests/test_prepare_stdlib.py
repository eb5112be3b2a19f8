import os
import subprocess
import sys
from collections import Counter

import pytest

from lightning_pack.encoders import RecordEncoder, load_tokenizer
from lightning_pack.prepare import PreparedDataset, prepare_stdlib, prepared, train_tokenizer
from lightning_pack.prepare.stdlib import documented
from lightning_pack.source import IGNORE
from tests.prepared_files import digests, members, read_back


@pytest.fixture(scope="session")
def stdlib(tmp_path_factory):
    return prepare_stdlib(tmp_path_factory.mktemp("data") / "stdlib", progress=False)


def test_thousands_of_records_of_long_tailed_lengths(stdlib):
    assert stdlib.fresh
    assert stdlib.train + stdlib.val > 3500
    assert 0.03 < stdlib.val / (stdlib.train + stdlib.val) < 0.07
    assert 1000 <= stdlib.lengths.count <= 2000
    assert stdlib.lengths.longest > 20 * stdlib.lengths.median > 600
    assert stdlib.lengths.left_out == {}
    assert sorted(stdlib.shards) == [*(f"train-{index:04d}.tar" for index in range(8)), "val-0000.tar"]
    text = stdlib.summary()
    assert f"{stdlib.train:,} training and {stdlib.val:,} validation records in 9 shards" in text


def test_records_are_questions_and_answers(stdlib):
    records = {**members(stdlib.path, "train"), **members(stdlib.path, "val")}
    assert len(records) == stdlib.train + stdlib.val
    question, answer = records["json-dumps.json"]["messages"]
    assert question["role"] == "user"
    assert "json.dumps" in question["content"]
    assert answer["content"].startswith("dumps(obj, *, skipkeys=False")
    assert "JSON formatted ``str``" in answer["content"]
    assert "json-encoder-JSONEncoder-iterencode.json" in records
    assert len(records["topics-assignment.json"]["messages"][1]["content"]) > 5000
    assert not any(part.startswith("_") for name in records for part in name.split("-"))
    assert not any(name.startswith(("test-", "idlelib-")) for name in records)
    wordings = Counter(record["messages"][0]["content"].split()[0] for record in records.values())
    assert len(wordings) >= 4


@pytest.mark.parametrize("workers", [0, 2])
def test_energon_gives_every_record_once(stdlib, workers):
    seen = {split: read_back(stdlib.path, split, workers=workers) for split in ("train", "val")}
    assert (len(seen["train"]), len(seen["val"])) == (stdlib.train, stdlib.val)
    expected = members(stdlib.path, "train") | members(stdlib.path, "val")
    got = {sample.__key__.split("/")[-1] + ".json": sample.record for samples in seen.values() for sample in samples}
    assert len(got) == stdlib.train + stdlib.val
    assert got == expected


def test_tokenizer_knows_the_template_and_the_answers_are_targets(stdlib):
    tokenizer = load_tokenizer(stdlib.tokenizer)
    assert len(tokenizer) == 4096
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    record = members(stdlib.path, "train")["json-dumps.json"]
    source = RecordEncoder(tokenizer)("k", record)
    question, answer = (message["content"] for message in record["messages"])
    whole = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    assert tokenizer.decode(source.input_ids) == whole
    assert tokenizer.decode(source.labels[source.labels != IGNORE]) == f"{answer}<|im_end|>"
    # It was trained on this language: a token is several characters.
    assert len(answer) > 2.5 * len(source)
    strange = "zażółć \N{SNOWMAN} \x00"
    assert tokenizer.decode(tokenizer(strange)["input_ids"]) == strange


def test_second_run_changes_nothing(stdlib):
    before = {file: file.stat().st_mtime_ns for file in stdlib.path.rglob("*")}
    again = prepare_stdlib(stdlib.path, progress=False)
    assert not again.fresh
    assert again.summary().startswith("already prepared")
    assert {file: file.stat().st_mtime_ns for file in stdlib.path.rglob("*")} == before
    assert (
        PreparedDataset(**{**vars(again), "fresh": True})
        == stdlib
        == PreparedDataset(**{**vars(prepared(stdlib.path)), "fresh": True})
    )


def test_other_settings_are_named_and_nothing_is_changed(stdlib):
    before = digests(stdlib.path)
    with pytest.raises(ValueError, match="other settings") as caught:
        prepare_stdlib(stdlib.path, vocab_size=512, val_fraction=0.1, progress=False)
    text = str(caught.value)
    assert "  vocab_size: 4096 there, 512 asked for\n" in text
    assert "  val_fraction: 0.05 there, 0.1 asked for\n" in text
    assert "shards" not in text
    assert "--overwrite" in text
    assert "another folder" in text
    assert digests(stdlib.path) == before


def test_another_process_writes_the_same_bytes(stdlib, tmp_path):
    code = "import sys; from lightning_pack.prepare import prepare_stdlib; prepare_stdlib(sys.argv[1], progress=False)"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "deep" / "other")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
    other = digests(tmp_path / "deep" / "other")
    assert len(other) == 9 + 3 + 3
    assert other == digests(stdlib.path)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["other"]


SOURCE = '''
"""A module's own text is not taken, however long it may be."""
import sys
raise SystemExit("sources are parsed, not run")
def short():
    """Too short."""
def public(a, *, b: int = 1):
    """A first line that is surely more than forty characters long.

        An indented line.
    """
    def inner(): "Inside a function there is nothing public, long as it may be."
def _private(): "A private function is not taken, however long its text may be."
if sys.platform == "win32":
    async def there(): "Defined on one platform, with more than forty characters."
else:
    class Here(Base, metaclass=Meta):
        "A class with a text of more than forty characters as well."
        @property
        def value(self): "A property with a text of more than forty characters."
def public(): "Defined a second time, with more than forty characters too."
'''


def test_what_is_documented(tmp_path):
    for name in ("pkg/__init__.py", "pkg/mod.py", "pkg/test/mod.py", "pkg/_hidden.py", "site-packages/mod.py", "bad-name.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def (")
    entries, skipped = documented(tmp_path)
    names = ["Here", "Here.value", "public", "there"]
    assert [entry.name for entry in entries] == sorted(f"{module}.{name}" for module in ("pkg", "pkg.mod") for name in names)
    entries = [entry for entry in entries if "mod" not in entry.name]
    assert [entry.kind for entry in entries] == ["class", "method", "function", "function"]
    assert entries[0].answer.startswith("class Here(Base)\n\nA class")
    assert entries[2].answer.startswith(
        "public(a, *, b: int=1)\n\nA first line that is surely more than forty characters long.\n\n"
    )
    assert skipped == {"source file that cannot be parsed": 1}


@pytest.mark.parametrize(("size", "said"), [(258, "at least 259"), (True, "whole number"), (3000.0, "whole number")])
def test_vocabulary_has_room_for_all_bytes(size, said):
    with pytest.raises(ValueError, match=said):
        train_tokenizer(["a"], vocab_size=size)
    assert len(train_tokenizer(["a"], vocab_size=259)) == 259
