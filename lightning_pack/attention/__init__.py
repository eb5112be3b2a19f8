"""Attention on packed rows: sources see themselves alone, and models in which that cannot be had are refused."""

from lightning_pack.attention.activation import ActivatedModel
from lightning_pack.attention.inspection import Finding, ModelRefusedError, find_models, inspect_model, require_packable
from lightning_pack.attention.isolation import leaking_sources
from lightning_pack.attention.masks import MaskDescription, describe_mask
from lightning_pack.attention.registration import ATTENTION, STRICT_ATTENTION, packed_attention, register
from lightning_pack.attention.segments import segment_attention, segment_lengths

register()

__all__ = [
    "ATTENTION",
    "STRICT_ATTENTION",
    "ActivatedModel",
    "Finding",
    "MaskDescription",
    "ModelRefusedError",
    "describe_mask",
    "find_models",
    "inspect_model",
    "leaking_sources",
    "packed_attention",
    "register",
    "require_packable",
    "segment_attention",
    "segment_lengths",
]
