"""What each rank does in the tests of context parallelism. Every function is called on all ranks, in the same order."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import varlen

from lightning_pack import ContextSlice, PackedBatch, PackingPolicy, ParallelLayout
from lightning_pack.attention import (
    ActivatedModel,
    SegmentsBackend,
    THDInputs,
    TransformerEngineBackend,
    VarlenBackend,
    packed_attention,
)
from lightning_pack.attention.context_parallel import ContextGroup
from lightning_pack.attention.registration import BACKEND_ATTRIBUTE
from lightning_pack.source import IGNORE, EncodedSource
from tests.reference_attention import reference_attention
from tests.te_stub import transformer_engine
from tests.tiny_models import gradients_of, largest_difference, make_sources, tiny_model

#: Of sources: real lengths. One is as short as can be, one longer than a block of queries under a window.
LENGTHS = (13, 1, 9, 280, 22)
HEADS, GROUPS, SIZE = 4, 2, 8
#: Kinds of models; with targets in one chunk only, or with activations that are computed again, in both ways.
MODELS = ("llama", "mistral", "llama prompt", "mistral reentrant", "llama again")


def kernel(*args: Any, **kwargs: Any) -> Tensor:
    """``varlen_attn`` in plain formulas: queries and keys of a source are aligned at their ends."""
    call = inspect.signature(_REAL).bind(*args, **kwargs).arguments
    query, key, value = call["query"], call["key"], call["value"]
    cu_q, cu_k, (left, right) = call["cu_seq_q"], call["cu_seq_k"], call["window_size"]
    assert (cu_q.dtype, cu_k.dtype, right) == (torch.int32, torch.int32, 0)
    assert call["enable_gqa"]
    assert all(tensor.is_contiguous() for tensor in (query, key, value, cu_q, cu_k))
    sizes, longer = cu_q.diff().tolist(), cu_k.diff().tolist()
    assert (sum(sizes), sum(longer)) == (len(query), len(key) if len(key) == len(value) else None)
    assert type(call["max_q"]) is type(call["max_k"]) is int
    assert max(sizes) <= call["max_q"]
    assert max(longer) <= call["max_k"]
    outputs = []
    for q, k, v in zip(query.split(sizes), key.split(longer), value.split(longer), strict=True):
        # The formulas know rows of equal lengths: queries that are not here come first, and their outputs are dropped.
        before = k.new_zeros(len(k) - len(q), *q.shape[1:])
        window = None if left < 0 else left + 1
        whole = reference_attention(torch.cat([before, q]), k, v, offsets=[0, len(k)], scale=call["scale"], window=window)
        outputs.append(whole[len(before) :])
    return torch.cat(outputs)


_REAL = varlen.varlen_attn
kernel.__signature__ = inspect.signature(_REAL)  # type: ignore[attr-defined]


@contextmanager
def stand_ins(version: str = "2.20") -> Iterator[Any]:
    """Kernels in plain formulas where CUDA would be needed."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(varlen, "varlen_attn", kernel))
        stack.enter_context(patch("lightning_pack.attention.backends.varlen.varlen_unusable", lambda device, dtype: None))
        yield stack.enter_context(transformer_engine(version))


def group_of(layout: ParallelLayout) -> ContextGroup:
    group = ContextGroup.of(layout, rank=dist.get_rank(), world_size=dist.get_world_size())
    assert group is not None
    return group


def row_of(lengths: tuple[int, ...], layout: ParallelLayout, **options: Any) -> PackedBatch:
    policy = PackingPolicy(capacity=480, multiple=layout.multiple, **options)
    return PackedBatch.from_packs([policy.build(make_sources(lengths))], pad_id=0)


def prompt_row(layout: ParallelLayout) -> PackedBatch:
    """One source with targets in its last chunk only, which the first rank holds."""
    ids = torch.arange(3, 3 + 8 * layout.context)
    labels = torch.full_like(ids, IGNORE)
    labels[-2:] = ids[-2:]
    policy = PackingPolicy(capacity=480, multiple=layout.multiple)
    return PackedBatch.from_packs([policy.build([EncodedSource.of("p", ids, labels)])], pad_id=0)


