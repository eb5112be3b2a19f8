"""The report on a run: its numbers are those of the checkpoint, its page needs nothing else, its sources command nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightning_pack.callbacks.history import MOST, History, Stretch
from lightning_pack.callbacks.monitor import PackingMonitor
from lightning_pack.callbacks.summary import print_summary, summary_html
from lightning_pack.checkpoints.contents import Contents, DataState, Position
from lightning_pack.checkpoints.figures import remarks
from lightning_pack.checkpoints.record import TrainingRecord, training_record
from lightning_pack.metrics import PackingMetrics
from tests.test_inspect import inspected
from tests.test_monitor import POLICY, ROWS, Loader, TokenModel, row, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning_pack.callbacks.monitor.LeftOutWarning"),
]
HOSTILE = "<script>document.title='owned'</script>\x1b[2J\u202e&amp;<img src=http://a.example/x>"
VOID = {"meta", "br", "line", "path", "rect"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page(HTMLParser):
    """Checks that elements are balanced, and keeps what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.hints = 0
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.hints += tag == "rect"
        if tag not in VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with the checkpoints of steps 3 and 6, which left something out for two reasons."""
    folder = tmp_path_factory.mktemp("report")
    batches = [
        row(*lengths, left_out=((f"long{i}", "overlength", 40), (HOSTILE, f"odd {i}", 3)) if i in (1, 4) else ())
        for i, lengths in enumerate(ROWS)
    ]

    def save(run: Any, *_: Any) -> None:
        if run.global_step in (3, 6):
            run.save_checkpoint(folder / "run" / "version_0" / "checkpoints" / f"step={run.global_step}.ckpt")

    monitor = PackingMonitor(policy=POLICY, summary=False)
    trainer(folder, monitor, LambdaCallback(on_train_batch_end=save)).fit(TokenModel(), Loader(batches))
    return folder / "run"


def last(run: Path) -> Path:
    return run / "version_0" / "checkpoints" / "step=6.ckpt"


def monitor_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return checkpoint["callbacks"]["PackingMonitor"]


def changed(run: Path, path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    checkpoint = torch.load(last(run), weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path)
    return path


def test_the_page_tells_what_the_checkpoint_holds(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.html"
    code, out = inspected(run, "--html", path, capsys=capsys)
    assert code == 0
    chosen = f"version_0/checkpoints/step=6.ckpt was taken: it has the most steps, 6, of the 2 checkpoints in {run}."
    assert out == f"{chosen}\nwritten: {path}\n"
    total = monitor_state(torch.load(last(run), weights_only=True))["total"]
    assert (total["left_out/overlength"], total["left_out/other"], total["left_out_tokens/overlength"]) == (2, 2, 80)
    text = path.read_text()
    page = Page(text)
    for words in (
        chosen,
        f"Fill {100 * total['real_tokens'] / total['slots']:.2f} % real tokens of {total['slots']} slots",
        f"Real tokens seen {total['real_tokens']} ",
        f"Target tokens {total['target_tokens']} ",
        f"Sources seen {total['sources']} ",
        f"alignment padding {total['alignment_padding']} ",
        f"tail padding {total['slots'] - total['real_tokens'] - total['alignment_padding']} ",
        "overlength 2 80 longer than the capacity",
        "long1 long4",
        "other 2 6 a reason that the encoder gave itself",
        "step 6 · epoch 0",
        "over-length 80",
    ):
        assert words in page.text, (words, page.text)
    # Three loggings, in each chart: fill, waste, left out, throughput.
    charts = re.findall(r'<figure class="chart">', text)
    assert (len(charts), page.hints) == (4, 12)
    for step, rows in ((0, ROWS[:2]), (2, ROWS[2:4]), (4, ROWS[4:])):
        assert f"steps {step + 1} to {step + 2}: fill {100 * sum(map(sum, rows)) / 32:.5g} %" in page.text


def test_the_page_needs_nothing_else_and_runs_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspected(last(run), "--html", tmp_path / "a.html", capsys=capsys)[0] == 0
    text = (tmp_path / "a.html").read_text()
    page = Page(text)
    assert HOSTILE.partition("\x1b")[0] in page.text, "the key is shown as it is"
    assert r"\x1b[2J\u202e&amp;" in page.text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "<script" not in text
    assert "<img" not in text
    names = {name for _, name, _ in page.attributes}
    assert not names & {"src", "href", "srcset", "onload", "action", "xlink:href"}
    assert not [value for _, _, value in page.attributes if "url(" in value or "//" in value]
    style = text.partition("<style>")[2].partition("</style>")[0]
    assert "prefers-color-scheme: dark" in style
    assert "@media print" in style
    assert not re.search(r"url\(|@import|@font-face|//", style)
    assert "default-src 'none'" in text


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_a_browser_shows_it(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspected(last(run), "--html", tmp_path / "a.html", capsys=capsys)[0] == 0
    options = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        f"--disable-component-update --disable-sync --user-data-dir={tmp_path / 'profile'} --dump-dom"
    )
    command = [str(CHROMIUM), *options.split(), (tmp_path / "a.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "<title>step=6.ckpt - training report</title>" in dom
    assert dom.count("<figure") == 4
    assert "<img" not in dom


def test_the_terminal_tells_the_same(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out = inspected(run, capsys=capsys)
    assert code == 0
    assert "\x1b" not in out, "this is no terminal"
    assert "version_0/checkpoints/step=6.ckpt was taken" in out
    for pattern in (
        r"version_0/checkpoints/step=3.ckpt .* step 3",
        r"training   step 6, epoch 0",
        r"Fill +65\.62 % +real tokens of 96 slots",
        r"tail padding +16 +16\.67 % +slots",
        r"Left out for overlength: 2 sources, 80 tokens \(longer than",
        r"  for example long1, long4",
        r"fill +█\S+ +\d+\.\d\d % to 90\.62 %|fill +\S+█ +\d+\.\d\d % to 90\.62 %",
    ):
        assert re.search(pattern, out), (pattern, out)
    assert HOSTILE.partition("\x1b")[0] + r"\x1b[2J\u202e" in out


def test_json_has_the_record(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = json.loads(inspected(last(run), "--json", capsys=capsys)[1])["training"]
    assert training["real_tokens"] == sum(map(sum, ROWS))
    assert sum(point["real_tokens"] for point in training["points"]) == training["real_tokens"]
    assert training["left_out"] == {"overlength": 2, "other": 2}


def test_a_chart_has_ticks_that_are_true_and_shows_no_waste_where_there_is_none(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(checkpoint: dict[str, Any]) -> None:
        state = monitor_state(checkpoint)
        for counts in (state["total"], state["history"]["counts"]):
            counts["real_tokens"], counts["alignment_padding"] = counts["slots"], [0, 0, 0]
        state["total"]["alignment_padding"] = 0

    path = changed(run, tmp_path / "full.ckpt", fill)
    assert inspected(path, "--html", tmp_path / "a.html", capsys=capsys)[0] == 0
    text = (tmp_path / "a.html").read_text()
    assert "Fill 100.00 %" in Page(text).text
    assert re.findall(r">([\d.]+ %)</span>", text)[:5] == ["99.9 %", "99.925 %", "99.95 %", "99.975 %", "100 %"]
    assert re.findall(r"<h3>(.*?)</h3>", text) == ["Fill", "Tokens left out", "Throughput"]


def test_advice_fits_what_was_done(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def cut(checkpoint: dict[str, Any]) -> None:
        total = monitor_state(checkpoint)["total"]
        for kind in ("left_out", "left_out_tokens"):
            total[f"{kind}/truncated"], total[f"{kind}/overlength"] = total[f"{kind}/overlength"] - 1, 0
        total["left_out/other"] += 1
        total["left_out_tokens/other"] += 1

    path = changed(run, tmp_path / "cut.ckpt", cut)
    out = inspected(path, capsys=capsys)[1]
    assert "Left out for truncated: 1 source, 79 tokens" in out
    assert "larger packing.capacity, or overlength split, for plain text" in out
    assert "overlength truncate or split" in inspected(last(run), capsys=capsys)[1]


def test_rows_written_ahead_were_cut_then(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = Contents.read(last(run))
    settings = {"encoder.encoder": "packed rows", "encoder.rows": "0123"}
    position = Position(ranks=1, num_workers=0, passes_done=0, passes=None, places=(), counts={}, point=None, settings=settings)
    ahead = replace(contents, data=DataState(datamodule="any", version=1, bytes=1, position=position))
    record = training_record(torch.load(last(run), weights_only=True))
    assert isinstance(record, TrainingRecord)
    assert remarks(contents, record) == record.remarks()
    assert "is in the manifest.json of their folder" in remarks(ahead, record)[-1]


def test_a_key_commands_no_terminal_when_a_run_ends(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = PackingMetrics()
    metrics.update(row(3, left_out=((HOSTILE, "overlength", 9),)))
    print_summary({"train": metrics.stats(metrics.counts)}, {"train": {"overlength": [HOSTILE]}})
    printed = capsys.readouterr().out
    assert "train: left out for overlength: 1 source, 9 tokens, for example <script>" in printed
    assert r"\x1b[2J\u202e" in printed
    assert "\x1b" not in printed
    # Nor does it turn what a notebook shows after it.
    html = summary_html("title", {"train": metrics.stats(metrics.counts)}, {"train": {"overlength": [HOSTILE]}})
    assert r"&lt;script&gt;" in html
    assert "\u202e" not in html


def test_a_long_history_and_the_rest_after_it(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lengthen(checkpoint: dict[str, Any]) -> None:
        state, history = monitor_state(checkpoint), History()
        for i in range(3 * MOST):
            work = {"nanoseconds": 10**9, "timed_tokens": 5, "modelled_nanoseconds": 10**9, "operations": 4 * 10**12}
            history = history.added(
                Stretch(steps=2, ratios=3 << 32, packs=1, sources=1, real_tokens=8 + i % 5, target_tokens=7, slots=16, **work)
            )
        total = history.total
        state["history"] = history.to_plain()
        state["total"] |= {name: getattr(total, name) for name in ("packs", "sources", "real_tokens", "target_tokens")}
        state["total"] |= {
            "slots": total.slots + 16,
            "alignment_padding": 0,
            "imbalance": [total.steps + 1, total.ratios + 2**32],
        }

    path = changed(run, tmp_path / "long.ckpt", lengthen)
    record = training_record(torch.load(path, weights_only=True))
    assert isinstance(record, TrainingRecord)
    assert len(record.points) == 3 * MOST // 4 + 1
    assert (record.points[-1].steps, record.points[-1].slots, record.points[-1].nanoseconds) == (1, 16, 0)
    assert inspected(path, "--html", tmp_path / "a.html", capsys=capsys)[0] == 0
    page = Page((tmp_path / "a.html").read_text())
    assert "TFLOP/s 4" in page.text
    assert "Each point is of 4 loggings" in page.text
    assert "Rank imbalance" in page.text
    assert "imbalance 1.5" in page.text
    out = inspected(path, capsys=capsys)[1]
    assert re.search(r"TFLOP/s +▄{60}  always 4\n", out), out


def test_checkpoints_with_no_or_a_damaged_record_say_so(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def old(checkpoint: dict[str, Any]) -> None:
        del monitor_state(checkpoint)["history"], monitor_state(checkpoint)["examples"]

    changes: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (old, "There is no history in this checkpoint: the release that wrote it kept none."),
        (lambda c: c.pop("callbacks"), "No record of training: the run had no PackingMonitor"),
        (lambda c: monitor_state(c).update(version=9), "has version 9, this release reads version 2"),
        (lambda c: monitor_state(c).update(history=[]), "history in the checkpoint is damaged"),
        (lambda c: monitor_state(c)["total"].update(packs=-1), "numbers that no run can count to"),
        (lambda c: monitor_state(c)["total"].update(packs=1 << 60), "numbers that no run can count to"),
        (lambda c: monitor_state(c)["total"].update(packs=0), "its history has more than the whole"),
        (lambda c: monitor_state(c).update(total=7), "damaged: there is a int instead of its counts"),
        (lambda c: monitor_state(c)["total"].update(packs=float("inf")), "damaged: its packs hold inf, and should"),
        (lambda c: monitor_state(c)["total"].update(packs="9" * 5000), "damaged: its packs hold"),
        (lambda c: monitor_state(c)["total"].update(imbalance=[6, 10**400]), "damaged: its histograms hold"),
        # A few bytes in the file that would be terabytes as numbers.
        (
            lambda c: monitor_state(c)["total"].update(ages=torch.zeros(1, dtype=torch.int64).expand(10**12)),
            "damaged: its ages, lengths and imbalance hold 0,",
        ),
    ]
    for change, text in changes:
        path = changed(run, tmp_path / "changed.ckpt", change)
        code, out = inspected(path, capsys=capsys)
        assert (code, text in out, "step 6, epoch 0" in out) == (0, True, True), out
        assert inspected(path, "--html", tmp_path / "changed.html", capsys=capsys)[0] == 0
        assert text in Page((tmp_path / "changed.html").read_text()).text
        assert ("Fill" in out) == (change is old)


def test_the_newest_of_equal_steps_and_what_cannot_be_read(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(("a.ckpt", "b.ckpt", "broken.ckpt")):
        shutil.copy(last(run), tmp_path / name)
        os.utime(tmp_path / name, (1e9 + number, 1e9 + number))
    os.truncate(tmp_path / "broken.ckpt", 100)
    out = inspected(tmp_path, capsys=capsys)[1]
    assert "b.ckpt, the newest of 2 that have as many, was taken: it has the most steps, 6, of the 3 checkpoints" in out
    assert "(1 of which cannot be read)" in out
    (tmp_path / "a.ckpt").unlink()
    (tmp_path / "b.ckpt").unlink()
    code, out = inspected(tmp_path, "--html", tmp_path / "a.html", capsys=capsys)
    assert (code, "none of the 1 checkpoints in" in out, "says what is wrong with it" in out) == (1, True, True)


def test_what_cannot_be_written_or_found(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "note.txt").write_text("no checkpoint")
    for args, code, text in (
        ((last(run), "--html", tmp_path / "nowhere" / "a.html"), 1, "make it first, or name another file"),
        ((last(run), "--html", tmp_path / "folder.html"), 1, "is a folder: name a file in it"),
        ((last(run), "--html", last(run)), 1, "ends in .html"),
        # Nobody, not even root, may make a file there.
        ((last(run), "--html", "/proc/a.html"), 1, "name a file in a folder that you may write to"),
        ((last(run), "--html", tmp_path / "a.html", "--json"), 2, "give one of them"),
        ((tmp_path / "nowhere", "--html", tmp_path / "a.html"), 1, "there is no checkpoint at"),
        ((tmp_path / "note.txt",), 1, "no checkpoint that torch.save wrote"),
        ((tmp_path / "folder.html",), 1, "name the folder that the Trainer saved to"),
        ((last(run), "--capacity", "5"), 2, "goes with --show N"),
        ((last(run), "--show", "0"), 1, "--show 0: at least 1 row is needed"),
        ((tmp_path / "nowhere", "--show", "1", "--capacity", "8"), 1, "there is no dataset at"),
        ((last(run), "--show", "1", "--json"), 2, "this is for checkpoints"),
    ):
        if args[-1] == "/proc/a.html" and not Path("/proc").is_dir():
            continue
        found, out = inspected(*args, capsys=capsys)
        assert (found, text in out) == (code, True), (args, out)
    assert last(run).stat().st_size > 1000
