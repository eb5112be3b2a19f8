"""One step on each of the heaviest rows before training, so that a run that will not fit in memory says so at once."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    XLAStrategy,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_pack.attention import find_models
from lightning_pack.attention.positions import learned_positions
from lightning_pack.attention.preservation import unchanged
from lightning_pack.callbacks.heaviest_rows import heaviest_rows, ordinary_token_ids
from lightning_pack.callbacks.optimizer_memory import missing_state
from lightning_pack.policy import PackingPolicy
from lightning_pack.row import PackedBatch

_OFF = "or switch the probe off with PackedAttention(probe_memory=False)"
#: Of allocators that raise no error class of their own.
_SIGNS = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")


class MemoryProbeError(RuntimeError):
    """A row that the data may bring does not fit in memory."""


class MemoryProbe:
    """Runs ``training_step`` and the backward pass on the heaviest rows.

    Meanwhile the memory of later steps is taken: the gradients of the step before, and the state that an optimizer of torch
    makes at its first step.

    Hooks of batches and of the backward pass are not called, and nothing is reduced over ranks. Afterwards everything is as it
    was: gradients, modes, attributes and buffers of the module, random state (torch, the device, numpy, Python, generators in
    attributes), logged values.
    What a step leaves elsewhere is not taken back: objects of other kinds in attributes, files, what is given to a logger
    directly.

    Args:
        trainer: of the fit.
        pl_module: its module.

    Raises:
        ValueError: for manual optimization, a strategy with which the probe is not known to leave no trace, and a fit whose
            packing rules are not known. :meth:`run` raises it for a step that changes weights in place.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trainer, self.module = trainer, pl_module
        strategy = trainer.strategy
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"probe_memory=True: {type(pl_module).__name__} optimizes manually, so its training_step would change the "
                f"weights: use automatic optimization, {_OFF}"
            )
        name = type(strategy).__name__
        if isinstance(strategy, FSDPStrategy | ModelParallelStrategy):
            raise ValueError(
                f"probe_memory=True: under {name} a step exchanges sharded weights and gradients with the other ranks, which "
                f"would wait for ever for one that ran out of memory: use a single device or DDPStrategy, {_OFF}"
            )
        known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
        # These are DDP strategies by name only.
        if not known or isinstance(strategy, DeepSpeedStrategy | XLAStrategy):
            raise ValueError(
                f"probe_memory=True: a step under {name} is not known to leave no trace in its engine: use a single device or "
                f"DDPStrategy, {_OFF}"
            )
        if getattr(strategy.model, "static_graph", False):
            # DDP counts backward passes also where it has not seen the forward, and takes the first for the graph of all.
            raise ValueError(
                "probe_memory=True: DistributedDataParallel would take the probe's step for the first one of its static graph: "
                f"leave static_graph=True out, {_OFF}"
            )
        datamodule = getattr(trainer, "datamodule", None)
        policy = getattr(datamodule, "packing", None)
        if not isinstance(policy, PackingPolicy):
            raise ValueError(
                "probe_memory=True: the heaviest row follows from packing rules, and "
                + ("there is no datamodule" if datamodule is None else f"{type(datamodule).__name__} has none")
                + ": fit with a datamodule whose attribute packing is the PackingPolicy (EnergonPackDataModule), "
                + _OFF
            )
        if getattr(getattr(datamodule, "encoder", None), "has_media", False):
            raise ValueError(
                "probe_memory=True: the heaviest rows are made of text, and this encoder gives images, whose pixels would be "
                f"missing from the measurement: bound them with max_media_tokens of the packing rules, {_OFF}"
            )
        self.policy: PackingPolicy = policy
        self.packs_per_batch: int = getattr(datamodule, "packs_per_batch", 1)
        for model in find_models(pl_module):
            most = learned_positions(model)
            if most is not None and policy.capacity > most:
                raise ValueError(
                    f"probe_memory=True: the heaviest row has one source of capacity={policy.capacity} tokens, and "
                    f"{type(model).__name__} has learned {most} positions: set capacity={most} or less, {_OFF}"
                )

    def run(self) -> None:
        """Run every row; collective, so that all ranks fail together.

        Raises:
            MemoryProbeError: naming the row that does not fit, and what to lower.
        """
        rows = heaviest_rows(self.policy, packs_per_batch=self.packs_per_batch, token_ids=ordinary_token_ids(self.module))
        peaks = []
        for name, row in rows.items():
            error = self._attempt(row)
            peak = self._peak()
            if error is not None:
                # What the frames of the step hold is memory that the next attempt of a notebook needs.
                traceback.clear_frames(error.__traceback__)
            if not self.trainer.strategy.reduce_boolean_decision(error is None, all=True):
                raise MemoryProbeError(self._message(name, row, error, peak)) from error
            peaks.append(f"{name}: {peak or 'it fits'}")
        rank_zero_info(f"Memory probe, capacity={self.policy.capacity}: {'; '.join(peaks)}")

    def _attempt(self, row: PackedBatch) -> BaseException | None:
        """The error of the allocator, if there is one."""
        device = self.trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            with ExitStack() as stack:
                stack.enter_context(_random_kept(device))
                stack.enter_context(unchanged(self.module))
                stack.enter_context(self._logging_nothing())
                stack.enter_context(self._untouched_gradients())
                self._step(row)
        except (RuntimeError, MemoryError) as error:
            told = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in _SIGNS)
            if not told:
                raise
            return error
        return None

    def _step(self, row: PackedBatch) -> None:
        trainer, module = self.trainer, self.module
        held = [missing_state(optimizer) for optimizer in trainer.optimizers]
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in trained:
            # From the second batch on the forward pass finds gradients: Lightning drops old ones before the backward pass.
            parameter.grad = torch.zeros_like(parameter)
        batch = trainer.precision_plugin.convert_input(row)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        module._current_fx_name = "training_step"
        weights = list(module.parameters())
        before = _fingerprints(weights)
        with trainer.precision_plugin.train_step_context():
            # The module itself, not what a strategy puts around it: no gradient is sent to another rank.
            output = module.training_step(batch, 0)
        loss = ClosureResult.from_training_step_output(output, trainer.accumulate_grad_batches).closure_loss
        if trainer.accumulate_grad_batches == 1:
            for parameter in trained:
                parameter.grad = None
        if isinstance(loss, Tensor):
            module.backward(loss)
        if _fingerprints(weights) != before:
            raise ValueError(
                f"probe_memory=True: training_step of {type(module).__name__} changes weights in place, which cannot be taken "
                f"back: start again with its weights as they were, and change them in on_train_batch_end, {_OFF}"
            )
        del held

    @contextmanager
    def _logging_nothing(self) -> Iterator[None]:
        loop, connector = self.trainer.fit_loop.epoch_loop, self.trainer._logger_connector
        results, logged_in = loop._results, connector._current_fx
        loop._results = _NoResults(training=True)
        try:
            yield
        finally:
            loop._results, connector._current_fx = results, logged_in

    @contextmanager
    def _untouched_gradients(self) -> Iterator[None]:
        gradients = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _peak(self) -> str:
        device = self.trainer.strategy.root_device
        if device.type != "cuda":
            return ""
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        return f"peak of {peak:.2f} GiB on a device of {torch.cuda.mem_get_info(device)[1] / 2**30:.2f} GiB"

    def _message(self, name: str, row: PackedBatch, error: BaseException | None, peak: str) -> str:
        policy, packs = self.policy, self.packs_per_batch
        lower = [f"capacity={policy.capacity}"]
        if isinstance(policy.width, int):
            lower.append(f"width={policy.width}")
        if packs > 1:
            lower.append(f"packs_per_batch={packs} (accumulate_grad_batches gives the same step in less memory)")
        said = "another rank ran out of it" if error is None else str(error).strip().partition("\n")[0]
        return (
            f"a row of the data may not fit in memory: before training, a step on {name} (capacity={policy.capacity}, "
            f"packs_per_batch={packs}, {row.input_ids.shape[-1]} tokens wide) ran out of it"
            + (f", {peak}" if peak else "")
            + f". Lower {' or '.join(lower)}; or recompute activations (gradient_checkpointing of PackedCausalLM), train in "
            f"half precision, or take a smaller model. What was said: {said}"
        )


@torch.no_grad()
def _fingerprints(weights: Sequence[Tensor]) -> list[tuple[int, int, str]]:
    """What changes if a weight is changed in place; through ``.data`` no version counts that, so values have a say."""
    # As text, in which one NaN equals another.
    sums = [str(weight.sum(dtype=torch.complex128 if weight.is_complex() else torch.float64).item()) for weight in weights]
    return [(weight._version, weight.data_ptr(), total) for weight, total in zip(weights, sums, strict=True)]


class _NoResults(_ResultCollection):
    """Where ``self.log`` writes during the probe."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Keep nothing, and reduce nothing over ranks: one that ran out of memory would not answer."""


@contextmanager
def _random_kept(device: torch.device) -> Iterator[None]:
    plain, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    of_mps = torch.mps.get_rng_state() if device.type == "mps" else None
    # Where no index is given, the current device is meant.
    devices = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(of_numpy)  # noqa: NPY002
            if of_mps is not None:
                torch.mps.set_rng_state(of_mps)
