"""Whether tokenizer, chat template and image processor go together, found out on trial before any data is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_pack.encoders.base import TemplateError
from lightning_pack.encoders.chat import ChatEncoder
from lightning_pack.encoders.families import VisionFamily
from lightning_pack.encoders.messages import Message
from lightning_pack.media import nbytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightning_pack.encoders.image_reader import ImageReader

#: Width and height of an image that is processed on trial.
_PROBED = (90, 70)
#: A chat whose images are counted in what the template makes of it.
_PROBE: list[Message] = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "First question?"}, {"type": "image"}]},
    {"role": "assistant", "content": "First answer."},
]


def known_token(tokenizer: PreTrainedTokenizerBase, family: VisionFamily) -> int:
    """Id of the family's placeholder.

    Raises:
        ValueError: if the tokenizer has no such token.
    """
    number = tokenizer.get_vocab().get(family.image_token)
    if number is None:
        raise ValueError(
            f"the tokenizer has no token {family.image_token!r}, the placeholder of family {family.name!r}: take the tokenizer "
            "of such a model, or another family"
        )
    return int(number)


def check_image_processor(processor: Any, family: VisionFamily) -> None:
    """Process an image on trial: what follows from its size must be what comes out.

    Raises:
        ValueError: if it does not, or the image processor is none of the family.
    """
    try:
        family.size(processor, 64, 64)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"{type(processor).__name__} is no image processor of family {family.name!r} ({error}): give "
            "processor.image_processor, or register a family that knows how long its images are"
        ) from error
    import PIL.Image

    image = PIL.Image.new("RGB", _PROBED)
    try:
        made = processor(images=[image], return_tensors="pt")
        media = {name: made[name] for name in family.tensors}
        tokens = int(media[family.grid].prod()) // processor.merge_size**2
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{type(processor).__name__} does not give {', '.join(family.tensors)} of family "
            f"{family.name!r} for an image of {_PROBED[0]} x {_PROBED[1]} pixels ({type(error).__name__}: {error}): "
            "give the image processor of such a model"
        ) from error
    size = family.size(processor, _PROBED[1], _PROBED[0])
    if (size.tokens, size.nbytes) != (tokens, nbytes(media)):
        raise ValueError(
            f"an image of {_PROBED[0]} x {_PROBED[1]} pixels becomes {tokens} tokens and {nbytes(media)} bytes by "
            f"{type(processor).__name__}, but its size says {size.tokens} and {size.nbytes}: lengths would be "
            "wrong; set do_resize=True, or register a family whose size is right"
        )


def check_model(images: ImageReader, config: Any, *, model: str) -> None:
    """Compare what an encoder makes of images with the configuration of the model that takes them.

    Args:
        images: what is done with those of the data.
        config: of the model.
        model: its name, for messages.

    Raises:
        ValueError: naming the setting that differs, with both values.
    """
    family, kind = images.family, getattr(config, "model_type", None)
    vision, text = getattr(config, "vision_config", None), config.get_text_config()
    if vision is None:
        raise ValueError(
            f"the encoder's family {family.name!r} gives images, and {model} (model_type={kind!r}) has no vision encoder: take "
            "a vision-language model, or leave vision out and train on text"
        )
    if family.model_types and kind not in family.model_types:
        raise ValueError(
            f"the encoder's family {family.name!r} is for models of model_type {' or '.join(map(repr, family.model_types))}, "
            f"and that of {model} is {kind!r}: set vision (family of VisionChatEncoder) to the model's own, "
            "with its tokenizer and image processor"
        )
    token = getattr(config, "image_token_id", None)
    if token != images.image_token_id:
        raise ValueError(
            f"the encoder writes images as token {images.image_token_id}, and image_token_id of {model} is {token}: "
            "set image_token_id in the model's configuration, or take tokenizer and model of one vision-language model"
        )
    processor = images.image_processor
    for ours, theirs in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        given, known = getattr(processor, ours, None), getattr(vision, theirs, None)
        if given is not None and known is not None and given != known:
            raise ValueError(
                f"{ours}={given} of the image processor, and {theirs}={known} of the vision_config of {model}: images would be "
                "cut in other patches than the model takes; use the image processor of the model, or make the settings equal"
            )
    # Qwen2-VL calls the width inside embed_dim.
    name = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
    width = getattr(vision, name, None)
    if width is not None and width != text.hidden_size:
        raise ValueError(
            f"{name}={width} of the vision_config of {model}, and hidden_size={text.hidden_size} of its text_config: "
            "an image's features take the place of embeddings, so make them equal"
        )


def check_template(chat: ChatEncoder, family: VisionFamily, *, image_token_id: int) -> None:
    """Encode a chat with images on trial.

    Raises:
        TemplateError: if the chat template does not write one placeholder for each.
    """
    try:
        ids, _, _ = chat.tokens(_PROBE)
    except Exception as error:
        raise TemplateError(f"the chat template fails on a chat with image parts ({error}): take that of the model") from error
    found = ids.count(image_token_id)
    if found != 2:
        raise TemplateError(
            f"the chat template writes {family.image_token!r} {found} times for 2 images: take the template of a "
            f"model of family {family.name!r}, which writes it once for each"
        )
