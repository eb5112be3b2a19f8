"""Packed rows as people read them: real tokenizers and datasets, hostile texts, images."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lightning_pack import PackedBatch, PackingPolicy, cli, draw
from lightning_pack.encoders import RecordEncoder
from lightning_pack.first_rows import first_rows
from lightning_pack.offline import prepack
from lightning_pack.prepare import prepare_jsonl
from lightning_pack.prepare.tokenizer import train_tokenizer
from lightning_pack.source import EncodedSource
from lightning_pack.visible_text import visible
from tests.tiny_vision import image_processor, sample, vision_tokenizer, write_shards

pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
TOKENIZER = train_tokenizer(["what is a row of sources? a row of sources is a pack."] * 4, vocab_size=300)
HOSTILE = "\x1b[31mred\x1b]0;owned\x07\r\u202e<script>alert(1)</script> & \u2028\x9b2J"
POLICY = PackingPolicy(capacity=256, multiple=8, width="fixed")


def chat(answer: str, *, key: str) -> EncodedSource:
    messages = [{"role": "user", "content": "what is a row?"}, {"role": "assistant", "content": answer}]
    return RecordEncoder(TOKENIZER)(key, {"messages": messages})


def packed(*sources: EncodedSource) -> PackedBatch:
    return PackedBatch.from_packs([POLICY.build(list(sources))], pad_id=0)


def in_terminal(item: object, *, colours: bool = True) -> str:
    file = io.StringIO()
    system = "truecolor" if colours else None
    Console(file=file, force_terminal=True, color_system=system, width=200).print(item, soft_wrap=True)  # type: ignore[arg-type]
    return file.getvalue()


class Words(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.underlined: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(f"{tag} {dict(attrs).get('style')}")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().split()[0] == tag

    def handle_data(self, data: str) -> None:
        if "underline" in self.open[-1]:
            self.underlined.append(data)


def test_a_row_of_chats() -> None:
    batch = packed(chat("a pack.", key="first"), chat("sources", key="second"))
    picture = draw(batch, TOKENIZER)
    lengths = batch.cu_seqlens.diff().tolist()
    assert any(length % 8 for length in lengths), "there is alignment padding"
    assert picture.tail == 256 - int(batch.cu_seqlens_padded[1]) - lengths[1] > 0
    first, second = picture.sources
    assert (first.tokens, first.pads, second.pads) == (lengths[0], -lengths[0] % 8, 0)
    assert first.targets + second.targets == int((batch.labels != -100).sum())
    # Targets are what the assistant wrote, and the pieces are the text.
    assert [piece.text for piece in first.pieces if piece.target] == ["a pack.<|im_end|>"]
    assert "".join(piece.text for piece in first.pieces) == (
        "<|im_start|>user↵\nwhat is a row?<|im_end|>↵\n<|im_start|>assistant↵\na pack.<|im_end|>↵\n"
    )
    text = str(picture)
    assert text.startswith(f"row of 256: 2 sources, {sum(lengths)} real tokens, ")
    assert "--- 1 | first |" in text
    assert "«sources<|im_end|>»" in text
    assert f"[{picture.tail} pads]" in text
    # In colours, sources take turns and targets are bold and underlined; without them, there are marks.
    coloured = in_terminal(picture)
    assert "\x1b[1;4;36ma pack." in coloured
    assert "\x1b[1;4;35msources" in coloured
    assert "«" not in coloured
    assert in_terminal(picture, colours=False) == text + "\n"
    page = Words(picture._repr_html_())
    assert page.underlined == ["a pack.<|im_end|>", "sources<|im_end|>"]
    assert repr(picture) == f"RowPicture({picture.summary})"


def test_a_hostile_text_commands_neither_terminal_nor_page() -> None:
    source = chat(HOSTILE, key=HOSTILE)
    source_gone = EncodedSource.dropped(HOSTILE, "overlength", 3)
    assert HOSTILE in TOKENIZER.decode(source.input_ids)
    picture = draw(packed(source, source_gone), TOKENIZER, most=None)
    assert picture.left_out
    plain = str(picture)
    assert r"\x1b[31mred\x1b]0;owned\x07\r\u202e<script>" in plain
    assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028]", plain) == []
    coloured = re.sub(r"\x1b\[[0-9;]*m", "", in_terminal(picture))
    assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028]", coloured) == []
    assert "\x1b[31m" not in in_terminal(picture), "rich takes no code from the text"
    html = picture._repr_html_()
    assert set(Words(html).tags) <= {"div", "span", "b", "i"}
    assert "&lt;script&gt;" in html
    assert "\x1b" not in html
    assert visible("e\u0301 👩\u200d🔬 नमस्ते") == "e\u0301 👩\u200d🔬 नमस्ते", "scripts of the world stay as they are"


def test_many_turns_take_no_more_than_their_tokens() -> None:
    class Counted:
        def __init__(self) -> None:
            self.tokens = 0

        def get_vocab(self) -> dict[str, int]:
            return TOKENIZER.get_vocab()

        def decode(self, ids: list[int], **options: bool) -> str:
            self.tokens += len(ids)
            return str(TOKENIZER.decode(ids, **options))

    ids = torch.tensor(TOKENIZER("so many words, zwölf Ä 漢字 🙂 " * 200)["input_ids"])
    assert len(ids) > 4000
    labels = torch.where(torch.arange(len(ids)) % 40 < 20, ids, -100)
    policy = PackingPolicy(capacity=len(ids))
    batch = PackedBatch.from_packs([policy.build([EncodedSource.of("turns", ids, labels)])], pad_id=0)
    counted = Counted()
    pieces = draw(batch, counted, most=None).sources[0].pieces  # type: ignore[arg-type]
    assert len(pieces) > 200
    assert counted.tokens < 5 * len(ids)


def test_a_tokenizer_that_did_not_make_the_row_is_refused() -> None:
    last = max(TOKENIZER.get_vocab().values())
    assert draw(packed(EncodedSource.of("x", torch.tensor([3, last]))), TOKENIZER).sources[0].tokens == 2
    row = packed(EncodedSource.of("x", torch.tensor([3, last + 1])))
    with pytest.raises(ValueError, match=rf"holds the id {last + 1}, and those of the tokenizer end with {last}: give the"):
        draw(row, TOKENIZER)
    with pytest.raises(ValueError, match="tokenizer is a str: give a tokenizer of transformers, or None to draw ids"):
        draw(row, "data/tokenizer")  # type: ignore[arg-type]
    assert f"«{last + 1}»" in str(draw(row))


def test_long_sources_are_cut_and_ids_are_drawn_without_a_tokenizer() -> None:
    source = EncodedSource.of("long", torch.arange(100) + 5)
    picture = draw(packed(source), most=6)
    assert str(picture).splitlines()[2] == "5 «6 7 8» [... 94 tokens ...]«103 104»"
    assert "".join(piece.text for piece in draw(packed(source), most=None).sources[0].pieces) == " ".join(
        map(str, range(5, 105))
    )
    ids = TOKENIZER("zwölf Ä 漢字 🙂")["input_ids"]
    assert len(ids) > 15, "characters are several tokens"
    for split in range(1, len(ids)):
        labels = torch.tensor(ids)
        labels[:split] = -100
        drawn = draw(packed(EncodedSource.of("x", torch.tensor(ids), labels)), TOKENIZER).sources[0].pieces
        assert [piece.target for piece in drawn] == [False, True]
        if "\ufffd" not in drawn[0].text:
            assert drawn[0].text + drawn[1].text == "zwölf Ä 漢字 🙂"
    with pytest.raises(ValueError, match="a list cannot be drawn: give a PackedBatch"):
        draw([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="most=1: at least 2"):
        draw(packed(source), most=1)
    news = PackedBatch.from_packs([POLICY.build([EncodedSource.dropped("gone", "empty")])], pad_id=0)
    assert "left out before it: gone (empty)" in str(draw(news, TOKENIZER))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 12 chats, the folder of its tokenizer beside it, and packed rows of it."""
    folder = tmp_path_factory.mktemp("texts")
    TOKENIZER.save_pretrained(str(folder / "tokenizer"))
    answers = ["a row of sources " * (1 + i % 4) + f"number {i}" for i in range(12)]
    chats = [
        {"messages": [{"role": "user", "content": f"what is {i}? \x1b[31m"}, {"role": "assistant", "content": answer}]}
        for i, answer in enumerate(answers)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats))
    prepare_jsonl(
        folder / "chats.jsonl", folder / "data", tokenizer=folder / "tokenizer", val_fraction=0, shards=1, progress=False
    )
    prepack(folder / "data", folder / "rows", capacity=192, multiple=4, workers=0)
    return folder


