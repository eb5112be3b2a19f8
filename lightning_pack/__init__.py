"""Online sequence packing for PyTorch Lightning: nothing lost, resumed exactly, equal to the unpacked run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_pack.attention import isolation_check
    from lightning_pack.binning import lower_bound, register_packer
    from lightning_pack.callbacks import PackedAttention, PackingMonitor, TokenNormalizedGradients
    from lightning_pack.collated import (
        BatchFields,
        CollatedBatchError,
        SourceOutput,
        in_reading_order,
        pack_loader,
        packed_row,
        unpack,
    )
    from lightning_pack.context import ContextSlice
    from lightning_pack.datamodule import EnergonPackDataModule
    from lightning_pack.energon.fields import StateError
    from lightning_pack.energon.outage import StorageError, StorageRetry
    from lightning_pack.energon.position import DamagedDataError
    from lightning_pack.energon.worker import WorkerFailedError
    from lightning_pack.flops import ModelFlops
    from lightning_pack.lora import LoraOptions
    from lightning_pack.module import PackedCausalLM
    from lightning_pack.offline import ManifestError, VerificationError, prepack
    from lightning_pack.parallel import ParallelLayout
    from lightning_pack.planner import plan
    from lightning_pack.policy import PackingPolicy
    from lightning_pack.resume import ResumeError
    from lightning_pack.rewind import SaveRefusedError
    from lightning_pack.row import PackedBatch
    from lightning_pack.row_picture import RowPicture, draw
    from lightning_pack.token_normalizer import TokenNormalizer

#: Imported when first asked for: Lightning, Energon and transformers take seconds, and a policy needs none of them.
_HOMES = {
    "BatchFields": "collated",
    "CollatedBatchError": "collated",
    "ContextSlice": "context",
    "DamagedDataError": "energon.position",
    "EnergonPackDataModule": "datamodule",
    "LoraOptions": "lora",
    "ManifestError": "offline",
    "ModelFlops": "flops",
    "PackedAttention": "callbacks",
    "PackedBatch": "row",
    "PackedCausalLM": "module",
    "PackingMonitor": "callbacks",
    "PackingPolicy": "policy",
    "ParallelLayout": "parallel",
    "ResumeError": "resume",
    "RowPicture": "row_picture",
    "SaveRefusedError": "rewind",
    "SourceOutput": "collated",
    "StateError": "energon.fields",
    "StorageError": "energon.outage",
    "StorageRetry": "energon.outage",
    "TokenNormalizedGradients": "callbacks",
    "TokenNormalizer": "token_normalizer",
    "VerificationError": "offline",
    "WorkerFailedError": "energon.worker",
    "draw": "row_picture",
    "lower_bound": "binning",
    "isolation_check": "attention",
    "in_reading_order": "collated",
    "pack_loader": "collated",
    "packed_row": "collated",
    "plan": "planner",
    "prepack": "offline",
    "register_packer": "binning",
    "unpack": "collated",
}

__all__ = [
    "BatchFields",
    "CollatedBatchError",
    "ContextSlice",
    "DamagedDataError",
    "EnergonPackDataModule",
    "LoraOptions",
    "ManifestError",
    "ModelFlops",
    "PackedAttention",
    "PackedBatch",
    "PackedCausalLM",
    "PackingMonitor",
    "PackingPolicy",
    "ParallelLayout",
    "ResumeError",
    "RowPicture",
    "SaveRefusedError",
    "SourceOutput",
    "StateError",
    "StorageError",
    "StorageRetry",
    "TokenNormalizedGradients",
    "TokenNormalizer",
    "VerificationError",
    "WorkerFailedError",
    "draw",
    "in_reading_order",
    "isolation_check",
    "lower_bound",
    "pack_loader",
    "packed_row",
    "plan",
    "prepack",
    "register_packer",
    "unpack",
]


# Hidden from type checkers, for which any name would be there, and a mistaken one no error.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
