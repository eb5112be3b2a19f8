"""PackLoader: the batches of a loader as packed rows, and the position of what was trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from lightning_pack.agreement import Agreement
from lightning_pack.blank_row import blank_row
from lightning_pack.collated.fields import BatchFields
from lightning_pack.collated.shares import number_of_ranks, refuse_same_data
from lightning_pack.collated.sources import sources_of
from lightning_pack.collated.waiting import LoaderPosition, WindowedPacks, plain_copy
from lightning_pack.policy import AUTO, PackingPolicy
from lightning_pack.row import PackedBatch
from lightning_pack.source import LeftOut
from lightning_pack.tracked import Fetched, TrackedLoader

OnMismatch = Literal["error", "restart"]


class PackLoader(TrackedLoader[LoaderPosition]):
    """What :func:`~lightning_pack.collated.pack_loader` gives.

    It has no ``state_dict``, which Lightning would save one batch too late, and of one rank for all.

    Args:
        loader: the wrapped one.
        policy: with the window, in batches, as ``buffer_size``.
        fields: of the batches.
        pad_id: token id in gaps.
        even_ranks: whether all ranks get equally many rows.
        for_predict: whether sources need no targets, and rows that a rank lacks are blank.
        sharded: whether the loader is known to give each rank a part of its own.
        on_mismatch: what happens to a resume that cannot be exact.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        policy: PackingPolicy,
        *,
        fields: BatchFields,
        pad_id: int,
        even_ranks: bool,
        for_predict: bool,
        sharded: bool,
        on_mismatch: OnMismatch,
    ) -> None:
        super().__init__(LoaderPosition())
        self.loader, self.policy, self.for_predict, self.on_mismatch = loader, policy, for_predict, on_mismatch
        self._fields, self._pad_id = fields, pad_id
        self._even_ranks, self._sharded = even_ranks, sharded
        self._algorithm: str | None = None
        self._agreement = Agreement()
        #: Whether rows are kept until they are counted as trained. Without it each iteration is a pass of its own.
        self.tracked = False
        self._passes = 0
        #: What in the state of the loader a checkpoint cannot hold.
        self._unplain: str | None = None

    @property
    def finished(self) -> bool:
        """Never: the Trainer decides how many passes there are."""
        return False

    def _more(self) -> bool:
        return True

    def __iter__(self) -> Iterator[PackedBatch]:
        if self.tracked:
            yield from super().__iter__()
            return
        position = LoaderPosition(epoch=self._passes)
        self._passes += 1
        for fetched in self._rows_from(position):
            yield fetched.batch

    # --- the position --------------------------------------------------------------------------------------------------

    @property
    def stateful(self) -> bool:
        """Whether the wrapped loader tells its state and can go back to one."""
        both = all(callable(getattr(self.loader, name, None)) for name in ("state_dict", "load_state_dict"))
        return both and self._unplain is None

    def _reads_again(self) -> bool:
        # Ranks that agree on each row would wait for one that reads alone.
        return self.stateful and not (self._even_ranks and number_of_ranks() > 1)

    def settings(self) -> dict[str, Any]:
        """What decides which rows the batches become, as plain values."""
        policy = self.policy.fingerprint()
        return {
            "packing": policy | {"window": policy.pop("buffer_size")},
            "even_ranks": self._even_ranks,
            "ranks": number_of_ranks(),
        }

    def state(self) -> dict[str, Any]:
        """Where training stands after the last complete step, as plain containers."""
        return {"at": self._committed.plain(), "algorithm": self._algorithm}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go to a state of :meth:`state`, or to the beginning of the first pass.

        Raises:
            ValueError: for a state that is none, and where the wrapped loader cannot go back to one.
        """
        if state is None:
            self._go_to(LoaderPosition())
            return
        if set(state) != {"at", "algorithm"}:
            raise ValueError("a loader's state should hold at, algorithm")
        position = LoaderPosition.of(state["at"])
        if (position.begun or position.epoch) and not self.stateful:
            raise ValueError(self.not_stateful)
        if state["algorithm"] not in (None, *AUTO):
            raise ValueError(f"algorithm of a loader's state is {state['algorithm']!r:.80}, not one of {', '.join(AUTO)}")
        self._algorithm = state["algorithm"]
        self._go_to(position)

    def stop(self) -> None:
        """End the reading. The position stays; where the loader cannot go back to it, its pass begins again."""
        super().stop()
        if not self.stateful:
            self._go_to(LoaderPosition(epoch=self._committed.epoch))

    @property
    def not_stateful(self) -> str:
        """Why there is no exact resume, and what to do."""
        why = self._unplain or "which has no state_dict and load_state_dict"
        return (
            f"pack_loader wraps a {type(self.loader).__name__}, {why}, so a run cannot go on where it stopped in the data: use "
            "torchdata.stateful_dataloader.StatefulDataLoader with plain values in its place, or "
            "pack_loader(..., on_mismatch='restart') to start the data over where a run is resumed"
        )

    def _snapshot(self) -> Any:
        if not (self.tracked and self.stateful):
            return None
        try:
            return plain_copy(self.loader.state_dict(), where="state")  # type: ignore[attr-defined]
        except TypeError as e:
            self._unplain = f"of whose state_dict {e}"
            return None

    def _settle(self, lengths: list[int]) -> str:
        if self._algorithm is None:
            # By sources, which are what the algorithms choose from.
            self._algorithm = replace(self.policy, buffer_size=len(lengths)).settled(lengths).algorithm
        return self._algorithm

    # --- a pass --------------------------------------------------------------------------------------------------------

    def _read(self) -> Iterator[Fetched[LoaderPosition]]:
        return self._rows_from(self._reached)

    def _open(self, position: LoaderPosition) -> tuple[Iterator[Any], LoaderPosition]:
        """The batches from a position on, and the position with the state that the loader then has."""
        if not self._sharded:
            refuse_same_data(self.loader)
        for sampler in (getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)):
            for each in (sampler, getattr(sampler, "sampler", None)):
                if callable(set_epoch := getattr(each, "set_epoch", None)):
                    set_epoch(position.epoch)
        if position.loader is not None:
            # Also after the last batch of a pass, from where the order of the next one follows.
            self.loader.load_state_dict(position.loader)  # type: ignore[attr-defined]
        batches = iter(self.loader)
        if position.begun:
            return batches, position
        begun = replace(position, loader=self._snapshot(), begun=True)
        if self.tracked:
            # A checkpoint from before the first row is trained tells of this pass and no other.
            self._committed = begun if self._committed == position else self._committed
            self._counted = begun if self._counted == position else self._counted
        return batches, begun

    def _rows_from(self, position: LoaderPosition) -> Iterator[Fetched[LoaderPosition]]:
        """As many rows as every rank has, or for predictions any rank, the last of them with what is left over."""
        everyone: Callable[[bool], bool] = self._agreement.everyone if self._even_ranks else bool
        batches, begun = self._open(position)
        finished = False
        try:
            yield from self._rows_of(batches, begun, everyone=everyone)
            finished = True
        finally:
            if not finished and callable(end := getattr(batches, "_shutdown_workers", None)):
                # Workers that only the garbage collector finds are waited for in vain, 5 s each.
                end()
                self.loader._iterator = None  # type: ignore[attr-defined]

    def _rows_of(
        self, batches: Iterator[Any], begun: LoaderPosition, *, everyone: Callable[[bool], bool]
    ) -> Iterator[Fetched[LoaderPosition]]:
        needs_targets = not self.for_predict
        packs = WindowedPacks(
            batches,
            sources=lambda batch, number: sources_of(
                batch, roles=self._fields, name=f"batch {number}", needs_targets=needs_targets
            ),
            snapshot=self._snapshot,
            policy=self.policy,
            position=begun,
            settle=self._settle,
            needs_targets=needs_targets,
        )
        pin = getattr(self.loader, "pin_memory", False) is True and torch.cuda.is_available()
        made = ((PackedBatch.from_packs([pack], pad_id=self._pad_id), after) for pack, after in packs.packs())
        rows = ((row.pin_memory() if pin else row, after) for row, after in made)
        held = next(rows, None)
        if self.for_predict:
            yield from self._rows_for_predict(held, rows, packs, begun, everyone=everyone)
            return
        if not everyone(held is not None):
            if not self._even_ranks and not packs.news:
                return
            raise self._no_row(packs.news)
        assert held is not None
        while everyone((following := next(rows, None)) is not None):
            assert following is not None
            yield Fetched(*held)
            held = following
        row, _ = held
        while following is not None:
            # Another rank has come to its end, and an optimizer step needs a row from each.
            more, _ = following
            row.left_out += more.left_out
            lengths = more.cu_seqlens.diff().tolist()
            row.left_out += [LeftOut(key, "uneven_ranks", n) for key, n in zip(more.source_keys, lengths, strict=False)]
            following = next(rows, None)
        row.left_out += packs.news
        yield Fetched(row, self._end_of(begun), ends_pass=True)

    def _rows_for_predict(
        self,
        held: tuple[PackedBatch, LoaderPosition] | None,
        rows: Iterator[tuple[PackedBatch, LoaderPosition]],
        packs: WindowedPacks,
        begun: LoaderPosition,
        *,
        everyone: Callable[[bool], bool],
    ) -> Iterator[Fetched[LoaderPosition]]:
        """All rows of this rank, and then blank ones as long as another rank has more."""
        if everyone(held is None):
            if not self._even_ranks and not packs.news:
                return
            raise self._no_row(packs.news)
        after = begun
        while True:
            row, after = held or (blank_row(self.policy, pad_id=self._pad_id), after)
            held = next(rows, None)
            if everyone(held is None):
                break
            yield Fetched(row, after)
        row.left_out += packs.news
        yield Fetched(row, self._end_of(begun), ends_pass=True)

    def _no_row(self, news: list[LeftOut]) -> ValueError:
        alone = number_of_ranks() == 1
        who = "a data-parallel rank has" if self._even_ranks and not self.for_predict and not alone else "there is"
        way_out = "use fewer ranks, or more data" if not alone else "it gives no batches" if not news else "correct its data"
        if alone and not news and isinstance(self.loader, Iterator):
            way_out = f"a {type(self.loader).__name__} can be read only once; give an iterable, such as a DataLoader"
        elif alone and any(gone.reason == "overlength" for gone in news):
            way_out = "raise the policy's capacity, or let overlength='truncate' cut what is longer"
        return ValueError(
            f"{who} no row in this pass over the loader: {way_out}"
            + "".join(f"; left out: {gone.key} ({gone.reason})" for gone in news[:3])
        )

    def _end_of(self, begun: LoaderPosition) -> LoaderPosition:
        return LoaderPosition(epoch=begun.epoch + 1, loader=self._snapshot())
