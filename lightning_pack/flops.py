"""Floating-point operations of a packed step, from the widths of rows, the squares of lengths, and a model's configuration.

A matrix product of ``[m, k]`` and ``[k, n]`` is ``2 m k n`` operations, so a weight matrix costs 2 per element and position
(Kaplan et al., Scaling Laws for Neural Language Models, 2020, table 1). With hidden size h, q query heads and g key heads of
width d, and L layers, the forward pass takes

* for each of the ``sum(width)`` positions, pads included, since they go through every layer:
  ``L * (2 h (q + 2 g) d + 2 q d h)`` in projections of attention, ``2 h i`` for each matrix of an MLP of width i (3 where it is
  gated, else 2), in a mixture of experts that for each expert that a token goes to, those that all tokens share, and the router
  with ``2 h`` for each expert; and ``2 h v`` in the projection onto a vocabulary of v, which tied weights do not change;
* for attention in each layer ``4 q d`` for each pair of a query and a key that it sees (scores, and their sum of values), of
  which causal attention over a source of length n has ``n^2 / 2``: by this causal convention ``2 q d * sum(n^2)`` over real
  lengths, half of what full attention costs. A window of w keys leaves out ``(n - w)^2 / 2`` of them where n > w.

Training takes three times that, as the backward pass has two products for each one of the forward pass (Chowdhery et al., PaLM,
2022, appendix B, which also defines model FLOPs utilisation). What is computed again in the backward pass to save memory does
not count. Vision encoders are counted in :mod:`lightning_pack.vision_flops`. Norms, activations, softmax, rotations and the
optimizer are left out: under one percent in models of usual size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_pack.vision_flops import VISION_MODELS, VisionFlops


class UnknownModelError(ValueError):
    """The operations of a model cannot be derived from its configuration."""


class _Family(NamedTuple):
    """What a configuration of this ``model_type`` means."""

    #: Layers with ``sliding_window``: none, all, or those that ``layer_types`` names.
    windows: Literal["none", "all", "by_layer"] = "none"
    #: Matrices of an MLP.
    matrices: int = 3
    #: Fields with the number of experts, their width, and the width of what all tokens go through.
    experts: str | None = None
    expert_width: str = "intermediate_size"
    shared_width: str | None = None
    #: Whether ``decoder_sparse_step`` and ``mlp_only_layers`` say which layers have experts; else all have.
    sparse_step: bool = False


_FAMILIES = {
    "cohere": _Family(),
    "cohere2": _Family("by_layer"),
    "gemma": _Family(),
    "gemma2": _Family("by_layer"),
    "gemma3_text": _Family("by_layer"),
    "gpt_oss": _Family("by_layer", experts="num_local_experts"),
    "granite": _Family(),
    "llama": _Family(),
    "ministral": _Family("by_layer"),
    "mistral": _Family("all"),
    "mixtral": _Family("all", experts="num_local_experts"),
    "olmo2": _Family(),
    "olmo3": _Family("by_layer"),
    "olmoe": _Family(experts="num_experts"),
    "phi3": _Family("all"),
    "qwen2": _Family("by_layer"),
    "qwen2_moe": _Family("by_layer", 3, "num_experts", "moe_intermediate_size", "shared_expert_intermediate_size", True),
    "qwen3": _Family("by_layer"),
    "qwen3_moe": _Family("all", 3, "num_experts", "moe_intermediate_size", None, True),
    "smollm3": _Family("by_layer"),
    "starcoder2": _Family("all", matrices=2),
}
#: ``model_type`` of the configurations of text models that :meth:`ModelFlops.of` reads; it knows ``VISION_MODELS`` too.
KNOWN_MODELS = tuple(_FAMILIES)
#: Text models with the operations of their text parts.
_TEXT_PARTS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "llama"}


class AttentionFlops(NamedTuple):
    """The layers that see equally far back."""

    #: Keys that a query sees, itself included; None where it sees all before it.
    window: int | None
    #: Forward operations of these layers for each unit of squared length: ``2 q d`` times their number.
    per_square: int


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """Operations of a causal language model; :meth:`of` reads them from a configuration.

    Args:
        per_position: forward operations of all weight matrices for one position of a row.
        attention: by window, each window once.
        vision: of its vision encoder; None where there is none.

    Example:
        >>> flops = ModelFlops(per_position=1000, attention=(AttentionFlops(None, 64), AttentionFlops(4, 64)))
        >>> squares = flops.squared_lengths(torch.tensor([3, 6]))
        >>> squares.tolist()
        [45, 41]
        >>> flops.training(width=12, squared_lengths=squares.tolist())
        52512
    """

    per_position: int
    attention: tuple[AttentionFlops, ...]
    vision: VisionFlops | None = None

    def __post_init__(self) -> None:
        windows = [kind.window for kind in self.attention]
        numbers = [self.per_position, *(kind.per_square for kind in self.attention), *(w for w in windows if w is not None)]
        if not all(isinstance(number, int) and number > 0 for number in numbers) or len(set(windows)) != len(windows):
            raise ValueError(
                f"ModelFlops(per_position={self.per_position}, attention={self.attention}): operations and windows are whole "
                "numbers above 0, and each window comes once"
            )

    @classmethod
    def of(cls, config: Any) -> ModelFlops:
        """The operations of a model with this configuration of transformers.

        Raises:
            UnknownModelError: for a model that is not one of :data:`KNOWN_MODELS`, or has layers of another kind.
        """
        kind = getattr(config, "model_type", None)
        vision = VisionFlops.of(config) if kind in VISION_MODELS else None
        if vision is not None:
            config = config.get_text_config()
        family = _family(kind if vision is None else _TEXT_PARTS.get(config.model_type))
        if family is None:
            known = ", ".join((*KNOWN_MODELS, *VISION_MODELS))
            raise UnknownModelError(
                f"the operations of a model of type {kind!r} are not known; known are {known}: build "
                "ModelFlops(per_position=..., attention=...) yourself"
            )
        hidden, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
        head = getattr(config, "head_dim", None) or hidden // heads
        queries, keys = heads * head, config.num_key_value_heads * head
        projections = 2 * hidden * (queries + 2 * keys) + 2 * queries * hidden
        mlps = sum(_mlp(config, family, layer) for layer in range(layers))
        windows = Counter(_window(config, family, layer) for layer in range(layers))
        return cls(
            per_position=layers * projections + mlps + 2 * hidden * config.vocab_size,
            attention=tuple(AttentionFlops(window, 2 * queries * number) for window, number in windows.items()),
            vision=vision,
        )

    def squared_lengths(self, lengths: Tensor) -> Tensor:
        """Sum of the squared lengths, less what a window leaves out; waits for no device.

        Args:
            lengths: whole numbers ``[N]``, real tokens of each source.

        Returns:
            int64 ``[len(attention)]``: for each window ``sum(n^2 - max(n - window, 0)^2)``. These add up over rows.
        """
        lengths = lengths.long()
        unseen = [torch.zeros_like(lengths) if w is None else (lengths - w).relu() for w, _ in self.attention]
        return torch.stack([(lengths.square() - n.square()).sum() for n in unseen]) if unseen else lengths.new_zeros(0)

    def forward(self, *, width: int, squared_lengths: Sequence[int], vision: Sequence[int] = ()) -> int:
        """Operations of the forward pass.

        Args:
            width: positions of all rows, pads included.
            squared_lengths: sums of :meth:`squared_lengths` over all rows.
            vision: sums of :meth:`VisionFlops.counts` over the images of all rows; none given means no images.

        Raises:
            ValueError: for counts of images, where the model has no vision encoder.
        """
        attention = sum(n * kind.per_square for n, kind in zip(squared_lengths, self.attention, strict=True))
        if vision and self.vision is None:
            raise ValueError(f"vision={list(vision)}: the operations of a vision encoder are not known (ModelFlops.vision)")
        images = 0 if self.vision is None or not vision else self.vision.forward(vision)
        return width * self.per_position + attention + images

    def training(self, *, width: int, squared_lengths: Sequence[int], vision: Sequence[int] = ()) -> int:
        """Operations of forward and backward pass, where all weights are trained: three times :meth:`forward`."""
        return 3 * self.forward(width=width, squared_lengths=squared_lengths, vision=vision)


def _family(kind: Any) -> _Family | None:
    return _FAMILIES.get(kind) if isinstance(kind, str) else None


def _mlp(config: Any, family: _Family, layer: int) -> int:
    """Operations of the MLP, or the experts, of a layer for one position."""
    per_unit = 2 * config.hidden_size * family.matrices
    dense = family.experts is None
    if family.sparse_step:
        dense = layer in (config.mlp_only_layers or ()) or (layer + 1) % config.decoder_sparse_step != 0
    if dense or family.experts is None:
        return per_unit * config.intermediate_size
    router = 2 * config.hidden_size * getattr(config, family.experts)
    routed = config.num_experts_per_tok * per_unit * getattr(config, family.expert_width)
    # What all tokens go through has a gate of one output.
    shared = per_unit * getattr(config, family.shared_width) + 2 * config.hidden_size if family.shared_width else 0
    return router + routed + shared


def _window(config: Any, family: _Family, layer: int) -> int | None:
    if family.windows == "none":
        return None
    if family.windows == "by_layer":
        kind = config.layer_types[layer]
        if kind not in ("full_attention", "sliding_attention"):
            raise UnknownModelError(
                f"the operations of {kind!r} in layer {layer} of a {config.model_type} model are not known: build "
                "ModelFlops(per_position=..., attention=...) yourself"
            )
        if kind == "full_attention":
            return None
    return config.sliding_window or None


#: Dense bfloat16 operations in 1e12 per second, by the name that the driver gives: NVIDIA's data sheets, without sparsity and
#: with sums in float32. Names must match whole: slices of a device (MIG) and variants with other clocks are other names.
_PEAKS = {
    "A10": 125,
    "A30": 165,
    "A40": 149.7,
    "A100-PCIE-40GB": 312,
    "A100-SXM4-40GB": 312,
    "A100 80GB PCIe": 312,
    "A100-SXM4-80GB": 312,
    "B200": 2250,
    "GB200": 2500,
    "GeForce RTX 3090": 71,
    "GeForce RTX 4090": 165.2,
    "GH200 120GB": 989.4,
    "GH200 480GB": 989.4,
    "H20": 148,
    "H100 80GB HBM3": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756,
    "H200": 989.4,
    "H200 NVL": 835.5,
    "L4": 121,
    "L40": 181.05,
    "L40S": 362.05,
    "RTX A6000": 154.8,
}


def peak_flops(device: torch.device | str) -> int | None:
    """Dense bfloat16 operations per second that a device can do at most; None where that is not known.

    Args:
        device: where a model is, such as ``"cuda:0"``.
    """
    device = torch.device(device)
    return peak_flops_of_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_flops_of_name(name: str) -> int | None:
    """The same of a device that the driver calls so.

    >>> peak_flops_of_name("NVIDIA H200"), peak_flops_of_name("NVIDIA H200 MIG 1g.18gb")
    (989400000000000, None)
    """
    peak = _PEAKS.get(name.removeprefix("NVIDIA "))
    return None if peak is None else round(peak * 1e12)
