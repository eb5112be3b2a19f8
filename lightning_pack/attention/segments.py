"""Attention segment by segment: every source of a packed row attends to itself alone.

No mask over the whole row is ever built. With segments of L tokens the cost is O(sum(L^2)), or O(sum(L * window)) under a
sliding window, instead of O(T^2); the price is one kernel call a segment (or a block of it). Works on every device and dtype.

The row ``a a a | b b`` (boundaries ``[0, 3, 5]``), causal, 1 = attends::

    a 1 . . . .
    a 1 1 . . .
    a 1 1 1 . .
    b . . . 1 .
    b . . . 1 1
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

#: Queries scored at once where scores are explicit, so that long segments need O(block * L) memory.
_QUERY_BLOCK = 1024


def segment_lengths(boundaries: Tensor, *, total: int) -> list[int]:
    """Physical length of each segment, in tokens (one device sync).

    Args:
        boundaries: int32 ``[N+1]``, cumulative, from 0 to ``total``; repeated offsets are empty segments.
        total: tokens of the row.

    Raises:
        ValueError: for another dtype or shape, decreasing offsets, or a last offset that is not the row's end.
    """
    if boundaries.dtype != torch.int32 or boundaries.dim() != 1 or len(boundaries) < 2:
        raise ValueError(
            f"boundaries are int32 of shape [N+1] with N >= 1, got {boundaries.dtype} of shape {list(boundaries.shape)}: "
            "pass PackedBatch.cu_seqlens_padded"
        )
    offsets = boundaries.tolist()
    lengths = [after - before for before, after in pairwise(offsets)]
    if offsets[0] != 0 or min(lengths) < 0:
        raise ValueError(f"boundaries start at 0 and never decrease, got {offsets}")
    if offsets[-1] != total:
        raise ValueError(
            f"the last boundary is {offsets[-1]} but the row has {total} tokens; tokens outside of every segment have no "
            "defined attention: pass physical boundaries (PackedBatch.cu_seqlens_padded), whose last offset is the width of "
            "the row"
        )
    return lengths


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """What holds for every segment of one call."""

    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    boundaries: Tensor,
    lengths: Sequence[int] | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    gaps: Collection[int] = (),
    chunks: Sequence[int] = (0,),
    of: int = 1,
) -> Tensor:
    """Attention inside each segment of one row.

    Args:
        query: ``[1, Hq, T, D]``, or less where only some ``chunks`` of each segment have queries here.
        key: ``[1, Hk, T, D]``, Hq a multiple of Hk; query head h uses key head ``h // (Hq // Hk)``.
        value: ``[1, Hk, T, Dv]``.
        boundaries: int32 ``[N+1]``, physical offsets of the segments, from 0 to T.
        lengths: what :func:`segment_lengths` gave for these boundaries, to save its device sync.
        scale: of the scores; None means ``1 / sqrt(D)``.
        causal: whether token i sees keys ``j <= i`` only; without it a token sees its whole segment, pads included.
        window: token i sees keys ``j > i - window`` only; causal attention only.
        softcap: scores s become ``softcap * tanh(s / softcap)``.
        sinks: ``[Hq]``, one score a head that takes part in the softmax and attends to nothing.
        dropout: probability that a weight is dropped.
        gaps: numbers of segments that hold no tokens; their outputs are 0.
        chunks: where a segment is cut in equal chunks, the numbers of those whose queries these are; segment by segment, and
            in this order. Causal attention only.
        of: number of chunks that a segment is cut in.

    Returns:
        ``[1, Hq, T, Dv]`` (as long as ``query``), dtype of ``query``.

    Raises:
        ValueError: for shapes, boundaries or options that do not fit together.

    Example:
        >>> q = torch.ones(1, 1, 3, 2)
        >>> v = torch.tensor([1.0, 3.0, 7.0]).view(1, 1, 3, 1)
        >>> cu = torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> segment_attention(q, q, v, boundaries=cu).flatten().tolist()
        [1.0, 2.0, 7.0]
    """
    _check_shapes(query, key, value, sinks, part=(len(chunks), of))
    if of > 1 and (not causal or gaps):
        raise ValueError(f"segments in {of} chunks (causal={causal}, {len(gaps)} gaps): only causal ones without gaps are cut")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window={window} (causal={causal}): a window is at least 1 token and needs causal attention")
    if lengths is None:
        lengths = segment_lengths(boundaries, total=query.shape[2])
    rule = _Rule(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        dropout=dropout,
    )
    # torch.split and not slices: the gradient of every slice would be a zero-filled tensor of the whole row.
    sizes = list(lengths)
    for uneven in [size for size in sizes if size % of][:1]:
        raise ValueError(f"a segment of {uneven} tokens cannot be cut in {of} equal chunks: pad sources to a multiple of {of}")
    pieces = iter(query.split([size // of for size in sizes for _ in chunks], 2))
    outputs = []
    for number, (keys, values) in enumerate(zip(key.split(sizes, 2), value.split(sizes, 2), strict=True)):
        for chunk in chunks:
            piece, stop = next(pieces), sizes[number] // of * (chunk + 1)
            if number in gaps:
                outputs.append(value.new_zeros(1, *piece.shape[1:3], value.shape[3]))
            elif piece.shape[2]:
                outputs.append(_segment(piece, _first(keys, stop), _first(values, stop), rule))
    return torch.cat(outputs, dim=2)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *, part: tuple[int, int]) -> None:
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if any(t.dim() != 4 for t in (query, key, value)) or query.shape[0] != 1:
        raise ValueError(f"a packed row has shape [1, heads, T, D], got {shapes}: pack into one row per batch")
    if key.shape[:3] != value.shape[:3] or query.shape[3] != key.shape[3] or query.shape[2] * part[1] != key.shape[2] * part[0]:
        raise ValueError(f"query, key and value of one row differ in length, heads or head size: {shapes}")
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads cannot be shared out over {key.shape[1]} key heads: {shapes}")
    if sinks is not None and sinks.shape != (query.shape[1],):
        raise ValueError(f"sinks have one score for each of {query.shape[1]} query heads, got shape {list(sinks.shape)}")


def _first(tensor: Tensor, length: int) -> Tensor:
    return tensor if tensor.shape[2] == length else tensor.narrow(2, 0, length)


def _segment(query: Tensor, key: Tensor, value: Tensor, rule: _Rule) -> Tensor:
    """One segment, or the last queries of it."""
    length, earlier = query.shape[2], key.shape[2] - query.shape[2]
    explicit = rule.softcap is not None or rule.sinks is not None
    windowed = rule.window is not None and rule.window < key.shape[2]
    # What torch calls causal is aligned at the first query, so earlier keys need a mask.
    if not windowed and not explicit and not earlier:
        return _sdpa(query, key, value, rule, causal=rule.causal, allowed=None)
    outputs = []
    for queries, (first, start, stop) in zip(query.split(_block(rule, length), 2), _blocks(rule, length, earlier), strict=True):
        keys, values = key.narrow(2, start, stop - start), value.narrow(2, start, stop - start)
        allowed = _allowed(rule, queries.shape[2], first=first, start=start, stop=stop, device=query.device)
        if explicit:
            outputs.append(_explicit(queries, keys, values, rule, allowed=allowed))
        else:
            outputs.append(_sdpa(queries, keys, values, rule, causal=False, allowed=allowed))
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]


def _block(rule: _Rule, length: int) -> int:
    # Blocks as long as the window waste at most half of the scores; tiny windows would make too many calls.
    return min(length, _QUERY_BLOCK if rule.window is None else min(max(rule.window, 64), _QUERY_BLOCK))


def _blocks(rule: _Rule, length: int, earlier: int) -> Iterator[tuple[int, int, int]]:
    """First query of each block, and the range of keys that its queries can see; ``length`` queries are behind earlier keys."""
    size, end = _block(rule, length), earlier + length
    for first in range(earlier, end, size):
        stop = min(first + size, end) if rule.causal else end
        yield first, 0 if rule.window is None else max(0, first - rule.window + 1), stop


def _allowed(rule: _Rule, queries: int, *, first: int, start: int, stop: int, device: torch.device) -> Tensor | None:
    """Bool ``[queries, stop - start]``: which keys each query of a block sees; None for all."""
    if not rule.causal:
        return None
    i = torch.arange(first, first + queries, device=device)[:, None]
    j = torch.arange(start, stop, device=device)
    return (j <= i) if rule.window is None else (j <= i) & (j > i - rule.window)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, rule: _Rule, *, causal: bool, allowed: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=allowed,
        dropout_p=rule.dropout,
        is_causal=causal,
        scale=rule.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _explicit(query: Tensor, key: Tensor, value: Tensor, rule: _Rule, *, allowed: Tensor | None) -> Tensor:
    """Scores as a tensor, for what no fused kernel takes: soft capping and sinks."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    # The softmax of half-precision scores is taken in float32, as the fused kernels do.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    weights = F.dropout(weights.to(query.dtype), p=rule.dropout)
    return torch.matmul(weights, value)
