"""What differs between vision-language models: their placeholder, how long an image is, and how its tokens are placed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_pack.encoders.mrope import mrope_positions


@dataclass(frozen=True)
class ImageSize:
    """What an image of some size becomes.

    Args:
        tokens: placeholders that stand for it.
        nbytes: of its tensors.
    """

    tokens: int
    nbytes: int


def size_in_patches(processor: Any, height: int, width: int) -> ImageSize:
    """The size of an image under the image processor of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, from its height and width alone.

    Raises:
        ValueError: if the image processor refuses the size.
    """
    patches = processor.get_number_of_image_patches(height, width)
    values = 3 * processor.temporal_patch_size * processor.patch_size**2
    # float32 pixels, and three numbers for the grid.
    return ImageSize(tokens=patches // processor.merge_size**2, nbytes=4 * values * patches + 24)


@dataclass(frozen=True, kw_only=True)
class VisionFamily:
    """Vision-language models that take images in the same way.

    Args:
        name: for :class:`~lightning_pack.encoders.VisionChatEncoder`.
        image_token: placeholder of the chat template, written once for an image.
        other_media_tokens: placeholders of media that are not supported, which no text may contain.
        size: (image processor, height, width) -> what the image becomes; known before any pixel is decoded.
        tensors: names of what the image processor gives and the model takes; rows in the order of the images.
        grid: name of the tensor whose rows tell the grid of each image in patches, int64 ``[images, 3]``.
        positions: (ids, grids, ``image_token_id=``, ``merge_size=``) -> int64 ``[3, L]``; None for models that place images
            like text.
        model_types: ``model_type`` of the models that take its images; empty for any.
    """

    name: str
    image_token: str = "<|image_pad|>"
    other_media_tokens: tuple[str, ...] = ("<|video_pad|>",)
    size: Callable[[Any, int, int], ImageSize] = size_in_patches
    tensors: tuple[str, ...] = ("pixel_values", "image_grid_thw")
    grid: str = "image_grid_thw"
    positions: Callable[..., Tensor] | None = mrope_positions
    model_types: tuple[str, ...] = ()


_FAMILIES: dict[str, VisionFamily] = {}


def register_vision_family(family: VisionFamily) -> VisionFamily:
    """Let encoders find a family by its name; one of the same name is replaced."""
    _FAMILIES[family.name] = family
    return family


def vision_family(name: str) -> VisionFamily:
    """The family that was registered by that name.

    Raises:
        ValueError: if there is none.
    """
    if name not in _FAMILIES:
        raise ValueError(
            f"vision family {name!r} is not known, but {', '.join(map(repr, sorted(_FAMILIES)))} are: take one of them, or "
            "describe yours with register_vision_family(VisionFamily(...))"
        )
    return _FAMILIES[name]


def known_image_tokens() -> frozenset[str]:
    """Placeholders of all registered families."""
    return frozenset(family.image_token for family in _FAMILIES.values())


for _types in (("qwen2_vl",), ("qwen2_5_vl",), ("qwen3_vl", "qwen3_vl_moe")):
    register_vision_family(VisionFamily(name=_types[0], model_types=_types))
