"""Encoders: from a record of the dataset to tokens and labels."""

from lightning_pack.encoders.base import Encoder, LeaveOut, TemplateError
from lightning_pack.encoders.chat import ChatEncoder
from lightning_pack.encoders.families import ImageSize, VisionFamily, register_vision_family, vision_family
from lightning_pack.encoders.image_processor import load_image_processor
from lightning_pack.encoders.images import MediaRecord
from lightning_pack.encoders.messages import read_messages, read_record, read_text
from lightning_pack.encoders.mrope import mrope_positions
from lightning_pack.encoders.record import RecordEncoder
from lightning_pack.encoders.text import PlainTextEncoder
from lightning_pack.encoders.tokenizer import load_tokenizer, tokenizer_fingerprint
from lightning_pack.encoders.vision_chat import VisionChatEncoder

__all__ = [
    "ChatEncoder",
    "Encoder",
    "ImageSize",
    "LeaveOut",
    "MediaRecord",
    "PlainTextEncoder",
    "RecordEncoder",
    "TemplateError",
    "VisionChatEncoder",
    "VisionFamily",
    "load_image_processor",
    "load_tokenizer",
    "mrope_positions",
    "read_messages",
    "read_record",
    "read_text",
    "register_vision_family",
    "tokenizer_fingerprint",
    "vision_family",
]
