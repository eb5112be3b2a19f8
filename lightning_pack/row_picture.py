"""A packed row as people read it: the texts of its sources, one after the other, with boundaries and targets."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from rich.text import Text

from lightning_pack.drawn_tokens import Images, Piece, Writer, check_tokenizer, joined_ids, many
from lightning_pack.row import PackedBatch
from lightning_pack.source import IGNORE, LeftOut
from lightning_pack.visible_text import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from transformers import PreTrainedTokenizerBase

#: Sources take turns.
_STYLES = ("cyan", "magenta")
_BACKGROUNDS = ("rgba(47,109,179,.16)", "rgba(224,140,43,.20)")
_FRAME = (
    "font:13px/1.6 ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre-wrap;overflow-wrap:anywhere;"
    "margin:.4em 0 1em"
)
_MOST_LEFT_OUT = 5


@dataclass(frozen=True, kw_only=True)
class DrawnSource:
    """A source of the row.

    Args:
        key: of the sample.
        tokens: real ones.
        targets: that the loss counts.
        pads: after it, up to the policy's multiple; those after the last source are the row's tail.
        pieces: its tokens, in order.
    """

    key: str
    tokens: int
    targets: int
    pads: int
    pieces: tuple[Piece, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True, repr=False)
class RowPicture:
    """A row, drawn: coloured by ``rich`` in a terminal, as HTML in a notebook, and as plain text by ``str()``.

    Sources take turns in two colours. Targets, the tokens that the loss counts, are bold and underlined; in plain text they are
    between « and ». Pads are a count. Control characters of the texts are written out.

    Args:
        width: T, in tokens.
        sources: in row order.
        tail: pads after the last source.
        left_out: what was left out since the row before.
        decoded: whether there are texts; token ids otherwise.
    """

    width: int
    sources: tuple[DrawnSource, ...]
    tail: int
    left_out: tuple[LeftOut, ...] = ()
    decoded: bool = True

    @property
    def summary(self) -> str:
        """The row in a line."""
        real, targets = sum(each.tokens for each in self.sources), sum(each.targets for each in self.sources)
        return (
            f"row of {self.width:,}: {many(len(self.sources), 'source')}, {many(real, 'real token')}, "
            f"{many(targets, 'target')}, {many(self.width - real, 'pad')}"
        )

    def __repr__(self) -> str:
        return f"RowPicture({self.summary})"

    def __str__(self) -> str:
        return self._text(plain=True).plain

    def __rich__(self) -> object:
        """For ``rich``; a console without colours gets the marks of plain text."""
        return _Drawing(self)

    def _repr_html_(self) -> str:
        parts = [f'<div style="opacity:.75">{escape(self.summary)}{escape(self._news())}</div>']
        for number, source in enumerate(self.sources):
            head = f"{number + 1} | {visible(source.key)} | {many(source.tokens, 'token')}, {many(source.targets, 'target')}"
            body = "".join(_html(piece) for piece in (*source.pieces, _pads(source.pads)))
            parts.append(
                f'<div style="background:{_BACKGROUNDS[number % 2]};border-radius:4px;padding:2px 8px 3px;margin:3px 0">'
                f'<div style="opacity:.6;font-size:.85em">{escape(head)}</div>{body}</div>'
            )
        return f'<div style="{_FRAME}">{"".join(parts)}{_html(_pads(self.tail))}</div>'

    def _text(self, *, plain: bool) -> Text:
        text = Text(f"{self.summary}{self._news()}\n", style="" if plain else "dim", end="")
        drawn = Text(end="")
        for number, source in enumerate(self.sources):
            style = _STYLES[number % 2]
            head = f"{number + 1} | {visible(source.key)} | {many(source.tokens, 'token')}, {many(source.targets, 'target')}"
            drawn.append(f"--- {head} ---\n", style=f"{style} dim")
            for piece in (*source.pieces, _pads(source.pads)):
                target = piece.target
                shown = f"«{piece.text}»" if plain and target else piece.text
                drawn.append(shown, style="dim" if piece.note else f"{style} bold underline" if target else style)
            if not drawn.plain.endswith("\n"):
                drawn.append("\n")
        drawn.append(_pads(self.tail).text, style="dim")
        return Text.assemble(text, drawn)

    def _news(self) -> str:
        if not self.left_out:
            return ""
        told = ", ".join(f"{visible(gone.key)} ({visible(gone.reason)})" for gone in self.left_out[:_MOST_LEFT_OUT])
        more = len(self.left_out) - _MOST_LEFT_OUT
        return f"\nleft out before it: {told}" + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class _Drawing:
    picture: RowPicture

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.picture._text(plain=console.color_system is None)


def draw(batch: PackedBatch, tokenizer: PreTrainedTokenizerBase | None = None, *, most: int | None = 240) -> RowPicture:
    """Draw a packed row.

    Args:
        batch: the row.
        tokenizer: that made its tokens; None draws their ids.
        most: tokens of a source that are drawn, an image being one; of longer ones the beginning and the end. None draws all.

    Raises:
        ValueError: for anything else than a packed row, ``most`` below 2, and a tokenizer that lacks tokens of the row.

    Example:
        >>> import torch
        >>> from lightning_pack import PackedBatch, PackingPolicy
        >>> from lightning_pack.source import EncodedSource
        >>> sources = [EncodedSource.of(key, torch.arange(n)) for key, n in (("a", 3), ("b", 2))]
        >>> print(draw(PackedBatch.from_packs([PackingPolicy(capacity=8).build(sources)], pad_id=0)))
        row of 5: 2 sources, 5 real tokens, 3 targets, 0 pads
        --- 1 | a | 3 tokens, 2 targets ---
        0 «1 2»
        --- 2 | b | 2 tokens, 1 target ---
        0 «1»
        <BLANKLINE>
    """
    if not isinstance(batch, PackedBatch):
        raise ValueError(
            f"a {type(batch).__name__} cannot be drawn: give a PackedBatch (lightning_pack.packed_row(batch) finds that of "
            "other batches)"
        )
    if most is not None and most < 2:
        raise ValueError(f"most={most}: at least 2 tokens of a source are drawn, its beginning and its end; None draws all")
    count = len(batch.source_keys)
    real, physical = batch.cu_seqlens.tolist(), batch.cu_seqlens_padded.tolist()
    ids, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
    if tokenizer is not None:
        spans = [range(physical[i], physical[i] + real[i + 1] - real[i]) for i in range(count)]
        check_tokenizer(tokenizer, [ids[at] for span in spans for at in span])
    images = Images(batch, tokenizer)
    drawn = []
    for i in range(count):
        start, length = physical[i], real[i + 1] - real[i]
        room = physical[i + 1] - start
        targets = [label != IGNORE for label in labels[start : start + length]]
        writer = Writer(ids[start : start + length], targets, tokenizer, images.of(i, ids[start : start + length]))
        pieces = tuple(joined_ids(writer.pieces(most)))
        last = i == count - 1
        drawn.append(
            DrawnSource(
                key=batch.source_keys[i],
                tokens=length,
                targets=sum(targets),
                pads=0 if last else room - length,
                pieces=pieces,
            )
        )
    end = physical[count - 1] + real[count] - real[count - 1] if count else 0
    return RowPicture(
        width=batch.width,
        sources=tuple(drawn),
        tail=batch.width - end,
        left_out=tuple(batch.left_out),
        decoded=tokenizer is not None,
    )


def _pads(count: int) -> Piece:
    return Piece(f"[{many(count, 'pad')}]" if count else "", note=True)


def _html(piece: Piece) -> str:
    text = escape(piece.text)
    if not text:
        return ""
    if piece.note:
        return f'<i style="opacity:.65">{text}</i>'
    return (
        f'<b style="font-weight:600;text-decoration:underline 1px;text-underline-offset:3px">{text}</b>'
        if piece.target
        else text
    )
