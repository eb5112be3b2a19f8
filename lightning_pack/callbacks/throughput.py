"""What a model does per second, and what share of what its devices could do."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_pack.callbacks.tally import sum_over_ranks
from lightning_pack.flops import ModelFlops, UnknownModelError, peak_flops
from lightning_pack.row import PackedBatch


def flops_of_module(pl_module: LightningModule) -> ModelFlops | None:
    """The operations of ``pl_module.model`` by its ``config``.

    None where there is no such model, where it is not a known one, and where weights of it are frozen: their backward pass does
    less than twice the forward pass.
    """
    model = getattr(pl_module, "model", None)
    if not isinstance(model, torch.nn.Module) or not all(weight.requires_grad for weight in model.parameters()):
        return None
    try:
        return ModelFlops.of(getattr(model, "config", None))
    except UnknownModelError:
        return None


class ModelThroughput:
    """Counts rows of training for their operations, on the device; a collective, once, where there are several ranks.

    Args:
        trainer: whose ranks train.
        flops: of the model.
        device: of this rank.
    """

    def __init__(self, trainer: Trainer, flops: ModelFlops, *, device: torch.device) -> None:
        self._trainer = trainer
        self._flops = flops
        # Width, then the squared lengths of each kind of attention, then what is counted of images.
        images = 0 if flops.vision is None else 4
        self._counts = torch.zeros(1 + len(flops.attention) + images, dtype=torch.int64, device=device)
        own = torch.tensor([peak_flops(device) or 0], dtype=torch.int64, device=device)
        peaks = trainer.strategy.all_gather(own).reshape(-1).tolist()
        self._peak: int | None = sum(peaks) if all(peaks) else None

    def restart(self) -> None:
        """Begin an interval."""
        self._counts.zero_()

    def add(self, batch: PackedBatch) -> None:
        """Count a row that was trained on; waits for no device."""
        self._counts[0] += batch.width
        text = 1 + len(self._flops.attention)
        self._counts[1:text] += self._flops.squared_lengths(batch.cu_seqlens.diff())
        if self._flops.vision is not None:
            for grids in _grids(batch):
                self._counts[text:] += self._flops.vision.counts(grids)

    def operations(self) -> int:
        """Of the interval, on all devices; a collective that waits for the device."""
        width, *counts = sum_over_ranks(self._trainer, self._counts)
        kinds = len(self._flops.attention)
        return self._flops.training(width=width, squared_lengths=counts[:kinds], vision=counts[kinds:])

    def rates(self, operations: int, *, seconds: float) -> dict[str, float]:
        """Names for a logger -> rates of an interval with so many operations, which lasted so long."""
        per_second = operations / seconds
        rates = {"model_tflops_per_second": per_second / 1e12}
        return rates if self._peak is None else rates | {"mfu": per_second / self._peak}


def _grids(batch: PackedBatch) -> list[Tensor]:
    """Of images and videos, the latter by frames; those of a collator's batch are kept with its further entries."""
    media = {**getattr(batch, "extras", {}), **batch.media}
    return [media[name] for name in ("image_grid_thw", "video_grid_thw") if isinstance(media.get(name), Tensor)]
