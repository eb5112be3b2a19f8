"""What has to hold of a backend, on any device and in any dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_pack import ContextSlice, ParallelLayout
from lightning_pack.attention import ActivatedModel, Backend, ContextGroup, THDInputs, leaking_sources
from lightning_pack.row import PackedBatch
from tests.context_ranks import LENGTHS as CUT_LENGTHS
from tests.context_ranks import row_of
from tests.gpu.device import poison
from tests.gpu.waits import counted_waits
from tests.reference_attention import reference_attention
from tests.tiny_models import make_sources, pack_row, tiny_model

#: Of the rows of tiny models; one token, and lengths that no block of a kernel divides.
LENGTHS = (70, 1, 105, 16, 40)
#: Kernels need heads of a multiple of 8, here 64.
LARGER = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
#: The names of results, in order.
RESULTS = ("output", "gradient of query", "gradient of key", "gradient of value")


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Sizes of one attention layer."""

    queries: int = 8
    keys: int = 2
    size: int = 64


def random_row(total: int, heads: Heads, *, device: torch.device, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Query, key, value and the gradient of the output, ``[total, heads, size]``, the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(total, number, heads.size) for number in (heads.queries, heads.keys, heads.keys, heads.queries)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def thd_inputs(lengths: Sequence[int], *, device: torch.device) -> THDInputs:
    """Boundaries of sources that fill their places."""
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return THDInputs(cu_seqlens=cu, cu_seqlens_padded=cu, max_seqlen=max(lengths), total=sum(lengths))


def results_of(backend: Backend, row: Sequence[Tensor], *, inputs: THDInputs, window: int | None = None) -> list[Tensor]:
    """Output and gradients, by :data:`RESULTS`."""
    *given, weight = row
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    out = backend(*leaves, inputs=inputs, window=window, training=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def reference_of(row: Sequence[Tensor], lengths: Sequence[int], *, window: int | None = None) -> list[Tensor]:
    """The same by the plain formulas in float64, on the device of ``row``, kept as float32.

    One key head at a time, since all scores of a long row would not fit in memory.
    """
    offsets = [0, *accumulate(lengths)]
    share = row[0].shape[1] // row[1].shape[1]
    parts: list[list[Tensor]] = []
    # Masks of the formulas are made on the default device.
    with torch.device(row[0].device):
        for head in range(row[1].shape[1]):
            queries = slice(head * share, (head + 1) * share)
            chosen = [row[0][:, queries], row[1][:, head : head + 1], row[2][:, head : head + 1]]
            leaves = [tensor.detach().double().requires_grad_() for tensor in chosen]
            out = reference_attention(*leaves, offsets=offsets, scale=row[0].shape[2] ** -0.5, window=window)
            gradients = torch.autograd.grad(out, leaves, row[3][:, queries].double())
            parts.append([tensor.float() for tensor in (out.detach(), *gradients)])
    return [torch.cat(each, dim=1) for each in zip(*parts, strict=True)]


@dataclass(frozen=True, eq=False)
class Together(ContextGroup):
    """A group whose ranks are this process, one after the other; it gathers what it is made with."""

    gathered: Any = None

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.gathered


def results_over_ranks(
    backend: Backend, context: int, *, device: torch.device, dtype: torch.dtype, window: int | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of a row of which each context-parallel rank computed its part, and those by the formulas."""
    layout = ParallelLayout(context=context)
    cut = row_of(CUT_LENGTHS, layout).to(device)
    row = random_row(cut.width, Heads(queries=4, keys=2), device=device, dtype=dtype)
    query, key, value = leaves = [tensor.detach().requires_grad_() for tensor in row[:3]]
    parts = [ContextSlice.of(cut, layout=layout, rank=rank) for rank in range(context)]
    places = torch.cat([part.indices for part in parts])
    outputs = []
    for rank, part in enumerate(parts):
        gathered = (key[places], value[places])
        backend.context = Together(rank=rank, ranks=tuple(range(context)), process_group=None, gathered=gathered)
        held = (tensor[part.indices] for tensor in leaves)
        outputs.append(backend(*held, inputs=THDInputs.of(part), window=window, scale=query.shape[2] ** -0.5, training=True))
    backend.context = None
    out = torch.zeros_like(query).index_copy(0, places, torch.cat(outputs))
    reference = reference_of(row, cut.cu_seqlens_padded.diff().tolist(), window=window)
    return [out.detach(), *torch.autograd.grad(out, leaves, row[3])], reference


def largest_error(results: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Largest difference of output and gradients, each relative to its largest number; infinite where one is not finite."""
    errors = []
    for mine, exact in zip(results, reference, strict=True):
        assert mine.shape == exact.shape
        error = float(((mine.float() - exact).abs().max() / exact.abs().max()).detach())
        errors.append(error if error == error else float("inf"))
    return max(errors)


def distance(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Of two lists of gradients, relative to the size of the second: what single small ones round to does not count."""
    squares = [((a.double() - b.double()).square().sum(), b.double().square().sum()) for a, b in zip(mine, theirs, strict=True)]
    return float((sum(d for d, _ in squares) / sum(s for _, s in squares)) ** 0.5)


def leaks_of_kernel(backend: Backend, row: Sequence[Tensor], lengths: Sequence[int], *, inputs: THDInputs) -> list[str]:
    """Which sources see which: the first and the longest are changed in turn, and no bit of another's output may move."""
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(row[0].device)
    with torch.no_grad():
        before = backend(*row[:3], inputs=inputs)
        found = []
        for changed in dict.fromkeys((0, max(range(len(lengths)), key=lengths.__getitem__))):
            inside = (numbers == changed)[:, None, None]
            after = backend(*(torch.where(inside, -tensor.flip(2), tensor) for tensor in row[:3]), inputs=inputs)
            moved = (before != after).flatten(1).any(dim=1)
            if not bool(moved[numbers == changed].all()):
                raise ValueError(f"source {changed} was changed and its own output was not: nothing can be told")
            others = numbers[moved & (numbers != changed)].unique().tolist()
            found += [f"source {other} sees {changed}" for other in others]
    return found


def packed_model(backend: Backend, model_type: str, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A tiny model whose attention ``backend`` computes."""
    model = tiny_model(model_type, **LARGER).to(device, dtype)
    ActivatedModel.of(model, backend=backend)
    return model


def leaks_of_model(backend: Backend, model_type: str, *, device: torch.device, dtype: torch.dtype) -> list[str]:
    """The same of a whole model."""
    model = packed_model(backend, model_type, device=device, dtype=dtype)
    batch = pack_row(make_sources(LENGTHS), multiple=8).to(device)
    return [
        f"{key} sees source {changed} of {model_type}"
        for changed in (0, 2)
        for key in leaking_sources(model, batch, source=changed)
    ]


def unusable_gradients(backend: Backend, *, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Parameters whose gradients are missing or not finite after a row with a wide tail, in memory full of NaN."""
    model = packed_model(backend, "llama", device=device, dtype=dtype)
    batch = pack_row(make_sources((70, 1)), multiple=64).to(device)
    if int(batch.cu_seqlens_padded[-1]) <= int(batch.cu_seqlens[-1]) + 50:
        raise ValueError("the row has no wide tail")
    poison(device)
    model(**batch).loss.backward()
    return [name for name, p in model.named_parameters() if p.grad is None or not bool(torch.isfinite(p.grad).all())]


def training_step(model: nn.Module) -> Callable[[PackedBatch], None]:
    """Forward, backward, clipping and the step of an optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: PackedBatch) -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def rows_of(count: int, *, device: torch.device, lengths: Sequence[int] = LENGTHS) -> list[PackedBatch]:
    """Rows of other tokens, and of other boundaries."""
    turned = [[*lengths[number % len(lengths) :], *lengths[: number % len(lengths)]] for number in range(count)]
    return [pack_row(make_sources(each, seed=n), multiple=8).to(device) for n, each in enumerate(turned)]


def waits_of_step(backend: Backend, *, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Where a training step waits for the device, after two to warm up."""
    model = packed_model(backend, "llama", device=device, dtype=dtype)
    step = training_step(model)
    rows = rows_of(3, device=device)
    before = copy.deepcopy(list(model.parameters()))
    for row in rows[:2]:
        step(row)
    with counted_waits(device) as found:
        step(rows[2])
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return found


def of_width(batch: PackedBatch) -> PackedBatch:
    """The row with the largest ``max_seqlen`` that there can be, a number that is the same for all rows."""
    return replace(batch, max_seqlen=batch.input_ids.shape[-1])
