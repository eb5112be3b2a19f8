"""Loaders that pack, beside PackedAttention: no two rules in one run, and targets where a stage needs them."""

from __future__ import annotations

from collections.abc import Iterator
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


def refuse_other_loaders(trainer: Trainer, *, stage: Stage, policy: PackingPolicy | None, evaluate_unlabelled: bool) -> None:
    """Make sure that the loaders of a stage pack for it, and as PackedAttention would.

    Args:
        trainer: in a step of the stage.
        stage: whose batches come packed.
        policy: of PackedAttention, for padded batches; None compares none.
        evaluate_unlabelled: whether validation and test need no targets.

    Raises:
        ValueError: for a :func:`~lightning_pack.collated.pack_loader` with another policy, naming what differs, for one whose
            rows are for predict in a stage that needs targets, and for one that the same fit trains on.
    """
    trained = [] if stage == "train" else [loader for loader in _loaders(trainer, "train") if loader.tracked]
    for loader in _loaders(trainer, stage):
        shared = any(loader.loader is each.loader and each.stateful for each in trained)
        if shared or (loader.tracked and stage != "train"):
            raise ValueError(
                f"the {stage} data is read by the same loader as the train data of this fit, so the position in that would be "
                "lost: make two of them, with pack_loader over a DataLoader each"
            )
        if policy is not None:
            _refuse_other_policy(policy, loader, stage=stage)
        if loader.for_predict and (stage == "train" or (stage != "predict" and not evaluate_unlabelled)):
            raise ValueError(
                f"the {stage} data is packed by pack_loader(..., for_predict=True), whose rows may have no targets: leave "
                "for_predict out and let the collator return labels"
                + (
                    ""
                    if stage == "train"
                    else f". If {stage}_step needs no targets, say PackedAttention(evaluate_unlabelled=True)"
                )
            )


def _loaders(trainer: Trainer, stage: Stage) -> Iterator[PackLoader]:
    given: Any = getattr(trainer, _LOADERS[stage])
    return (loader for loader in CombinedLoader(given, "sequential").flattened if isinstance(loader, PackLoader))


def _refuse_other_policy(policy: PackingPolicy, loader: PackLoader, *, stage: Stage) -> None:
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
