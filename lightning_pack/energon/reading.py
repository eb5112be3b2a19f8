"""Reading of samples: what cannot be read is an error or is left out and counted, and a finite stream stays at its end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from megatron.energon import Sample, WorkerConfig, edataclass
from megatron.energon.flavors.base_dataset import SavableDataset, add_sample_restore_key
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData, WebdatasetSampleLoaderDataset
from megatron.energon.wrappers.base import BaseWrapperDataset

from lightning_pack.energon.index import hold_indices
from lightning_pack.energon.outage import StorageError
from lightning_pack.energon.position import DamagedDataError
from lightning_pack.energon.worker import Whereabouts
from lightning_pack.source import EncodedSource

OnDamaged = Literal["error", "skip"]


@edataclass
class DamagedSample(Sample):
    """Takes the place of a sample that a checkpoint refers to and that cannot be read any more."""


class Reading(BaseWrapperDataset[Sample, Sample]):
    """The samples of an Energon dataset as they are read, before they are shuffled and encoded.

    Energon's datasets begin again when they are iterated after their end, so a stage above that still holds samples at the end
    of a pass would, restored, mix them with a second pass: this one stays at its end.

    Each sample gets a number of its own in the stream, as a part of its key: in another pass over the data it is another one.

    Args:
        dataset: samples of one share.
        finite: whether it has an end.
        on_damaged: whether a sample that cannot be read ends the run, or is left out as ``damaged``.
        whereabouts: is told about each sample before it is read.
        worker_config: of the logical worker.
    """

    _savable_fields = ("_ended", "_index")

    def __init__(
        self,
        dataset: SavableDataset[Sample],
        *,
        finite: bool,
        on_damaged: OnDamaged,
        whereabouts: Whereabouts,
        worker_config: WorkerConfig,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self._finite = finite
        self._on_damaged = on_damaged
        self._whereabouts = whereabouts
        self._damaged: list[EncodedSource] = []
        self._damaged_in_a_row = 0
        for leaf in _leaves(dataset):
            for reader in leaf.join_readers:
                hold_indices(reader)
            # Once as it is iterated, where an exception would end Energon's iterator, and once by key.
            read = leaf._get_sample
            leaf._get_sample = partial(self._read_next, leaf, read)
            leaf.restore_sample = partial(self._read_again, leaf, read)
        self.reset_state_own()

    def reset_state_own(self) -> None:
        """Stand at the beginning."""
        self._ended = False
        self._index = 0

    def take_damaged(self) -> list[EncodedSource]:
        """Markers of the samples that could not be read since the last call."""
        damaged, self._damaged = self._damaged, []
        return damaged

    def __iter__(self) -> Iterator[Sample]:
        if not self._finite:
            yield from self._numbered()
        elif not self._ended and self.dataset.worker_has_samples():
            yield from self._numbered()
            self._ended = True

    def _numbered(self) -> Iterator[Sample]:
        for sample in self.dataset:
            self._index += 1
            yield add_sample_restore_key(sample, self._index, src=self)

    def restore_sample(self, restore_key: Any) -> Sample:
        """A sample by key; under ``on_damaged="skip"`` one that cannot be read any more becomes a :class:`DamagedSample`."""
        name, index, *rest = restore_key
        if name != type(self).__name__ or not isinstance(index, int):
            raise ValueError(f"the checkpoint refers to a sample by {restore_key!r}, which is no key of this dataset")
        try:
            return add_sample_restore_key(super().restore_sample(tuple(rest)), index, src=self)
        except DamagedDataError as e:
            if self._on_damaged == "error":
                raise
            return DamagedSample(__key__=str(e).split(": ", 1)[0], __restore_key__=restore_key, __subflavors__=None)

    def _read_next(self, leaf: WebdatasetSampleLoaderDataset, read: Any, index: int) -> RawSampleData:
        try:
            sample = self._read(leaf, read, index)
            self._damaged_in_a_row = 0
            return sample
        except DamagedDataError as e:
            if self._on_damaged == "error":
                raise
            self._damaged_in_a_row += 1
            if not self._finite and self._damaged_in_a_row > self.len_worker(0):
                # Energon would go round and round.
                raise DamagedDataError(
                    f"{self._damaged_in_a_row} samples in a row cannot be read, which is all that a loader worker has. "
                    f"The last: {e}"
                ) from e
            self._damaged.append(EncodedSource.dropped(str(e).split(": ", 1)[0], "damaged"))
            # Energon passes over it.
            return RawSampleData(__restore_key__=("Webdataset", index), data=(None,))

    def _read_again(self, leaf: WebdatasetSampleLoaderDataset, read: Any, restore_key: Any) -> RawSampleData:
        kind, index = restore_key
        if kind != "Webdataset" or not isinstance(index, int):
            raise ValueError(f"the checkpoint refers to a sample by {restore_key!r}, which is no key of this dataset")
        sample = self._read(leaf, read, index)
        if sample.data[0] is None:
            raise DamagedDataError(self._cannot_read(_place(leaf, index), "it is excluded from the dataset now"))
        return sample

    def _read(self, leaf: WebdatasetSampleLoaderDataset, read: Any, index: int) -> RawSampleData:
        place = _place(leaf, index)
        self._whereabouts.reads(place)
        try:
            return read(index)
        except StorageError:
            # The store is away; the data is not damaged.
            raise
        except Exception as e:
            raise DamagedDataError(self._cannot_read(place, f"{type(e).__name__}: {e}")) from e

    @staticmethod
    def _cannot_read(place: str, why: str) -> str:
        return (
            f"{place}: cannot be read ({why}). The shard is damaged, or not the one that was indexed: restore it and resume, "
            'or set on_damaged="skip" to go on without what cannot be read (it is counted)'
        )

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Samples of a worker."""
        return self.dataset.len_worker(worker_idx)

    def config(self) -> dict[str, Any]:
        """That of the wrapped dataset."""
        return {"type": type(self).__qualname__, "dataset": self.dataset.config()}


def _leaves(dataset: SavableDataset[Any]) -> Iterator[Any]:
    if isinstance(dataset, WebdatasetSampleLoaderDataset):
        yield dataset
    for inner in getattr(dataset, "datasets", ()):
        yield from _leaves(inner)


def _place(leaf: Any, index: int) -> str:
    """Shard and number of a sample, such as ``data/train-2.tar[17]``."""
    reader = leaf.join_readers[0]
    if hasattr(reader, "jsonl_path"):
        return f"{reader.jsonl_path}[{index}]"
    if hasattr(reader, "shard_count_cumsum"):
        sums = reader.shard_count_cumsum
        shard = min(max(bisect_right(sums, index) - 1, 0), len(sums) - 2)
        return f"{reader.shard_infos[shard].path}[{index - sums[shard]}]"
    return f"{reader.base_path}[{index}]"
