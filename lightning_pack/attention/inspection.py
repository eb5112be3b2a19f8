"""What can be known about a model before its first step: whether packed rows are isolated in it.

Attention is not the only way in which tokens meet. A convolution, a recurrent state or a linear attention that runs over the
row carries one source into the next, and code that does not go through transformers' attention interface never sees the
boundaries. Such models are refused here; what only shows in a forward is refused there (see :mod:`.registration`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lightning_pack.attention.backends import Backend
from lightning_pack.attention.backends.choice import backend_refusals
from lightning_pack.attention.calls import losing_calls

#: Layer kinds whose tokens meet in attention only.
_ATTENTION_KINDS = {"full_attention", "sliding_attention", "attention"}
#: Layer kinds that see one token at a time.
_TOKEN_KINDS = {"mlp", "moe", "dense", "sparse"}
#: Names under which configurations list the kinds of their layers.
_KIND_FIELDS = ("layer_types", "layers_block_type", "block_types")
#: Classes that mix tokens outside of attention, or choose keys over the whole row.
_MIXERS = re.compile(
    r"(Mixer|SSM|DeltaNet|ShortConv|RecurrentBlock|RgLru|RGLRU|LightningAttention|LinearAttention|Indexer)$"
    r"|StateSpace|DeltaRule|Rwkv\w*Attention|[xX]LSTM\w*Layer"
)
#: Attributes in which Lightning keeps what a module was made with, copies included.
_RECORDS = ("_hparams", "_hparams_initial")
_UNPACKED = (
    "train this model unpacked, or choose one whose layers are causal softmax attention (Llama, Qwen, Mistral, Gemma, ...)"
)


class ModelRefusedError(ValueError):
    """A model in which packed sources would see each other, or of which that is not known."""


@dataclass(frozen=True)
class Finding:
    """One reason why a model cannot run packed rows."""

    #: Class of the model.
    model: str
    reason: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.model}: {self.reason}; {self.way_out}"


def find_models(module: nn.Module) -> list[PreTrainedModel]:
    """The outermost transformers models in a module, each once, in order; those in its lists, tuples and dicts come last.

    Raises:
        ModelRefusedError: if there is none.
    """
    found = list(_outermost(module, set()))
    if not found:
        raise ModelRefusedError(
            f"no transformers model was found in {type(module).__name__}; packed attention reaches models through "
            "transformers' attention interface: assign a PreTrainedModel to an attribute of the module in __init__ or "
            "configure_model. A model of another library has to use batch.cu_seqlens_padded itself: leave the callback "
            "PackedAttention out"
        )
    return found


def _outermost(module: nn.Module, seen: set[int]) -> Iterator[PreTrainedModel]:
    if id(module) in seen:
        return
    seen.add(id(module))
    if isinstance(module, PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, seen)
    # A teacher is kept out of the weights of its student in this way, and sees packed rows all the same.
    for name, value in vars(module).items():
        if name not in _RECORDS and isinstance(value, list | tuple | dict):
            for kept in value.values() if isinstance(value, dict) else value:
                if isinstance(kept, nn.Module):
                    yield from _outermost(kept, seen)


def inspect_model(model: PreTrainedModel, *, backend: Backend | None = None) -> list[Finding]:
    """Every reason why packed rows would go wrong in ``model``; empty for a model that is fine as far as can be seen.

    Args:
        model: with its configuration.
        backend: that is to compute its attention; None for one that computes everything.
    """
    name = type(model).__name__
    reasons = chain(_reasons(model), backend_refusals(backend, model) if backend is not None else ())
    return [Finding(name, reason, way_out) for reason, way_out in reasons]


def require_packable(model: PreTrainedModel, *, backend: Backend | None = None) -> None:
    """Refuse a model with findings.

    Raises:
        ModelRefusedError: with all findings.
    """
    findings = inspect_model(model, backend=backend)
    if findings:
        raise ModelRefusedError("packed rows are not safe with this model. " + " | ".join(map(str, findings)))


def _reasons(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    config = model.config
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder, whose cross-attention knows no sources", _UNPACKED
    lost = losing_calls(decoder_of(model))
    if not uses_attention_interface(model):
        yield "its code does not use transformers' attention interface, so boundaries would be ignored", _UNPACKED
    elif lost:
        yield f"its code does not hand boundaries on to attention in {', '.join(lost)}", _UNPACKED
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        yield "its forward takes no position_ids, so positions cannot restart at each source", _UNPACKED
    if "cu_seq_lens_q" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        yield "its forward takes no further keyword arguments, so boundaries cannot reach attention", _UNPACKED
    # Newer configurations give one list under several names.
    told: list[str] = []
    for field in _KIND_FIELDS:
        kinds = set(map(str, getattr(text, field, None) or ())) - _ATTENTION_KINDS - _TOKEN_KINDS
        named = ", ".join(sorted(kinds))
        if named and named not in told:
            told.append(named)
            yield f"{field} has {named}, which carry or cut across sources of one row", _UNPACKED
    if getattr(text, "attention_chunk_size", None) is not None and "layer_types" not in text:
        yield f"it attends in chunks of {text.attention_chunk_size} tokens of the row, not of the source", _UNPACKED
    for field, bad in (("use_bidirectional_attention", (True, "all", "vision")), ("is_causal", (False,))):
        if getattr(text, field, None) in bad:
            yield (
                f"{field}={getattr(text, field)!r}: its attention is bidirectional, so real tokens would see pads",
                f"set {field}={field == 'is_causal'} if a causal model is meant, else train it unpacked",
            )
    if getattr(text, "output_router_logits", False):
        yield (
            "output_router_logits=True: its balancing loss counts the pads of a row as tokens",
            "set it to False; a loss of your own can leave out batch.padding_mask()",
        )
    yield from _module_reasons(model)


def _module_reasons(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    mixers, bidirectional, masking, counting = set(), set(), set(), set()
    for module in decoder_of(model).modules():
        kind = type(module).__name__
        if isinstance(module, nn.Conv1d | nn.RNNBase) or _MIXERS.search(kind):
            mixers.add(kind)
        if getattr(module, "is_causal", True) is False:
            bidirectional.add(kind)
        if hasattr(module, "prepare_dynamic_mask"):
            masking.add(kind)
        if hasattr(module, "create_position_ids_from_input_ids"):
            counting.add(kind)
    if mixers:
        layers = ", ".join(sorted(mixers))
        yield (
            f"it mixes tokens of the whole row in {layers} (seq_idx, which some such kernels take, is not passed on)",
            _UNPACKED,
        )
    if bidirectional:
        yield f"it attends in both directions in {', '.join(sorted(bidirectional))}", _UNPACKED
    if masking:
        yield f"it makes a mask of its own over the whole row in {', '.join(sorted(masking))}", _UNPACKED
    if counting:
        yield f"its positions do not start at 0 but behind the pad id, in {', '.join(sorted(counting))}", _UNPACKED


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part of ``model`` that text goes through; vision and audio parts tell their sources apart by themselves."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return decoder if isinstance(decoder, nn.Module) else model


def uses_attention_interface(model: PreTrainedModel) -> bool:
    """Whether the code of ``model`` takes its attention function from transformers' interface."""
    if not getattr(model, "_supports_attention_backend", False):
        return False
    vision = getattr(model.config, "vision_config", None)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is not vision]
    # Sharding puts a class of its own in front; transformers reads the source of the class and remembers the answer there.
    return all(_original_class(part)._can_set_attn_implementation() for part in parts)


def _original_class(model: PreTrainedModel) -> Any:
    return next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch."))
