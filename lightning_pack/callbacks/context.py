"""A run over context-parallel ranks: their groups, and rows that are cut before they go to the device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, XLAStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pack.attention.context_parallel import ContextGroup
from lightning_pack.context import ContextSlice
from lightning_pack.parallel import ParallelLayout
from lightning_pack.row import PackedBatch

_HOOK = "on_before_batch_transfer"


class ContextParallel:
    """The groups of a layout, one for training and one for evaluation. Made by every rank at the same time.

    Args:
        layout: of which a context-parallel size is above 1.
        trainer: whose processes are set up.

    Raises:
        ValueError: for processes that cannot be divided, and a strategy under which gradients would not be right.
    """

    def __init__(self, layout: ParallelLayout, trainer: Trainer) -> None:
        self._layout, self._world = layout, dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        rank, world_size = trainer.global_rank, trainer.world_size
        for part in (layout, layout.evaluation):
            part.context_groups(world_size=world_size)
        _check_strategy(trainer, layout)
        self._training = ContextGroup.of(layout, rank=rank, world_size=world_size)
        self._evaluation = self._training
        if layout.evaluation.context != layout.context:
            self._evaluation = ContextGroup.of(layout.evaluation, rank=rank, world_size=world_size)
        #: Whether of training (True) and of evaluation (False) the first row of this run was compared.
        self._compared: set[bool] = set()

    def begin(self) -> None:
        """A run begins: its data may be other data, whose first rows are compared again."""
        self._compared.clear()

    def serves(self, layout: ParallelLayout) -> bool:
        """Whether the groups are those of a layout in the processes of now."""
        return layout == self._layout and dist.is_initialized() and dist.group.WORLD is self._world

    def group(self, trainer: Trainer) -> ContextGroup | None:
        """The ranks that share a row at present; None where a rank has whole rows."""
        return self._training if trainer.training else self._evaluation

    @property
    def largest(self) -> ContextGroup | None:
        """That of training or of evaluation, whichever has more ranks: what it can compute, both can."""
        return max(self._training, self._evaluation, key=lambda group: 1 if group is None else group.size)

    def cut(self, batch: Any, trainer: Trainer) -> Any:
        """The part of a row that is this rank's; anything else as it is.

        Raises:
            ValueError: if the ranks that share a row got different ones; told by the first of training and of evaluation.
        """
        group = self.group(trainer)
        if group is None or not isinstance(batch, PackedBatch) or isinstance(batch, ContextSlice):
            return batch
        if trainer.training not in self._compared:
            _require_one_row(batch, group)
            self._compared.add(trainer.training)
        layout = self._layout if trainer.training else self._layout.evaluation
        part = ContextSlice.of(batch, layout=layout, rank=group.rank, group=group.process_group)
        return part.pin_memory() if batch.input_ids.is_pinned() else part


def _require_one_row(batch: PackedBatch, group: ContextGroup) -> None:
    """Refuse parts of different rows, whose attention would mean nothing: a collective of the ranks that share a row."""
    ids, boundaries = batch.input_ids.cpu().numpy(), batch.cu_seqlens_padded.tolist()
    own = (hashlib.sha256(ids.tobytes()).hexdigest(), boundaries, batch.source_keys[:1])
    rows: list[Any] = [None] * group.size
    dist.all_gather_object(rows, own, group=group.process_group)
    if any(row != own for row in rows):
        raise ValueError(
            f"ranks {', '.join(map(str, group.ranks))} share a row, and their loaders gave them different ones (of "
            f"{', '.join(str(boundaries[-1]) for _, boundaries, _ in rows)} tokens, which begin with "
            f"{', '.join(map(repr, (key for _, _, keys in rows for key in keys)))}): deal the data out by "
            "ParallelLayout.data_parallel(rank, world_size=...), as EnergonPackDataModule does, with "
            "Trainer(use_distributed_sampler=False), since Lightning deals a DataLoader out over all ranks"
        )


def _check_strategy(trainer: Trainer, layout: ParallelLayout) -> None:
    strategy = trainer.strategy
    known = isinstance(strategy, DDPStrategy | ModelParallelStrategy)
    # These are DDP strategies by name only.
    if not known or isinstance(strategy, DeepSpeedStrategy | XLAStrategy):
        raise ValueError(
            f"context={layout.context}, eval_context={layout.evaluation.context}: rows over several ranks are known to be "
            f"right with DDPStrategy and ModelParallelStrategy only, and this is {type(strategy).__name__}: use one of "
            "these, or set both to 1"
        )
    if isinstance(strategy, ModelParallelStrategy) and strategy.device_mesh is not None:
        size = strategy.device_mesh["tensor_parallel"].size()
        if size != layout.tensor:
            raise ValueError(
                f"ModelParallelStrategy has {size} tensor-parallel ranks and the layout has tensor={layout.tensor}: they would "
                f"not agree on who shares a row, so set ParallelLayout(tensor={size})"
            )


class RowCutter:
    """Cuts every batch on the host, before Lightning moves it to the device, so that all hooks and callbacks see the part.

    Does so behind the ``on_before_batch_transfer`` of the datamodule or, where that has none of its own, of the module.

    Args:
        trainer: of the run.
        pl_module: its module.
        cut: a batch -> what becomes of it.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, cut: Callable[[Any], Any]) -> None:
        datamodule = getattr(trainer, "datamodule", None)
        # As Lightning chooses.
        self._owner = datamodule if is_overridden(_HOOK, datamodule) else pl_module
        self._before = vars(self._owner).get(_HOOK)
        hook = getattr(self._owner, _HOOK)

        # Wrapped, so that Lightning still knows whether the hook behind it is anyone's own.
        @wraps(hook)
        def cutting(batch: Any, dataloader_idx: int) -> Any:
            return cut(hook(batch, dataloader_idx))

        setattr(self._owner, _HOOK, cutting)

    def remove(self) -> None:
        """Put the hook back as it was."""
        vars(self._owner).pop(_HOOK, None)
        if self._before is not None:
            setattr(self._owner, _HOOK, self._before)
