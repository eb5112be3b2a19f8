"""Small pieces of HTML for notebooks and reports: text, tables, bars. They look right on a light and on a dark page.

Colours of text and lines are those of the page; fills have a middle tone. Every text that comes in is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from lightning_pack.visible_text import visible

Kind = Literal["target", "token", "other_token", "alignment", "tail", "left_out"]

#: A bar with more parts than this is drawn with one part for each kind.
MOST_PARTS = 256
_COLORS: dict[Kind, str] = {
    "target": "#4c9f70",
    "token": "#4c78a8",
    "other_token": "#86a9cf",
    "alignment": "#e08a2c",
    "tail": "#8c8c8c",
    "left_out": "#cf5c60",
}
_CELL = "padding:2px 10px;border-bottom:1px solid rgba(128,128,128,.35)"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stretch of a bar.

    Args:
        size: tokens, or whatever the bar measures; 0 is not drawn.
        kind: gives the colour.
        title: shown where the mouse rests.
    """

    size: int
    kind: Kind
    title: str


def text(value: object) -> str:
    r"""Its ``str`` without the characters that mean something in HTML, quotation marks included; hidden ones are written out.

    >>> print(text("<b> & 'c'\u202e"))
    &lt;b&gt; &amp; &#x27;c&#x27;\u202e
    """
    return escape(visible(str(value)))


def card(title: str, *parts: str) -> str:
    """A heading and what is under it.

    Args:
        title: text.
        *parts: HTML.
    """
    return f'<div style="margin:4px 0"><div><b>{text(title)}</b></div>{"".join(parts)}</div>'


def line(words: str) -> str:
    """A line of text."""
    return f'<div style="margin:4px 0">{text(words)}</div>'


def note(words: str) -> str:
    """A line of text in a smaller size."""
    return f'<div style="font-size:90%;opacity:.75">{text(words)}</div>'


def table(rows: Iterable[Sequence[object]], *, headings: Sequence[str] = (), marked: int | None = None) -> str:
    """A table; the first column is left-aligned, the others are right-aligned.

    Args:
        rows: cells as text, as many in each.
        headings: of the columns; none where there are none.
        marked: number of the row that is bold.
    """
    head = f"<thead><tr>{_cells('th', headings)}</tr></thead>" if headings else ""
    body = ""
    for number, row in enumerate(rows):
        style = ' style="font-weight: bold"' if number == marked else ""
        body += f"<tr{style}>{_cells('td', row)}</tr>"
    # A page narrower than the table scrolls it.
    return (
        '<div style="overflow-x:auto;margin:4px 0"><table style="border-collapse:collapse;font-size:inherit">'
        f"{head}<tbody>{body}</tbody></table></div>"
    )


def _cells(tag: str, cells: Sequence[object]) -> str:
    sides = ["left", *["right"] * (len(cells) - 1)]
    return "".join(
        f'<{tag} style="{_CELL};text-align:{side}">{text(cell)}</{tag}>' for side, cell in zip(sides, cells, strict=True)
    )


def details(summary: str, content: str) -> str:
    """HTML that opens with a click on a line of text."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def bar(parts: Sequence[Part], *, height: int = 18) -> str:
    """Parts side by side, each as wide as its share of their sum; nothing where that is 0.

    Args:
        parts: from left to right.
        height: in pixels.

    >>> bar([Part(size=3, kind="token", title="a"), Part(size=1, kind="tail", title="free")]).count("<rect")
    2
    """
    drawn = [part for part in parts if part.size]
    total = sum(part.size for part in drawn)
    if not total:
        return ""
    if len(drawn) > MOST_PARTS:
        drawn = _by_kind(drawn)
    rects, start = [], 0.0
    for part in drawn:
        width = 1000 * part.size / total
        rects.append(
            f'<rect x="{start:.2f}" y="0" width="{width:.2f}" height="{height}" fill="{_COLORS[part.kind]}">'
            f"<title>{text(part.title)}</title></rect>"
        )
        start += width
    shape = f'viewBox="0 0 1000 {height}" preserveAspectRatio="none" width="100%" height="{height}"'
    return f'<svg {shape} role="img" style="display:block;max-width:720px;margin:4px 0">{"".join(rects)}</svg>'


def _by_kind(parts: Sequence[Part]) -> list[Part]:
    sizes: dict[Kind, int] = {}
    for part in parts:
        sizes[part.kind] = sizes.get(part.kind, 0) + part.size
    return [Part(size=size, kind=kind, title=f"{kind.replace('_', ' ')}: {size:,}") for kind, size in sizes.items()]


def legend(entries: Iterable[tuple[Kind, str]]) -> str:
    """What colours of a bar mean, in one line.

    Args:
        entries: kinds, and their texts.
    """
    spans = [
        f'<span style="white-space:nowrap;margin-right:14px"><span style="display:inline-block;width:10px;height:10px;'
        f'background:{_COLORS[kind]};margin-right:5px"></span>{text(name)}</span>'
        for kind, name in entries
    ]
    return f'<div style="font-size:90%">{"".join(spans)}</div>'
