"""TrainingStream: the training rows of a rank, what decides about them, and whether they go on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pack.agreement import Agreement
from lightning_pack.energon import ExactLoader, StreamOptions, Workers, data_fingerprint, refuse_endless, sample_sources
from lightning_pack.energon.fingerprint import library_fingerprint
from lightning_pack.policy import BYTES_PER_TOKEN, PackingPolicy
from lightning_pack.progress import TrainingProgress
from lightning_pack.restore import first_problem, gather, of_rank, point_of, problem_of, settled_as
from lightning_pack.resume import STATE_VERSION, different_settings, plain_settings
from lightning_pack.rewind import ResumePoint
from lightning_pack.topology import topology


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a stream is dealt out.

    Args:
        rank: this data-parallel rank.
        ranks: how many there are.
        num_workers: loader processes of each; 0 reads in the main process.
        timeout: seconds in which a process must read at least one more sample, else it counts as hung.
        epochs: passes over the data; None is an endless stream.
    """

    rank: int
    ranks: int
    num_workers: int
    timeout: float
    epochs: int | None

    def workers(self, rank: int | None = None) -> Workers:
        """Those of a rank, of this one by default."""
        rank = self.rank if rank is None else rank
        return Workers.of_rank(rank, ranks=self.ranks, num_workers=self.num_workers, timeout=self.timeout)


