"""The callbacks that PackedAttention brings along, and where they stand among the others."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pack.callbacks.monitor import PackingMonitor
from lightning_pack.callbacks.token_normalization import TokenNormalizedGradients
from lightning_pack.collated.loader import PackLoader
from lightning_pack.loader_progress import LoaderProgress
from lightning_pack.policy import PackingPolicy
from lightning_pack.progress import TrainingProgress


def bring_along(
    attention: Callback,
    *,
    trainer: Trainer,
    module: LightningModule,
    stage: str,
    policy: PackingPolicy | None,
    monitor: bool,
    token_normalization: bool,
) -> None:
    """Add what a packed run needs and the trainer does not have, from within the hook ``setup`` of ``attention``.

    The order is: whoever keeps the position; ``attention``, which packs the batches that the rest counts; the normalization of
    gradients, before any callback that clips or logs them; the monitor; all others as they were.

    Args:
        attention: the callback PackedAttention.
        trainer: its trainer.
        module: that is trained.
        stage: of the hook.
        policy: packs padded batches; None where none is packed here.
        monitor: whether a monitor is wanted.
        token_normalization: whether gradients per target token are wanted.
    """
    before: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    fitting = stage == "fit"
    # A datamodule of ours keeps the position itself.
    progress = fitting and not _has(before, TrainingProgress) and LoaderProgress.may_serve(trainer)
    normalization = fitting and token_normalization and not _has(before, TokenNormalizedGradients)
    added: list[Callback] = [LoaderProgress()] if progress else []
    added += [TokenNormalizedGradients()] if normalization else []
    added += [_monitor(trainer, policy)] if monitor and not _has(before, PackingMonitor) else []

    at = before.index(attention)
    rest = before[:at] + before[at + 1 :]
    counting = (PackingMonitor, TokenNormalizedGradients)
    first = next((i for i in range(at) if isinstance(rest[i], counting) or (normalization and _sees_gradients(rest[i]))), at)
    # A list of its own: the hook that is running goes on along the old one, and visits nobody twice.
    trainer.callbacks = [*rest[:first], attention, *added, *rest[first:]]  # type: ignore[attr-defined]
    for callback in added:
        callback.setup(trainer, module, stage)


def _has(callbacks: list[Callback], kind: type[Callback]) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


def _sees_gradients(callback: Callback) -> bool:
    return is_overridden("on_before_optimizer_step", callback) and not isinstance(callback, TrainingProgress)


def _monitor(trainer: Trainer, policy: PackingPolicy | None) -> PackingMonitor:
    # A row without a fixed width has no slots but its own tokens, if its packs come out of one batch.
    known = None if policy is None or policy.row_width is None else policy
    loader = trainer.fit_loop._data_source.instance
    return PackingMonitor(policy=loader.policy if isinstance(loader, PackLoader) else known)
