"""A tiny vision-language set-up: tokenizer and template, image processor, models, images, chats as shards and as a file."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lightning_pack.encoders import VisionChatEncoder
from tests.numbers_data import write_samples

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ body(m) }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ body(m) }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BODY = (
    "{% macro body(m) %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
)
TEXT = ("What is in this picture? Compare both pictures. It shows a cat and a horse. The first is brighter.", "a b c d e f g h")
VOCABULARY = 320
#: Sides of the images, so that grids differ.
SIZES = ((80, 140), (128, 128), (180, 66), (64, 260), (114, 116))


@functools.cache
def vision_tokenizer(*, marked: bool = True) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=SPECIAL[1:]
    )
    # A macro cannot be used inside generation marks in every version, so it comes first.
    tokenizer.chat_template = BODY + (
        TEMPLATE if marked else TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    )
    return tokenizer


def image_processor(family: str, **changes: Any) -> Qwen2VLImageProcessorPil:
    patch = 16 if family == "qwen3_vl" else 14
    sizes = {"shortest_edge": 32 * 32, "longest_edge": 160 * 160}
    return Qwen2VLImageProcessorPil(**{"patch_size": patch, "size": sizes, **changes})


def vision_encoder(family: str = "qwen3_vl", **options: Any) -> VisionChatEncoder:
    return VisionChatEncoder(vision_tokenizer(), image_processor(family), family=family, **options)


def vision_config(family: str) -> dict[str, Any]:
    ids = dict(
        zip(("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), range(3, 7), strict=True)
    )
    rope = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [4, 2, 2]}
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    if family == "qwen3_vl":
        text |= {"head_dim": 16, "rope_parameters": rope | {"mrope_interleaved": True}}
        vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
        vision |= {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    else:
        text |= {"rope_parameters": rope}
        vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
        if family == "qwen2_5_vl":
            vision |= {"intermediate_size": 48, "out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1]}
        else:
            vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    return {"model_type": family, "text_config": text, "vision_config": vision, **ids}


def vision_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Random weights that are large enough for attention and images to matter."""
    values = vision_config(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2 and "embed" not in name:
                    parameter.mul_(4)
    return model.to(dtype).train()


def picture(seed: int, *, size: tuple[int, int] | None = None, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """An encoded image with large shapes, so that small images differ too."""
    draw = np.random.default_rng(seed)
    height, width = size or SIZES[seed % len(SIZES)]
    coarse = draw.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR).convert(mode)
    file = io.BytesIO()
    image.save(file, format=kind)
    return file.getvalue()


def chat(seed: int, images: int, *, answer: str = "It shows a cat and a horse. ") -> dict[str, Any]:
    """A chat with its images at the beginning, in the middle, at the end and in a later turn."""
    first: list[Any] = [{"type": "image"} for _ in range(min(images, 1))]
    first += [{"type": "text", "text": f"What is in picture {seed}?"}]
    first += [{"type": "image"} for _ in range(images >= 2)]
    first += [{"type": "text", "text": " Compare."}] * (images >= 2)
    messages = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": [{"type": "text", "text": answer * (1 + seed % 3)}]},
    ]
    if images > 2:
        messages += [
            {
                "role": "user",
                "content": [{"type": "text", "text": "And these? "}, *({"type": "image"} for _ in range(images - 2))],
            },
            {"role": "assistant", "content": f"The first is brighter, {seed}."},
        ]
    return {"messages": messages}


Members = Mapping[str, bytes]


def sample(seed: int, images: int, **options: Any) -> dict[str, bytes]:
    """The members of a sample: its chat, and its images."""
    members = {f"{i}.png": picture(seed * 10 + i) for i in range(images)}
    return {"json": json.dumps(chat(seed, images, **options)).encode(), **members}


def write_shards(folder: Path, parts: Mapping[str, Sequence[Members]], *, shards: int = 2) -> Path:
    """An Energon dataset of crude samples with files."""
    return write_samples(folder, parts, shards=shards, digits=4)
