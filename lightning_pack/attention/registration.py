"""The attention interface of transformers, served by the backends of packed attention.

Boundaries travel as the keyword arguments ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k`` of the
model's forward, which every model on the interface hands to its attention layers, also when activations are recomputed.
Two names are registered:

* :data:`ATTENTION` takes rows with boundaries, and rows without any as plain causal batches.
* :data:`STRICT_ATTENTION` takes rows with boundaries only, so a model that loses them on the way is noticed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from lightning_pack.attention.backends import Backend, SegmentsBackend
from lightning_pack.attention.detection import skip_detection
from lightning_pack.attention.frequencies import chooses_frequencies, refuse_shared_frequencies
from lightning_pack.attention.masks import MaskDescription, describe_mask, refuse_cache, refuse_restarts
from lightning_pack.attention.thd import THDInputs

#: Attention implementation for packed rows, and for plain rows without boundaries.
ATTENTION = "packed_thd"
#: The same, but a call without boundaries is an error.
STRICT_ATTENTION = "packed_thd_strict"
#: Attribute of an attention layer: the backend that computes it (set by :class:`~.activation.ActivatedModel`).
BACKEND_ATTRIBUTE = "_packed_attention_backend"
#: Attribute of an attention layer that has read the boundaries of its first row.
CHECKED_ATTRIBUTE = "_packed_attention_checked"
#: Of layers without one.
_SEGMENTS = SegmentsBackend()

#: Arguments that change what attention computes and that are not served here.
_REFUSED = ("position_bias", "attention_bias", "alibi", "score_mod", "block_mask", "head_mask", "layer_head_mask")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskDescription | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    require_boundaries: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers' interface.

    Args:
        module: the attention layer.
        query: ``[B, Hq, T, D]``, B = 1 where boundaries are given. Under context parallelism these are tokens of this rank, and
            boundaries those of the full row.
        key: ``[B, Hk, T, D]``.
        value: ``[B, Hk, T, Dv]``.
        attention_mask: what :func:`describe_mask` gave, or None where the model builds no mask.
        scaling: of the scores; None means ``1 / sqrt(D)``.
        dropout: probability that a weight is dropped.
        require_boundaries: refuse calls without boundaries.
        **kwargs: ``cu_seq_lens_q/k`` (int32 ``[N+1]``, one object), ``max_length_q/k``, ``sliding_window``, ``softcap``,
            ``s_aux``.

    Returns:
        ``[B, T, Hq, Dv]`` and None (no weights are kept).

    Raises:
        ValueError: for anything that would let sources see each other or that is not computed here.
    """
    backend: Backend = getattr(module, BACKEND_ATTRIBUTE, _SEGMENTS)
    ranks = 1 if backend.context is None else backend.context.size
    if ranks > 1 and torch.compiler.is_dynamo_compiling():
        # A compiler would order the collectives of attention as it likes.
        return _uncompiled(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            dropout=dropout,
            require_boundaries=require_boundaries,
            **kwargs,
        )
    layer = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    if attention_mask is not None and not isinstance(attention_mask, MaskDescription):
        raise ValueError(
            f"{layer} got an attention mask of type {type(attention_mask).__name__}"
            f"{f' and shape {list(attention_mask.shape)}' if isinstance(attention_mask, Tensor) else ''}; packed rows are told "
            "apart by their boundaries: call the model with attention_mask=None"
        )
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{layer} passes {name} to attention, which packed attention does not compute: train it unpacked")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True: packed attention keeps no weights; ask for them with attention 'eager'")
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(
            f"{layer} is bidirectional: its real tokens would see pads, and later tokens; packed rows are causal only"
        )
    refuse_cache(query.shape[2], key.shape[2])

    boundaries = _boundaries(kwargs, layer=layer)
    # The mask says what the layer really uses; the argument is all there is where the model builds no mask.
    window = kwargs.get("sliding_window") if attention_mask is None else attention_mask.window
    if boundaries is None:
        if require_boundaries or ranks > 1:
            raise ValueError(
                f"no boundaries reached {layer}, so the sources of the row would see each other: call the model with all that "
                "the batch holds (model(**batch), or **batch.model_inputs()); if you do, the model's code loses cu_seq_lens_q "
                "on the way and cannot be trained packed (to generate, set another attention implementation first)"
            )
        refuse_restarts(attention_mask, kwargs.get("position_ids"), length=query.shape[2])
        inputs = THDInputs.of_rows(query.shape[0], query.shape[2], device=query.device)
    else:
        if query.shape[0] != 1:
            raise ValueError(
                f"boundaries describe one packed row, but the batch has {query.shape[0]} rows: pass one row "
                "(PackedBatch.from_packs concatenates packs into one)"
            )
        description = MaskDescription(window=None, packed=True) if attention_mask is None else attention_mask
        inputs = description.inputs(boundaries, total=query.shape[2] * ranks, max_seqlen=kwargs.get("max_length_q"))
        config = getattr(module, "config", None)
        if chooses_frequencies(config):
            refuse_shared_frequencies(config, inputs.lengths, ranks=ranks)
        _check_first_row(module, inputs)
    output = backend(
        *(tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)),
        inputs=inputs,
        window=window,
        scale=scaling,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout=dropout,
        training=module.training,
    )
    return output.unflatten(0, (query.shape[0], query.shape[2])).contiguous(), None


