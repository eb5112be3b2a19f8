"""Gradients per target token: the formula, and the strategies under which it is exact.

With micro-batches of different numbers of target tokens, the mean of their mean losses is not the mean loss: a token in a short
batch weighs more. Here the gradient of an optimizer step is the gradient of

    sum of the losses of all target tokens / number of target tokens

over all micro-batches of a window and all data-parallel ranks. Every strategy that is let in averages gradients over its ranks,
and with automatic optimization Lightning divides a loss by ``accumulate_grad_batches``. With n targets in a micro-batch, N in
the window on all ranks, W ranks and losses divided by A, each loss is multiplied by ``n / C`` before its backward and the
gradients by ``A * W * C / N`` before clipping.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    XLAStrategy,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.optim import Optimizer

from lightning_pack.policy import PackingPolicy

LossKind = Literal["mean", "sum"]
#: C of the formula where the width of rows is not known.
_TOKENS = 4096


class TargetWindow:
    """Backward passes whose gradients add up to those of one optimizer step, and the target tokens in them.

    Args:
        loss: what is sent backward: the ``"mean"`` over the target tokens of a micro-batch, or their ``"sum"``.
    """

    def __init__(self, *, loss: LossKind = "mean") -> None:
        if loss not in ("mean", "sum"):
            raise ValueError(f"loss={loss!r} is not 'mean' or 'sum': say what training_step returns over its target tokens")
        self.loss = loss
        #: C of the formula: keeps scaled losses near the mean, so that float16 gradients stay in range.
        self.scale = float(_TOKENS)
        #: Target tokens up to now on this rank, int64 on the device; None before the first backward pass.
        self.targets: Tensor | None = None

    def fit_scale(self, trainer: Trainer) -> None:
        """Take C from the packing rules: about the tokens of a row, equal on all ranks. A power of two changes no digit."""
        datamodule = getattr(trainer, "datamodule", None)
        policy = getattr(datamodule, "packing", None)
        if isinstance(policy, PackingPolicy):
            self.scale = 2.0 ** round(math.log2(policy.capacity * getattr(datamodule, "packs_per_batch", 1)))

    def factor(self, targets: Tensor) -> Tensor | float:
        """What the loss of a micro-batch with so many target tokens is multiplied by."""
        # The default type may be a half one, in which numbers of tokens are rounded.
        return targets.to(torch.float32) / self.scale if self.loss == "mean" else 1.0 / self.scale

    @torch.no_grad()
    def add(self, targets: Tensor) -> None:
        """Count the target tokens (int64, one number) of a micro-batch whose backward pass belongs to the window."""
        self.targets = targets if self.targets is None else self.targets + targets

    @torch.no_grad()
    def normalize(self, optimizer: Optimizer, trainer: Trainer, *, divided_by: int = 1) -> None:
        """Divide the gradients of ``optimizer`` by the target tokens of the window on all data-parallel ranks; collective.

        Args:
            optimizer: whose gradients are changed in place.
            trainer: tells the ranks.
            divided_by: A of the formula.
        """
        device = trainer.strategy.root_device
        total = torch.zeros((), dtype=torch.int64, device=device) if self.targets is None else self.targets.clone()
        ranks = sum_over_data_parallel_ranks(total, trainer)
        # Without any target in the window every gradient is zero, and stays so.
        total = total.clamp(min=1).to(torch.float32 if total.device.type == "mps" else torch.float64)
        multiply_gradients(optimizer, divided_by * ranks * self.scale / total)


def sum_over_data_parallel_ranks(total: Tensor, trainer: Trainer) -> int:
    """Sum ``total`` in place over the ranks that the strategy averages gradients over; returns how many they are."""
    strategy = trainer.strategy
    group, ranks = None, trainer.world_size
    if isinstance(strategy, ModelParallelStrategy):
        mesh = strategy.device_mesh["data_parallel"]
        group, ranks = mesh.get_group(), mesh.size()
    if ranks > 1:
        dist.all_reduce(total, group=group)
    return ranks


@torch.no_grad()
def multiply_gradients(optimizer: Optimizer, factor: Tensor) -> None:
    """Multiply the gradients of ``optimizer`` in place, shards of them where they are sharded.

    Args:
        optimizer: of torch.
        factor: one number, float64 or float32, on the device.
    """
    gradients: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for options in optimizer.param_groups:
        for parameter in options["params"]:
            if parameter.grad is not None:
                gradient = _local(parameter.grad)
                gradients[gradient.device, gradient.dtype].append(gradient)
    for (device, dtype), alike in gradients.items():
        if dtype in (torch.float16, torch.bfloat16):
            # In these types the factor itself would be rounded, or be out of range.
            wide = factor.to(device, torch.float32)
            for gradient in alike:
                gradient.copy_(gradient.to(torch.float32).mul_(wide))
        else:
            torch._foreach_mul_(alike, factor.to(device, dtype))


def _local(gradient: Tensor) -> Tensor:
    # The shard of a distributed gradient, in the storage of the gradient itself.
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def refuse_strategy(strategy: Strategy, *, way_out: str) -> None:
    """Refuse a strategy under which gradients per target token would not be exact.

    Raises:
        ValueError: with the reason, and ``way_out``.
    """
    name = type(strategy).__name__
    if strategy.handles_gradient_accumulation:
        raise ValueError(
            f"{name} accumulates gradients inside its engine, where they cannot be normalized by target tokens: use "
            f"DDPStrategy, FSDPStrategy or ModelParallelStrategy, {way_out}"
        )
    known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy | FSDPStrategy | ModelParallelStrategy)
    if not known or isinstance(strategy, DeepSpeedStrategy | XLAStrategy):
        raise ValueError(
            f"{name}: gradients per target token are known to be exact with a single device, DDPStrategy, FSDPStrategy and "
            f"ModelParallelStrategy only: use one of these, {way_out}"
        )
    if isinstance(strategy, DDPStrategy) and isinstance(strategy._ddp_comm_state, PostLocalSGDState):
        raise ValueError(
            f"{name} with PostLocalSGDState averages weights and not gradients over all ranks, so no step is one of all target "
            f"tokens: leave ddp_comm_state out, {way_out}"
        )
    if isinstance(strategy, FSDPStrategy) and strategy.kwargs.get("process_group") is not None:
        raise ValueError(
            f"{name}(process_group=...) may average gradients over a part of the ranks: leave process_group out, and shard "
            f"inside groups with sharding_strategy='HYBRID_SHARD', {way_out}"
        )


def refuse_unaveraged(module: nn.Module, strategy: Strategy, *, way_out: str) -> None:
    """Refuse parameters whose gradients stay those of one data-parallel rank under ``ModelParallelStrategy``.

    That strategy averages none by itself, ``fully_shard`` in ``configure_model`` does. Ranks would drift apart without an
    error.

    Raises:
        ValueError: naming the first of them, and ``way_out``.
    """
    if not isinstance(strategy, ModelParallelStrategy):
        return
    group = strategy.device_mesh["data_parallel"]
    ranks = set(group.mesh.flatten().tolist())
    for name, parameter in module.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        spread = set() if mesh is None else set(mesh.mesh.flatten().tolist())
        if len(ranks) > 1 and parameter.requires_grad and not ranks <= spread:
            raise ValueError(
                f"the gradient of {name} is not averaged over the {len(ranks)} data-parallel ranks (context-parallel ones are "
                "among them): ModelParallelStrategy leaves that to the module, so call fully_shard(part, "
                "mesh=self.device_mesh['data_parallel']) in configure_model for all parts, the module itself last, "
                f"{way_out}"
            )
