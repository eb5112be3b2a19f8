"""PackedAttention: what turns a training run into a packed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_pack.attention import ActivatedModel, BackendChoice, choose_backend, find_models, inspect_model
from lightning_pack.attention.backends import BackendName, check_backend_name
from lightning_pack.attention.inspection import ModelRefusedError
from lightning_pack.callbacks.context import ContextParallel, RowCutter
from lightning_pack.callbacks.memory_probe import MemoryProbe
from lightning_pack.callbacks.token_normalization import TokenNormalizedGradients
from lightning_pack.context import ContextSlice
from lightning_pack.parallel import ParallelLayout
from lightning_pack.row import PackedBatch
from lightning_pack.target_window import refuse_unaveraged

#: First part of the trainer's precision, and the dtype in which attention is then computed.
_COMPUTED_IN = {"bf16": torch.bfloat16, "16": torch.float16, "transformer": torch.bfloat16}


class PackedAttention(Callback):
    """Keeps the sources of a packed row apart in every transformers model of the LightningModule.

    Before the first batch, the sanity check included, every model is inspected, its attention is set to the packed one and its
    KV cache is switched off; when the run ends or fails, all of that is put back. Every batch has to be a
    :class:`~lightning_pack.row.PackedBatch`. The module calls its model with ``model(**batch.model_inputs())`` or
    ``model(**batch)``.

    **Context parallelism.** Where the datamodule's ``parallel`` layout has a ``context`` above 1, every batch of a step is the
    :class:`~lightning_pack.context.ContextSlice` of its rank: cut on the host before the transfer, with the boundaries of the
    full row, and seen as such by all hooks and callbacks. Attention runs over the ranks that share the row; every forward and
    backward pass is a collective of theirs. With gradients per target token they are those of the full row, under DDPStrategy
    and ModelParallelStrategy. A rank whose slice holds no target has the mean loss of none: 0 in PackedCausalLM, NaN in a model
    of transformers; its gradient is 0 and all of it is right, but log ``batch.token_mean(sum)`` instead.

    Args:
        backend: what computes attention: ``te`` (TransformerEngine, CUDA), ``varlen`` (torch's variable-length kernel, CUDA,
            half precision), ``segments`` (torch, source by source, everywhere) or ``auto``, the first of these that is
            installed, can run here and computes what the model asks for. What was chosen, and why, is told once.
        monitor: add a :class:`~lightning_pack.callbacks.monitor.PackingMonitor` if the trainer has none.
        token_normalization: add a :class:`TokenNormalizedGradients` if the trainer has none (in ``fit``), before all callbacks
            that see gradients in ``on_before_optimizer_step``; it expects that ``training_step`` returns the mean loss over
            the target tokens of its batch.
        probe_memory: before the first step of a fit, run a step on each of the heaviest rows that the datamodule's packing
            rules allow, and leave everything as it was (see :class:`~lightning_pack.callbacks.memory_probe.MemoryProbe`).

    Raises:
        MemoryProbeError: if such a row does not fit in memory, with what to lower.
        ModelRefusedError: before the first step, for a model in which sources would see each other or that asks for what the
            backend does not compute, with the reason; later, for one whose attention was set to something else.
        BackendError: for an unknown backend, and before the first step for one that is not installed or cannot run here.
        ValueError: for batches that are not packed; for a layout into which the processes cannot be divided, or that the
            strategy does not know how to train; for ranks that share a row and got different ones; for ``probe_memory`` with a
            context-parallel layout.
    """

    def __init__(
        self,
        *,
        backend: BackendName = "auto",
        monitor: bool = True,
        token_normalization: bool = True,
        probe_memory: bool = False,
    ) -> None:
        check_backend_name(backend)
        self.backend: BackendName = backend
        self.monitor = monitor
        self.token_normalization = token_normalization
        self.probe_memory = probe_memory
        self._active: list[ActivatedModel] = []
        self._context: ContextParallel | None = None
        self._cutter: RowCutter | None = None
        self._told: set[str] = set()

    # --- the run -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add the callbacks that belong to packed training, form the groups of a layout; refuse a second one of its kind."""
        if sum(isinstance(callback, PackedAttention) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError(
                "the trainer has several PackedAttention callbacks, and each would set the attention of the same models: leave "
                "one (the command line always brings one; set it with --attention.*)"
            )
        self._prepare_context(trainer)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        normalization, monitor = self._normalization(trainer, stage), self._monitor(trainer)
        # Inserted behind this callback: the hook that is running visits them next, and Lightning keeps checkpoints last.
        at = callbacks.index(self) + 1
        if monitor is not None:
            callbacks.insert(at, monitor)
        if normalization is not None:
            # Before any that clips or logs gradients, which would get them as they are before. Where that is before this
            # callback, the hook visits this one a second time, and nothing is left to be added.
            early = (number for number in range(at) if is_overridden("on_before_optimizer_step", callbacks[number]))
            callbacks.insert(next(early, at), normalization)

    def _prepare_context(self, trainer: Trainer) -> None:
        layout = getattr(getattr(trainer, "datamodule", None), "parallel", None)
        if not isinstance(layout, ParallelLayout) or layout.context == layout.evaluation.context == 1:
            self._context = None
            return
        if self.probe_memory:
            raise ValueError(
                f"probe_memory=True with context={layout.context}, eval_context={layout.evaluation.context}: a rank that runs "
                "out of memory alone would leave the others waiting in attention: switch one of them off"
            )
        if self._context is None or not self._context.serves(layout):
            self._context = ContextParallel(layout, trainer)

    def _monitor(self, trainer: Trainer) -> Callback | None:
        if not self.monitor:
            return None
        from lightning_pack.callbacks.monitor import PackingMonitor

        return None if _has(trainer, PackingMonitor) else PackingMonitor()

    def _normalization(self, trainer: Trainer, stage: str) -> Callback | None:
        if not self.token_normalization or stage != "fit" or _has(trainer, TokenNormalizedGradients):
            return None
        return TokenNormalizedGradients()

    def _activate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active:
            return
        choices = [(model, self._choose(trainer, model)) for model in find_models(pl_module)]
        findings = [finding for model, choice in choices for finding in inspect_model(model, backend=choice.backend)]
        if findings:
            raise ModelRefusedError("packed rows are not safe with this model. " + " | ".join(map(str, findings)))
        for model, choice in choices:
            self._active.append(ActivatedModel.of(model, backend=choice.backend))
            message = f"Packed attention of {type(model).__name__}: {choice}"
            if message not in self._told:
                self._told.add(message)
                rank_zero_info(message)
        if self._context is not None:
            if trainer.training and self._context.group(trainer) is not None:
                refuse_unaveraged(pl_module, trainer.strategy, way_out="or set context=1")
            self._context.begin()
            self._cutter = RowCutter(trainer, pl_module, partial(self._context.cut, trainer=trainer))

    def _choose(self, trainer: Trainer, model: PreTrainedModel) -> BackendChoice:
        # What a precision plugin casts to; without one a model computes in the dtype of its weights.
        dtype = _COMPUTED_IN.get(str(trainer.precision).partition("-")[0], model.dtype)
        context = None if self._context is None else self._context.group(trainer)
        device = trainer.strategy.root_device
        return choose_backend(self.backend, model, device=device, dtype=dtype, context=context)

    def _restore(self) -> None:
        if self._cutter is not None:
            self._cutter.remove()
            self._cutter = None
        active, self._active = self._active, []
        # Backwards: models may share a configuration, and only the first of them found it as it was.
        for model in reversed(active):
            model.restore()

    # configure_model has run and the sanity check has not when each of these is called.
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inspect and switch."""
        self._activate(trainer, pl_module)
        if self.probe_memory:
            # Refuses what it cannot run, before the sanity check.
            MemoryProbe(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Probe the memory, with everything restored that a checkpoint holds."""
        if self.probe_memory:
            MemoryProbe(trainer, pl_module).run()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inspect and switch, unless ``fit`` has."""
        self._activate(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inspect and switch."""
        self._activate(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inspect and switch."""
        self._activate(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the models back as they were."""
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the models back: Lightning calls no teardown after an error."""
        self._restore()

    # --- the batches ---------------------------------------------------------------------------------------------------

    def _begin_step(self, trainer: Trainer, batch: Any) -> None:
        packed = require_packed(batch)
        group = None if self._context is None else self._context.group(trainer)
        expected = 1 if group is None else group.size
        found = packed.context if isinstance(packed, ContextSlice) else 1
        if found != expected:
            raise ValueError(
                f"the step got a row that is cut for {found} context-parallel ranks, and {expected} share a row: leave the "
                "cutting to PackedAttention, after on_before_batch_transfer"
            )
        for model in self._active:
            model.require_active()
            if model.backend is not None:
                # Evaluation in between may have had another group.
                model.backend.context = group

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Refuse a batch that is not packed, and a model that no longer is."""
        self._begin_step(trainer, batch)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Refuse a batch that is not packed, and a model that no longer is."""
        self._begin_step(trainer, batch)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Refuse a batch that is not packed, and a model that no longer is."""
        self._begin_step(trainer, batch)

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Refuse a batch that is not packed, and a model that no longer is."""
        self._begin_step(trainer, batch)


def _has(trainer: Trainer, kind: type[Callback]) -> bool:
    return any(isinstance(callback, kind) for callback in trainer.callbacks)  # type: ignore[attr-defined]


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
        return batch
    raise ValueError(
        f"PackedAttention got {describe_batch(batch)} and needs a PackedBatch, whose boundaries keep sources apart: use a "
        "datamodule that packs (EnergonPackDataModule), or let the loader's collate_fn return "
        "PackedBatch.from_packs([policy.build(sources)], pad_id=...)"
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
