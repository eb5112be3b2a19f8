"""What a Trainer must not ask of packed rows and what it must bring, and whether its ranks must stay in step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_pack.row import PackedBatch

#: Names under which strategies keep the number of stages.
_PIPELINE = ("pipeline_model_parallel_size", "pipeline_parallel_size", "pipeline_parallel")


def refuse_to_train(trainer: pl.Trainer, *, epochs: int | None) -> None:
    """Check a Trainer that is about to fit.

    Args:
        trainer: with its module.
        epochs: passes over the data; None is an endless stream.

    Raises:
        ValueError: for settings under which rows would be repeated, left out, or trained on without anyone knowing.
    """
    settings: Any = trainer
    if settings.accumulate_grad_batches < 1:
        raise ValueError(
            f"accumulate_grad_batches={settings.accumulate_grad_batches}: rows of a step, and a step needs at least one"
        )
    if settings.overfit_batches:
        raise ValueError(
            "overfit_batches repeats the same batches every epoch, which a stream cannot: use limit_train_batches, or a "
            "dataset of a few samples"
        )
    if epochs is not None and settings.limit_train_batches != 1.0 and not settings.fast_dev_run:
        raise ValueError(
            f"epochs={epochs} trains on every source of a pass, limit_train_batches={settings.limit_train_batches} ends it "
            "early: set one of the two"
        )
    if epochs is not None and (settings.min_steps is not None or (settings.min_epochs or 0) > epochs):
        raise ValueError(
            f"training ends after epochs={epochs} passes over the data, but min_steps={settings.min_steps} or "
            f"min_epochs={settings.min_epochs} asks for more: leave them out, or raise epochs"
        )
    module = trainer.lightning_module
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"{type(module).__name__}.training_step takes dataloader_iter, so nobody can tell which batches it trained on: "
            "take batch and batch_idx"
        )


def must_stay_in_step(trainer: pl.Trainer | None) -> bool:
    """Whether a forward pass is a collective, because it gathers weights from all ranks."""
    strategy = None if trainer is None else trainer.strategy
    return isinstance(strategy, FSDPStrategy | ModelParallelStrategy | DeepSpeedStrategy)


def refuse_pipeline(trainer: Any) -> None:
    """Check that every rank has all layers.

    Raises:
        ValueError: for a strategy that cuts a model into stages, naming the setting.
    """
    strategy = trainer.strategy
    settings = {name: getattr(strategy, name, None) for name in _PIPELINE}
    mesh: Any = getattr(strategy, "_device_mesh", None)
    for name in getattr(mesh, "mesh_dim_names", None) or ():
        if name in ("pp", "pipeline", "pipeline_parallel"):
            settings[f"{name} of the device mesh"] = mesh[name].size()
    for name, value in settings.items():
        if isinstance(value, int) and value > 1:
            raise ValueError(
                f"{name}={value} of {type(strategy).__name__}: a pipeline cuts a step in micro-batches of equal shape and "
                "hands on hidden states without boundaries, which packed rows need in every layer: set it to 1 and spread the "
                "model with ParallelLayout (context, tensor) or sharded weights"
            )


def refuse_other_namespace(trainer: Any) -> None:
    """Check that a callback's Trainer is one of ``lightning.pytorch``.

    Raises:
        ValueError: for one of ``pytorch_lightning``, whose strategies, callbacks and modules are other classes.
    """
    if any(kind.__module__.partition(".")[0] == "pytorch_lightning" for kind in type(trainer).__mro__):
        raise ValueError(
            "the Trainer comes from 'pytorch_lightning', whose classes are others than those of "
            "'lightning', which lightning_pack uses: write 'import lightning.pytorch as pl' instead of 'import "
            "pytorch_lightning as pl' (the same code under another name), and likewise in 'from pytorch_lightning import ...'"
        )


def require_packed(batch: Any) -> PackedBatch:
    """The batch, which has to be a packed row.

    Raises:
        ValueError: telling what came instead.
    """
    if isinstance(batch, PackedBatch):
        if batch.input_ids.shape[-1] == 0:
            raise ValueError(
                "an empty row reached the model (its packs only carry what was left out): do not emit it as a batch"
            )
        if batch.input_ids.ndim != 2 or batch.input_ids.shape[0] != 1:
            raise ValueError(
                f"input_ids of a PackedBatch have the shape {list(batch.input_ids.shape)}, and a micro-batch is one physical "
                "row, [1, T], over which its boundaries (cu_seqlens) run: join packs with PackedBatch.from_packs or "
                "packs_per_batch, and give more of them with accumulate_grad_batches"
            )
        return batch
    if _combined(batch):
        raise ValueError(
            f"PackedAttention got {describe_batch(batch)}, the batches of several loaders in one step, and a step has one "
            "packed row: give the Trainer one loader (torch.utils.data.ConcatDataset joins datasets), for evaluation a list of "
            "loaders, which come one after the other"
        )
    raise ValueError(
        f"PackedAttention got {describe_batch(batch)} and needs a PackedBatch, whose boundaries keep sources apart: use a "
        "datamodule that packs (EnergonPackDataModule), let PackedAttention(policy=PackingPolicy(...)) pack the padded batches "
        "(dicts with input_ids, attention_mask and labels) of any loader, or let the loader's collate_fn return "
        "PackedBatch.from_packs([policy.build(sources)], pad_id=...)"
    )


def _combined(batch: Any) -> bool:
    """Whether this is what Lightning makes of a dict or list of training loaders: a batch, padded or packed, of each."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    # Samples that are not collated have a dimension less.
    return bool(parts) and all(
        isinstance(part, PackedBatch)
        or (isinstance(part, Mapping) and isinstance(ids := part.get("input_ids"), Tensor) and ids.dim() == 2)
        for part in parts
    )


def describe_batch(batch: Any) -> str:
    """Type and keys or length of a batch, for messages."""
    name = type(batch).__name__
    if isinstance(batch, Tensor):
        return f"a {name} of shape {list(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"a {name} with keys {sorted(map(str, batch))}"
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return f"a {name} of {len(batch)} ({', '.join(sorted({type(item).__name__ for item in batch}))})"
    return f"a {name}" + (
        f" with {sorted(vars(batch))}" if hasattr(batch, "__dict__") and not isinstance(batch, nn.Module) else ""
    )
