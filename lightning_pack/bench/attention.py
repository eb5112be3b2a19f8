"""``lightning-pack bench attention``: a packed row by its boundaries, against one mask over the whole row.

The other side is what transformers does with a packed row without boundaries: scaled dot-product attention with a bool mask of
T x T. Each side runs in a process of its own, so that the peak of one is not hidden below that of the other. Both have to give
the same outputs and gradients.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_pack.attention import SegmentsBackend, THDInputs, TransformerEngineBackend, VarlenBackend
from lightning_pack.attention.backends import Backend
from lightning_pack.bench.processes import in_a_process
from lightning_pack.bench.result import BenchResult

_BACKENDS: dict[str, Callable[[], Backend]] = {
    "segments": SegmentsBackend,
    "varlen": VarlenBackend,
    "te": TransformerEngineBackend,
}
FULL_MASK = "full mask"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: How far results may differ, relative to their size.
_TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}


@dataclass(frozen=True, kw_only=True)
class AttentionSetting:
    """One layer's attention over one row."""

    lengths: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 64
    dtype: str = "float32"
    device: str = "cpu"
    turns: int = 2
    #: None for as many as torch takes here.
    threads: int | None = None

    @property
    def total(self) -> int:
        """Tokens of the row."""
        return sum(self.lengths)

    def shaped(self, lengths: Callable[[int, int], tuple[int, ...]]) -> AttentionSetting:
        """As many tokens and sources, with other lengths."""
        return replace(self, lengths=lengths(self.total, len(self.lengths)))


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """What one side takes, the fastest of its turns.

    Args:
        forward: seconds.
        backward: seconds.
        peak: bytes above what inputs take, in the first turn.
        results: projections of the output and of the three gradients, by which the sides are compared.
    """

    forward: float
    backward: float
    peak: int
    results: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class AttentionComparison:
    """Both sides of one setting.

    Args:
        name: of the lengths.
        row: that was computed, in words.
        backend: that computes by boundaries.
        ours: what it takes.
        theirs: what the full mask takes.
    """

    name: str
    row: str
    backend: str
    ours: AttentionCost
    theirs: AttentionCost

    @property
    def speed(self) -> float:
        """How many times as fast as the full mask, forward and backward."""
        return (self.theirs.forward + self.theirs.backward) / (self.ours.forward + self.ours.backward)

    @property
    def memory(self) -> float:
        """Peak memory as a share of that of the full mask; not a number where that found all it needed in memory at hand."""
        return self.ours.peak / self.theirs.peak if self.theirs.peak else float("nan")

    @property
    def results(self) -> tuple[BenchResult, BenchResult]:
        """Rows of the table."""
        what = f"attention by boundaries ({self.name} lengths, {self.backend}) against a mask over the row"
        times = [f"{cost.forward:.3g} + {cost.backward:.3g} s" for cost in (self.ours, self.theirs)]
        peaks = [f"{cost.peak / 2**20:,.0f} MiB" for cost in (self.ours, self.theirs)]
        return (
            BenchResult(
                name=f"attention/{self.name}/speed",
                what=f"{what}, speed",
                value=self.speed,
                unit="x",
                better="more",
                details=f"forward + backward in {' against '.join(times)}; {self.row}",
            ),
            BenchResult(
                name=f"attention/{self.name}/memory",
                what=f"{what}, peak memory",
                value=self.memory,
                unit="share",
                better="less",
                details=f"{' against '.join(peaks)}; {self.row}",
            ),
        )


def equal_lengths(total: int, sources: int) -> tuple[int, ...]:
    """``sources`` lengths of about the same size, ``total`` tokens together."""
    return tuple(total // sources + (number < total % sources) for number in range(sources))


def uneven_lengths(total: int, sources: int) -> tuple[int, ...]:
    """``sources`` long-tailed lengths, ``total`` tokens together, always the same."""
    drawn = np.random.default_rng(0).lognormal(0, 1, sources)
    ends = np.rint(np.cumsum(drawn) / drawn.sum() * (total - sources)).astype(int)
    return tuple(int(length) + 1 for length in np.diff(ends, prepend=0))


#: Lengths of the sources of a row, by name.
SHAPES: dict[str, Callable[[int, int], tuple[int, ...]]] = {"equal": equal_lengths, "long-tailed": uneven_lengths}


def compared(name: str, setting: AttentionSetting, *, backend: str) -> AttentionComparison:
    """Measure both sides, each in a new process.

    Raises:
        RuntimeError: if a side fails, or the two do not give the same.
    """
    ours, theirs = (_in_a_process(side, setting) for side in (backend, FULL_MASK))
    for mine, other in zip(ours.results, theirs.results, strict=True):
        if not abs(mine - other) <= _TOLERANCES[setting.dtype] * max(1.0, abs(other)):
            raise RuntimeError(
                f"{name}: {backend} and the full mask differ (output, then gradients of query, key and value): "
                f"{ours.results} against {theirs.results}"
            )
    row = f"{len(setting.lengths)} sources in {setting.total:,} tokens, {setting.dtype}"
    return AttentionComparison(name=name, row=row, backend=backend, ours=ours, theirs=theirs)


def both(setting: AttentionSetting, *, backend: str = "segments") -> Iterator[AttentionComparison]:
    """Each of :data:`SHAPES`, with as many tokens and sources as the setting has."""
    for name, lengths in SHAPES.items():
        yield compared(name, setting.shaped(lengths), backend=backend)


def _in_a_process(side: str, setting: AttentionSetting) -> AttentionCost:
    return in_a_process(measured, side, replace(setting, threads=setting.threads or torch.get_num_threads()))


def measured(side: str, setting: AttentionSetting) -> AttentionCost:
    """One side in this process, which it should have for itself: peaks are those of the process."""
    if setting.threads is not None:
        torch.set_num_threads(setting.threads)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, setting.total, setting.head_size) for heads in (setting.heads, setting.kv_heads, setting.kv_heads)]
    dtype, device = _DTYPES[setting.dtype], torch.device(setting.device)
    row = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    weight = torch.randn(1, setting.total, setting.heads, setting.head_size, generator=generator).to(device, dtype)
    # A first small call, so that loading kernels is not measured.
    small = AttentionSetting(lengths=(8, 8), heads=setting.heads, kv_heads=setting.kv_heads, head_size=setting.head_size)
    _attention(side, small, device)(*(tensor.detach()[:, :, :16] for tensor in row))
    base = _reset_peak(device)
    # The mask is made here: a model makes one for all its layers, which takes memory in every step and little time.
    attend = _attention(side, setting, device)
    forward = backward = float("inf")
    peak = 0
    for turn in range(setting.turns):
        started = _now(device)
        out = attend(*row)
        middle = _now(device)
        gradients = torch.autograd.grad(out, row, weight)
        ended = _now(device)
        forward, backward = min(forward, middle - started), min(backward, ended - middle)
        peak = peak if turn else _peak(device) - base
    return AttentionCost(
        forward=forward, backward=backward, peak=peak, results=tuple(map(_projected, (out.detach(), *gradients)))
    )


