"""Encoders: from a record of the dataset to tokens and labels."""

from lightning_pack.encoders.base import Encoder, LeaveOut, TemplateError
from lightning_pack.encoders.chat import ChatEncoder
from lightning_pack.encoders.messages import read_messages, read_record, read_text
from lightning_pack.encoders.record import RecordEncoder
from lightning_pack.encoders.text import PlainTextEncoder
from lightning_pack.encoders.tokenizer import load_tokenizer, tokenizer_fingerprint

__all__ = [
    "ChatEncoder",
    "Encoder",
    "LeaveOut",
    "PlainTextEncoder",
    "RecordEncoder",
    "TemplateError",
    "load_tokenizer",
    "read_messages",
    "read_record",
    "read_text",
    "tokenizer_fingerprint",
]
