"""BatchPacker: the batches of a run, packed in place where they do not come packed."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from lightning_pack.collated.fields import BatchFields, CollatedBatchError
from lightning_pack.collated.handing import hand_back
from lightning_pack.collated.rectangle import pack_collated
from lightning_pack.collated.row import CollatedRow, CurrentRow
from lightning_pack.collated.usable import usable_policy
from lightning_pack.policy import PackingPolicy
from lightning_pack.row import PackedBatch

Stage = Literal["train", "validation", "test", "predict"]


class BatchPacker:
    """Packs one batch after the other and keeps the row of the batch in hand for :func:`~.row.packed_row`.

    Args:
        policy: None packs flattened batches only.
        roles: what the entries of batches are.
        evaluate_unlabelled: whether batches for validation and test may have no labels; for predict they always may.

    Raises:
        ValueError: naming each setting of the policy that is not used here.
    """

    def __init__(self, policy: PackingPolicy | None, *, roles: BatchFields, evaluate_unlabelled: bool = False) -> None:
        self.evaluate_unlabelled = evaluate_unlabelled
        self._policy = None if policy is None else usable_policy(policy)
        self._roles = roles
        self._current = CurrentRow()
        #: How the batches of each stage come.
        self._comes: dict[str, str] = {}

    def begin(self) -> None:
        """A new run: its batches may come in another way."""
        self._current.release()
        self._comes = {}

    def take(
        self, batch: Any, *, stage: Stage, name: str, pad_id: int = 0, model: nn.Module | None = None
    ) -> PackedBatch | None:
        """The row of a batch, which is packed in place if need be; None for what is no batch of a collator.

        Args:
            batch: on its device.
            stage: that it belongs to.
            name: of the batch, for sources without a key.
            pad_id: token id in gaps.
            model: that the arguments are for.

        Raises:
            CollatedBatchError: for a batch that cannot be packed, and for one that comes packed in a stage whose others did
                not, or the other way round.
        """
        if isinstance(batch, PackedBatch):
            if self._policy is not None and batch.max_seqlen > self._policy.capacity:
                raise CollatedBatchError(
                    f"{name} comes packed and has a source of {batch.max_seqlen} tokens, more than "
                    f"capacity={self._policy.capacity} of PackedAttention's policy, which packs padded batches and is not used "
                    "here: leave the policy out"
                )
            self._refuse_mixture(stage, "PackedBatch", name)
            return batch
        if self._policy is None and isinstance(batch, tuple):
            return None
        needs_targets = stage != "predict"
        row = pack_collated(
            batch, policy=self._policy, roles=self._roles, pad_id=pad_id, name=name, needs_targets=needs_targets
        )
        if row is None:
            return None
        self._refuse_mixture(stage, "flattened" if row.rows is None else "padded", name)
        if needs_targets and not row.labelled and (stage == "train" or not self.evaluate_unlabelled):
            raise CollatedBatchError(
                f"{name} has neither labels nor shift_labels: targets that a step makes of a packed row by "
                "itself would cross the boundaries of sources, so let the collator return labels (-100 where a token is no "
                "target)"
                + (
                    ""
                    if stage == "train"
                    else f". If {stage}_step needs no targets, say PackedAttention(evaluate_unlabelled=True)"
                )
            )
        hand_back(batch, row, roles=self._roles, model=model)
        self._current.hold(batch, row)
        return row

    def _refuse_mixture(self, stage: Stage, how: str, name: str) -> None:
        before = self._comes.setdefault(stage, how)
        if before != how:
            raise CollatedBatchError(
                f"{name} of the {stage} data comes as {how}, and those before came as {before}: what is packed twice in "
                "different ways has no meaning in metrics, so pack all of them in the loader, or none"
            )

    def end(self) -> None:
        """Forget the batch in hand."""
        self._current.release()

    def row_of(self, batch: Any) -> CollatedRow | None:
        """The row of the batch in hand."""
        return self._current.of(batch)
