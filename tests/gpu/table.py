"""``python -m tests.gpu``: what packed attention costs on this device and whether it is right, in one table of Markdown.

Each row is one attention layer over the same 32 sources of long-tailed lengths, forward and backward. With it stand two other
ways to compute them: every source padded to the longest, and one row under a mask of T x T. It fails if a backend does.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from lightning_pack.attention import Backend, BackendError
from lightning_pack.bench.attention import uneven_lengths
from tests.gpu.checks import (
    Heads,
    largest_error,
    leaks_of_kernel,
    leaks_of_model,
    random_row,
    reference_of,
    results_of,
    thd_inputs,
    unusable_gradients,
    waits_of_step,
)
from tests.gpu.device import BACKENDS, KERNELS, TOLERANCES
from tests.gpu.sides import Cost, Side, by_boundaries, cost_of, full_mask, padded

T = TypeVar("T")

MODELS = ("llama", "mistral")
#: Seconds for the table and the tests behind it.
_LIMIT = 235.0
#: Waits of a training step that are known: the boundaries are read once a forward.
KNOWN_WAITS = {"segments": 1}
COLUMNS = (
    "tokens",
    "attention",
    "forward + backward",
    "peak memory",
    "against padded",
    "against full mask",
    "error",
    "leaks",
    "waits a step",
    "NaN",
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured."""

    device: torch.device
    dtype: torch.dtype
    tokens: tuple[int, ...] = (8192, 32768)
    sources: int = 32
    heads: Heads = field(default_factory=lambda: Heads(queries=32, keys=8, size=128))
    turns: int = 10


@dataclass(kw_only=True)
class Verdicts:
    """What tiny models say of a backend."""

    waits: str = "—"
    #: None where the probe failed.
    leaks: list[str | None] = field(default_factory=list)
    nan: str = "—"


