"""The policy of PackedAttention beside those of loaders that pack: no two rules in one run, and none without use."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader

from lightning_pack.collated.loader import PackLoader
from lightning_pack.collated.packer import Stage
from lightning_pack.collated.usable import OF_A_STREAM
from lightning_pack.policy import PackingPolicy

_LOADERS = {
    "train": "train_dataloader",
    "validation": "val_dataloaders",
    "test": "test_dataloaders",
    "predict": "predict_dataloaders",
}


def refuse_other_policy(policy: PackingPolicy, *, trainer: Trainer, stage: Stage) -> None:
    """Make sure that the loaders of a stage pack as PackedAttention would.

    Args:
        policy: of PackedAttention, for padded batches.
        trainer: in a step of the stage.
        stage: whose batches come packed.

    Raises:
        ValueError: for a :func:`~lightning_pack.collated.pack_loader` with another policy, naming what differs.
    """
    given: Any = getattr(trainer, _LOADERS[stage])
    for loader in CombinedLoader(given, "sequential").flattened:
        if not isinstance(loader, PackLoader):
            continue
        names = [f.name for f in fields(PackingPolicy) if f.name not in OF_A_STREAM]
        different = [
            f"{name}={getattr(policy, name)!r} and {getattr(loader.policy, name)!r}"
            for name in names
            if getattr(policy, name) != getattr(loader.policy, name)
        ]
        if different:
            raise ValueError(
                f"the {stage} data is packed by pack_loader, whose policy is another than that of PackedAttention(policy=...), "
                f"which is not used then: {', '.join(different)}. Leave the policy of PackedAttention out, or give the same"
            )
