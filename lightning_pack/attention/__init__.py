"""Attention on packed rows: sources see themselves alone, and models in which that cannot be had are refused."""

from lightning_pack.attention.activation import ActivatedModel
from lightning_pack.attention.check import isolation_check
from lightning_pack.attention.inspection import Finding, ModelRefusedError, find_models, inspect_model, require_packable
from lightning_pack.attention.isolation import leaking_sources
from lightning_pack.attention.masks import MaskDescription, describe_mask
from lightning_pack.attention.registration import ATTENTION, STRICT_ATTENTION, packed_attention, register
from lightning_pack.attention.segments import segment_attention, segment_lengths
from lightning_pack.attention.verdict import IsolationVerdict, SourceIsolation

register()

__all__ = [
    "ATTENTION",
    "STRICT_ATTENTION",
    "ActivatedModel",
    "Finding",
    "IsolationVerdict",
    "MaskDescription",
    "ModelRefusedError",
    "SourceIsolation",
    "describe_mask",
    "find_models",
    "inspect_model",
    "isolation_check",
    "leaking_sources",
    "packed_attention",
    "register",
    "require_packable",
    "segment_attention",
    "segment_lengths",
]
