"""``te``: TransformerEngine's ``DotProductAttention`` with ``qkv_format="thd"``. CUDA; versions 2.0 and later.

Under context parallelism it sends keys and values around by itself: ``p2p``, or for sliding windows, which that does not
compute, ``a2a`` or ``all_gather``.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_pack.attention.backends.base import USE_SEGMENTS, BackendError, in_autocast, refuse_options, unsupported
from lightning_pack.attention.context_parallel import ContextGroup
from lightning_pack.attention.thd import THDInputs, bucketed

#: Its choice of a kernel is cached by the longest source, so that is rounded up to a multiple of this.
_MAX_SEQLEN_MULTIPLE = 128


@dataclass(frozen=True)
class _Layer:
    """What an instance is made for."""

    heads: int
    groups: int
    #: Of keys, and of values.
    sizes: tuple[int, int]
    scale: float
    window: int | None
    context: ContextGroup | None


class TransformerEngineBackend:
    """One kernel call a layer, chosen by TransformerEngine; nothing waits for the device.

    Except under context parallelism in versions before 2.2, which compare boundaries on the host.

    Its modules have no weights. They are kept here and not in the model, whose state would get new keys.

    Raises:
        BackendError: if TransformerEngine is missing or broken.
    """

    name = "te"

    def __init__(self) -> None:
        self._kind = _attention_class()
        # Without the argument a version compares boundaries on the host where padded ones are given, so none are.
        self._says_padding = "pad_between_seqs" in inspect.signature(self._kind.forward).parameters
        self._layers: dict[_Layer, Any] = {}
        self._stream: Any = None
        self.context: ContextGroup | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or a pickle of a model that is switched on makes instances of its own.
        return type(self), (), {"context": self.context}

    def refusals(self, model: PreTrainedModel) -> Iterator[str]:
        """Soft capping, dropout and sinks; sliding windows over ranks where the version has none."""
        yield from unsupported(model)
        text: Any = model.config.get_text_config()
        layers = getattr(text, "layer_types", None) or ["sliding_attention"]
        if self.context is not None and getattr(text, "sliding_window", None) and "sliding_attention" in layers:
            heads = text.num_attention_heads
            groups = getattr(text, "num_key_value_heads", None) or heads
            communication = _communication(self.context.size, heads=heads, groups=groups, window=text.sliding_window)
            if communication not in _COMMUNICATIONS:
                yield communication

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
            BackendError: for what is not computed, and for boundaries on another device.
        """
        refuse_options(self.name, causal=causal, dropout=dropout, softcap=softcap, sinks=sinks, gaps=inputs.pad_between_seqs)
        if inputs.cu_seqlens.device != query.device:
            raise BackendError(
                f"boundaries on {inputs.cu_seqlens.device} and queries on {query.device}: kernels would read foreign memory; "
                "move the whole batch (batch.to(device))"
            )
        query, key, value = (tensor.contiguous() for tensor in in_autocast(query, key, value))
        heads, size = query.shape[1:]
        groups, value_size = key.shape[1], value.shape[2]
        scale = size**-0.5 if scale is None else scale
        layer = self._layer(_Layer(heads, groups, (size, value_size), scale, window, self.context))
        if layer.training != training:
            layer.train(training)
        multiple = _MAX_SEQLEN_MULTIPLE
        if self.context is not None:
            # Boundaries and the longest source are those of the full row; it divides them by the ranks.
            multiple = math.lcm(multiple, 2 * self.context.size)
            self.context.places(inputs)
        longest = bucketed(inputs.max_seqlen, multiple=multiple, limit=inputs.total)
        cu = inputs.cu_seqlens
        # By keyword: the order of arguments has changed between versions.
        options: dict[str, Any] = {
            "cu_seqlens_q": cu,
            "cu_seqlens_kv": cu,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }
        if self._says_padding or self.context is not None:
            # One object in all slots: versions tell 'no gaps' by identity.
            options |= {"cu_seqlens_q_padded": cu, "cu_seqlens_kv_padded": cu}
        if self._says_padding:
            options["pad_between_seqs"] = False
        out = layer(query_layer=query, key_layer=key, value_layer=value, **options)
        return out.view(query.shape[0], heads, value_size)

    def _layer(self, made_for: _Layer) -> Any:
        if made_for not in self._layers:
            size, value_size = made_for.sizes
            layer = self._kind(
                num_attention_heads=made_for.heads,
                kv_channels=size if size == value_size else made_for.sizes,
                num_gqa_groups=made_for.groups,
                attention_dropout=0.0,
                qkv_format="thd",
                attn_mask_type="padding_causal",
                # Both ends count: a window of W tokens reaches W - 1 to the left.
                window_size=(-1 if made_for.window is None else made_for.window - 1, 0),
                softmax_scale=made_for.scale,
            )
            if made_for.context is not None:
                self._spread(layer, made_for, made_for.context)
            self._layers[made_for] = layer
        return self._layers[made_for]

    def _spread(self, layer: Any, made_for: _Layer, context: ContextGroup) -> None:
        heads, groups, window = made_for.heads, made_for.groups, made_for.window
        communication = _communication(context.size, heads=heads, groups=groups, window=window)
        if communication not in _COMMUNICATIONS:
            raise BackendError(f"backend 'te' does not compute {communication}; {USE_SEGMENTS}")
        if self._stream is None and torch.cuda.is_available():
            # The second half of its work overlaps with the first on a stream of its own, one for all layers.
            self._stream = torch.cuda.Stream()
        layer.set_context_parallel_group(
            cp_group=context.process_group,
            cp_global_ranks=list(context.ranks),
            cp_stream=self._stream,
            cp_comm_type=communication,
        )


