"""What stands in the place of attention masks.

The mask function builds no tensor. It gives the layers a :class:`MaskDescription`, so that each follows the model's own
choice of sliding window, and refuses every mask that says something else than "causal, perhaps within a window".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from lightning_pack.attention.segments import segment_lengths
from lightning_pack.attention.thd import THDInputs

#: The parts of transformers that a mask of packed causal attention is made of.
_CAUSAL_PARTS = {"causal_mask_function", "sliding_window_overlay", "and_masks"}
_PACKED_PARTS = {"packed_sequence_mask_function", "remap_positions_for_packed_sequence"}


@dataclass(eq=False)
class MaskDescription:
    """What stands in the place of a mask: one object for all layers of a kind, made anew in every forward."""

    #: Sliding window: token i sees keys ``j > i - window``; None for all earlier ones.
    window: int | None
    #: Whether the positions say that the row holds several sources.
    packed: bool
    _inputs: THDInputs | None = field(default=None, repr=False)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: the model's code computes with its attention mask, and there is none over a packed row; train it unpacked"
        )

    def __getitem__(self, part: Any) -> MaskDescription:
        """Itself, where a model slices its masks and keeps all of them (Gemma 4 does before layers that share keys).

        Raises:
            ValueError: if less is kept.
        """
        if any(one not in (slice(None), slice(0, None)) for one in (part if isinstance(part, tuple) else (part,))):
            raise ValueError(
                f"the model's code takes the part {part} of its mask: a packed row is computed whole, so leave logits_to_keep "
                "at 0; if you do, train this model unpacked"
            )
        return self

    def inputs(self, boundaries: Tensor, *, total: int, max_seqlen: int | None = None) -> THDInputs:
        """The inputs of all layers, made by the first; ``max_seqlen`` None reads the boundaries from the device.

        Raises:
            ValueError: for boundaries of another dtype or shape, and, where they are read, for wrong ones.
        """
        inputs = self._inputs
        if inputs is None or inputs.cu_seqlens is not boundaries or inputs.total != total:
            longest = max(segment_lengths(boundaries, total=total)) if max_seqlen is None else max_seqlen
            inputs = THDInputs(cu_seqlens=boundaries, cu_seqlens_padded=boundaries, max_seqlen=longest, total=total)
            # A compiler keeps them by itself, and lets recomputed layers (gradient checkpointing) change nothing outside.
            if not torch.compiler.is_compiling():
                self._inputs = inputs
        return inputs


def describe_mask(
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    q_length: int,
    kv_length: int,
    **_unused: Any,
) -> MaskDescription:
    """What the registered attention is to do; called by the model once per kind of layer.

    Raises:
        ValueError: if the caller passed a mask, a KV cache is used, or the model asks for more than causal attention.
    """
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask of shape {list(attention_mask.shape)} was given to a model that runs packed rows; the mask would "
            "say nothing that the boundaries do not say, and models read it as 'one source': call the model with "
            "attention_mask=None, for instance as model(**batch.model_inputs())"
        )
    refuse_cache(q_length, kv_length)
    # Other tracers run this function as it is.
    if torch.compiler.is_dynamo_compiling():
        from lightning_pack.attention.traced_masks import comptime

        comptime(_check_traced)
        # A compiler traces all rows as if they held several sources, so that says nothing; positions have to be looked at.
        return MaskDescription(window=local_size, packed=False)
    parts = dict(_mask_parts(mask_function))
    _refuse_foreign(parts, windowed=local_size is not None)
    return MaskDescription(
        window=local_size if "sliding_window_overlay" in parts else None,
        packed=not _PACKED_PARTS.isdisjoint(parts),
    )


def _check_traced(context: Any) -> None:
    """As :func:`describe_mask` does, while a compiler traces it."""
    from lightning_pack.attention.traced_masks import traced_parts

    parts = traced_parts(context, "mask_function", parts_of=_mask_parts, known=_part)
    windowed = context.get_local("local_size").python_type() is not type(None)
    _refuse_foreign(parts, windowed=windowed)
    if windowed != ("sliding_window_overlay" in parts):
        raise ValueError(
            "the model gives its mask a local size and no sliding window, which is not told apart while torch.compile traces: "
            "do not compile this model"
        )


def _refuse_foreign(parts: dict[str, bool], *, windowed: bool) -> None:
    foreign = sorted(name for name, known in parts.items() if not known)
    if foreign:
        raise ValueError(
            f"the model's attention is more than causal: its mask is made with {', '.join(foreign)} (bidirectional, chunked or "
            "blockwise attention, or a mask of its own), which packed attention does not compute; switch that feature off in "
            "the model's configuration, or train this model unpacked"
        )
    if "sliding_window_overlay" in parts and not windowed:
        raise ValueError(
            "the model's mask has a sliding window but does not tell its size, so packed attention cannot follow it"
        )


def _mask_parts(function: Any) -> Iterator[tuple[str, bool]]:
    """Name of each function that a mask function is composed of, and whether it is one of the known parts."""
    if not isinstance(function, FunctionType):
        yield getattr(function, "__qualname__", repr(function)), False
        return
    name, known = _part(function.__module__, function.__qualname__)
    yield name, known
    if not known:
        return
    for cell in function.__closure__ or ():
        values = cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,)
        for value in values:
            if callable(value) and not isinstance(value, Tensor):
                yield from _mask_parts(value)


def _part(module: str, qualified: str) -> tuple[str, bool]:
    name = qualified.partition(".<locals>")[0]
    known = module == masking_utils.__name__ and name in _CAUSAL_PARTS | _PACKED_PARTS
    return (name if known else f"{module}.{qualified}"), known


def refuse_cache(queries: int, keys: int) -> None:
    """Refuse keys that are not those of the queries.

    Raises:
        ValueError: if there are more or fewer keys than queries.
    """
    if queries != keys:
        raise ValueError(
            f"{queries} queries meet {keys} keys: a KV cache or cross-attention is in use, which packed rows cannot have; pass "
            "use_cache=False (PackedBatch.model_inputs() does), and generate with another attention implementation"
        )


def refuse_restarts(description: MaskDescription | None, position_ids: Tensor | None, *, length: int) -> None:
    """Refuse a row without boundaries whose positions say that it holds several sources.

    Raises:
        ValueError: if positions restart.
    """
    restarts = description is not None and description.packed
    if not restarts and position_ids is not None and position_ids.shape[-1] == length:
        # M-RoPE positions of images do not go up by one, so only rows of text positions tell.
        restarts = position_ids.dim() == 2 and bool((position_ids.diff(dim=-1) != 1).any())
    if restarts:
        raise ValueError(
            "position_ids restart inside the row, so it holds several sources, but no boundaries were given and the sources "
            "would see each other: pass cu_seq_lens_q/k and max_length_q/k, as model(**batch.model_inputs()) does"
        )
