"""ExactLoader: the training rows of a rank under Lightning, with a state that says what was trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from lightning_pack.energon.dataset import StreamOptions, open_share, sample_count
from lightning_pack.energon.position import StagePosition
from lightning_pack.energon.reader import Position, RankReader, WorkerPosition, Workers
from lightning_pack.energon.state import from_plain, to_plain
from lightning_pack.energon.worker import NoSampleError
from lightning_pack.row import PackedBatch
from lightning_pack.source import LeftOut
from lightning_pack.topology import many
from lightning_pack.tracked import Fetched, TrackedLoader


@dataclass(frozen=True)
class Standing:
    """Where the training of a rank stands.

    Args:
        epoch: passes over the data that are complete; 0 in an endless stream.
        workers: of the pass that comes next, in the order in which their next rows come.
    """

    epoch: int
    workers: Position

    def plain(self) -> dict[str, Any]:
        """As plain containers."""
        return {"epoch": self.epoch, "workers": [_plain(worker) for worker in self.workers]}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Standing:
        """From plain containers."""
        return cls(state["epoch"], tuple(_worker(worker) for worker in state["workers"]))


def _plain(position: WorkerPosition) -> dict[str, Any]:
    at = position.at
    # Empty bytes are pickled as a call, which loading with weights_only refuses.
    plain = (
        None if at is None else {f.name: None if (value := getattr(at, f.name)) == b"" else to_plain(value) for f in fields(at)}
    )
    return {"worker": position.worker, "at": plain}


def _worker(plain: Mapping[str, Any]) -> WorkerPosition:
    at = plain["at"]
    position = (
        None
        if at is None
        else StagePosition(**{name: from_plain(b"" if value is None else value) for name, value in at.items()})
    )
    return WorkerPosition(plain["worker"], position)


def redistribute(states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
    """The loader's state of one of ``ranks`` ranks, from those of all ranks of a run with as many logical workers.

    Each step takes one row from each rank, so the rows of a run have one order over all ranks: that in which the workers take
    turns, rank by rank. Dealing the workers out again in this order continues it, however many ranks there are.

    >>> two = [{"epoch": 0, "workers": ["a", "c"]}, {"epoch": 0, "workers": ["b", "d"]}]
    >>> redistribute(two, rank=0, ranks=1)
    {'epoch': 0, 'workers': ['a', 'b', 'c', 'd']}
    """
    order = [worker for turn in zip(*(state["workers"] for state in states), strict=True) for worker in turn]
    return {"epoch": states[0]["epoch"], "workers": order[rank::ranks]}


class ExactLoader(TrackedLoader[Standing]):
    """Training rows of one data-parallel rank.

    An endless stream never ends. In finite passes each iteration is one pass, or the rest of one; ranks agree on where it ends.

    Args:
        options: of the stream; may be replaced until the first row is read.
        workers: those of this rank.
        epochs: passes over the data; None is an endless stream.
        everyone: whether a condition holds on all data-parallel ranks; a collective.
    """

    def __init__(
        self,
        options: StreamOptions,
        *,
        workers: Workers,
        epochs: int | None = None,
        everyone: Callable[[bool], bool] = bool,
    ) -> None:
        super().__init__(Standing(0, workers.beginning))
        self.options = options
        self._workers = workers
        self.epochs = epochs
        self._everyone = everyone
        self._reader: RankReader | None = None

    @property
    def finished(self) -> bool:
        """Whether the last pass is trained on to its end."""
        return self._counted.epoch == self.epochs

    def _more(self) -> bool:
        return self._reached.epoch != self.epochs

    def _reads_again(self) -> bool:
        # In passes ranks agree on each row, and would wait for one that reads alone.
        return self.epochs is None or self._workers.of == len(self._workers.numbers)

    def state(self) -> dict[str, Any]:
        """Where training stands after the last complete step, as plain containers."""
        return self._committed.plain()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go to a state of :meth:`state`, or to the beginning; rows that were fetched and not trained are forgotten."""
        self._go_to(Standing(0, self._workers.beginning) if state is None else Standing.of(state))

    def _shut(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _read(self) -> Iterator[Fetched[Standing]]:
        return self._endless() if self.epochs is None else self._pass()

    def _open(self, epoch: int | None) -> RankReader:
        share = partial(open_share, self.options, split="train", of=self._workers.of, epoch=epoch)
        self._reader = RankReader(share, workers=self._workers, start=self._reached.workers)
        return self._reader

    def _endless(self) -> Iterator[Fetched[Standing]]:
        reader = self._open(None)
        while (batch := self._row_of(reader)) is not None:
            yield Fetched(batch, Standing(0, reader.position()))
        raise RuntimeError("the endless stream has ended")

    def _row_of(self, reader: RankReader) -> PackedBatch | None:
        try:
            return reader.read()
        except NoSampleError as e:
            raise NoSampleError(f"a loader worker has no sample to read: {self._spread()}") from e

    def _spread(self) -> str:
        """How many samples there are for how many workers, and what to do about too few."""
        path, of, here = self.options.path, self._workers.of, len(self._workers.numbers)
        samples, ranks = sample_count(path, "train"), of // here
        asked = here if self._workers.processes else 0
        most = samples // ranks
        if most >= here:
            way_out = "use fewer workers or ranks"
        elif most:
            way_out = f"set num_workers={most} or less" + (", use fewer ranks" if ranks > 1 else "")
        else:
            way_out = f"use {many(samples, 'rank')} at most"
        spread = f"{many(ranks, 'data-parallel rank')}, num_workers={asked}"
        return (
            f"{path!r} has {many(samples, 'sample')} to train on for {many(of, 'loader worker')} ({spread}), and each worker "
            f"reads its own share: {way_out}, or give more data"
        )

    def _nothing_usable(self, orphans: Sequence[LeftOut]) -> str:
        """What to do where all that a rank reads is left out, however many samples there are."""
        way_out = "correct the data"
        if any(gone.reason == "overlength" for gone in orphans):
            way_out = "raise the policy's capacity"
            if not getattr(self.options.encoder, "has_media", False):
                way_out += ", or let overlength='truncate' cut what is longer"
        return f"all {many(len(orphans), 'source')} that this one has read are left out: {way_out}"

    def _pass(self) -> Iterator[Fetched[Standing]]:
        """The rest of a pass: as many rows as every rank has, the last of them with what is left over."""
        epoch = self._reached.epoch
        reader = self._open(epoch)
        held = reader.read()
        if not self._everyone(held is not None):
            orphans = reader.take_orphans()
            raise ValueError(
                "a data-parallel rank has no row to train on in this pass over the data: "
                + (self._spread() if held is not None or not orphans else self._nothing_usable(orphans))
                + _listed(orphans)
            )
        assert held is not None
        while True:
            after = reader.position()
            following = reader.read()
            if not self._everyone(following is not None):
                break
            assert following is not None
            yield Fetched(held, Standing(epoch, after))
            held = following
        while following is not None:
            # Another rank has come to its end, and an optimizer step needs a row from each.
            tokens = following.cu_seqlens.diff().tolist()[: len(following.source_keys)]
            held.left_out += following.left_out
            held.left_out += [LeftOut(key, "uneven_ranks", n) for key, n in zip(following.source_keys, tokens, strict=True)]
            following = reader.read()
        held.left_out += reader.take_orphans()
        reader.close()
        self._reader = None
        yield Fetched(held, Standing(epoch + 1, self._workers.beginning), ends_pass=True)


def _listed(orphans: Sequence[LeftOut]) -> str:
    return "".join(f"; left out: {gone.key} ({gone.reason})" for gone in orphans[:3])
