"""How policies, sources, packs and batches show in a notebook. Lengths and boundaries only: no tokenizer is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from lightning_pack import markup
from lightning_pack.markup import Kind, Part

if TYPE_CHECKING:
    from lightning_pack.policy import PackingPolicy
    from lightning_pack.row import PackedBatch
    from lightning_pack.source import EncodedSource, LeftOut, Pack

#: Sources that a table lists, and what was left out.
MOST_ROWS = 16


def policy_html(policy: PackingPolicy) -> str:
    """Settings that were chosen, and the others behind a click."""
    chosen: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    for field in fields(policy):
        value = getattr(policy, field.name)
        (others if field.default is not MISSING and value == field.default else chosen).append((field.name, repr(value)))
    return markup.card(type(policy).__name__, markup.table(chosen), markup.details("defaults", markup.table(others)))


def source_html(source: EncodedSource) -> str:
    """Its stretches of targets and of tokens that are none, and what was left out of it."""
    targets = (source.labels == source.input_ids).tolist()
    told: list[tuple[Kind, str]] = [
        ("target", f"{sum(targets):,} target tokens"),
        ("token", f"{len(source) - sum(targets):,} others, as context"),
    ]
    rows: list[tuple[str, object]] = [
        (name, value) for name in ("group", "media_tokens", "media_bytes") if (value := getattr(source, name))
    ]
    rows += [(name, f"{tensor.dtype} {list(tensor.shape)}") for name, tensor in source.media.items()]
    return markup.card(
        f"{type(source).__name__} {source.key}",
        markup.bar([*_stretches(targets)]),
        markup.legend(told) if len(source) else "",
        markup.table(rows) if rows else "",
        _left_out(source.news),
    )


def _stretches(targets: Sequence[bool]) -> Iterator[Part]:
    start = 0
    for end in range(1, len(targets) + 1):
        if end == len(targets) or targets[end] != targets[start]:
            kind: Kind = "target" if targets[start] else "token"
            yield Part(size=end - start, kind=kind, title=f"tokens {start} to {end - 1}: {kind}")
            start = end


def pack_html(pack: Pack) -> str:
    """The row that it becomes, and its sources."""
    name = type(pack).__name__
    if pack.layout is None:
        return markup.card(f"{name}: no sources", _left_out(pack.left_out))
    number = len(pack.sources)
    real, physical = (offsets[: number + 1].tolist() for offsets in (pack.layout.cu_seqlens, pack.layout.cu_seqlens_padded))
    keys = [source.key for source in pack.sources]
    rows = [(key, *lengths) for key, *lengths in zip(keys, *_sizes(real, physical), pack.ages or [0] * number, strict=True)]
    return markup.card(
        f"{name}: {number:,} sources",
        *_row(keys, real, physical),
        _listed(rows, headings=("source", "tokens", "padding", "age")),
        _left_out(pack.left_out),
    )


def batch_html(batch: PackedBatch) -> str:
    """The row with the boundaries of its sources and their targets, and the tensors behind a click."""
    number = len(batch.source_keys)
    here = batch.segment_ids[batch.loss_mask].long()
    targets = torch.bincount(here, minlength=number + 1)[1 : number + 1].tolist()
    real, physical = (offsets[: number + 1].tolist() for offsets in (batch.cu_seqlens, batch.cu_seqlens_padded))
    keys = batch.source_keys
    rows = [
        (key, *lengths)
        for key, *lengths in zip(keys, *_sizes(real, physical), targets, batch.ages or [0] * number, strict=True)
    ]
    # Part of a row may be all that a rank holds.
    whole = batch.input_ids.shape[-1] == batch.width
    return markup.card(
        f"{type(batch).__name__}: {number:,} sources in a row of {batch.width:,}",
        *_row(keys, real, physical),
        _listed(rows, headings=("source", "tokens", "padding", "targets" if whole else "targets here", "age")),
        _left_out(batch.left_out),
        markup.details("tensors", markup.table(_tensors(batch), headings=("name", "dtype", "shape", "device"))),
    )


def _tensors(batch: PackedBatch) -> Iterator[tuple[str, ...]]:
    named = {field.name: getattr(batch, field.name) for field in fields(batch)}
    for name, value in (named | batch.media).items():
        if isinstance(value, torch.Tensor):
            yield name, str(value.dtype).removeprefix("torch."), str(list(value.shape)), str(value.device)


def _sizes(real: Sequence[int], physical: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of each source its tokens, and the pads after them."""
    tokens = [b - a for a, b in pairwise(real)]
    padded = [b - a for a, b in pairwise(physical)]
    return tokens, [p - t for p, t in zip(padded, tokens, strict=True)]


def _row(keys: Sequence[str], real: Sequence[int], physical: Sequence[int]) -> tuple[str, str]:
    """A bar of the row, and what it shows in numbers."""
    tokens, padding = _sizes(real, physical)
    parts = []
    for index, (key, length, pads) in enumerate(zip(keys, tokens, padding, strict=True)):
        last = index == len(keys) - 1
        parts.append(Part(size=length, kind="other_token" if index % 2 else "token", title=f"{key}: {length:,} tokens"))
        title = f"padding after {key}: {pads:,}"
        parts.append(Part(size=pads, kind="tail" if last else "alignment", title=title))
    width = physical[-1]
    if not width:
        return "", markup.note("an empty row")
    told = f"{sum(tokens):,} real tokens in {width:,} slots, {sum(tokens) / width:.1%}"
    between, end = f"{sum(padding[:-1]):,} pads between sources", f"{sum(padding[-1:]):,} at the end"
    return markup.bar(parts), markup.legend([("token", told), ("alignment", between), ("tail", end)])


def _listed(rows: Sequence[Sequence[object]], *, headings: Sequence[str]) -> str:
    if not rows:
        return ""
    more = len(rows) - MOST_ROWS
    shown = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows[:MOST_ROWS]]
    return markup.table(shown, headings=headings) + (markup.note(f"and {more:,} more") if more > 0 else "")


def _left_out(left_out: Iterable[LeftOut]) -> str:
    return _listed([(gone.key, gone.reason, gone.tokens) for gone in left_out], headings=("left out", "reason", "tokens"))
