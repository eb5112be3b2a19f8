"""The share of the data that each rank reads, where nobody but the loader sees to it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset


def number_of_ranks() -> int:
    """Ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def refuse_same_data(loader: Any) -> None:
    """Refuse a DataLoader that gives every rank all of the data.

    Raises:
        ValueError: for one without a ``DistributedSampler``, with the ways out.
    """
    ranks = number_of_ranks()
    if ranks == 1 or not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if not any(hasattr(sampler, "num_replicas") for sampler in samplers):
        raise ValueError(
            f"each of the {ranks} ranks would train on all of the data, since the DataLoader given to pack_loader has no "
            "DistributedSampler (Lightning puts one only into DataLoaders that it sees): give it "
            "sampler=DistributedSampler(dataset), or say pack_loader(..., sharded=True) if each rank has a part of its own"
        )
