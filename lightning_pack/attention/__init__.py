"""Attention on packed rows: sources see themselves alone, and models in which that cannot be had are refused."""

from lightning_pack.attention.activation import ActivatedModel
from lightning_pack.attention.backends import (
    Backend,
    BackendChoice,
    BackendError,
    SegmentsBackend,
    TransformerEngineBackend,
    VarlenBackend,
    choose_backend,
)
from lightning_pack.attention.check import isolation_check
from lightning_pack.attention.context_parallel import ContextGroup
from lightning_pack.attention.inspection import Finding, ModelRefusedError, find_models, inspect_model, require_packable
from lightning_pack.attention.isolation import leaking_sources
from lightning_pack.attention.masks import MaskDescription, describe_mask
from lightning_pack.attention.registration import ATTENTION, STRICT_ATTENTION, packed_attention, register
from lightning_pack.attention.segments import segment_attention, segment_lengths
from lightning_pack.attention.thd import THDInputs, packed_seq_params
from lightning_pack.attention.verdict import IsolationVerdict, SourceIsolation
from lightning_pack.boundaries import BoundariesError, check_boundaries

register()

__all__ = [
    "ATTENTION",
    "STRICT_ATTENTION",
    "ActivatedModel",
    "Backend",
    "BackendChoice",
    "BackendError",
    "BoundariesError",
    "ContextGroup",
    "Finding",
    "IsolationVerdict",
    "MaskDescription",
    "ModelRefusedError",
    "SegmentsBackend",
    "SourceIsolation",
    "THDInputs",
    "TransformerEngineBackend",
    "VarlenBackend",
    "check_boundaries",
    "choose_backend",
    "describe_mask",
    "find_models",
    "inspect_model",
    "isolation_check",
    "leaking_sources",
    "packed_attention",
    "packed_seq_params",
    "register",
    "require_packable",
    "segment_attention",
    "segment_lengths",
]
