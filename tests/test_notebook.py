"""How objects show in a notebook and in a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_pack import ContextSlice, PackedBatch, PackingMonitor, PackingPolicy, ParallelLayout, markup
from lightning_pack.callbacks.monitor import LeftOutWarning
from lightning_pack.collated.rectangle import pack_collated
from lightning_pack.markup import MOST_PARTS, Part
from lightning_pack.source import EncodedSource, Pack
from tests.padded_batches import pad
from tests.test_monitor import EvaluatedModel, Loader, trainer
from tests.tiny_models import make_sources

POLICY = PackingPolicy(capacity=32, multiple=4, width="fixed")
EVIL = "<script>'a' & \"b\"</script>"


class Page(HTMLParser):
    """What a browser would make of it: every tag closed, and its texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.rects: list[dict[str, str | None]] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)
        if tag == "rect":
            self.rects.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def widths(self) -> list[float]:
        """Of the parts of bars, of 1000."""
        return [float(rect["width"] or 0) for rect in self.rects]


def page(thing: object) -> Page:
    html = thing._repr_html_()  # type: ignore[attr-defined]
    # Colours of the page show through: no text has one of its own.
    assert not re.search(r"[\";]color:|background:(?!#)", html)
    return Page(html)


def sources() -> list[EncodedSource]:
    long = EncodedSource.of(EVIL, torch.arange(10))
    long.labels[:4] = -100
    return [long, EncodedSource.of("b", torch.arange(5)), EncodedSource.dropped("gone<b>", "overlength", 99)]


def test_a_policy_shows_what_was_chosen_first() -> None:
    shown = page(PackingPolicy(capacity=4096, multiple=8, overlength="split"))
    at = shown.texts.index("defaults")
    assert shown.texts[:at] == ["PackingPolicy", "capacity", "4096", "multiple", "8", "overlength", "'split'"]
    assert "buffer_size" in shown.texts[at:]
    assert len(repr(PackingPolicy(capacity=4096))) < 600


def test_a_source_shows_its_targets() -> None:
    first, _, gone = sources()
    shown = page(first)
    assert shown.widths() == [400.0, 600.0]
    assert f"EncodedSource {EVIL}" in shown.texts
    assert "6 target tokens" in shown.texts
    assert "script" not in shown.tags
    assert {"gone<b>", "overlength", "99"} <= set(page(gone).texts)


def test_a_pack_shows_its_row() -> None:
    pack = POLICY.build(sources())
    shown = page(pack)
    # 10 tokens and 2 pads, 5 tokens and the rest of 32 slots.
    assert shown.widths() == [312.5, 62.5, 156.25, 468.75]
    assert {EVIL, "b", "gone<b>", "15 real tokens in 32 slots, 46.9%", "2 pads between sources", "15 at the end"} <= {
        *shown.texts
    }
    assert repr(pack) == "Pack(2 sources, 15 real tokens in a row of 32, 1 left out)"
    empty = Pack([], None, left_out=pack.left_out)
    assert repr(empty) == "Pack(0 sources, no row, 1 left out)"
    assert "gone<b>" in page(empty).texts


def test_a_batch_shows_boundaries_targets_and_fill() -> None:
    batch = PackedBatch.from_packs([POLICY.build(sources())], pad_id=0)
    shown = page(batch)
    assert shown.widths() == [312.5, 62.5, 156.25, 468.75]
    rows = "|".join(shown.texts)
    assert f"|{EVIL}|10|2|6|0|b|5|15|4|0|" in rows
    assert "|input_ids|int64|[1, 32]|cpu|" in rows
    assert repr(batch) == "PackedBatch(2 sources, 15 real tokens in a row of 32, 46.9%, 1 left out, on cpu)"
    blank = PackedBatch.from_packs([Pack([], None)], pad_id=0)
    assert "an empty row" in page(blank).texts


def test_a_batch_with_a_fixed_number_of_boundaries_shows_its_sources_only() -> None:
    policy = PackingPolicy(capacity=32, width="fixed", max_sources=8, fixed_boundaries=True)
    batch = PackedBatch.from_packs([policy.build(sources()[:2])], pad_id=0)
    assert len(batch.cu_seqlens) == 9
    assert page(batch).widths() == [312.5, 156.25, 531.25]


