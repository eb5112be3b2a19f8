"""Floating-point operations of the vision encoder of Qwen-VL models, from the grids of images.

An image of t frames of h by w patches counts as P = t h w patches, and by frames as P2 = t (h w)^2 pairs of patches; it becomes
M = t h w / m^2 tokens, where m by m patches are merged. With hidden size e, L layers, MLPs of width i and patches of s values,
the forward pass takes

* for each patch ``2 s e`` in the patch embedding, and in each layer ``8 e^2`` in projections of attention and ``2 e i`` for
  each matrix of the MLP (two, in Qwen2.5-VL three);
* for each pair of patches of one frame ``4 e`` in each layer: attention looks in both directions, so nothing is halved.
  Qwen2.5-VL has layers that look within windows: their pairs W are counted in each window alone;
* for each token ``2 (m^2 e)^2 + 2 m^2 e o`` in a merger onto o features; Qwen3-VL has one more for each layer of its
  ``deepstack_visual_indexes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: ``model_type`` of the models whose vision encoders are known.
VISION_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@dataclass(frozen=True, kw_only=True)
class VisionFlops:
    """Operations of a vision encoder; :meth:`of` reads them from a configuration.

    Args:
        per_patch: forward operations for each patch.
        per_pair: for each pair of patches of a frame, all layers that see whole frames together.
        per_window_pair: for each pair of patches of a window, all layers that see windows together.
        per_token: for each token that patches become.
        merge_size: m, patches along a side of a token.
        window: patches along a side of a window; None where no layer has windows.

    Example:
        >>> flops = VisionFlops(per_patch=5, per_pair=2, per_token=3, merge_size=2)
        >>> counts = flops.counts(torch.tensor([[1, 10, 10], [1, 10, 10]]))
        >>> counts.tolist(), flops.counts(torch.tensor([[2, 10, 10]])).tolist()
        ([200, 20000, 0, 50], [200, 20000, 0, 50])
        >>> flops.forward(counts.tolist())
        41150
    """

    per_patch: int
    per_pair: int
    per_window_pair: int = 0
    per_token: int
    merge_size: int
    window: int | None = None

    def __post_init__(self) -> None:
        if min(self.per_patch, self.per_pair, self.per_window_pair, self.per_token) < 0 or self.merge_size < 1:
            raise ValueError(f"{self}: operations are whole numbers of at least 0, and merge_size is at least 1")
        if (self.per_window_pair > 0) != (self.window is not None):
            raise ValueError(
                f"VisionFlops(per_window_pair={self.per_window_pair}, window={self.window}): give both, or none of them"
            )

    @classmethod
    def of(cls, config: Any) -> VisionFlops:
        """The operations of the vision encoder of a model of :data:`VISION_MODELS`, by its whole configuration."""
        kind, vision = config.model_type, config.vision_config
        width = vision.embed_dim if kind == "qwen2_vl" else vision.hidden_size
        features = vision.hidden_size if kind == "qwen2_vl" else vision.out_hidden_size
        inner = int(width * vision.mlp_ratio) if kind == "qwen2_vl" else vision.intermediate_size
        matrices = 3 if kind == "qwen2_5_vl" else 2
        mergers = 1 + (len(vision.deepstack_visual_indexes) if kind == "qwen3_vl" else 0)
        merged = vision.spatial_merge_size**2 * width
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        whole = len(vision.fullatt_block_indexes) if kind == "qwen2_5_vl" else vision.depth
        windowed = 4 * width * (vision.depth - whole)
        tokens = vision.window_size // vision.patch_size // vision.spatial_merge_size if windowed else 0
        return cls(
            per_patch=2 * values * width + vision.depth * (8 * width**2 + 2 * matrices * width * inner),
            per_pair=4 * width * whole,
            per_window_pair=windowed,
            per_token=mergers * (2 * merged**2 + 2 * merged * features),
            merge_size=vision.spatial_merge_size,
            window=tokens * vision.spatial_merge_size if windowed else None,
        )

    def counts(self, grids: Tensor) -> Tensor:
        """What operations follow from; waits for no device.

        Args:
            grids: whole numbers ``[images, 3]``: frames, and patches down and across, of each image or video.

        Returns:
            int64 ``[4]``: P, P2, W and M. These add up over rows.
        """
        t, h, w = grids.long().unbind(-1)
        patches = t * h * w
        windows = torch.zeros_like(t) if self.window is None else t * _squares(h, self.window) * _squares(w, self.window)
        return torch.stack([patches.sum(), (t * (h * w).square()).sum(), windows.sum(), (patches // self.merge_size**2).sum()])

    def forward(self, counts: Sequence[int]) -> int:
        """Operations of the forward pass, from sums of :meth:`counts`."""
        costs = (self.per_patch, self.per_pair, self.per_window_pair, self.per_token)
        return sum(cost * count for cost, count in zip(costs, counts, strict=True))


def _squares(side: Tensor, window: int) -> Tensor:
    """Sum of the squared lengths of the windows along a side; the last one may be shorter."""
    return side // window * window**2 + (side % window).square()
