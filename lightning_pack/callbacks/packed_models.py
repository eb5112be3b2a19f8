"""The models of a LightningModule while they run packed rows."""

from __future__ import annotations

from functools import partial

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from transformers import PreTrainedModel

from lightning_pack.attention import ActivatedModel, BackendChoice, choose_backend, find_models, inspect_model
from lightning_pack.attention.backends import BackendName
from lightning_pack.attention.inspection import ModelRefusedError
from lightning_pack.attention.positions import require_positions
from lightning_pack.attention.vocabulary import embedded_ids, require_embeddings
from lightning_pack.callbacks.context import ContextParallel, RowCutter
from lightning_pack.callbacks.media_parameters import MediaParameters
from lightning_pack.collated.row import CollatedRow
from lightning_pack.context import ContextSlice
from lightning_pack.encoders.image_reader import ImageReader
from lightning_pack.encoders.vision_checks import check_model
from lightning_pack.parallel import ParallelLayout
from lightning_pack.row import PackedBatch
from lightning_pack.target_window import refuse_unaveraged
from lightning_pack.trainer_checks import must_stay_in_step

#: First part of the trainer's precision, and the dtype in which attention is then computed.
_COMPUTED_IN = {"bf16": torch.bfloat16, "16": torch.float16, "transformer": torch.bfloat16}


class PackedModels:
    """Switches models to packed attention, keeps an eye on them, and puts them back.

    Args:
        backend: what computes attention.
    """

    def __init__(self, backend: BackendName) -> None:
        self.backend: BackendName = backend
        self._active: list[ActivatedModel] = []
        self._media: list[MediaParameters] = []
        self._context: ContextParallel | None = None
        self._cutter: RowCutter | None = None
        #: Ids that one of the models embeds; None where that is not known.
        self._embedded: int | None = None
        self._told: set[str] = set()

    @property
    def only(self) -> PreTrainedModel | None:
        """The model, if there is just one."""
        return self._active[0].model if len(self._active) == 1 else None

    def begin(self, trainer: Trainer, *, probe_memory: bool) -> None:
        """Form the groups of a context-parallel layout.

        Raises:
            ValueError: for a layout that the processes or the strategy do not fit, and together with ``probe_memory``.
        """
        layout = getattr(getattr(trainer, "datamodule", None), "parallel", None)
        if not isinstance(layout, ParallelLayout) or layout.context == layout.evaluation.context == 1:
            self._context = None
            return
        if probe_memory:
            raise ValueError(
                f"probe_memory=True with context={layout.context}, eval_context={layout.evaluation.context}: a rank that runs "
                "out of memory alone would leave the others waiting in attention: switch one of them off"
            )
        if getattr(getattr(trainer.datamodule, "encoder", None), "has_media", False):  # type: ignore[attr-defined]
            raise ValueError(
                f"context={layout.context}, eval_context={layout.evaluation.context} of the datamodule's parallel layout cuts "
                "rows, and the images of its encoder belong to whole ones: train with images on context=1"
            )
        if self._context is None or not self._context.serves(layout):
            self._context = ContextParallel(layout, trainer)

    def activate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inspect every model and switch it, unless that is done.

        Raises:
            ModelRefusedError: with all findings.
        """
        if self._active:
            return
        choices = [(model, self._choose(trainer, model)) for model in find_models(pl_module)]
        # Of rows that were written ahead too.
        images = getattr(getattr(getattr(trainer, "datamodule", None), "encoder", None), "images", None)
        if isinstance(images, ImageReader):
            # A text model may stand beside the one that sees.
            seeing = [model for model, _ in choices if hasattr(model.config, "vision_config")]
            for model in seeing or [choices[0][0]]:
                check_model(images, model.config, model=type(model).__name__)
        findings = [finding for model, choice in choices for finding in inspect_model(model, backend=choice.backend)]
        if findings:
            raise ModelRefusedError("packed rows are not safe with this model. " + " | ".join(map(str, findings)))
        for model, choice in choices:
            self._active.append(ActivatedModel.of(model, backend=choice.backend))
            self._media.append(MediaParameters(model, sharded=must_stay_in_step(trainer)))
            message = f"Packed attention of {type(model).__name__}: {choice}"
            if message not in self._told:
                self._told.add(message)
                rank_zero_info(message)
        self._embedded = embedded_ids([model for model, _ in choices])
        if self._context is not None:
            if trainer.training and self._context.group(trainer) is not None:
                refuse_unaveraged(pl_module, trainer.strategy, way_out="or set context=1")
            self._context.begin()
            self._cutter = RowCutter(trainer, pl_module, partial(self._context.cut, trainer=trainer))

    def _choose(self, trainer: Trainer, model: PreTrainedModel) -> BackendChoice:
        # What a precision plugin casts to; without one a model computes in the dtype of its weights.
        dtype = _COMPUTED_IN.get(str(trainer.precision).partition("-")[0], model.dtype)
        context = None if self._context is None else self._context.largest
        device = trainer.strategy.root_device
        return choose_backend(self.backend, model, device=device, dtype=dtype, context=context)

    def restore(self) -> None:
        """Put everything back as it was."""
        if self._cutter is not None:
            self._cutter.remove()
            self._cutter = None
        while self._media:
            self._media.pop().remove()
        active, self._active = self._active, []
        # Backwards: models may share a configuration, and only the first of them found it as it was.
        for model in reversed(active):
            model.restore()

    def require(self, packed: PackedBatch, *, trainer: Trainer, pl_module: LightningModule, cut_late: bool) -> None:
        """Refuse a row that is cut for other ranks than those that share it, or has ids or positions that no model embeds.

        And a model that is no longer set to packed rows.

        Args:
            packed: the row of the step.
            trainer: that runs it.
            pl_module: whose models were switched.
            cut_late: whether the row was packed on its device, after rows are cut.
        """
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
        # What stands for media is no token, and a module of one's own puts features in its place.
        if self._embedded is not None and not (packed.media or (isinstance(packed, CollatedRow) and packed.with_media)):
            names = " and ".join(dict.fromkeys(type(model.model).__name__ for model in self._active))
            require_embeddings(packed, most=self._embedded, model=names)
        for model in self._active:
            model.require_active()
            if model.positions is not None:
                require_positions(packed, most=model.positions, model=type(model.model).__name__)
            if model.backend is not None:
                # Evaluation in between may have had another group.
                model.backend.context = group