def attention(layout: ParallelLayout) -> dict[str, float]:
    """Largest differences of outputs and gradients of this rank from those of the full row in plain formulas."""
    group, found = group_of(layout), {}
    row = row_of(LENGTHS, layout)
    assert row.cu_seqlens_padded.diff().min() == 2 * layout.context  # a source of one token to a chunk
    assert row.cu_seqlens is not row.cu_seqlens_padded
    inputs = THDInputs.of(row)
    offsets = row.cu_seqlens_padded.tolist()
    held = ContextSlice.of(row, layout=layout, rank=group.rank).indices
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, SIZE), (GROUPS, SIZE), (GROUPS, SIZE), (HEADS, SIZE)]
    full = [torch.randn(row.width, *shape, dtype=torch.float64, generator=generator) for shape in shapes]
    weight = full.pop()
    cases: dict[str, dict[str, Any]] = {"": {}, " window": {"window": 5}, " long window": {"window": 70}}
    own = {" sinks, softcap": {"softcap": 2.0, "sinks": torch.randn(HEADS, dtype=torch.float64, generator=generator)}}
    with stand_ins() as te:
        for backend in (SegmentsBackend(), VarlenBackend(), TransformerEngineBackend()):
            backend.context = group
            for name, options in (cases | (own if backend.name == "segments" else {})).items():
                rows = [tensor.clone().requires_grad_() for tensor in full]
                options = {key: v.clone().requires_grad_() if key == "sinks" else v for key, v in options.items()}
                leaves = rows + [v for v in options.values() if isinstance(v, Tensor)]
                expected = reference_attention(*rows, offsets=offsets, scale=0.3, **options)
                (expected * weight).sum().backward()
                wanted = [expected.detach()[held], *(tensor.grad[held] for tensor in rows)]
                wanted += [tensor.grad for tensor in leaves[3:]]
                part = [tensor.detach()[held].requires_grad_() for tensor in rows]
                options = {key: v.detach().requires_grad_() if isinstance(v, Tensor) else v for key, v in options.items()}
                out = backend(*part, inputs=inputs, scale=0.3, training=True, **options)
                (out * weight[held]).sum().backward()
                got = [out.detach(), *(tensor.grad for tensor in part)]
                for value in options.values():
                    if isinstance(value, Tensor):
                        dist.all_reduce(value.grad, group=group.process_group)
                        got.append(value.grad)
                assert all(float(one.abs().max()) > 0.1 for one in wanted)
                found[backend.name + name] = max(float((a - b).abs().max()) for a, b in zip(got, wanted, strict=True))
    used = {made.cp_comm_type for made in te.instances}
    assert used == ({"p2p", "a2a"} if GROUPS % layout.context == 0 else {"p2p", "all_gather"})
    return found