def shown(*args: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = 0
    capsys.readouterr()
    try:
        cli.main(["inspect", *map(str, args)])
    except SystemExit as e:
        code = int(e.code or 0)
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return code, printed.out + printed.err


def test_rows_of_a_dataset_in_the_terminal(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    code, out = shown(texts / "data", "--show", 2, "--capacity", 192, "--multiple", 4, capsys=capsys)
    assert code == 0
    assert len(re.findall(r"^row of \d+: ", out, flags=re.MULTILINE)) == 2
    assert "\x1b" not in out
    assert r"\x1b[31m<|im_end|>" in out
    # All of it: the keys are those of the rows, in order.
    rows = list(first_rows(texts / "data", count=99, capacity=192, multiple=4))
    assert 2 < len(rows) < 12
    keys = [source.key for row in rows for source in row.sources]
    assert len(keys) == len(set(keys)) == 12
    assert re.findall(r"--- \d+ \| (\S+) \|", out) == [source.key for row in rows[:2] for source in row.sources]
    assert all(source.pads < 4 for row in rows for source in row.sources)
    assert "The data has no more rows" in shown(texts / "data", "--show", 99, "--capacity", 192, capsys=capsys)[1]


def test_packed_rows_are_drawn_as_they_are(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = shown(texts / "rows", "--show", 99, capsys=capsys)
    assert code == 0
    assert len(set(re.findall(r"--- \d+ \| (\S+) \|", out))) == 12
    assert "«a row of sources number 0<|im_end|>»" in out
    (texts / "rows" / "tokenizer").rename(texts / "elsewhere")
    code, out = shown(texts / "rows", "--show", 1, capsys=capsys)
    assert (code, "so ids are drawn: give --tokenizer DIR" in out, "im_end" in out) == (0, True, False)
    code, out = shown(texts / "rows", "--show", 1, "--tokenizer", texts / "elsewhere", capsys=capsys)
    assert (code, "im_end" in out) == (0, True)


def test_what_cannot_be_shown(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.ckpt").write_bytes(b"")
    (tmp_path / "a.yaml").write_text("model: 1\n")
    for args, code, text in (
        ((texts / "data", "--show", 0, "--capacity", 64), 1, "--show 0: at least 1 row"),
        ((texts / "data", "--show", 1), 1, "give --capacity N"),
        ((texts / "rows", "--show", 1, "--capacity", 64), 1, "packed rows, which are decided: leave --capacity out"),
        ((texts / "nowhere", "--show", 1, "--capacity", 64), 1, "there is no dataset at"),
        ((tmp_path / "empty", "--show", 1, "--capacity", 64), 1, "cannot be opened as"),
        ((tmp_path / "a.ckpt", "--show", 1, "--capacity", 64), 1, "is a checkpoint, which has no rows"),
        ((tmp_path / "a.yaml", "--show", 1, "--capacity", 64), 1, "has no 'splits', but model (the configuration of a run"),
        ((tmp_path / "a.yaml",), 1, "is data, and no checkpoint: '--show 3 --capacity N' draws"),
        ((texts / "data", "--show", 1, "--capacity", 64, "--tokenizer", tmp_path), 1, "no tokenizer can be loaded"),
        ((texts / "data", "--show", 1, "--capacity", 64, "--html", "a.html"), 2, "--show draws rows of a dataset"),
        ((texts / "data",), 1, "Of a dataset, '--show 3' draws the first rows"),
        ((texts / "data", "--full"), 2, "goes with --show N"),
    ):
        found, out = shown(*args, capsys=capsys)
        assert (found, text in out) == (code, True), (args, out)


def test_images_are_named_with_their_grid_and_tokens(tmp_path: Path) -> None:
    vision_tokenizer().save_pretrained(str(tmp_path / "tokenizer"))
    image_processor("qwen3_vl").save_pretrained(str(tmp_path / "tokenizer"))
    data = write_shards(tmp_path / "chats", {"train": [sample(i, (1, 3, 0, 2)[i % 4]) for i in range(8)]})
    rows = list(first_rows(data, count=99, capacity=256, vision="qwen3_vl", tokenizer=tmp_path / "tokenizer", most=60))
    sources = [source for row in rows for source in row.sources]
    notes = {source.key: [piece.text for piece in source.pieces if piece.note] for source in sources}
    counts = [sum("image" in note for note in each) for each in notes.values()]
    assert max(counts) >= 2
    assert 0 in counts
    assert any("tokens ...]" in note for each in notes.values() for note in each)
    for each in notes.values():
        for note in each:
            if found := re.fullmatch(r"\[image (\d+)x(\d+) -> (\d+) tokens\]", note):
                height, width, tokens = map(int, found.groups())
                assert tokens == height * width // 4 > 0
            else:
                assert "tokens ...]" in note
    assert not any("image_pad" in piece.text for source in sources for piece in source.pieces)
