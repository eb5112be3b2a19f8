"""Tokens of a source as pieces of text: decoded, marked where the loss counts them, images by their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from lightning_pack.row import PackedBatch
from lightning_pack.visible_text import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Tokens before others on which it depends how these are decoded.
_CONTEXT = 16


class Piece(NamedTuple):
    """Tokens in a row that are drawn alike."""

    text: str
    #: Whether the loss counts them.
    target: bool = False
    #: Whether the text is about the tokens, such as an image, and not theirs.
    note: bool = False


class Images:
    """Where the images of a row are.

    Args:
        batch: the row.
        tokenizer: knows their placeholders; without one they are ids like all others.
    """

    def __init__(self, batch: PackedBatch, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._placeholders = _placeholders(tokenizer) if batch.media and tokenizer is not None else frozenset()
        self._grids = batch.media["image_grid_thw"].tolist() if "image_grid_thw" in batch.media else []
        self._rows = batch.media_rows.get("image_grid_thw", [])

    def of(self, source: int, ids: list[int]) -> dict[int, tuple[int, str]]:
        """First token of each image of a source -> end, and what is drawn."""
        runs = list(_runs([token in self._placeholders for token in ids]))
        grids = self._grids[sum(self._rows[:source]) : sum(self._rows[: source + 1])]
        patches = sum(t * h * w for t, h, w in grids)
        tokens = sum(end - start for start, end, image in runs if image)
        found: dict[int, tuple[int, str]] = {}
        for start, end, image in runs:
            while image and start < end:
                if grids and patches:
                    t, h, w = grids.pop(0)
                    size = f" {h}x{w}" if t == 1 else f" {t}x{h}x{w}"
                    # All images of a row have as many patches to a token.
                    until = min(start + max(t * h * w * tokens // patches, 1), end)
                else:
                    size, until = "", end
                found[start] = until, f"[image{size} -> {until - start} tokens]"
                start = until
        return found


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> None:
    """Refuse one that cannot have made these tokens: it would leave out what it does not know.

    Args:
        tokenizer: as it was given.
        ids: of the real tokens.

    Raises:
        ValueError: saying what to give.
    """
    if not hasattr(tokenizer, "decode") or not hasattr(tokenizer, "get_vocab"):
        raise ValueError(f"tokenizer is a {type(tokenizer).__name__}: give a tokenizer of transformers, or None to draw ids")
    last = max(tokenizer.get_vocab().values(), default=-1)
    if unknown := [token for token in ids if not 0 <= token <= last]:
        raise ValueError(
            f"the row holds the id {unknown[0]}, and those of the tokenizer end with {last}: give the tokenizer that made the "
            "row, or None to draw ids"
        )


def _placeholders(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    from lightning_pack.encoders.families import known_image_tokens

    names = {*known_image_tokens(), getattr(tokenizer, "image_token", None)}
    vocabulary = tokenizer.get_vocab()
    return frozenset(vocabulary[name] for name in names if name in vocabulary)


class Writer:
    """Writes the tokens of a source.

    Args:
        ids: of them.
        targets: whether the loss counts each.
        tokenizer: that made them; None writes ids.
        images: first token -> end, and what is drawn instead.
    """

    def __init__(
        self,
        ids: list[int],
        targets: list[bool],
        tokenizer: PreTrainedTokenizerBase | None,
        images: dict[int, tuple[int, str]],
    ) -> None:
        self._ids, self._targets, self._tokenizer, self._images = ids, targets, tokenizer, images

    def pieces(self, most: int | None) -> Iterator[Piece]:
        """All of them, or the beginning and the end.

        Args:
            most: tokens and images that are drawn.
        """
        count = len(self._ids)
        starts = list(self._starts())
        if most is None or len(starts) <= most:
            yield from self._between(0, count)
            return
        cut, on = starts[most - most // 3], starts[len(starts) - most // 3] if most // 3 else count
        yield from self._between(0, cut)
        yield Piece(f"[... {many(on - cut, 'token')} ...]", note=True)
        yield from self._between(on, count)

    def _starts(self) -> Iterator[int]:
        """First tokens of what is drawn; an image is one thing."""
        at = 0
        while at < len(self._ids):
            yield at
            at = self._images[at][0] if at in self._images else at + 1

    def _between(self, start: int, end: int) -> Iterator[Piece]:
        at = start
        while at < end:
            if at in self._images:
                at, words = self._images[at]
                yield Piece(words, note=True)
                continue
            until = at + 1
            while until < end and until not in self._images and self._targets[until] == self._targets[at]:
                until += 1
            yield Piece(self._words(at, until, begins=start), target=self._targets[at])
            at = until

    def _words(self, start: int, end: int, *, begins: int) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, self._ids[start:end])) + ("" if end == len(self._ids) else " ")
        # What is decoded depends on what comes before: some tokenizers drop the space of a first word, and characters of
        # several tokens. All that was drawn before would take the square of the tokens.
        begins = max(begins, start - _CONTEXT)
        before, both = self._decoded(begins, start), self._decoded(begins, end)
        words = both[len(before) :] if both.startswith(before) else self._decoded(start, end)
        return "↵\n".join(map(visible, words.split("\n")))

    def _decoded(self, start: int, end: int) -> str:
        assert self._tokenizer is not None
        if start == end:
            return ""
        given = self._ids[start:end]
        return str(self._tokenizer.decode(given, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def joined_ids(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Ids end with a space, which belongs to no target."""
    for piece in pieces:
        if piece.target and piece.text.endswith(" ") and piece.text[:-1].replace(" ", "").isdigit():
            yield piece._replace(text=piece.text[:-1])
            yield Piece(" ")
        else:
            yield piece


def _runs(flags: list[bool]) -> Iterator[tuple[int, int, bool]]:
    """Where equal flags begin and end."""
    start = 0
    for at in range(1, len(flags) + 1):
        if at == len(flags) or flags[at] != flags[start]:
            yield start, at, flags[start]
            start = at


def many(n: int, noun: str) -> str:
    """A number with its noun."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
