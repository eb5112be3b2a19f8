"""Batches that a collator made, padded or flattened, as packed rows on their device."""

from lightning_pack.collated.fields import BatchFields, CollatedBatchError
from lightning_pack.collated.loader import PackLoader
from lightning_pack.collated.output import SourceOutput, in_reading_order, unpack
from lightning_pack.collated.rectangle import pack_collated
from lightning_pack.collated.row import CollatedRow, packed_row
from lightning_pack.collated.wrapping import pack_loader

__all__ = [
    "BatchFields",
    "CollatedBatchError",
    "CollatedRow",
    "PackLoader",
    "SourceOutput",
    "in_reading_order",
    "pack_collated",
    "pack_loader",
    "packed_row",
    "unpack",
]
