"""Online sequence packing for PyTorch Lightning: nothing lost, resumed exactly, equal to the unpacked run."""

from lightning_pack.datamodule import EnergonPackDataModule
from lightning_pack.parallel import ParallelLayout
from lightning_pack.policy import PackingPolicy
from lightning_pack.row import PackedBatch

__all__ = [
    "EnergonPackDataModule",
    "PackedBatch",
    "PackingPolicy",
    "ParallelLayout",
]
