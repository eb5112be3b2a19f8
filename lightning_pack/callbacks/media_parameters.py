"""Packs without images, for models with a vision encoder: every parameter takes part in every step, on every rank.

DistributedDataParallel waits for a gradient of each parameter, and where weights are sharded, those of a vision encoder are
gathered from all ranks when any of them runs it. A rank whose row has no image would leave the others waiting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

#: Arguments of transformers models with which media come.
_MEDIA = ("pixel_values", "pixel_values_videos", "input_features")
#: What of an output a loss may be made of; whatever else there is follows from the last.
_RESULTS = ("loss", "logits", "last_hidden_state")


def media_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters that only images and the like use: all but decoder and embeddings; none in a model for text alone."""
    if model.config.get_text_config() is model.config:
        return []
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    text = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in text]


class MediaParameters:
    """Makes the parameters of a vision encoder take part in forward passes over rows without images.

    With whole weights, what the model returns depends on them with a gradient of exactly zero, and no digit of it changes:
    nothing is computed but zeros in the backward pass, and not even that where they are frozen. With sharded weights the
    encoder runs on an image of one token, whose features no position sees.

    A parameter without any image in a step then has a zero gradient instead of none, on one device as on many: momentum and
    weight decay go on.

    Args:
        model: a model of transformers.
        sharded: whether its weights are gathered from all ranks when they are used.

    Raises:
        ValueError: in a forward pass with images, of a sharded model whose images are not made of patches as those of Qwen-VL.
    """

    def __init__(self, model: PreTrainedModel, *, sharded: bool) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._image: dict[str, Tensor] | None = None
        if not media_parameters(model):
            return
        if sharded:
            self._image = _blank_image(model)
            self._handles = [model.register_forward_pre_hook(self._begin_forward, with_kwargs=True, prepend=True)]
        else:
            self._handles = [model.register_forward_hook(self._keep, with_kwargs=True)]

    def remove(self) -> None:
        """Take the hooks out of the model."""
        while self._handles:
            self._handles.pop().remove()

    def _keep(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not torch.is_grad_enabled() or _has_media(kwargs) or not isinstance(output, ModelOutput):
            return None
        trained = [parameter for parameter in media_parameters(self._model) if parameter.requires_grad]
        if trained:
            for name in _RESULTS:
                if isinstance(value := output.get(name), Tensor) and value.is_floating_point():
                    output[name] = _Uses.apply(value, *trained)
        return output

    def _begin_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._image is None:
            if _has_media(kwargs):
                raise ValueError(
                    f"{type(self._model).__name__} got images while its weights are sharded: a rank whose row has none would "
                    "have to run the vision encoder along, and what an image of this model is made of is not known; use "
                    "DDPStrategy"
                )
            return
        if _has_media(kwargs):
            return
        embeddings = self._model.get_input_embeddings()

        def hook(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
            # Once: a model may embed several times. Between embeddings and decoder, as real images are, so that weights are
            # gathered in the same order on all ranks, backward too.
            handle.remove()
            return self._with_image(embedded)

        handle = embeddings.register_forward_hook(hook)

    def _with_image(self, embedded: Tensor) -> Tensor:
        assert self._image is not None
        image = {name: tensor.to(embedded.device) for name, tensor in self._image.items()}
        model: Any = self._model
        features = model.get_image_features(**image)
        tensors = [tensor for tensor in torch.utils._pytree.tree_leaves(features) if isinstance(tensor, Tensor)]
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        return _Uses.apply(embedded, *wanted) if wanted else embedded


class _Uses(torch.autograd.Function):
    """The first tensor, as it is; the gradient of all others is zero."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *used: Tensor) -> Tensor:
        ctx.used = [(tensor.shape, tensor.dtype, tensor.device) for tensor in used]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.used)
        return gradient, *zeros


def _has_media(arguments: dict[str, Any]) -> bool:
    return any(arguments.get(name) is not None for name in _MEDIA)


def _blank_image(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """The smallest image that becomes a token; None where it is not known what images are made of."""
    vision = getattr(model.config, "vision_config", None)
    names = ("spatial_merge_size", "temporal_patch_size", "patch_size", "in_channels")
    if not hasattr(model, "get_image_features") or not all(hasattr(vision, name) for name in names):
        return None
    merge: int = vision.spatial_merge_size  # type: ignore[union-attr]
    values: int = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2  # type: ignore[union-attr]
    return {
        "pixel_values": torch.zeros(merge**2, values, dtype=torch.float32),
        "image_grid_thw": torch.tensor([[1, merge, merge]], dtype=torch.int64),
    }
