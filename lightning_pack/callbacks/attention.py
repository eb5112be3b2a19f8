"""PackedAttention: what turns a training run into a packed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_pack.attention import ActivatedModel, BackendChoice, choose_backend, find_models, inspect_model
from lightning_pack.attention.backends import BackendName, check_backend_name
from lightning_pack.attention.inspection import ModelRefusedError
from lightning_pack.attention.positions import require_positions
from lightning_pack.callbacks.context import ContextParallel, RowCutter
from lightning_pack.callbacks.memory_probe import MemoryProbe
from lightning_pack.callbacks.token_normalization import TokenNormalizedGradients
from lightning_pack.collated.fields import BatchFields
from lightning_pack.collated.loader import PackLoader
from lightning_pack.collated.packer import BatchPacker, Stage
from lightning_pack.context import ContextSlice
from lightning_pack.parallel import ParallelLayout
from lightning_pack.policy import PackingPolicy
from lightning_pack.row import PackedBatch
from lightning_pack.trainer_checks import refuse_other_namespace

if TYPE_CHECKING:
    from lightning_pack.callbacks.monitor import PackingMonitor

#: First part of the trainer's precision, and the dtype in which attention is then computed.
_COMPUTED_IN = {"bf16": torch.bfloat16, "16": torch.float16, "transformer": torch.bfloat16}


class PackedAttention(Callback):
    """Keeps the sources of a packed row apart in every transformers model of the LightningModule.

    Before the first batch, the sanity check included, every model is inspected, its attention is set to the packed one and its
    KV cache is switched off; when the run ends or fails, all of that is put back. Every batch of a step is, or becomes, a
    packed row. A :class:`~lightning_pack.row.PackedBatch` passes through; the module calls its model with
    ``model(**batch.model_inputs())`` or ``model(**batch)``.

    **Batches of other loaders.** With a ``policy``, padded batches (dict, ``BatchEncoding`` or mutable dataclass) are packed in
    place on their device in ``on_*_batch_start``, in all four stages: their entries become the arguments with which a
    transformers model takes the row, ``attention_mask`` becomes None, and ``self.model(**batch).loss`` and ``.logits`` keep
    working. :func:`~lightning_pack.collated.pack_collated` says what is understood and what refused. Each batch costs one wait
    for the device. Flattened batches (``DataCollatorWithFlattening``) need no policy.
    :func:`~lightning_pack.collated.packed_row` gives the row of such a batch, :func:`~lightning_pack.collated.unpack` its
    results by source. A stage has batches that come packed, or batches that do not, but not both.

    **Context parallelism.** Where the datamodule's ``parallel`` layout has a ``context`` above 1, every batch of a step is the
    :class:`~lightning_pack.context.ContextSlice` of its rank: cut on the host before the transfer, with the boundaries of the
    full row, and seen as such by all hooks and callbacks. Attention runs over the ranks that share the row; every forward and
    backward pass is a collective of theirs. With gradients per target token they are those of the full row, under DDPStrategy
    and ModelParallelStrategy. A rank whose slice holds no target has the mean loss of none: 0 in PackedCausalLM, NaN in a model
    of transformers; its gradient is 0 and all of it is right, but log ``batch.token_mean(sum)`` instead.

    Args:
        policy: packs the sources of each padded batch; None takes batches that are packed or flattened already. ``"auto"`` is
            ``"minimum_bin_slack"`` here. Settings that only a stream of sources has (``buffer_size``, ``carry_over``, ...) are
            refused.
        fields: what the entries of those batches are, where names and shapes do not tell.
        backend: what computes attention: ``te`` (TransformerEngine, CUDA), ``varlen`` (torch's variable-length kernel, CUDA,
            half precision), ``segments`` (torch, source by source, everywhere) or ``auto``, the first of these that is
            installed, can run here and computes what the model asks for. What was chosen, and why, is told once.
        monitor: add a :class:`~lightning_pack.callbacks.monitor.PackingMonitor` if the trainer has none.
        token_normalization: add a :class:`TokenNormalizedGradients` if the trainer has none (in ``fit``); it expects that
            ``training_step`` returns the mean loss over the target tokens of its batch.
        probe_memory: before the first step of a fit, run a step on each of the heaviest rows that the datamodule's packing
            rules allow, and leave everything as it was (see :class:`~lightning_pack.callbacks.memory_probe.MemoryProbe`).

    Raises:
        MemoryProbeError: if such a row does not fit in memory, with what to lower.
        ModelRefusedError: before the first step, for a model in which sources would see each other or that asks for what the
            backend does not compute, with the reason; later, for one whose attention was set to something else.
        BackendError: for an unknown backend, and before the first step for one that is not installed or cannot run here.
        CollatedBatchError: for a batch that cannot be packed as it is, naming the entry and the ways out.
        ValueError: for settings of the policy that are not used; for batches that are not packed; for a layout into which the
            processes cannot be divided, or that the strategy does not know how to train; for ``probe_memory`` with a
            context-parallel layout, and for batches of other loaders with one, since rows are cut before they go to the device.
    """

    def __init__(
        self,
        *,
        policy: PackingPolicy | None = None,
        fields: BatchFields | None = None,
        backend: BackendName = "auto",
        monitor: bool = True,
        token_normalization: bool = True,
        probe_memory: bool = False,
    ) -> None:
        check_backend_name(backend)
        self.policy = policy
        self._packer = BatchPacker(policy, roles=fields or BatchFields())
        self.backend: BackendName = backend
        self.monitor = monitor
        self.token_normalization = token_normalization
        self.probe_memory = probe_memory
        self._active: list[ActivatedModel] = []
        self._context: ContextParallel | None = None
        self._cutter: RowCutter | None = None
        self._told: set[str] = set()
        self._told_left_out = False

    # --- the run -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add the callbacks that belong to packed training, form the groups of a layout; refuse a second one of its kind."""
        if sum(isinstance(callback, PackedAttention) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError(
                "the trainer has several PackedAttention callbacks, and each would set the attention of the same models: leave "
                "one (the command line always brings one; set it with --attention.*)"
            )
        refuse_other_namespace(trainer)
        datamodule = getattr(trainer, "datamodule", None)
        if self.policy is not None and isinstance(getattr(datamodule, "packing", None), PackingPolicy):
            raise ValueError(
                f"PackedAttention(policy=...) packs padded batches, and {type(datamodule).__name__} packs by its own rules "
                "(packing), so this policy is not used: leave it out"
            )
        self._packer.begin()
        self._told_left_out = False
        self._prepare_context(trainer)
        # Inserted behind this callback: the hook that is running visits them next, and Lightning keeps checkpoints last. Before
        # it, this callback would be visited a second time.
        added = [self._progress(trainer, stage), self._normalization(trainer, stage), self._monitor(trainer)]
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        at = callbacks.index(self)
        callbacks[at + 1 : at + 1] = [callback for callback in added if callback is not None]
        # Before those that count its rows, wherever they were put; all that change places have been visited.
        counting = (_monitor_type(), TokenNormalizedGradients)
        callbacks.insert(next((i for i in range(at) if isinstance(callbacks[i], counting)), at), callbacks.pop(at))

    def _progress(self, trainer: Trainer, stage: str) -> Callback | None:
        """What resumes the rows of pack_loader; a datamodule of ours brings its own."""
        from lightning_pack.loader_progress import LoaderProgress, TrainingProgress

        needed = stage == "fit" and not _has(trainer, TrainingProgress) and LoaderProgress.may_serve(trainer)
        return LoaderProgress() if needed else None

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
        # A row without a fixed width has no slots but its own tokens, if its packs come out of one batch.
        loader = trainer.fit_loop._data_source.instance
        policy = None if self.policy is None or self.policy.row_width is None else self.policy
        policy = loader.policy if isinstance(loader, PackLoader) else policy
        kind = _monitor_type()
        return None if _has(trainer, kind) else kind(policy=policy)

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
        self._packer.end()
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the models back: Lightning calls no teardown after an error."""
        self._packer.end()
        self._restore()

    # --- the batches ---------------------------------------------------------------------------------------------------

    def _begin_step(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *, stage: Stage, name: str) -> None:
        model = self._active[0].model if len(self._active) == 1 else None
        pad_id = None if model is None else model.config.get_text_config().pad_token_id
        row = self._packer.take(batch, stage=stage, name=name, pad_id=pad_id or 0, model=model)
        packed = require_packed(batch if row is None else row)
        self._require_parts(trainer, pl_module, packed, cut_late=packed is not batch)
        if stage == "predict" and packed.left_out and not self._told_left_out:
            # In the other stages the monitor tells.
            self._told_left_out = True
            gone = packed.left_out[0]
            rank_zero_warn(
                f"{len(packed.left_out)} sources of {name} are left out of the prediction or cut, such as {gone.key!r} "
                f"({gone.reason}, {gone.tokens} tokens); of later batches packed_row(batch).left_out tells"
            )

    def _require_parts(self, trainer: Trainer, pl_module: LightningModule, packed: PackedBatch, *, cut_late: bool) -> None:
        """Refuse a row that is cut for other ranks than those that share it, and a model that is no longer set to it."""
        group = None if self._context is None else self._context.group(trainer)
        expected = 1 if group is None else group.size
        if cut_late and expected > 1:
            raise ValueError(
                f"{expected} context-parallel ranks share a row, and it is cut before it goes to the device, where this batch "
                "was only packed: let the loader give packed rows, such as pack_loader(loader, policy, sharded=True)"
            )
        found = packed.context if isinstance(packed, ContextSlice) else 1
        if found != expected:
            raise ValueError(
                f"the step got a row that is cut for {found} context-parallel ranks, and {expected} share a row: leave the "
                "cutting to PackedAttention, after on_before_batch_transfer"
            )
        for found_now in find_models(pl_module):
            if all(found_now is not model.model for model in self._active):
                raise ModelRefusedError(
                    f"{type(found_now).__name__} was put into {type(pl_module).__name__} after the run had begun, so nothing "
                    "keeps the sources of a packed row apart in it: assign models in __init__ or configure_model"
                )
        for model in self._active:
            model.require_active()
            if model.positions is not None:
                require_positions(packed, most=model.positions, model=type(model.model).__name__)
            if model.backend is not None:
                # Evaluation in between may have had another group.
                model.backend.context = group

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Pack the batch, unless it is; refuse what cannot be packed."""
        self._begin_step(trainer, pl_module, batch, stage="train", name=f"batch {batch_idx}")

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Pack the batch, unless it is; refuse what cannot be packed."""
        self._begin_step(trainer, pl_module, batch, stage="validation", name=_named(batch_idx, dataloader_idx))

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Pack the batch, unless it is; refuse what cannot be packed."""
        self._begin_step(trainer, pl_module, batch, stage="test", name=_named(batch_idx, dataloader_idx))

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Pack the batch, unless it is; refuse what cannot be packed."""
        self._begin_step(trainer, pl_module, batch, stage="predict", name=_named(batch_idx, dataloader_idx))


def _named(batch_idx: int, dataloader_idx: int) -> str:
    return f"batch {batch_idx}" + (f" of loader {dataloader_idx}" if dataloader_idx else "")


def _monitor_type() -> type[PackingMonitor]:
    from lightning_pack.callbacks.monitor import PackingMonitor

    return PackingMonitor


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
        "datamodule that packs (EnergonPackDataModule), let PackedAttention(policy=PackingPolicy(...)) pack the padded batches "
        "(dicts with input_ids, attention_mask and labels) of any loader, or let the loader's collate_fn return "
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