def loss_and_gradients(
    model: Any, batch: PackedBatch, share: float, group: Any = None, *, own: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """Of the mean loss over targets, which are this share of all, added up over a group; ``own``: as the model computes it."""
    model.zero_grad()
    output = model(**batch)
    # The model's own is in float32.
    loss = output.loss if own else F.cross_entropy(output.logits[0], batch.shift_labels[0], ignore_index=IGNORE)
    if share:
        total = (loss * share).detach().clone()
        (loss * share).backward()
    else:
        # As a callback does it: the mean of no target is no number, but all of its gradients are 0.
        total = torch.zeros_like(loss.detach())
        (loss * torch.zeros_like(total)).backward()
    gradients = gradients_of(model)
    if group is not None:
        for tensor in (total, *gradients.values()):
            dist.all_reduce(tensor, group=group)
    return total.item(), gradients


def models(layout: ParallelLayout, names: tuple[str, ...] = MODELS) -> dict[str, list[float]]:
    """For each model: differences of loss and gradients from the unsliced row, targets here, size of the largest gradient."""
    group, found = group_of(layout), {}
    row = row_of((7, 1, 12, 5, 9), layout)
    prompt = prompt_row(layout)
    for name in names:
        batch = prompt if name == "llama prompt" else row
        model = tiny_model(name.partition(" ")[0], dtype=torch.float64)
        backend = SegmentsBackend()
        active = ActivatedModel.of(model, backend=backend)
        own = name == "llama prompt"
        expected = loss_and_gradients(model, batch, 1.0, own=own)
        if name.endswith(("reentrant", "again")):
            model.gradient_checkpointing_enable({"use_reentrant": name.endswith("reentrant")})
        backend.context = group
        part = ContextSlice.of(batch, layout=layout, rank=group.rank, group=group.process_group)
        targets = int(part.loss_mask.sum())
        loss, gradients = loss_and_gradients(model, part, targets / part.targets, group.process_group, own=own)
        active.restore()
        size = max(float(gradient.abs().max()) for gradient in gradients.values())
        found[name] = [abs(loss - expected[0]), largest_difference(gradients, expected[1]), targets, size]
    return found


class Layer(nn.Module):
    """An attention layer without weights."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, cu: Tensor, longest: int) -> Tensor:
        boundaries = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}
        out, _ = packed_attention(self, query * 2, key, value, None, **boundaries)
        return out * 3


def compiled(layout: ParallelLayout) -> list[float]:
    """Difference of a compiled layer's outputs and gradients from those of the layer; number of graphs."""
    group, row = group_of(layout), row_of((7, 1, 12), layout)
    layer, backend = Layer(), SegmentsBackend()
    setattr(layer, BACKEND_ATTRIBUTE, backend)
    backend.context = group
    part = ContextSlice.of(row, layout=layout, rank=group.rank)
    shape = (part.input_ids.shape[1], SIZE)
    generator = torch.Generator().manual_seed(group.rank)
    parts = [torch.randn(1, heads, *shape, dtype=torch.float64, generator=generator) for heads in (HEADS, GROUPS, GROUPS)]
    graphs: list[Any] = []

    def keep(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    results = []
    for call in (layer, torch.compile(layer, backend=keep)):
        leaves = [tensor.clone().requires_grad_() for tensor in parts]
        out = call(*leaves, part.cu_seqlens_padded, part.max_seqlen)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return [max(float((a - b).abs().max()) for a, b in zip(*results, strict=True)), len(graphs)]


def refusals(layout: ParallelLayout) -> dict[str, str]:
    """Messages of what cannot be computed."""
    group, row = group_of(layout), row_of((7, 12), layout)
    part = ContextSlice.of(row, layout=layout, rank=group.rank)
    found = {}

    def refused(name: str, call: Any) -> None:
        try:
            call()
        except Exception as e:
            found[name] = f"{type(e).__name__}: {e}"

    for name, changes in {
        "dynamic": {
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            "max_position_embeddings": 8,
        },
        "full": {},
    }.items():
        model, backend = tiny_model("llama", **changes), SegmentsBackend()
        ActivatedModel.of(model, backend=backend)
        backend.context = group
        refused(name, partial(model, **(row if name == "full" else part)))
    tensors = [torch.ones(part.input_ids.shape[1], heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    three = ContextGroup(rank=0, ranks=(0, 1, 2), process_group=None)
    for version, context in (("2.9", group), ("2.17", three), ("2.18", three), ("2.10", group)):
        with transformer_engine(version):
            te = TransformerEngineBackend()
            te.context = context
            assert not list(te.refusals(tiny_model("llama")))
            found[f"te {version}"] = " ".join(te.refusals(tiny_model("mistral")))
            if found[f"te {version}"]:
                refused(f"te {version} call", partial(te, *tensors, inputs=THDInputs.of(part), window=4))
    backend = SegmentsBackend()
    backend.context = group
    refused("bidirectional", partial(backend, *tensors, inputs=THDInputs.of(part), causal=False))
    return found