class TrainingStream:
    """The training rows of a rank, from the beginning of the data until a position is restored.

    Args:
        options: of the stream; a policy with ``algorithm="auto"`` is settled before the first row is read.
        spread: how it is dealt out.
        on_mismatch: what happens where a position cannot be continued exactly.
        check_restored: called before the first batch; raises if a position should have been restored and was not.

    Raises:
        ValueError: if the data cannot be opened, or has no end where passes are asked for.
    """

    def __init__(
        self,
        options: StreamOptions,
        *,
        spread: Spread,
        on_mismatch: Literal["error", "restart"] = "error",
        check_restored: Callable[[], None] = lambda: None,
    ) -> None:
        if spread.epochs is not None:
            refuse_endless(options.path, "train")
        self._asked = options.policy
        #: With the algorithm of the dry run, once there was one.
        self._chosen: PackingPolicy | None = None
        self._spread, self._on_mismatch = spread, on_mismatch
        self.settings = _settings(options, spread)
        loader = ExactLoader(options, workers=spread.workers(), epochs=spread.epochs, everyone=Agreement().everyone)
        self.progress: TrainingProgress[ExactLoader] = TrainingProgress(loader, check_restored=check_restored)
        #: Whether it has gone to a position, or was told to start over.
        self.restored = False

    @property
    def policy(self) -> PackingPolicy:
        """The packing rules, with the algorithm that was chosen, once it is."""
        return self.progress.loader.options.policy

    def _pack_with(self, policy: PackingPolicy) -> None:
        loader = self.progress.loader
        loader.options = replace(loader.options, policy=policy)
        self.settings["packing.algorithm"] = policy.algorithm

    def settle(self) -> None:
        """Choose the algorithm by the first sources of the data, where it is not chosen yet."""
        if self.policy.algorithm != "auto":
            return
        self._chosen = settled_by_dry_run(self.progress.loader.options, of=self._spread.workers().of)
        self._pack_with(self._chosen)

    def _begin_unsettled(self) -> None:
        """As if nothing was restored; the loader may have been handed out before."""
        self._pack_with(self._chosen or self._asked)

    def loader(self) -> ExactLoader:
        """The rows; reading begins where it is iterated."""
        self.settle()
        if self.policy.balance is not None:
            size = self.policy.window_tokens * BYTES_PER_TOKEN / 2**20
            rank_zero_info(
                f"balance={self.policy.balance!r}: each of {max(self._spread.num_workers, 1)} loader workers of a rank holds "
                f"{self.policy.window_size} packs, at most {size:.2g} MiB"
            )
        return self.progress.loader

    def goes_on_from(self, before: TrainingStream) -> bool:
        """Whether the rows of an earlier fit are those of this stream, so that it would only go on with them.

        Warns where that is so no longer.
        """
        self._pack_with(settled_as(self._asked, before.settings))
        changed = different_settings(before.settings, self.settings)
        self._begin_unsettled()
        if changed:
            rank_zero_warn(
                "the data starts over from its beginning, because it changed since the last fit:\n" + "\n".join(changed)
            )
        return not changed and topology(before.settings) == topology(self.settings)

    def state(self, trainer: pl.Trainer | None, *, model_parallel_size: int) -> dict[str, Any]:
        """The position of every data-parallel rank, and the settings it holds for. Collective."""
        ranks = gather(partial(self.progress.state, trainer))[::model_parallel_size]
        return {"version": STATE_VERSION, "settings": dict(self.settings), "ranks": ranks}

    def restore(self, state: Any) -> None:
        """Go to the position of this rank in a state of :meth:`state`.

        Raises:
            ResumeError: naming each setting that differs, with both values; not with ``on_mismatch="restart"``.
            StateError: naming the part of the position that is damaged; likewise.
        """
        problem = first_problem(self.problem(state, ranks=[self._spread.rank]))
        if problem is not None:
            self.refuse_or_restart(problem, point=point_of(state))
            return
        if damage := self.damage(state):
            rank_zero_warn(damage)
        if self.policy.algorithm == "auto":
            # Saved before there was a choice, that is at the beginning.
            self._begin_unsettled()
        self.progress.restore(of_rank(state["ranks"], rank=self._spread.rank, ranks=self._spread.ranks))
        self.restored = True

    def problem(self, state: Any, *, ranks: Iterable[int]) -> ValueError | None:
        """Why some ranks would not go on from a state, or None if they would.

        An algorithm that is still to be chosen becomes the one that the state was made with.
        """
        self._pack_with(settled_as(self._asked, state.get("settings") if isinstance(state, Mapping) else None))
        return problem_of(
            state,
            settings=self.settings,
            workers={rank: self._spread.workers(rank) for rank in ranks},
            options=self.progress.loader.options,
            epochs=self._spread.epochs,
        )

    def damage(self, state: Mapping[str, Any]) -> str | None:
        """What a run that goes on from a state without a :meth:`problem` is to be told: how the data changed since."""
        changed = different_settings(state["settings"], self.settings)
        if not changed:
            return None
        return (
            "on_damaged='skip': the data is not what it was when the checkpoint was saved; what cannot be read is left out and "
            "counted as damaged, what can be read is taken as it is now:\n" + "\n".join(changed)
        )

    def refuse_or_restart(self, problem: ValueError, *, point: ResumePoint | None = None) -> None:
        """Raise a problem, or start over with the data and go on from ``point`` in Lightning's loops."""
        if self._on_mismatch == "error":
            raise problem
        rank_zero_warn(
            "on_mismatch='restart': THE DATA STARTS OVER from its beginning, so what was trained on comes again. Weights, "
            f"optimizer and step count go on from the checkpoint. The reason: {problem}"
        )
        self._begin_unsettled()
        self.progress.start_over(point)
        self.restored = True


def settled_by_dry_run(options: StreamOptions, *, of: int, split: str = "train", evaluation: bool = False) -> PackingPolicy:
    """The policy of a stream with the algorithm that packs its first sources best, see :func:`sample_sources`; says which."""
    found = sample_sources(options, of=of, split=split, evaluation=evaluation)
    policy = options.policy.settled(found.lengths, keys=found.groups, media=found.media)
    rank_zero_info(f"algorithm='auto' packs this data with {policy.algorithm!r}")
    return policy


def _settings(options: StreamOptions, spread: Spread) -> dict[str, Any]:
    """Everything that decides which batches come, flat, under the names that people set."""
    named = {
        "packing": options.policy.fingerprint(),
        "encoder": options.encoder.fingerprint(),
        "data": data_fingerprint(options.path, missing_ok=options.on_damaged == "skip"),
        "data-parallel ranks": spread.ranks,
        "num_workers": spread.num_workers,
        "seed": options.seed,
        "shuffle_buffer_size": options.shuffle_buffer_size,
        "max_samples_per_sequence": options.max_samples_per_sequence,
        "packs_per_batch": options.packs_per_batch,
        "epochs": spread.epochs,
    }
    return plain_settings(named) | library_fingerprint()
