import json
import random
from dataclasses import replace

import pytest

from lightning_pack import EnergonPackDataModule, PackingPolicy, plan, prepack
from lightning_pack.encoders import RecordEncoder, TemplateError, load_tokenizer
from lightning_pack.energon import check_group_field
from lightning_pack.prepare import BadLineError, prepare_jsonl, prepared, train_tokenizer
from lightning_pack.prepare.image_lines import ImageLineParser
from tests.prepared_files import digests, members, read_back

TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["what is the question, and what is the answer?"] * 5, vocab_size=300).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"weights that nobody wants copied")
    return folder


def write(path, lines):
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))
    return path


def records(count):
    rng = random.Random(0)
    forms = [
        lambda text: {"text": text, "id": 5},
        lambda text: {"prompt": text, "completion": text, "source": "x"},
        lambda text: {"messages": [*TURNS, {"role": "user", "content": text}, TURNS[1]], "meta": {}},
    ]
    return [forms[i % 3](f"{i}: " + "word " * rng.randrange(1, 60)) for i in range(count)]


def kept(record):
    """The form of a record, and its plain notes."""
    if "text" in record:
        return {"text": record["text"], "id": 5}
    if "messages" in record:
        return {"messages": record["messages"]}
    turns = [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["completion"]}]
    return {"messages": turns, "source": "x"}


def test_every_record_comes_back_once_with_its_line_number(tmp_path, tokenizer):
    given = records(200)
    file = write(tmp_path / "chats.jsonl", [b"\xef\xbb\xbf" + json.dumps(given[0]).encode(), b"", b"  \r", *given[1:]])
    dataset = prepare_jsonl(file, tmp_path / "out", tokenizer=tokenizer, val_fraction=0.2, shards=3, progress=False)
    assert dataset.fresh
    assert dataset.train + dataset.val == 200
    assert 20 < dataset.val < 60
    assert sorted(dataset.shards) == ["train-0000.tar", "train-0001.tar", "train-0002.tar", "val-0000.tar"]
    assert sum(dataset.shards.values()) == 200
    expected = {f"{1 if i == 0 else i + 3:010d}": kept(record) for i, record in enumerate(given)}
    train, val = read_back(dataset.path, "train"), read_back(dataset.path, "val")
    assert (len(train), len(val)) == (dataset.train, dataset.val)
    assert {sample.__key__.split("/")[-1]: sample.record for sample in train + val} == expected
    encoder = RecordEncoder(load_tokenizer(dataset.tokenizer))
    lengths = sorted(len(encoder("k", record)) for record in expected.values())
    assert (dataset.lengths.count, dataset.lengths.total) == (200, sum(lengths))
    assert (dataset.lengths.median, dataset.lengths.p95, dataset.lengths.longest) == (lengths[100], lengths[190], lengths[-1])
    assert not (dataset.tokenizer / "model.safetensors").exists()
    assert encoder.fingerprint() == RecordEncoder(load_tokenizer(tokenizer)).fingerprint()


def test_prepared_sources_are_grouped_by_a_field_of_their_lines(tmp_path, tokenizer):
    languages = ["de", "en", None, "fr"]
    lines = [{"text": f"{i} word", "language": languages[i % 4], "meta": {"nested": 1}} for i in range(60)]
    file = write(tmp_path / "texts.jsonl", lines)
    made = prepare_jsonl(file, tmp_path / "out", tokenizer=tokenizer, progress=False, shards=1)
    policy = PackingPolicy(256, buffer_size=16)
    data = EnergonPackDataModule(made.path, packing=policy, group_by="language", num_workers=0, epochs=1)
    data.setup("fit")
    rows = list(data.train_dataloader())
    data.teardown("fit")
    of_key = {f"{i + 1:010d}": languages[i % 4] for i in range(60)}
    groups = [{of_key[key.split("/")[-1]] for key in row.source_keys} for row in rows]
    assert max(len(row.source_keys) for row in rows) > 2
    assert all(len(group) == 1 for group in groups)
    assert {language for group in groups for language in group} == set(languages)
    # A field that no record has is no group; what is not plain is not kept.
    for wrong in ("lang", "meta"):
        message = rf"group_by='{wrong}': none of the \d+ records of '.*out' has a value in this field, .*\['language', 'text'\]"
        wrongly = EnergonPackDataModule(made.path, packing=policy, group_by=wrong, num_workers=0)
        with pytest.raises(ValueError, match=message):
            wrongly.setup("fit")
        with pytest.raises(ValueError, match=message):
            plan(made.path, capacity=256, group_by=wrong, sources=50)
        with pytest.raises(ValueError, match=message):
            prepack(made.path, tmp_path / "rows", capacity=256, group_by=wrong, workers=0)
    chat = ImageLineParser(tmp_path)(json.dumps({"messages": TURNS, "language": "de", "meta": {}}).encode())
    assert chat == {"messages": TURNS, "images": [], "language": "de"}
    last = write(tmp_path / "late.jsonl", [{"text": "a"}] * 30 + [{"text": "b", "language": "de"}])
    late = prepare_jsonl(last, tmp_path / "late", tokenizer=tokenizer, progress=False, shards=1, val_fraction=0)
    grouped = EnergonPackDataModule(late.path, packing=policy, group_by="language", num_workers=0)
    grouped.setup("fit")
    with pytest.raises(ValueError, match=r"none of the first 2 records"):
        check_group_field(replace(grouped.options, encoder=RecordEncoder(data.tokenizer, group_by="lang")), most=2)


