"""The last stage of a worker's stream: sources -> packs -> rows, with a position that costs nothing to note."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.state import FlexState
from megatron.energon.wrappers.base import BaseWrapperDataset

from lightning_pack.energon.packs import Emitted, PackStream, Select
from lightning_pack.energon.position import StagePosition
from lightning_pack.energon.window import in_balance
from lightning_pack.policy import PackingPolicy
from lightning_pack.row import PackedBatch
from lightning_pack.source import EncodedSource, LeftOut, Pack


class PackingStage(BaseWrapperDataset[EncodedSource, PackedBatch]):
    """Rows from sources, exactly resumable after every row, in endless streams and to the end of finite ones.

    Args:
        dataset: sources, and markers of those that are left out.
        policy: the packing rules.
        select: buffer -> groups (Energon's first hook).
        build: group -> pack (Energon's second hook).
        complete: gives a pack that leaves the media of its sources; only then, since they are large.
        batch: packs -> row.
        packs_per_batch: packs in a row; only the last row of a finite stream may have fewer.
        take_damaged: markers of the samples that could not be read since the last call.
        repair: whether to go on where the sources of a buffer are not those that they were.
        worker_config: of the logical worker.
    """

    def __init__(
        self,
        dataset: SavableDataset[EncodedSource],
        *,
        policy: PackingPolicy,
        select: Select,
        build: Callable[[list[EncodedSource]], Pack],
        complete: Callable[[Pack], Pack],
        batch: Callable[[Sequence[Pack]], PackedBatch],
        packs_per_batch: int,
        take_damaged: Callable[[], list[EncodedSource]],
        repair: bool,
        worker_config: WorkerConfig,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self._policy = policy
        self._select, self._build, self._complete, self._batch = select, build, complete, batch
        self._packs_per_batch = packs_per_batch
        #: Markers of the samples that could not be read since the last call.
        self.take_damaged = take_damaged
        self._repair = repair
        self.reset_state_own()

    def reset_state_own(self) -> None:
        """Stand at the beginning."""
        self._origin: StagePosition | None = None
        self._position: StagePosition | None = None
        self._news: list[LeftOut] = []
        self._stream = PackStream(
            self.dataset,
            buffer_size=self._policy.buffer_size,
            media_tokens=self._policy.buffer_media_tokens,
            media_bytes=self._policy.buffer_media_bytes,
            select=self._select,
            build=self._build,
            take_damaged=self.take_damaged,
            repair=self._repair,
            worker_config=self.worker_config,
        )

    @property
    def orphans(self) -> list[LeftOut]:
        """What was left out of a finite stream behind its last row, or where it has none."""
        return self._news + self._stream.orphans

    @property
    def position(self) -> StagePosition:
        """After the last row."""
        return self._position or self._origin or StagePosition(0, 0, self.dataset.save_state())

    def go_to(self, position: StagePosition) -> None:
        """Go to a position, before the stage is iterated. Energon changes the state in it, so give a copy."""
        self.reset_state_own()
        self.dataset.restore_state(position.start)
        # What was restored is not changed before it is iterated.
        self._origin = replace(position, start=self.dataset.save_state())

    def save_state(self) -> FlexState:
        """The position, for Energon."""
        at = self.position
        return FlexState(__class__=type(self).__name__, **{f.name: getattr(at, f.name) for f in fields(at)})

    def restore_state(self, state: FlexState) -> None:
        """Go to a position, for Energon."""
        self.go_to(StagePosition(**{f.name: state[f.name] for f in fields(StagePosition)}))

    def __iter__(self) -> Iterator[PackedBatch]:
        packs: list[Pack] = []
        after = self._position
        for each in self._packs():
            pack = self._complete(each.pack)
            if pack.layout is None:
                # None of its images could be read: it is no row, and what it tells rides in the next pack.
                self._news += pack.left_out
                continue
            pack.left_out[:0], self._news = self._news, []
            packs.append(pack)
            after = each.after
            if len(packs) == self._packs_per_batch:
                self._position = after
                row = self._batch(packs)
                # The row has copies of the pixels in them.
                packs = []
                del pack
                yield row
                del row
        if packs:
            self._position = after
            yield self._batch(packs)

    def _packs(self) -> Iterator[Emitted]:
        if self._policy.balance is None:
            return self._stream.packs(self.position)
        return in_balance(
            self._stream.packs,
            self.position,
            size=self._policy.window_size,
            seed=self._policy.seed,
            may_repair=self._stream.may_repair,
        )

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Samples of a worker: the number of packs is not known before they are packed."""
        return self.dataset.len_worker(worker_idx)

    def config(self) -> dict[str, Any]:
        """What decides about the rows."""
        return {
            "type": type(self).__qualname__,
            "policy": self._policy.fingerprint(),
            "packs_per_batch": self._packs_per_batch,
            "select": self._function_config(self._select),
            "dataset": self.dataset.config(),
        }
