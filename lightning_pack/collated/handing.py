"""A packed row handed back in the batch that it was made of, so that steps written for that batch keep working."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import fields
from typing import Any

from torch import nn

from lightning_pack.collated.fields import BatchFields, CollatedBatchError
from lightning_pack.collated.row import CollatedRow


def hand_back(batch: Any, row: CollatedRow, *, roles: BatchFields, model: nn.Module | None = None) -> None:
    """Replace the entries of a batch, in place, by those of its packed row.

    They become the keyword arguments of a transformers model: those of
    :meth:`~lightning_pack.row.PackedBatch.model_inputs` (without labels where there were none), ``attention_mask`` None, and
    the batch's further entries.

    Args:
        batch: a dict, ``BatchEncoding`` or mutable dataclass.
        row: that was made of it.
        roles: of its entries; those to be left out go.
        model: that the arguments are for.

    Raises:
        CollatedBatchError: for a dataclass with slots that has no place for an argument.
    """
    values: dict[str, Any] = row.model_inputs(model) | {"attention_mask": None} | row.extras
    if not row.labelled:
        del values["labels"], values["shift_labels"]
    if isinstance(batch, MutableMapping):
        batch.clear()
        batch.update(values)
        return
    declared = {f.name for f in fields(batch)}
    if not hasattr(batch, "__dict__") and (missing := sorted(values.keys() - declared)):
        raise CollatedBatchError(
            f"{type(batch).__name__} is a dataclass with slots and has no place for {', '.join(missing)}: leave slots out, or "
            "let collate_fn return a dict"
        )
    for name in roles.leave_out:
        if name in declared:
            setattr(batch, name, None)
    for name, value in values.items():
        setattr(batch, name, value)