_COMMUNICATIONS = ("p2p", "a2a", "all_gather")


def _communication(size: int, *, heads: int, groups: int, window: int | None) -> str:
    """How keys and values get to other ranks; what is not computed, if there is no way."""
    if window is None:
        return "p2p"
    told = str(getattr(import_module("transformer_engine"), "__version__", "of unknown version"))
    numbers = re.match(r"(\d+)\.(\d+)", told)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if version >= (2, 10) and heads % size == 0 and groups % size == 0:
        return "a2a"
    if version >= (2, 18):
        return "all_gather"
    return (
        f"a sliding window of {window} tokens over {size} context-parallel ranks with TransformerEngine {told}: 'a2a' needs "
        f"version 2.10 and numbers of heads that {size} divides ({heads} of queries, {groups} of keys), 'all_gather' needs "
        "version 2.18"
    )


def te_unusable(device: torch.device, dtype: torch.dtype, *, automatic: bool = False) -> str | None:
    """Why TransformerEngine cannot or, for an automatic choice, should not run there; None if it can."""
    if device.type != "cuda":
        return f"runs on CUDA devices, and the model is on {device.type}"
    if automatic and dtype not in (torch.bfloat16, torch.float16):
        return f"is fast in bfloat16 and float16, and the model computes in {str(dtype).removeprefix('torch.')}"
    return None


def _attention_class() -> Any:
    try:
        return import_module("transformer_engine.pytorch").DotProductAttention
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != "transformer_engine":
            raise BackendError(
                f"backend 'te': TransformerEngine is installed and cannot be imported ({e}); {USE_SEGMENTS}"
            ) from e
        raise BackendError(
            "backend 'te' needs TransformerEngine, which is not installed: pip install --no-build-isolation "
            f"'transformer-engine[pytorch]', or {USE_SEGMENTS}"
        ) from e
    # Its import loads libraries, and fails in as many ways as there are broken installations.
    except Exception as e:
        raise BackendError(
            f"backend 'te': TransformerEngine is installed and cannot be imported ({type(e).__name__}: {e}); mend the "
            f"installation, or {USE_SEGMENTS}"
        ) from e