def test_lengths_are_of_records_taken_evenly(tmp_path, tokenizer):
    # The first half is short, the second long: only an even choice has the right share of both.
    file = write(tmp_path / "texts.jsonl", [{"text": "a"}] * 2600 + [{"text": "a" * 20}] * 2600)
    dataset = prepare_jsonl(file, tmp_path / "out", tokenizer=tokenizer, progress=False)
    assert dataset.lengths.count == 1300
    assert dataset.lengths.total == 650 * 2 + 650 * 21


BAD = {
    "not UTF-8": b'{"text": "\xff"}',
    "not JSON": b'{"text": ',
    "not an object": b'["text"]',
    "no known fields": {"body": "x"},
    "unknown role": {"messages": [{"role": "tool", "content": "x"}, TURNS[1]]},
    "wrong role order": {"messages": [TURNS[1], TURNS[0], TURNS[1]]},
    "last message not the assistant's": {"messages": [*TURNS, TURNS[0]]},
    "content not a string": {"messages": [TURNS[0], {"role": "assistant", "content": [{"type": "text"}]}]},
    "empty answer": {"prompt": "x", "completion": " "},
    "empty message": {"messages": [{"role": "user", "content": ""}, TURNS[1]]},
    "empty text": {"text": ""},
    "broken unicode": b'{"text": "\\udc00"}',
    "no messages": {"messages": []},
}


@pytest.mark.parametrize("problem", BAD)
def test_each_kind_of_bad_line_is_told_by_number_or_counted(tmp_path, tokenizer, problem):
    file = write(tmp_path / "chats.jsonl", [{"text": "good"}, b"", BAD[problem], {"prompt": "a", "completion": "b"}])
    with pytest.raises(BadLineError) as caught:
        prepare_jsonl(file, tmp_path / "out", tokenizer=tokenizer, progress=False)
    text = str(caught.value)
    assert text.startswith(f"{file} has 1 bad line of 4:\n  line 3: ")
    assert "--on-bad-line skip" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl"]
    dataset = prepare_jsonl(file, tmp_path / "out", tokenizer=tokenizer, on_bad_line="skip", progress=False)
    assert dataset.skipped == {problem: 1}
    assert (dataset.train, dataset.val) == (1, 1)
    assert f"skipped 1: {problem} 1" in dataset.summary()
    assert prepared(tmp_path / "out").skipped == {problem: 1}


