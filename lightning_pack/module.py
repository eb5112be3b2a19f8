"""PackedCausalLM: a causal language model trained on packed rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric, Metric
from transformers import PreTrainedModel

from lightning_pack.lora import BASE, LoraOptions, add_adapters, leave_out_frozen, put_in_frozen, refuse_other_adapters
from lightning_pack.pretrained import checkpoint_activations, load_causal_lm
from lightning_pack.row import PackedBatch
from lightning_pack.source import IGNORE
from lightning_pack.trainer_checks import must_stay_in_step

Schedule = Literal["constant", "linear", "cosine"]


class PackedCausalLM(LightningModule):
    """A transformers causal language model with its loss, optimizer and schedule.

    ``training_step`` returns the mean loss over the target tokens of its row and logs it as ``train_loss``;
    :class:`~lightning_pack.callbacks.PackedAttention` makes the gradient one per target token of the whole step. ``val_loss``
    and ``test_loss`` are means over all target tokens of the pass, on all ranks.

    Args:
        model: a local folder with a saved model (nothing is downloaded), or a configuration as a dict with ``model_type``,
            whose weights are then drawn from torch's generator (seed it with ``seed_everything``).
        learning_rate: peak learning rate of AdamW.
        weight_decay: of matrices; norms and biases have none.
        betas: of AdamW.
        warmup_steps: optimizer steps in which the learning rate rises linearly.
        schedule: after the warm-up: ``"constant"``, or down to zero at the last step, ``"linear"`` or ``"cosine"``.
        gradient_checkpointing: recompute activations in the backward pass, for less memory.
        dtype: of the weights, such as ``"float32"`` or ``"bfloat16"``. Mixed precision of the Trainer needs ``"float32"``.
        lora: freeze the model and train adapters; None trains the model.

    Raises:
        ValueError: for a model that cannot be built, and for values that do not fit together.

    Example:
        >>> sizes = dict(vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> module = PackedCausalLM({"model_type": "llama", "num_key_value_heads": 1, **sizes})
        >>> module.configure_model()
        >>> type(module.model).__name__
        'LlamaForCausalLM'
    """

    def __init__(
        self,
        model: str | dict[str, Any],
        *,
        learning_rate: float = 1e-4,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 0,
        schedule: Schedule = "constant",
        gradient_checkpointing: bool = False,
        dtype: str = "float32",
        lora: LoraOptions | None = None,
    ) -> None:
        super().__init__()
        if schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule={schedule!r} is not one of 'constant', 'linear', 'cosine'")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps}: the number of warm-up steps cannot be negative")
        if not isinstance(getattr(torch, dtype, None), torch.dtype) or not getattr(torch, dtype).is_floating_point:
            raise ValueError(
                f"dtype={dtype!r} is not the name of a floating-point type of torch, such as 'float32' or 'bfloat16'"
            )
        # A checkpoint is loaded without unpickling classes, so it holds plain values only: a Path would make it unreadable.
        model = model if isinstance(model, dict) else str(model)
        betas = (float(betas[0]), float(betas[1]))
        lora = LoraOptions.of(lora)
        self.save_hyperparameters(
            {
                "model": model,
                "learning_rate": learning_rate,
                "weight_decay": weight_decay,
                "betas": betas,
                "warmup_steps": warmup_steps,
                "schedule": schedule,
                "gradient_checkpointing": gradient_checkpointing,
                "dtype": dtype,
                "lora": None if lora is None else lora.plain(),
            }
        )
        self._source = model
        self._learning_rate = learning_rate
        self._weight_decay = weight_decay
        self._betas = betas
        self._warmup_steps = warmup_steps
        self._schedule: Schedule = schedule
        self._gradient_checkpointing = gradient_checkpointing
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._lora = lora
        self.model: PreTrainedModel | None = None
        self.val_loss = MeanMetric()
        self.test_loss = MeanMetric()
        self._widen(self.val_loss, self.test_loss)

    def configure_model(self) -> None:
        """Build the model, once; a hook, so that sharding strategies decide where its weights are made."""
        if self.model is not None:
            return
        model = load_causal_lm(self._source, dtype=self._dtype)
        if getattr(model.config.get_text_config(), "output_router_logits", False):
            raise ValueError("output_router_logits=True: PackedCausalLM has no router loss; set it to False")
        if self._lora is not None:
            add_adapters(model, self._lora)
        if self._gradient_checkpointing:
            checkpoint_activations(model)
        # Saved models come in evaluation mode, and Lightning trains a module in the mode in which it finds it.
        self.model = model.train()

    # --- steps ---------------------------------------------------------------------------------------------------------

    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits ``[1, T, vocabulary]`` of a packed row."""
        assert self.model is not None
        inputs = batch.model_inputs(self.model)
        # Without labels the model computes no loss of its own; ours is per token.
        del inputs["labels"], inputs["shift_labels"]
        return self.model(**inputs).logits

    def _total(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Sum of the losses of the target tokens, float32 or wider, and their number."""
        logits = self(batch)[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = F.cross_entropy(logits, batch.shift_labels[0], ignore_index=IGNORE, reduction="sum")
        return total, batch.loss_mask.sum()

    def _loss(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Mean loss over the target tokens, float32 or wider, and their number."""
        total, count = self._total(batch)
        return total / count.clamp(min=1), count

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        """Mean loss, ``[]``, over the target tokens of the row, or of what this rank holds of it; logged is that of the row."""
        total, count = self._total(batch)
        logged = batch.token_mean(total.detach())
        self.log("train_loss", logged, on_step=True, on_epoch=False, prog_bar=True, batch_size=1)
        return total / count.clamp(min=1)

    def validation_step(self, batch: PackedBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count the row in ``val_loss``."""
        self._evaluate(batch, self.val_loss, "val_loss", dataloader_idx)

    def test_step(self, batch: PackedBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Count the row in ``test_loss``."""
        self._evaluate(batch, self.test_loss, "test_loss", dataloader_idx)

    def _evaluate(self, batch: PackedBatch, metric: Metric, name: str, dataloader_idx: int) -> None:
        if dataloader_idx:
            raise ValueError(f"{name} is the mean over one loader, but there are several: give one evaluation loader")
        loss, count = self._loss(batch)
        metric.update(loss, count)
        self.log(name, metric, on_step=False, on_epoch=True, prog_bar=True, batch_size=1)

    # --- before the first step -----------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Check the vocabulary before the sanity check."""
        self._check_vocabulary()
        if self._lora is not None and self._lora.adapters_only and must_stay_in_step(self.trainer):
            raise ValueError(
                f"lora.adapters_only=True: {type(self.trainer.strategy).__name__} saves weights in shards of its own: set it "
                "to false, or train under DDPStrategy"
            )

    def on_validation_start(self) -> None:
        """Check the vocabulary; sum in double precision."""
        self._check_vocabulary()
        self._widen(self.val_loss)

    def on_test_start(self) -> None:
        """Check the vocabulary; sum in double precision."""
        self._check_vocabulary()
        self._widen(self.test_loss)

    @staticmethod
    def _widen(*metrics: Metric) -> None:
        # Sums of millions of tokens need more than float32, which Apple's devices do not have. Under precision="bf16-true" and
        # the like, Lightning converts the whole module.
        for metric in metrics:
            metric.set_dtype(torch.float32 if torch.backends.mps.is_available() else torch.float64)

    def _check_vocabulary(self) -> None:
        assert self.model is not None
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
        size = self.model.config.get_text_config().vocab_size
        if tokenizer is not None and len(tokenizer) > size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens, more than the model's vocabulary of {size}: an id of {size} or "
                "more has no embedding; set vocab_size of the model's configuration, resize its embeddings, or use its own "
                "tokenizer"
            )

    # --- checkpoints ---------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave out what is frozen, under ``lora.adapters_only``."""
        if self._lora is not None and self._lora.adapters_only:
            leave_out_frozen(checkpoint, self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse one of other adapters, and complete one of adapters alone."""
        refuse_other_adapters(checkpoint, self._lora)
        if BASE in checkpoint:
            put_in_frozen(checkpoint, self)

    # --- optimizer -----------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """AdamW, and the learning-rate schedule by optimizer steps."""
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for parameter in self.parameters():
            if parameter.requires_grad:
                (matrices if parameter.ndim >= 2 else others).append(parameter)
        groups = [{"params": matrices, "weight_decay": self._weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = AdamW([g for g in groups if g["params"]], lr=self._learning_rate, betas=self._betas)
        scheduler = LambdaLR(optimizer, learning_rate_factor(self._schedule, self._warmup_steps, self._total_steps()))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _total_steps(self) -> int | None:
        if self._schedule == "constant":
            return None
        trainer = self.trainer
        total: float = trainer.max_steps
        # Asking for an estimate makes the training loader. Where checkpoints are restored after that, the loader would not
        # start where the checkpoint says.
        if total < 1 and not trainer.strategy.restore_checkpoint_after_setup:
            total = trainer.estimated_stepping_batches
        if total < 1 or not math.isfinite(total):
            raise ValueError(
                f"schedule={self._schedule!r} falls to zero at the last step, but the number of steps is not known: set "
                "max_steps of the Trainer, or use schedule='constant'"
            )
        if self._warmup_steps >= total:
            raise ValueError(
                f"warmup_steps={self._warmup_steps} leaves nothing of the {int(total)} steps: warm up for fewer steps"
            )
        return int(total)


def learning_rate_factor(schedule: Schedule, warmup_steps: int, total_steps: int | None) -> Callable[[int], float]:
    """Factor of the learning rate by optimizer step, from 0; ``total_steps`` is needed by schedules that decay.

    >>> factor = learning_rate_factor("linear", 2, 6)
    >>> [factor(step) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if schedule == "constant":
            return 1.0
        assert total_steps is not None
        done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
