"""Preparation of datasets that Energon can load, from the standard library's documentation or from a file of one's own."""

from lightning_pack.prepare.jsonl import BadLineError, prepare_jsonl
from lightning_pack.prepare.result import LengthStatistics, PreparedDataset, prepared
from lightning_pack.prepare.skimage import prepare_skimage
from lightning_pack.prepare.stdlib import prepare_stdlib
from lightning_pack.prepare.tokenizer import train_tokenizer

__all__ = [
    "BadLineError",
    "LengthStatistics",
    "PreparedDataset",
    "prepare_jsonl",
    "prepare_skimage",
    "prepare_stdlib",
    "prepared",
    "train_tokenizer",
]