def test_deeply_nested_and_huge_values_are_bad_lines(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", [b"[" * 100_000, b'{"text": "a", "n": ' + b"1" * 10_000 + b"}", {"text": "good"}])
    with pytest.raises(BadLineError, match=r"(?s)has 2 bad lines of 3:\n  line 1: not JSON.*\n  line 2: not JSON"):
        prepare_jsonl(file, tmp_path / "out", tokenizer=tokenizer, progress=False)


def test_only_the_first_twenty_bad_lines_are_told(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", [{"text": "good"}, *[b"bad"] * 50])
    with pytest.raises(BadLineError, match="has 50 bad lines of 51, the first 20 of them") as caught:
        prepare_jsonl(file, tmp_path / "out", tokenizer=tokenizer, progress=False)
    told = [line for line in str(caught.value).splitlines() if line.startswith("  line ")]
    assert len(told) == 20
    assert told[-1] == "  line 21: not JSON: Expecting value at column 1"


@pytest.mark.parametrize(
    ("count", "fraction", "train", "val"),
    [(1, 0.5, 1, 0), (2, 0.001, 1, 1), (2, 0.999, 1, 1), (3, 0, 3, 0), (50, 0.001, 49, 1)],
)
def test_no_wanted_split_and_no_shard_is_empty(tmp_path, tokenizer, count, fraction, train, val):
    file = write(tmp_path / "a.jsonl", [{"text": str(i)} for i in range(count)])
    dataset = prepare_jsonl(file, tmp_path / "out", tokenizer=tokenizer, val_fraction=fraction, progress=False)
    assert (dataset.train, dataset.val) == (train, val)
    assert min(dataset.shards.values()) >= 1
    assert len(dataset.shards) == min(train, 8) + min(val, 1)
    assert len(read_back(dataset.path, "train")) == train
    assert len(members(dataset.path, "val")) == val
    assert ("val" in (dataset.path / ".nv-meta" / "split.yaml").read_text()) == (val > 0)


def test_two_runs_write_the_same_bytes_and_other_content_is_noticed(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", records(60))
    one = prepare_jsonl(file, tmp_path / "one", tokenizer=tokenizer, progress=False)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(file.read_bytes())
    prepare_jsonl(copy, tmp_path / "two", tokenizer=tokenizer, progress=False)
    before = digests(tmp_path / "one")
    assert len(before) == 9 + 3 + 3
    assert digests(tmp_path / "two") == before
    again = prepare_jsonl(copy, tmp_path / "one", tokenizer=one.tokenizer, progress=False)
    assert again.summary().startswith("already prepared")
    write(file, records(61))
    changed = r"one was prepared from other lines: the input file changed since, or is another one; all settings .*\. Prepare"
    with pytest.raises(ValueError, match=changed):
        prepare_jsonl(file, tmp_path / "one", tokenizer=tokenizer, progress=False)
    both = (
        r"other settings:\n  content: the input file changed since, or is another one\n  shards: 8 there, 2 asked for\nPrepare"
    )
    with pytest.raises(ValueError, match=both):
        prepare_jsonl(file, tmp_path / "one", tokenizer=tokenizer, shards=2, progress=False)
    other = load_tokenizer(tokenizer)
    other.add_tokens(["question"])
    other.save_pretrained(tmp_path / "tokenizer")
    vocabulary = (
        r"other settings:\n  tokenizer\.backend: the tokenizer has another vocabulary, or cuts texts by other rules\n"
        r"  tokenizer\.vocab_size: \d+ there, \d+ asked for\nPrepare"
    )
    with pytest.raises(ValueError, match=vocabulary):
        prepare_jsonl(copy, tmp_path / "one", tokenizer=tmp_path / "tokenizer", progress=False)
    assert digests(tmp_path / "one") == before
    dataset = prepare_jsonl(file, tmp_path / "one", tokenizer=tokenizer, overwrite=True, progress=False)
    assert dataset.fresh
    assert dataset.train + dataset.val == 61 == len(members(dataset.path, "train")) + len(members(dataset.path, "val"))


def test_records_that_training_will_leave_out_are_told(tmp_path, tokenizer):
    strict = load_tokenizer(tokenizer)
    strict.chat_template = (
        "{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('no') }}{%- endif -%}" + strict.chat_template
    )
    strict.save_pretrained(tmp_path / "strict")
    system = {"messages": [{"role": "system", "content": "Be brief."}, *TURNS]}
    file = write(tmp_path / "a.jsonl", [{"messages": TURNS}, system, system])
    dataset = prepare_jsonl(file, tmp_path / "out", tokenizer=tmp_path / "strict", progress=False)
    assert dataset.lengths.count == 1
    assert "2 more will be left out in training (corrupt 2)" in dataset.summary()


def test_chats_need_a_template(tmp_path, tokenizer):
    bare = load_tokenizer(tokenizer)
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    texts, chats = (
        write(tmp_path / "a.jsonl", [{"text": "a"}]),
        write(tmp_path / "b.jsonl", [{"text": "a"}, {"messages": TURNS}]),
    )
    assert prepare_jsonl(texts, tmp_path / "out", tokenizer=tmp_path / "bare", progress=False).train == 1
    with pytest.raises(
        TemplateError, match=r"no chat template: set .* a file chat_template\.jinja in the tokenizer's folder, or"
    ):
        prepare_jsonl(chats, tmp_path / "other", tokenizer=tmp_path / "bare", progress=False)
    assert not (tmp_path / "other").exists()
    # The way out is one.
    (tmp_path / "bare" / "chat_template.jinja").write_text(load_tokenizer(tokenizer).chat_template)
    assert prepare_jsonl(chats, tmp_path / "other", tokenizer=tmp_path / "bare", progress=False).lengths.count == 2


def test_bad_settings_are_refused_before_anything_is_written(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", [{"text": "a"}])
    for settings, said in [
        ({"shards": 0}, "shards=0: a whole number from 1 to 512"),
        ({"shards": 513}, "shards=513"),
        ({"val_fraction": 1.0}, "val_fraction=1.0: a number from 0 to less than 1"),
        ({"val_fraction": -0.1}, "val_fraction=-0.1"),
        ({"on_bad_line": "ignore"}, "on_bad_line='ignore' is not 'error' or 'skip'"),
        ({"tokenizer": tmp_path / "none"}, "none' does not exist"),
    ]:
        with pytest.raises(ValueError, match=said):
            prepare_jsonl(file, tmp_path / "out", **{"tokenizer": tokenizer, "progress": False, **settings})
    with pytest.raises(ValueError, match=r"b\.jsonl is no file"):
        prepare_jsonl(tmp_path / "b.jsonl", tmp_path / "out", tokenizer=tokenizer)
    empty = write(tmp_path / "empty.jsonl", [b"", b"bad"])
    with pytest.raises(ValueError, match="holds no records: 2 lines, 1 of them bad"):
        prepare_jsonl(empty, tmp_path / "out", tokenizer=tokenizer, on_bad_line="skip", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "empty.jsonl"]