def test_part_of_a_row_says_so() -> None:
    batch = PackedBatch.from_packs([POLICY.build(sources())], pad_id=0)
    part = ContextSlice.of(batch, layout=ParallelLayout(context=2), rank=1)
    assert {"ContextSlice: 2 sources in a row of 32", "targets here"} <= set(page(part).texts)
    assert repr(part).startswith("ContextSlice(rank 1 of 2, 16 tokens of PackedBatch(2 sources, 15 real")


def test_many_sources_are_drawn_and_listed_in_part() -> None:
    policy = PackingPolicy(capacity=2048, multiple=4)
    many = [EncodedSource.of(f"s{i}", torch.arange(3)) for i in range(400)]
    html = PackedBatch.from_packs([policy.build(many)], pad_id=0)._repr_html_()
    shown = Page(html)
    # Sources of both shades, pads between them, the pad at the end.
    assert len(shown.rects) == 4
    assert sum(shown.widths()) == pytest.approx(1000, abs=0.1)
    assert "and 384 more" in shown.texts
    assert len(html) < 20_000


def test_a_bar_with_too_many_parts_keeps_the_sizes_of_each_kind() -> None:
    parts = [Part(size=1 + i % 2, kind="token" if i % 2 else "tail", title=str(i)) for i in range(MOST_PARTS + 2)]
    assert Page(markup.bar(parts)).widths() == [pytest.approx(1000 / 3, abs=0.01), pytest.approx(2000 / 3, abs=0.01)]
    assert len(Page(markup.bar(parts[:MOST_PARTS])).rects) == MOST_PARTS
    assert markup.bar([Part(size=0, kind="tail", title="")]) == ""


def row(*lengths: int, left_out: Sequence[tuple[str, str, int]] = ()) -> PackedBatch:
    packed = [EncodedSource.of(f"s{n}", torch.arange(n)) for n in lengths]
    return PackedBatch.from_packs([POLICY.build([*packed, *(EncodedSource.dropped(*gone) for gone in left_out)])], pad_id=0)


def test_a_monitor_shows_what_was_counted_so_far(tmp_path: Path) -> None:
    monitor = PackingMonitor(policy=POLICY, summary=False)
    assert repr(monitor) == "PackingMonitor(no batch was counted yet)"
    assert "no batch was counted yet" in page(monitor).texts
    during: list[tuple[str, Page]] = []

    class Looking(EvaluatedModel):
        def on_train_batch_end(self, *_: object) -> None:
            during.append((repr(monitor), page(monitor)))

    run = trainer(tmp_path, monitor, logger=CSVLogger(tmp_path), max_steps=2, num_sanity_val_steps=0)
    with pytest.warns(LeftOutWarning):
        run.fit(Looking(), Loader([row(9, 7, left_out=[(EVIL, "corrupt", 3)]), row(32)]), Loader([row(16)]))
    # The module's hook comes after those of callbacks.
    (first, shown), (second, _) = during
    assert first == "PackingMonitor(train: 1 packs, fill 50.00%)"
    assert second == "PackingMonitor(train: 2 packs, fill 75.00%)"
    assert shown.widths() == [437.5, 62.5, 125.0, 375.0]
    assert repr(monitor) == "PackingMonitor(train: 2 packs, fill 75.00%; validation: 1 packs, fill 50.00%)"
    shown = page(monitor)
    assert {"train", "validation", "75.00%", "50.00%", EVIL, "corrupt"} <= set(shown.texts)
    assert shown.texts[0] == "PackingMonitor: counted so far"
    monitor._repr_html_()
    assert monitor.state_dict()["total"]["packs"] == 2


def test_a_row_of_a_padded_batch_shows_short() -> None:
    row = pack_collated(pad(make_sources([7, 3])), policy=PackingPolicy(capacity=16), name="batch")
    assert repr(row).startswith("CollatedRow(of a batch of 2 rows: PackedBatch(2 sources, 10 real tokens in a row of ")
    assert len(repr(row)) < 200
    assert page(row).texts[0].startswith("CollatedRow: 2 sources in a row of ")
