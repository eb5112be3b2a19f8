"""The segments backend as one operator of torch: a compiler sees shapes and nothing of the lengths inside.

Traced as Python, every pack would be a program of its own, since a segment more is a kernel call more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

_NAME, _BACKWARD = "lightning_pack::segment_attention", "lightning_pack::segment_attention_backward"
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor cu_seqlens, Tensor? cu_seqlens_padded, "
    "SymInt max_seqlen, float? scale, bool causal, int? window, float? softcap"
)

#: ``(query, key, value, cu_seqlens, cu_seqlens_padded, *, max_seqlen, scale, causal, window, softcap, sinks)`` -> output.
Compute = Callable[..., Tensor]


def segment_operator(compute: Compute) -> Compute:
    """Register ``lightning_pack::segment_attention``, once, and return it.

    The backward pass computes the forward pass of its call again, so nothing but the inputs is kept. Boundaries are read by
    each call, which waits for the device where they are not on the CPU. There is no second derivative, and no dropout: what
    was dropped would not be known when it is computed again.

    Args:
        compute: the attention; ``query [T, Hq, D]``, ``key [T, Hk, D]``, ``value [T, Hk, Dv]`` -> ``[T, Hq, Dv]``.
            ``cu_seqlens_padded`` is None unless there are gaps.
    """

    def forward(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *rule: Any) -> Tensor:
        # An operator's output has the layout that its fake says, and no memory of its inputs.
        out = _called(compute, query, key, value, sinks, *rule)
        return out.contiguous()

    def forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        return query.new_empty(query.shape[0], query.shape[1], value.shape[2])

    def backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *rule: Any) -> list[Tensor]:
        with torch.enable_grad():
            inputs = [None if tensor is None else tensor.detach().requires_grad_() for tensor in (query, key, value, sinks)]
            out = _called(compute, *inputs, *rule)
            known = [tensor for tensor in inputs if tensor is not None]
            return [tensor.contiguous() for tensor in torch.autograd.grad(out, known, gradient)]

    def backward_fake(gradient: Tensor, *rest: Any) -> list[Tensor]:
        return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in rest[:4] if tensor is not None]

    # A captured graph of the device would never read boundaries again (torch 2.9 and later can be told).
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    tags: dict[str, Any] = {} if unsafe is None else {"tags": (unsafe,)}
    operator = library.custom_op(_NAME, forward, mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor", **tags)
    operator.register_fake(forward_fake)
    # Not a custom_op: inside one autograd is off, and this one runs it.
    library.define(_BACKWARD, f"(Tensor gradient, {_ARGUMENTS}) -> Tensor[]", **tags)
    library.impl(_BACKWARD, "default", backward)
    library.register_fake(_BACKWARD, backward_fake)
    derivative = torch.ops.lightning_pack.segment_attention_backward.default

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        query, key, value, sinks, cu_seqlens, cu_seqlens_padded, *ctx.rule = inputs
        ctx.save_for_backward(query, key, value, sinks, cu_seqlens, cu_seqlens_padded)

    def differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor] = derivative(gradient, *ctx.saved_tensors, *ctx.rule)
        return (*found, *[None] * (11 - len(found)))

    operator.register_autograd(differentiate, setup_context=keep)
    return operator


def _called(compute: Compute, *arguments: Any) -> Tensor:
    query, key, value, sinks, cu_seqlens, cu_seqlens_padded, *rule = arguments
    names = ("max_seqlen", "scale", "causal", "window", "softcap")
    return compute(query, key, value, cu_seqlens, cu_seqlens_padded, sinks=sinks, **dict(zip(names, rule, strict=True)))