@dataclass(kw_only=True)
class Table:
    """The rows so far, and everything that failed."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [COLUMNS, tuple("---" for _ in COLUMNS), *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def versions(device: torch.device) -> str:
    """The environment, as a line."""
    parts = [f"torch {torch.__version__}"]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        parts.insert(
            0, f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB, sm{properties.major}{properties.minor})"
        )
        parts.append(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    else:
        parts.insert(0, f"{platform.machine()}, {torch.get_num_threads()} threads")
    for name in ("transformers", "transformer-engine", "flash-attn"):
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            parts.append(f"no {name}")
    return "; ".join(parts)


def measured(setting: Setting, *, say: Callable[[str], None] = print) -> Table:
    """The table. A backend that cannot be had is a row that says why; one that fails is a failure, and the rest goes on."""
    table = Table()
    backends = {name: backend for name in BACKENDS if (backend := _backend(name, setting, table)) is not None}
    if not backends:
        table.failures.append("no backend ran")
    verdicts = {name: _verdicts(name, backend, setting, table) for name, backend in backends.items()}
    for tokens in setting.tokens:
        lengths = uneven_lengths(tokens, setting.sources)
        say(f"{tokens:,} tokens: sources of {min(lengths)} to {max(lengths):,}")
        errors = dict.fromkeys(backends, "—")
        leaks = {name: list(verdict.leaks) for name, verdict in verdicts.items()}
        _judge(backends, lengths, setting, errors=errors, leaks=leaks, table=table)
        others = {
            "padded": _competitor(padded, lengths, setting),
            "full mask": _competitor(full_mask, lengths, setting),
        }
        for name, backend in backends.items():
            side = partial(by_boundaries, backend)
            cost = _attempt(f"{name}, {tokens:,} tokens, cost", table, partial(_cost, side, lengths, setting))
            ratios = [_ratio(cost, other) for other in others.values()]
            verdict = verdicts[name]
            seen = "failed" if None in leaks[name] else f"{len(leaks[name])}!" if leaks[name] else "none"
            table.rows.append((f"{tokens:,}", name, *_cells(cost), *ratios, errors[name], seen, verdict.waits, verdict.nan))
        for name, other in others.items():
            table.rows.append((f"{tokens:,}", name, *_cells(other), *["—"] * 6))
    return table


def _backend(name: str, setting: Setting, table: Table) -> Backend | None:
    if name in KERNELS and setting.device.type != "cuda":
        table.rows.append(("all", name, f"runs on CUDA devices, not on {setting.device.type}", *["—"] * (len(COLUMNS) - 3)))
        return None
    try:
        return BACKENDS[name]()
    except BackendError as e:
        table.rows.append(("all", name, "not installed" if name == "te" else str(e), *["—"] * (len(COLUMNS) - 3)))
        # Another package may be missing; torch's own kernel may not.
        if name != "te" or "is not installed" not in str(e):
            table.failures.append(f"{name}: {e}")
        return None


def _verdicts(name: str, backend: Backend, setting: Setting, table: Table) -> Verdicts:
    """What a tiny model says, whatever the row is."""
    where = {"device": setting.device, "dtype": setting.dtype}
    verdict = Verdicts()
    for kind in MODELS:
        leaks = _attempt(f"{name}, leaks of {kind}", table, partial(leaks_of_model, backend, kind, **where))
        verdict.leaks += [None] if leaks is None else leaks
        table.failures += [f"{name}: {leak}" for leak in leaks or ()]
    waits = _attempt(f"{name}, waits", table, partial(waits_of_step, backend, **where))
    if waits is not None:
        known = KNOWN_WAITS.get(name, 0)
        verdict.waits = str(len(waits))
        if len(waits) > known:
            table.failures.append(f"{name}: a step waits {len(waits)} times for the device, not {known}: {', '.join(waits)}")
    bad = _attempt(f"{name}, gradients", table, partial(unusable_gradients, backend, **where))
    if bad is not None:
        verdict.nan = f"{len(bad)}!" if bad else "none"
        table.failures += [f"{name}: gradients of {', '.join(bad)} are missing or not finite"] if bad else []
    return verdict


def _judge(
    backends: dict[str, Backend],
    lengths: Sequence[int],
    setting: Setting,
    *,
    errors: dict[str, str],
    leaks: dict[str, list[str | None]],
    table: Table,
) -> None:
    """Error against the reference and leaks, of every backend over the whole row."""
    row = random_row(sum(lengths), setting.heads, device=setting.device, dtype=setting.dtype)
    inputs = thd_inputs(lengths, device=setting.device)
    reference = _attempt(f"reference, {sum(lengths):,} tokens", table, partial(reference_of, row, lengths))
    limit = TOLERANCES[setting.dtype]
    for name, backend in backends.items():
        at = f"{name}, {sum(lengths):,} tokens"
        if reference is not None:
            results = _attempt(f"{at}, results", table, partial(results_of, backend, row, inputs=inputs))
            error = None if results is None else _attempt(f"{at}, error", table, partial(largest_error, results, reference))
            if error is not None:
                errors[name] = f"{error:.1e}"
                if not error <= limit:
                    table.failures.append(f"{at}: error of {error:.1e}, more than {limit:.0e}")
        found = _attempt(f"{at}, leaks", table, partial(leaks_of_kernel, backend, row, lengths, inputs=inputs))
        leaks[name] += [None] if found is None else found
        table.failures += [f"{at}: {leak}" for leak in found or ()]


def _cost(make: Callable[..., Side], lengths: Sequence[int], setting: Setting) -> Cost:
    side = partial(make, lengths, setting.heads, device=setting.device, dtype=setting.dtype)
    return cost_of(side, device=setting.device, turns=setting.turns)


def _competitor(make: Callable[..., Side], lengths: Sequence[int], setting: Setting) -> Cost | str:
    """Its cost, or why there is none; that is no failure of ours."""
    try:
        return _cost(make, lengths, setting)
    except (torch.OutOfMemoryError, MemoryError):
        return "does not fit"
    except RuntimeError as e:
        # Allocators and kernels of other devices have no class of their own for it.
        return "does not fit" if "alloc" in str(e).lower() else f"fails: {str(e).strip().splitlines()[0][:80]}"


def _attempt(what: str, table: Table, do: Callable[[], T]) -> T | None:
    """What it gives, or None: one failure does not keep the rest from being known, since devices are lent for minutes."""
    try:
        return do()
    except Exception as e:
        table.failures.append(f"{what}: {type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}")
        return None


def _cells(cost: Cost | str | None) -> tuple[str, str]:
    if isinstance(cost, Cost):
        return f"{cost.seconds * 1000:.2f} ms", "—" if cost.peak is None else f"{cost.peak / 2**20:,.0f} MiB"
    return ("failed" if cost is None else cost), "—"


def _ratio(ours: Cost | None, theirs: Cost | str) -> str:
    if ours is None or not isinstance(theirs, Cost):
        return "—"
    memory = f", {ours.peak / theirs.peak:.0%} of the memory" if ours.peak and theirs.peak else ""
    return f"{theirs.seconds / ours.seconds:.1f}x as fast{memory}"


def _tests(limit: float) -> str | None:
    """Run the checks; what failed, or None."""
    # They run in a process of their own, from which memory that this one keeps for later would be missing.
    gc.collect()
    torch.cuda.empty_cache()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "-n", "0", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"pytest -m gpu took more than {limit:.0f} s"
    return None if done.returncode == 0 else f"pytest -m gpu ended with {done.returncode}"


def main(args: Sequence[str] | None = None) -> int:
    """Print the table; 0 where every check holds, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Packed attention on this device, as a table.")
    parser.add_argument("--device", default="cuda", help="(default: cuda)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="(default: bfloat16, on a CPU float32)")
    parser.add_argument("--small", action="store_true", help="short rows and few heads, for a try on a CPU")
    parser.add_argument("--no-tests", action="store_true", help="leave out pytest -m gpu at the end")
    options = parser.parse_args(args)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: try --device cpu --small", file=sys.stderr)
        return 1
    if device.index is not None:
        torch.cuda.set_device(device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    setting = Setting(device=device, dtype=dtype)
    if options.small:
        setting = Setting(
            device=device, dtype=dtype, tokens=(128, 256), sources=6, heads=Heads(queries=4, keys=2, size=16), turns=2
        )
    started = time.monotonic()
    heads = setting.heads
    print(versions(device))
    print(
        f"{setting.sources} sources of long-tailed lengths, {heads.queries} heads, {heads.keys} of keys, of {heads.size}, "
        f"{str(dtype).removeprefix('torch.')}; median of up to {setting.turns} turns, peak with inputs and gradients; error: "
        "largest of output and gradients against plain formulas in float64, relative to the largest number; waits: of a "
        "training step of a tiny model",
        flush=True,
    )
    table = measured(setting, say=partial(print, file=sys.stderr, flush=True))
    print(f"\n{table}\n", flush=True)
    print(f"The table took {time.monotonic() - started:.0f} s.", flush=True)
    if device.type != "cuda" or options.no_tests:
        print("The checks: python -m pytest -m gpu tests/gpu", flush=True)
    elif (failed := _tests(max(30.0, _LIMIT - (time.monotonic() - started)))) is not None:
        table.failures.append(failed)
    for failure in table.failures:
        print(f"FAILED {failure}", flush=True)
    return 1 if table.failures else 0
