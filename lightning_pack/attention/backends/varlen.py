"""``varlen``: ``torch.nn.attention.varlen``, FlashAttention as torch brings it. CUDA, bfloat16 and float16."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_pack.attention.backends.base import (
    USE_SEGMENTS,
    BackendError,
    head_sizes,
    in_autocast,
    refuse_options,
    unsupported,
)
from lightning_pack.attention.context_parallel import ContextGroup
from lightning_pack.attention.thd import THDInputs

#: What the kernel is given by keyword; earlier versions of torch had other arguments.
_NEEDED = {"scale", "window_size", "enable_gqa"}
#: Longest head that FlashAttention has a backward for.
_LARGEST_HEAD = 256


class VarlenBackend:
    """One kernel call a layer, two under context parallelism; nothing waits for the device.

    Raises:
        BackendError: if this torch does not have the kernel.
    """

    name = "varlen"

    def __init__(self) -> None:
        self._kernel = _kernel()
        self.context: ContextGroup | None = None

    def refusals(self, model: PreTrainedModel) -> Iterator[str]:
        """Soft capping, dropout, sinks, and heads that FlashAttention does not take."""
        yield from unsupported(model)
        for sizes in head_sizes(model):
            yield from _wrong_heads(*sizes)

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
        """See :class:`~.base.Backend`.

        Raises:
            BackendError: off CUDA, for other dtypes, and for what is not computed.
        """
        refuse_options(self.name, causal=causal, dropout=dropout, softcap=softcap, sinks=sinks, gaps=inputs.pad_between_seqs)
        query, key, value = (tensor.contiguous() for tensor in in_autocast(query, key, value))
        # A compiler cannot trace the question what the device is able to do; it was asked when the backend was chosen.
        asked = _wrong_place if torch.compiler.is_compiling() else varlen_unusable
        unusable = asked(query.device, query.dtype)
        if unusable is not None:
            raise BackendError(f"backend 'varlen' {unusable}; {USE_SEGMENTS}")
        for refusal in _wrong_heads(query.shape[-1], value.shape[-1]):
            raise BackendError(f"backend 'varlen' does not compute {refusal}; {USE_SEGMENTS}")
        options: dict[str, Any] = {
            "scale": scale,
            # Both ends count: a window of W tokens reaches W - 1 to the left.
            "window_size": (-1 if window is None else window - 1, 0),
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        if self.context is not None:
            return self._over_ranks(query, key, value, inputs=inputs, context=self.context, options=options)
        cu, longest = inputs.cu_seqlens, inputs.max_seqlen
        return self._kernel(query, key, value, cu, cu, longest, longest, **options)

    def _over_ranks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        inputs: THDInputs,
        context: ContextGroup,
        options: dict[str, Any],
    ) -> Tensor:
        # Of unequal numbers of queries and keys the kernel aligns the last ones, for windows as well.
        places = context.places(inputs)
        key, value = context.gather(key, value)
        outputs = [
            self._kernel(
                query.index_select(0, chunk.queries),
                key.index_select(0, chunk.keys),
                value.index_select(0, chunk.keys),
                chunk.cu_seqlens_q,
                chunk.cu_seqlens_k,
                chunk.max_seqlen_q,
                chunk.max_seqlen_k,
                **options,
            )
            for chunk in places.chunks
        ]
        return torch.cat(outputs).index_select(0, places.back)


def varlen_unusable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot run there; None if it can."""
    wrong = _wrong_place(device, dtype)
    if wrong is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"needs compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    return wrong


def _wrong_place(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"runs on CUDA devices, and the model is on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        computed_in = str(dtype).removeprefix("torch.")
        return f"computes in bfloat16 and float16, and the model in {computed_in} (precision='bf16-mixed' changes that)"
    return None


def _wrong_heads(size: int, value_size: int) -> Iterator[str]:
    if size != value_size:
        yield f"heads of {size} with values of {value_size} (both have to be equal)"
    if size % 8 or size > _LARGEST_HEAD:
        yield f"heads of {size} (only multiples of 8 up to {_LARGEST_HEAD})"


def _kernel() -> Callable[..., Tensor]:
    try:
        kernel = import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError) as e:
        raise BackendError(
            f"backend 'varlen' needs torch.nn.attention.varlen, which torch {torch.__version__} does not have: upgrade torch, "
            f"or {USE_SEGMENTS}"
        ) from e
    missing = sorted(_NEEDED - inspect.signature(kernel).parameters.keys())
    if missing:
        raise BackendError(
            f"backend 'varlen' needs varlen_attn with {', '.join(missing)}, which torch {torch.__version__} does not have: "
            f"upgrade torch, or {USE_SEGMENTS}"
        )
    return kernel
