"""What a backend is: one function that computes the attention of a packed row, and what it cannot compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_pack.attention.context_parallel import ContextGroup
from lightning_pack.attention.thd import THDInputs

#: The way out of every refusal of a kernel.
USE_SEGMENTS = "use PackedAttention(backend='segments'), which computes it, or backend='auto', which then chooses that"


class BackendError(ValueError):
    """A backend that cannot be used here, or that does not compute what a model asks for."""


class Backend(Protocol):
    """Computes attention inside each source of a row."""

    #: As in ``PackedAttention(backend=...)``.
    name: str
    #: The ranks that share each row, set by ``PackedAttention``; None where a rank has whole rows.
    context: ContextGroup | None

    def refusals(self, model: PreTrainedModel) -> Iterator[str]:
        """What ``model`` would ask for that is not computed, as far as its configuration tells."""
        ...

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
        """Attention of one row, or of the part that this rank of :attr:`context` holds; collective then.

        Under context parallelism T in the shapes below is that of the part, while the boundaries are those of the full row.

        Args:
            query: ``[T, Hq, D]``.
            key: ``[T, Hk, D]``, Hq a multiple of Hk; query head h uses key head ``h // (Hq // Hk)``.
            value: ``[T, Hk, Dv]``.
            inputs: boundaries of the row.
            causal: token i sees tokens ``j <= i`` of its source only.
            window: token i sees tokens ``j > i - window`` only.
            scale: of the scores; None means ``1 / sqrt(D)``.
            dropout: probability that a weight is dropped.
            softcap: scores s become ``softcap * tanh(s / softcap)``.
            sinks: ``[Hq]``, one score a head that takes part in the softmax and attends to nothing.
            training: whether gradients are to come.

        Returns:
            ``[T, Hq, Dv]``.

        Raises:
            BackendError: for what is not computed.
        """
        ...


def in_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of autocast where that is on, as torch does for its own attention.

    Without it a norm whose weights are float32 makes queries float32 and leaves values as they were.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def refuse_options(name: str, *, causal: bool, dropout: float, softcap: float | None, sinks: Tensor | None, gaps: bool) -> None:
    """Refuse what only the segment backend computes.

    Raises:
        BackendError: naming the option.
    """
    refused = {
        "causal=False: real tokens would see pads": not causal,
        f"dropout={dropout}: its kernels do not all drop weights, and which one runs depends on device and lengths": dropout
        > 0,
        f"softcap={softcap}: its kernels do not all cap scores": softcap is not None,
        "sinks: its kernels do not all have a score that attends to nothing": sinks is not None,
        "real boundaries with gaps: what its kernels leave in the gaps is not defined; pass physical ones": gaps,
    }
    for reason, holds in refused.items():
        if holds:
            raise BackendError(f"backend {name!r} does not compute {reason}; {USE_SEGMENTS}")


def unsupported(model: PreTrainedModel) -> Iterator[str]:
    """What the configuration of a model asks for that only the segment backend computes."""
    text: Any = model.config.get_text_config()
    for field in ("attn_logit_softcapping", "attn_logit_softcap", "attn_softcap"):
        if getattr(text, field, None):
            yield f"soft-capped scores ({field}={getattr(text, field)})"
    for field in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if getattr(text, field, None):
            yield f"dropout of attention weights ({field}={getattr(text, field)}; 0 switches it off)"
    names = {
        name for name, _ in model.named_parameters() if name.rpartition(".")[2] in ("sinks", "sink", "attention_sink_bias")
    }
    if names:
        yield f"attention sinks ({min(names)})"


def head_sizes(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Size of a head of queries and keys, and of values, for each kind of layer; empty where that is not told."""
    text: Any = model.config.get_text_config()
    # Where layers differ, such a field of the whole configuration is an error to read.
    layers = text.per_layer_config if getattr(text, "per_layer_attributes", None) else [text]
    return list(dict.fromkeys(sizes for layer in layers if (sizes := _head_sizes(layer)) is not None))


def _head_sizes(text: Any) -> tuple[int, int] | None:
    rotated = getattr(text, "qk_rope_head_dim", None)
    if rotated is not None and hasattr(text, "qk_nope_head_dim"):
        return text.qk_nope_head_dim + rotated, getattr(text, "v_head_dim", text.qk_nope_head_dim)
    size = getattr(text, "head_dim", None)
    if size is None and getattr(text, "hidden_size", None) and getattr(text, "num_attention_heads", None):
        size = text.hidden_size // text.num_attention_heads
    return None if size is None else (size, size)
