"""Attention of the same sources in three ways, and what each costs: by boundaries, padded, and under one mask over the row."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_pack.attention import Backend, THDInputs
from tests.gpu.checks import Heads, thd_inputs

#: Function of the leaves, and the leaves.
Side = tuple[Callable[..., Tensor], list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Forward and backward of one layer's attention.

    Args:
        seconds: the median of the turns.
        peak: most bytes in use at a time, with inputs, output and gradients; None where it is not known (off CUDA).
    """

    seconds: float
    peak: int | None


def by_boundaries(backend: Backend, lengths: Sequence[int], heads: Heads, *, device: torch.device, dtype: torch.dtype) -> Side:
    """One row ``[T, heads, size]``."""
    row = _leaves((sum(lengths),), heads, device=device, dtype=dtype)
    known = thd_inputs(lengths, device=device)

    def attend(*row: Tensor) -> Tensor:
        # Made anew in each call, as in each forward of a model.
        inputs = THDInputs(
            cu_seqlens=known.cu_seqlens, cu_seqlens_padded=known.cu_seqlens, max_seqlen=known.max_seqlen, total=known.total
        )
        return backend(*row, inputs=inputs, training=True)

    return attend, row


def padded(lengths: Sequence[int], heads: Heads, *, device: torch.device, dtype: torch.dtype) -> Side:
    """A batch of a row a source, each padded to the longest: causal, and so without any mask."""
    batch = [t.transpose(1, 2) for t in _leaves((len(lengths), max(lengths)), heads, device=device, dtype=dtype)]
    gqa = heads.queries != heads.keys
    return lambda *row: F.scaled_dot_product_attention(*row, is_causal=True, enable_gqa=gqa), _fresh(batch)


def full_mask(lengths: Sequence[int], heads: Heads, *, device: torch.device, dtype: torch.dtype) -> Side:
    """One row under a bool mask ``[T, T]``, as transformers computes a packed row without boundaries."""
    cu = thd_inputs(lengths, device=device).cu_seqlens
    place = torch.arange(sum(lengths), device=device)
    source = torch.bucketize(place, cu[1:], right=True)
    mask = ((source[:, None] == source) & (place[:, None] >= place))[None, None]
    layer: Any = nn.Module()
    layer.num_key_value_groups, layer.is_causal = heads.queries // heads.keys, True
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    row = [t.transpose(1, 2) for t in _leaves((1, sum(lengths)), heads, device=device, dtype=dtype)]
    return lambda *row: attention(layer, *row, mask)[0], _fresh(row)


def _leaves(shape: tuple[int, ...], heads: Heads, *, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(*shape, number, heads.size, generator=generator, device=device, dtype=dtype).requires_grad_()
        for number in (heads.queries, heads.keys, heads.keys)
    ]


def _fresh(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in tensors]


def cost_of(make: Callable[[], Side], *, device: torch.device, turns: int, limit: float = 5.0) -> Cost:
    """Measure a side; ``limit`` is about how many seconds its turns may take, of which there is at least one.

    Raises:
        torch.OutOfMemoryError: if it does not fit.
    """
    base = 0
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated(device)
    attend, leaves = make()
    out = attend(*leaves)
    weight = torch.ones_like(out)
    del out

    def turn() -> None:
        result = attend(*leaves)
        torch.autograd.grad(result, leaves, weight)

    turn()
    # That chose and loaded kernels, whose workspace is not what a step takes.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    turn()
    peak = None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - base
    each = time.perf_counter() - started
    turns = max(1, min(turns, int(limit / max(each, 1e-9))))
    return Cost(seconds=statistics.median(_timed(turn, device=device) for _ in range(turns)), peak=peak)


def _timed(turn: Callable[[], None], *, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        turn()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    turn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000
