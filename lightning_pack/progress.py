"""TrainingProgress: what a rank has trained on, as one entry of a checkpoint."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pack.energon import ExactLoader

_COUNTS = ("rows", "sources", "real_tokens", "left_out")


class TrainingProgress(Callback):
    """Tells the loader which batches were trained, and keeps count; the datamodule puts it first among the callbacks.

    Args:
        loader: the stream of this rank.
    """

    def __init__(self, loader: ExactLoader) -> None:
        self.loader = loader
        #: Rows, sources and real tokens trained on by this rank, and sources left out, since the run began.
        self.counts = dict.fromkeys(_COUNTS, 0)
        #: Micro-batches whose gradients wait for the optimizer step.
        self._in_window = 0
        self._random: dict[str, Any] | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Continue the random numbers of the run that was stopped; dropout uses them."""
        if self._random is not None:
            torch.set_rng_state(self._random["cpu"])
            if self._random["device"] is not None and pl_module.device.type == "cuda":
                torch.cuda.set_rng_state(self._random["device"], pl_module.device)
            self._random = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Count a batch."""
        self.count_batch()
        self._in_window = self._in_window + 1 if trainer.fit_loop._should_accumulate() else 0
        if not self._in_window:
            self.loader.commit()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Train nothing where a checkpoint says that all passes are done."""
        self._stop_after_last_pass(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End training after the last pass over the data."""
        self._stop_after_last_pass(trainer)

    def _stop_after_last_pass(self, trainer: pl.Trainer) -> None:
        if self.loader.finished:
            trainer.should_stop = True

    def count_batch(self) -> None:
        """Count the oldest batch that was fetched."""
        batch = self.loader.trained()
        new = (1, len(batch.source_keys), int(batch.cu_seqlens[-1]), len(batch.left_out))
        for name, more in zip(_COUNTS, new, strict=True):
            self.counts[name] += more

    def state(self) -> dict[str, Any]:
        """The position, the counts and torch's random state, as plain containers.

        Raises:
            PositionLostError: if a loader worker has failed.
        """
        if self._in_window:
            rank_zero_warn(
                f"a checkpoint is saved between optimizer steps: it counts {self._in_window} micro-batches as trained whose "
                "gradients it does not hold, so a resumed run would go on with a shorter step. Save when a step is complete: "
                "let val_check_interval and other intervals be multiples of accumulate_grad_batches"
            )
        on_device = torch.cuda.is_available() and torch.cuda.is_initialized()
        # Before its first step a resumed run still stands where its checkpoint does.
        random = self._random or {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state() if on_device else None}
        return {"loader": self.loader.state(), "counts": dict(self.counts), "random": random}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a state of :meth:`state`."""
        self.loader.restore(state["loader"])
        self.counts = dict(state["counts"])
        self._random = state["random"]
        self._in_window = 0
