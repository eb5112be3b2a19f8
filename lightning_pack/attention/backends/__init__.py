"""Backends of packed attention: TransformerEngine, torch's variable-length kernel, and torch segment by segment."""

from lightning_pack.attention.backends.base import Backend, BackendError
from lightning_pack.attention.backends.choice import BackendChoice, BackendName, check_backend_name, choose_backend
from lightning_pack.attention.backends.segments import SegmentsBackend
from lightning_pack.attention.backends.transformer_engine import TransformerEngineBackend
from lightning_pack.attention.backends.varlen import VarlenBackend

__all__ = [
    "Backend",
    "BackendChoice",
    "BackendError",
    "BackendName",
    "SegmentsBackend",
    "TransformerEngineBackend",
    "VarlenBackend",
    "check_backend_name",
    "choose_backend",
]
