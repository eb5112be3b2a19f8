"""``segments``: torch's own attention, source by source. Every device and dtype, every feature."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_pack.attention.backends.base import in_autocast
from lightning_pack.attention.backends.segment_operator import segment_operator
from lightning_pack.attention.context_parallel import ContextGroup
from lightning_pack.attention.segments import segment_attention
from lightning_pack.attention.thd import THDInputs


class SegmentsBackend:
    """The reference that can be trained on. Waits for the device once per THDInputs, where the row is not on the CPU.

    Under :func:`torch.compile` each call is one operator, so that no graph depends on the lengths of the sources; it then waits
    for the device once per call, and once more in the backward pass. With dropout, attention stays out of the graphs.
    """

    name = "segments"

    def __init__(self) -> None:
        self.context: ContextGroup | None = None

    def refusals(self, model: PreTrainedModel) -> Iterator[str]:
        """None: it computes all that packed attention lets pass."""
        yield from ()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        inputs: THDInputs,
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        training: bool = False,
    ) -> Tensor:
        """See :class:`~.base.Backend`; places of a gap are 0, and so are their gradients.

        Raises:
            ValueError: for shapes, boundaries or options that do not fit together, and a ``max_seqlen`` that is too small.
        """
        if torch.compiler.is_compiling():
            padded = inputs.cu_seqlens_padded if inputs.pad_between_seqs else None
            if dropout:
                return _uncompiled(
                    query,
                    key,
                    value,
                    inputs.cu_seqlens,
                    padded,
                    max_seqlen=inputs.max_seqlen,
                    scale=scale,
                    causal=causal,
                    window=window,
                    softcap=softcap,
                    sinks=sinks,
                    dropout=dropout,
                )
            rule = (inputs.max_seqlen, scale, causal, window, softcap)
            return _operator(*in_autocast(query, key, value), sinks, inputs.cu_seqlens, padded, *rule)
        longest = max(inputs.lengths)
        if inputs.max_seqlen < longest:
            raise ValueError(
                f"max_length_q={inputs.max_seqlen} is less than the longest source of {longest} tokens: pass max_seqlen"
            )
        lengths = inputs.lengths
        if inputs.pad_between_seqs:
            # A gap becomes a segment of its own, so that no real token is in it; then it is cut off.
            gaps = [room - real for room, real in zip(lengths, inputs.real_lengths, strict=True)]
            lengths = list(chain.from_iterable(zip(inputs.real_lengths, gaps, strict=True)))
        chunks: dict[str, Any] = {}
        if self.context is not None:
            query, key, value = in_autocast(query, key, value)
            places = self.context.places(inputs).gathered
            key, value = (tensor.index_select(0, places) for tensor in self.context.gather(key, value))
            chunks = {"chunks": self.context.chunks, "of": 2 * self.context.size}
        out = segment_attention(
            *(tensor.transpose(0, 1)[None] for tensor in (query, key, value)),
            boundaries=inputs.cu_seqlens_padded,
            lengths=lengths,
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
            gaps=range(1, len(lengths), 2) if inputs.pad_between_seqs else (),
            **chunks,
        )
        return out[0].transpose(0, 1)


def _compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    *,
    max_seqlen: int,
    **rule: Any,
) -> Tensor:
    """The attention of the operator, uncompiled."""
    inputs = THDInputs(
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded,
        max_seqlen=max_seqlen,
        total=query.shape[0],
        pad_between_seqs=cu_seqlens_padded is not None,
    )
    return SegmentsBackend()(query, key, value, inputs=inputs, **rule)


_operator = segment_operator(_compute)
# The operator computes attention again for its gradient, and would drop other weights then.
_uncompiled = torch.compiler.disable(_compute)
