"""PackedAttention: what turns a training run into a packed one."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_pack.attention.backends import BackendName, check_backend_name
from lightning_pack.callbacks.companions import bring_along
from lightning_pack.callbacks.memory_probe import MemoryProbe
from lightning_pack.callbacks.packed_models import PackedModels
from lightning_pack.callbacks.policies import refuse_other_loaders
from lightning_pack.collated.fields import BatchFields
from lightning_pack.collated.packer import BatchPacker, Stage
from lightning_pack.collated.row import CollatedRow
from lightning_pack.policy import PackingPolicy
from lightning_pack.row import PackedBatch
from lightning_pack.source import LeftOut
from lightning_pack.trainer_checks import refuse_other_namespace, refuse_pipeline, require_packed


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
    for the device. Flattened batches (``DataCollatorWithFlattening``) need no policy; with one they have to keep to it, and so
    does the policy of :func:`~lightning_pack.collated.pack_loader`.
    :func:`~lightning_pack.collated.packed_row` gives the row of such a batch, :func:`~lightning_pack.collated.unpack` its
    results by source. A stage has batches that come packed, or batches that do not, but not both.

    **Context parallelism.** Where the datamodule's ``parallel`` layout has a ``context`` above 1, every batch of a step is the
    :class:`~lightning_pack.context.ContextSlice` of its rank: cut on the host before the transfer, with the boundaries of the
    full row, and seen as such by all hooks and callbacks. Attention runs over the ranks that share the row; every forward and
    backward pass is a collective of theirs. With gradients per target token they are those of the full row, under DDPStrategy
    and ModelParallelStrategy. A rank whose slice holds no target has the mean loss of none: 0 in PackedCausalLM, NaN in a model
    of transformers; its gradient is 0 and all of it is right, but log ``batch.token_mean(sum)`` instead. Outputs of a step are
    those of the part; ``batch.indices`` says where they are in the full row.

    Args:
        policy: packs the sources of each padded batch; None takes batches that are packed or flattened already. ``"auto"`` is
            ``"minimum_bin_slack"`` here. Settings that only a stream of sources has (``buffer_size``, ``carry_over``, ...) are
            refused.
        fields: what the entries of those batches are, where names and shapes do not tell.
        backend: what computes attention: ``te`` (TransformerEngine, CUDA), ``varlen`` (torch's variable-length kernel, CUDA,
            half precision), ``segments`` (torch, source by source, everywhere) or ``auto``, the first of these that is
            installed, can run here and computes what the model asks for. What was chosen, and why, is told once.
        monitor: add a :class:`~lightning_pack.callbacks.monitor.PackingMonitor` if the trainer has none.
        token_normalization: add a :class:`TokenNormalizedGradients` if the trainer has none (in ``fit``), before all callbacks
            that see gradients in ``on_before_optimizer_step``; it expects that ``training_step`` returns the mean loss over
            the target tokens of its batch.
        probe_memory: before the first step of a fit, run a step on each of the heaviest rows that the datamodule's packing
            rules allow, and leave everything as it was (see :class:`~lightning_pack.callbacks.memory_probe.MemoryProbe`).
        evaluate_unlabelled: take padded and flattened batches without labels, and rows of ``pack_loader(for_predict=True)``, in
            validation and test too, for steps that look at outputs alone. Otherwise they are refused by name, since a loss
            without labels is None, and one over targets that a step makes itself would cross the boundaries of sources.
            ``predict`` never needs labels, training always does.

    Raises:
        MemoryProbeError: if such a row does not fit in memory, with what to lower.
        ModelRefusedError: before the first step, for a model in which sources would see each other or that asks for what the
            backend does not compute, with the reason; later, for one whose attention was set to something else.
        BackendError: for an unknown backend, and before the first step for one that is not installed or cannot run here.
        CollatedBatchError: for a batch that cannot be packed as it is, naming the entry and the ways out.
        ValueError: before a step, for a row with a token id that the model does not embed, naming its source.
        ValueError: for settings of the policy that are not used; for batches that are not packed; for a layout into which the
            processes cannot be divided, or that the strategy does not know how to train; for ranks that share a row and got
            different ones; for ``probe_memory`` with a context-parallel layout, and for batches of other loaders with one,
            since rows are cut before they go to the device.
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
        evaluate_unlabelled: bool = False,
    ) -> None:
        check_backend_name(backend)
        self.policy = policy
        self._packer = BatchPacker(policy, roles=fields or BatchFields(), evaluate_unlabelled=evaluate_unlabelled)
        #: Stages whose loaders were asked what they pack, and how.
        self._asked = set[str]()
        self.backend: BackendName = backend
        self.monitor = monitor
        self.token_normalization = token_normalization
        self.probe_memory = probe_memory
        self._models = PackedModels(backend)
        self._told_left_out = False
        #: What this rank was given since the run began: whether sources to train on, and one that is none.
        self._trains = False
        self._useless: LeftOut | None = None

    # --- the run -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add the callbacks that belong to packed training, form the groups of a layout; refuse a second one of its kind."""
        if sum(isinstance(callback, PackedAttention) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError(
                "the trainer has several PackedAttention callbacks, and each would set the attention of the same models: leave "
                "one (the command line always brings one; set it with --attention.*)"
            )
        refuse_other_namespace(trainer)
        refuse_pipeline(trainer)
        datamodule = getattr(trainer, "datamodule", None)
        if self.policy is not None and isinstance(getattr(datamodule, "packing", None), PackingPolicy):
            raise ValueError(
                f"PackedAttention(policy=...) packs padded batches, and {type(datamodule).__name__} packs by its own rules "
                "(packing), so this policy is not used: leave it out"
            )
        self._packer.begin()
        self._asked.clear()
        self._told_left_out = False
        self._models.begin(trainer, probe_memory=self.probe_memory)
        bring_along(
            self,
            trainer=trainer,
            module=pl_module,
            stage=stage,
            policy=self.policy,
            monitor=self.monitor,
            token_normalization=self.token_normalization,
        )

    # configure_model has run and the sanity check has not when each of these is called.
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inspect and switch."""
        self._models.activate(trainer, pl_module)
        if self.probe_memory:
            # Refuses what it cannot run, before the sanity check.
            MemoryProbe(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Probe the memory, with everything restored that a checkpoint holds."""
        # What is left of an epoch after a resume may hold no source, and is no reason to fail.
        self._trains, self._useless = trainer.global_step > 0, None
        # Before, in the sanity check, it was not known what is trained on.
        self._asked.clear()
        if self.probe_memory:
            MemoryProbe(trainer, pl_module).run()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell of a run that has trained on no source by the end of an epoch, which is no success.

        Raises:
            ValueError: with an example; where there are several ranks it is a warning, since others may have had sources.
        """
        if self._trains or self._useless is None:
            return
        gone = self._useless
        problem = (
            f"no source of this epoch was trained on; {gone.key!r}, for example, was left out as {gone.reason} ({gone.tokens} "
            "tokens): "
        ) + (
            "raise the policy's capacity, or let overlength='truncate' cut what is longer"
            if gone.reason == "overlength"
            else "correct the data (a table of all reasons follows at the end of a run that trains on something)"
        )
        if trainer.world_size == 1:
            raise ValueError(problem)
        warnings.warn(f"rank {trainer.global_rank}: {problem}", stacklevel=2)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inspect and switch, unless ``fit`` has."""
        self._models.activate(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inspect and switch."""
        self._models.activate(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inspect and switch."""
        self._models.activate(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the models back as they were."""
        self._packer.end()
        self._models.restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the models back: Lightning calls no teardown after an error."""
        self._packer.end()
        self._models.restore()

    # --- the batches ---------------------------------------------------------------------------------------------------

    def _begin_step(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *, stage: Stage, name: str) -> None:
        if isinstance(batch, PackedBatch) and stage not in self._asked:
            self._asked.add(stage)
            refuse_other_loaders(trainer, stage=stage, policy=self.policy, evaluate_unlabelled=self._packer.evaluate_unlabelled)
        model = self._models.only
        pad_id = None if model is None else model.config.get_text_config().pad_token_id
        row = self._packer.take(batch, stage=stage, name=name, pad_id=pad_id or 0, model=model)
        packed = require_packed(batch if row is None else row)
        if (results := trainer._results) is not None:
            # Lightning weighs what a step logs by the length of the first tensor that it finds, which is one row, and warns
            # that others of the batch have other lengths.
            results.batch_size = row.rows if isinstance(row, CollatedRow) and row.rows is not None else 1
        self._models.require(packed, trainer=trainer, pl_module=pl_module, cut_late=packed is not batch)
        if stage == "train":
            self._trains |= len(packed.source_keys) > 0
            self._useless = packed.left_out[0] if packed.left_out else self._useless
        if stage == "predict" and packed.left_out and not self._told_left_out:
            # In the other stages the monitor tells. Each rank loses sources of its own.
            self._told_left_out = True
            gone = packed.left_out[0]
            way = (
                " (pack_loader(..., for_predict=True) leaves out neither no_targets nor uneven_ranks)"
                if any(each.reason in ("no_targets", "uneven_ranks") for each in packed.left_out)
                else ""
            )
            warnings.warn(
                f"{len(packed.left_out)} sources of {name} on rank {trainer.global_rank} are left out of the prediction or "
                f"cut, such as {gone.key!r} ({gone.reason}, {gone.tokens} tokens){way}; of later batches "
                "packed_row(batch).left_out tells",
                stacklevel=2,
            )

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