def _projected(tensor: Tensor) -> float:
    """A number that tells tensors apart: the sum under weights that change along the last two dimensions."""
    weights = torch.linspace(-1, 1, tensor.shape[-1] * tensor.shape[-2], device=tensor.device, dtype=torch.float64)
    return float((tensor.double() * weights.view(tensor.shape[-2:])).sum())


def _attention(side: str, setting: AttentionSetting, device: torch.device) -> Callable[..., Tensor]:
    """Function of query, key and value ``[1, heads, T, D]`` that gives ``[1, T, heads, D]``."""
    cu = torch.tensor([0, *accumulate(setting.lengths)], dtype=torch.int32, device=device)
    if side != FULL_MASK:
        backend = _BACKENDS[side]()
        longest = max(setting.lengths)

        def by_boundaries(*row: Tensor) -> Tensor:
            # Made anew in each call, as in each forward of a model.
            inputs = THDInputs(cu_seqlens=cu, cu_seqlens_padded=cu, max_seqlen=longest, total=setting.total)
            return backend(*(tensor[0].transpose(0, 1) for tensor in row), inputs=inputs, training=True)[None]

        return by_boundaries

    place = torch.arange(setting.total, device=device)
    source = torch.bucketize(place, cu[1:], right=True)
    mask = ((source[:, None] == source) & (place[:, None] >= place))[None, None]
    layer: Any = nn.Module()
    layer.num_key_value_groups, layer.is_causal = setting.heads // setting.kv_heads, True
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return lambda query, key, value: attention(layer, query, key, value, mask)[0]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _reset_peak(device: torch.device) -> int:
    """Bytes in use, and the peak set back to them where that can be done."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
    return _peak(device)


def _peak(device: torch.device) -> int:
    """Largest number of bytes that were in use at a time."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    # In bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(args: Sequence[str]) -> None:
    """``lightning-pack bench attention`` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="lightning-pack bench attention", description="A packed row by its boundaries, against a mask over the whole row."
    )
    parser.add_argument("--backend", choices=_BACKENDS, default="segments", help="what to measure (default: segments)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the row (default: 8192)")
    parser.add_argument("--sources", type=int, default=32, help="sources in it (default: 32)")
    parser.add_argument("--heads", type=int, default=8, help="heads of queries (default: 8)")
    parser.add_argument("--kv-heads", type=int, default=2, help="heads of keys and values (default: 2)")
    parser.add_argument("--head-size", type=int, default=64, help="size of a head (default: 64)")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="(default: float32)")
    parser.add_argument("--device", default="cpu", help="(default: cpu)")
    parser.add_argument("--turns", type=int, default=2, help="turns of each side, of which the fastest counts (default: 2)")
    options = parser.parse_args(args)
    for name in ("tokens", "sources", "heads", "kv_heads", "head_size", "turns"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: at least 1 is needed")
    if options.sources > options.tokens:
        parser.error(f"--sources {options.sources} do not fit in --tokens {options.tokens}")
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads} cannot be shared out over --kv-heads {options.kv_heads}")
    print(
        f"{options.sources} sources in a row of {options.tokens:,} tokens, {options.heads} heads, {options.kv_heads} of keys, "
        f"of {options.head_size}, {options.dtype} on {options.device}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}; forward + backward and peak, against a full mask",
        flush=True,
    )
    setting = AttentionSetting(
        lengths=equal_lengths(options.tokens, options.sources),
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_size=options.head_size,
        dtype=options.dtype,
        device=options.device,
        turns=options.turns,
    )
    for found in both(setting, backend=options.backend):
        print(*found.results, sep="\n", flush=True)
