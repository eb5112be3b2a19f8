"""The way of a sample inside a loader worker: raw parts -> record -> source -> buffer -> pack -> row.

Whatever is wrong with a sample ends here as a marker (:meth:`EncodedSource.dropped`), never as an exception: Energon answers an
exception inside its select hook by dropping the whole buffer. The markers are ordinary sources of no length, so Energon's own
restore keys carry them through every checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    stateless,
)
from megatron.energon.errors import SYSTEM_EXCEPTIONS
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory
from megatron.energon.state import FlexState
from megatron.energon.wrappers import ShuffleBufferDataset
from megatron.energon.wrappers.buffer import SavableSampleBuffer

from lightning_pack.encoders import Encoder, LeaveOut, TemplateError
from lightning_pack.energon.outage import StorageError
from lightning_pack.energon.randomness import number_of, seed_for
from lightning_pack.energon.reading import OnDamaged, Reading
from lightning_pack.energon.records import cook, keep_bad_lines, media_record_of, parts_of, record_of
from lightning_pack.energon.stage import PackingStage
from lightning_pack.energon.worker import Whereabouts
from lightning_pack.policy import PackingPolicy
from lightning_pack.policy_checks import check_encoder
from lightning_pack.row import PackedBatch
from lightning_pack.source import EncodedSource, LeftOut, Pack

logger = logging.getLogger(__name__)
_Made = TypeVar("_Made")


def _make_cheap(buffer: SavableSampleBuffer[Sample]) -> None:
    """Let a restored buffer read its samples as they lie in the shards, for random access costs more than the samples.

    And let its state be a copy of the list of keys; Energon copies each key as well, though none is ever changed.
    """
    start = buffer.worker_start

    def refill() -> None:
        if buffer._restore_pending:
            keys = buffer._restore_keys
            # A key ends with the number of the sample.
            order = sorted(range(len(keys)), key=lambda i: keys[i][-1])
            samples = {i: buffer.restore_sample(keys[i]) for i in order}
            buffer.buffer.extend(samples[i] for i in range(len(keys)))
            buffer._restore_pending = False
        start()

    def save() -> FlexState:
        return FlexState(__class__=type(buffer).__name__, _restore_keys=list(buffer._restore_keys))

    buffer.worker_start, buffer.save_state = refill, save


class Fault(NamedTuple):
    """Why nothing was made of a sample."""

    reason: str
    why: str


def tried(key: str, make: Callable[[], _Made]) -> _Made | Fault:
    """What is made of a sample, or why it cannot be."""
    try:
        return make()
    except LeaveOut as e:
        reason, why = e.reason, str(e)
    except (*SYSTEM_EXCEPTIONS, TemplateError, StorageError):
        # A fault of the set-up, which every sample would have, or of the store.
        raise
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        reason, why = "corrupt", str(e)
    except Exception as e:
        reason, why = "encoder_error", f"{type(e).__name__}: {e}"
    logger.info("sample %r is left out (%s): %s", key, reason, why)
    return Fault(reason, why)


class PackTaskEncoder(DefaultTaskEncoder):
    """Energon's hooks, answered by an encoder and a policy.

    Args:
        encoder: record -> source.
        policy: the packing rules.
        shuffle_buffer_size: samples that are drawn from at random before encoding; 0 keeps the order of reading.
        packs_per_batch: packs in a row.
        finite: whether the samples have an end.
        on_damaged: what happens to a sample that cannot be read.
        whereabouts: is told what is read.
    """

    cookers = (Cooker(cook),)
    #: Parts stay bytes, so that a part that cannot be decoded is counted instead of skipped.
    decoder = None

    def __init__(
        self,
        encoder: Encoder,
        *,
        policy: PackingPolicy,
        shuffle_buffer_size: int = 0,
        packs_per_batch: int = 1,
        finite: bool = False,
        on_damaged: OnDamaged = "error",
        whereabouts: Whereabouts | None = None,
    ) -> None:
        super().__init__()
        check_encoder(policy, encoder)
        self.encoder = encoder
        self.policy = policy
        self._shuffle_buffer_size = shuffle_buffer_size
        self._packs_per_batch = packs_per_batch
        self._finite = finite
        self._on_damaged = on_damaged
        self._whereabouts = whereabouts or Whereabouts()
        self._reading: Reading | None = None
        self._seed_of: tuple[WorkerConfig, int] | None = None
        self._record_of: Callable[[Sample], Any] = media_record_of if getattr(encoder, "has_media", False) else record_of
        if getattr(encoder, "reads_parts", False):
            self._record_of = parts_of

    def _load_dataset(self, dataset: Any, worker_rotation_offset: int, worker_config: WorkerConfig) -> Any:
        if isinstance(dataset.dataset, CrudeJsonlDatasetFactory):
            keep_bad_lines(dataset.dataset)
        return super()._load_dataset(dataset, worker_rotation_offset, worker_config)

    @stateless
    def encode_sample(self, sample: Sample) -> EncodedSource:
        """The source of a sample, or the marker of its absence."""
        (source,) = self._sources(sample)
        return source

    def _sources(self, sample: Sample) -> list[EncodedSource]:
        sources = self.policy.admit(self._encode(sample))
        for source in sources:
            # Energon extends the key of the sample that a source came from.
            source.__restore_key__ = sample.__restore_key__
        return sources

    def _encode(self, sample: Sample) -> EncodedSource:
        key = sample.__key__
        worker = WorkerConfig.active_worker_config
        assert worker is not None
        if self._seed_of is None or self._seed_of[0] is not worker:
            self._seed_of = worker, worker.worker_seed()
        seed_for(number_of(sample.__restore_key__), seed=self._seed_of[1])
        found = tried(key, lambda: self.encoder(key, self._record_of(sample)))
        return found if isinstance(found, EncodedSource) else EncodedSource.dropped(key, found.reason, why=found.why)

    def select_samples_to_pack(
        self, samples: list[EncodedSource], *, ages: Sequence[int] | None = None, final: bool = True
    ) -> list[list[EncodedSource]]:
        """Groups of the buffer's sources; the order of the groups depends on the worker and on how often it has selected.

        Energon's own protocol knows neither ages nor sources that stay: without them the whole buffer is packed.
        """
        worker = WorkerConfig.active_worker_config
        stack = WorkerConfig._sample_index_stack
        assert worker is not None
        assert stack is not None
        number = worker.rank * max(worker.num_workers, 1) + worker.rank_worker_id()
        return self.policy.select(samples, ages=ages, final=final, worker=number, index=stack[-1])

    @stateless
    def pack_selected_samples(self, samples: list[EncodedSource]) -> Pack:
        """The pack of one group."""
        return self.policy.build(samples)

    def complete(self, pack: Pack) -> Pack:
        """The pack with the media of its sources; those whose media cannot be made are left out of it.

        Its boundaries are made anew then, and it may end up without a source, which is a pack without a layout.
        """
        if all(source.deferred is None for source in pack.sources):
            return pack
        sources, ages, left_out = [], [], list(pack.left_out)
        for source, age in zip(pack.sources, pack.ages or [0] * len(pack.sources), strict=True):
            found = tried(source.key, source.completed)
            if isinstance(found, EncodedSource):
                sources.append(found)
                ages.append(age)
            else:
                left_out.append(LeftOut(source.key, found.reason, len(source)))
        layout = pack.layout
        if len(sources) < len(pack.sources):
            layout = self.policy.layout([len(source) for source in sources]) if sources else None
        return Pack(sources=sources, layout=layout, left_out=left_out, ages=ages)

    @stateless
    def batch(self, samples: Sequence[Pack]) -> PackedBatch:
        """The packs of a batch as one physical row."""
        return PackedBatch.from_packs(samples, pad_id=self.encoder.pad_id)

    def build_encode_sample(self, dataset: SavableDataset[Sample], *, worker_config: WorkerConfig) -> SavableDataset[Any]:
        """Samples as read -> shuffled -> source."""
        dataset = self._reading = Reading(
            dataset,
            finite=self._finite,
            on_damaged=self._on_damaged,
            whereabouts=self._whereabouts,
            worker_config=worker_config,
        )
        if self._shuffle_buffer_size > 1:
            dataset = ShuffleBufferDataset(dataset, size=self._shuffle_buffer_size, worker_config=worker_config)
            _make_cheap(dataset._active_buffer)
        return super().build_encode_sample(dataset, worker_config=worker_config)

    def build_batch(
        self,
        dataset: SavableDataset[EncodedSource],
        *,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        worker_config: WorkerConfig,
    ) -> PackingStage:
        """Source -> pack -> row."""
        assert self._reading is not None
        return PackingStage(
            dataset,
            policy=self.policy,
            select=self.select_samples_to_pack,
            build=self.pack_selected_samples,
            complete=self.complete,
            batch=self.batch,
            packs_per_batch=self._packs_per_batch,
            take_damaged=self._reading.take_damaged,
            repair=self._on_damaged == "skip",
            worker_config=worker_config,
        )


class SplitTaskEncoder(PackTaskEncoder):
    """For policies that split: a sample may be several sources."""

    @stateless
    def encode_sample(self, sample: Sample) -> Generator[EncodedSource, None, None]:
        """The sources of a sample."""
        yield from self._sources(sample)


def task_encoder(encoder: Encoder, *, policy: PackingPolicy, **options: Any) -> PackTaskEncoder:
    """The task encoder for a policy; ``options`` are those of :class:`PackTaskEncoder`."""
    return (SplitTaskEncoder if policy.overlength == "split" else PackTaskEncoder)(encoder, policy=policy, **options)