def _check_first_row(module: nn.Module, inputs: THDInputs) -> None:
    """Read the boundaries of the first row of a layer, since kernels do not look at them.

    What stands between a row and its layers may have made it longer or shorter, as prompt tuning does.
    """
    # A layer without a backend of its own computes segments, which always read them. Later rows are left alone, as reading
    # waits for the device, and a compiler cannot read at all.
    own = vars(module)
    if BACKEND_ATTRIBUTE not in own or CHECKED_ATTRIBUTE in own or torch.compiler.is_compiling():
        return
    longest = max(inputs.lengths)
    if inputs.max_seqlen < longest:
        raise ValueError(
            f"max_length_q={inputs.max_seqlen} is less than the longest source of {longest} tokens: pass PackedBatch.max_seqlen"
        )
    own[CHECKED_ATTRIBUTE] = True


_uncompiled = torch.compiler.disable(packed_attention)


def _boundaries(kwargs: dict[str, Any], *, layer: str) -> Tensor | None:
    query, key = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if query is not key:
        raise ValueError(
            f"{layer} got cu_seq_lens_q and cu_seq_lens_k that are not one and the same tensor; attention inside sources needs "
            "equal boundaries, and kernels tell 'equal' by identity: pass PackedBatch.cu_seqlens_padded as both"
        )
    longest_query, longest_key = kwargs.get("max_length_q"), kwargs.get("max_length_k")
    if longest_query != longest_key:
        raise ValueError(
            f"max_length_q={longest_query} and max_length_k={longest_key} differ: pass PackedBatch.max_seqlen as both"
        )
    return query


def register() -> None:
    """Make both names known to transformers (done when this package is imported; once more does no harm).

    Raises:
        RuntimeError: if this version of transformers means something else by a sliding window or a causal mask.
    """
    query, keys = torch.tensor(9, device="cpu"), torch.arange(4, 12, device="cpu")
    # Annotated for numbers, called with tensors.
    masks: list[Any] = [masking_utils.sliding_window_causal_mask_function(4), masking_utils.causal_mask_function]
    window, causal = (mask(query, query, query, keys).tolist() for mask in masks)
    if window != [False, False, True, True, True, True, False, False] or causal != [True] * 6 + [False] * 2:
        raise RuntimeError(
            "the masks of this version of transformers do not follow the convention that packed attention was written for "
            f"(query 9 sees keys 6 to 9 in a window of 4; of keys 4 to 11 it got {window}, without a window {causal}): use "
            "another version of transformers"
        )
    for name, required in ((ATTENTION, False), (STRICT_ATTENTION, True)):
        AttentionInterface.register(name, partial(packed_attention, require_boundaries=required))
        AttentionMaskInterface.register(name, describe_mask)
    skip_detection(STRICT_ATTENTION)
