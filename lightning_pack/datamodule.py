"""EnergonPackDataModule: packed rows from an Energon dataset, and their exact position in Lightning's checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from transformers import PreTrainedTokenizerBase

from lightning_pack.agreement import Agreement
from lightning_pack.encoder_choice import EncoderChoice
from lightning_pack.encoders import Encoder
from lightning_pack.energon import (
    ExactLoader,
    PassLoader,
    StreamOptions,
    check_group_field,
    has_split,
)
from lightning_pack.energon.outage import StorageRetry
from lightning_pack.energon.reading import OnDamaged
from lightning_pack.energon.storage import set_retry
from lightning_pack.location import location, require_dataset
from lightning_pack.offline.agreement import DEFAULT_CAPACITY, given_settings, refuse_other_tokens
from lightning_pack.offline.replay import ReplayPolicy, RowEncoder
from lightning_pack.parallel import ParallelLayout
from lightning_pack.policy import PackingPolicy
from lightning_pack.policy_checks import check_encoder
from lightning_pack.progress import TrainingProgress
from lightning_pack.resume import ResumeError, no_position
from lightning_pack.search_loader import SearchLoader
from lightning_pack.trainer_checks import must_stay_in_step, refuse_to_train
from lightning_pack.trainer_warnings import warn_endless, warn_without_attention
from lightning_pack.training_stream import Spread, TrainingStream, settled_by_dry_run

#: What nobody has to give; rows that were written ahead do not contradict it.
DEFAULT_PACKING = PackingPolicy(capacity=DEFAULT_CAPACITY)


class EnergonPackDataModule(pl.LightningDataModule):
    """Packed rows from any Energon dataset or metadataset, continued bitwise from a checkpoint.

    The training stream is shuffled. It is endless, and an epoch is what ``limit_train_batches`` says, or it is ``epochs``
    passes over the data. Validation reads the split ``val`` from its beginning every time. Batches are
    :class:`~lightning_pack.PackedBatch`.

    A folder that ``lightning-pack prepack`` wrote is recognised, and its rows come as they are, one to a batch, in an order
    that ``seed`` draws. ``packing``, ``tokenizer``, ``vision``, ``encoder`` and ``group_by`` may then be left out; what is
    given must be what the rows were made with, also where its value is the default, except ``packing.balance`` and
    ``packing.window``, which only order them. (A policy of ``dataclasses.replace``, or of a command line other than
    ``lightning-pack``, gives every setting; of such a one those count that do not have their default.) Images in rows are
    processed when a row is read, by the image processor that came along with it, or lies beside ``tokenizer``.

    Args:
        path: prepared dataset folder, ``.jsonl`` file or metadataset ``.yaml``; on a disk, or ``msc://PROFILE/...`` in an
            object store, where ``PROFILE`` is one of the multi-storage client's configuration.
        tokenizer: folder of a tokenizer, or a tokenizer; None takes the folder ``tokenizer`` inside ``path``.
        packing: the packing rules. ``packing.multiple`` is raised to what ``parallel`` asks for.
        num_workers: loader processes per rank; 0 loads in the main process.
        parallel: how the model is spread over devices; the ranks left over are data parallel.
        shuffle_buffer_size: samples a worker draws from at random before encoding, with the image files in
            them, which no limit of ``packing`` counts; 0 keeps the order of reading.
        max_samples_per_sequence: most samples read one after the other from a shard; None reads whole shards.
        packs_per_batch: packs joined to one row.
        seed: of the order in which samples are read.
        val_path: another dataset to validate on; a single ``.jsonl`` file has no ``val`` split of its own.
        vision: family of a vision-language model, such as ``"qwen3_vl"``: chats may then have images, and the folder of the
            tokenizer holds an image processor too (:class:`~lightning_pack.encoders.VisionChatEncoder`).
        prepare: ``"stdlib"`` makes the example dataset at ``path`` on first use, ``"skimage"`` that of captioned images.
        encoder: turns records into sources; None understands chats, prompt/completion pairs and plain text.
        group_by: a field of the records, such as ``"language"``: sources that differ in it do not share a pack. An encoder of
            your own sets ``EncodedSource.group`` instead.
        epochs: passes over the training data, each one epoch of the Trainer, in a new order, with every source in it; training
            then ends. None is an endless stream, and ``fit`` warns where nothing of the Trainer ends it.
        on_damaged: what happens to a sample that cannot be read: ``"error"`` names it and ends the run, ``"skip"`` leaves it
            out and counts it as ``damaged``.
        worker_timeout: seconds in which a loader worker must read at least one more sample, else it counts as hung.
        on_mismatch: what ``fit`` does with a checkpoint whose position in the data cannot be continued exactly, since a setting
            or the data changed, or the position is missing, damaged or of another version: ``"error"`` refuses it;
            ``"restart"`` warns, and goes on with weights, optimizer and step count while the data starts over.
        storage_retry: how long an object store may be away before the run ends. It holds for the whole process, so that of the
            datamodule that was set up last.

    Raises:
        ValueError: for settings that do not fit together (at once), or data that cannot be opened (in ``setup``).
        ResumeError: in ``fit``, for a checkpoint that this run cannot continue exactly.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        packing: PackingPolicy = DEFAULT_PACKING,
        num_workers: int = 2,
        parallel: ParallelLayout = ParallelLayout(),  # noqa: B008 - frozen
        shuffle_buffer_size: int = 256,
        max_samples_per_sequence: int | None = 100,
        packs_per_batch: int = 1,
        seed: int = 0,
        val_path: str | Path | None = None,
        vision: str | None = None,
        prepare: Literal["stdlib", "skimage"] | None = None,
        encoder: Encoder | None = None,
        group_by: str | None = None,
        epochs: int | None = None,
        on_damaged: OnDamaged = "error",
        worker_timeout: float = 300.0,
        on_mismatch: Literal["error", "restart"] = "error",
        storage_retry: StorageRetry = StorageRetry(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__()
        if not isinstance(packing, PackingPolicy):
            raise ValueError(f"packing={packing!r}: a PackingPolicy is needed, such as PackingPolicy(capacity=4096)")
        for name, value, least in (
            ("num_workers", num_workers, 0),
            ("shuffle_buffer_size", shuffle_buffer_size, 0),
            ("max_samples_per_sequence", 1 if max_samples_per_sequence is None else max_samples_per_sequence, 1),
            ("packs_per_batch", packs_per_batch, 1),
            ("seed", seed, 0),
            ("epochs", 1 if epochs is None else epochs, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: a whole number of at least {least} is needed")
        if prepare not in (None, "stdlib", "skimage"):
            raise ValueError(f"prepare={prepare!r} is not one of 'stdlib', 'skimage'")
        if group_by is not None and (packing.min_bins, packing.bins_multiple_of) != (None, 1):
            raise ValueError(
                f"group_by={group_by!r} keeps sources apart, which packing.min_bins and packing.bins_multiple_of would move"
            )
        if on_mismatch not in ("error", "restart"):
            raise ValueError(f"on_mismatch={on_mismatch!r} is not one of 'error', 'restart'")
        if on_damaged not in ("error", "skip"):
            raise ValueError(f"on_damaged={on_damaged!r} is not one of 'error', 'skip'")
        if isinstance(worker_timeout, bool) or not isinstance(worker_timeout, int | float) or not worker_timeout > 0:
            raise ValueError(f"worker_timeout={worker_timeout!r}: a number of seconds above 0 is needed")
        if not isinstance(storage_retry, StorageRetry):
            raise ValueError(
                f"storage_retry={storage_retry!r}: a StorageRetry is needed, such as StorageRetry(outage_seconds=60)"
            )
        self.path = location(path)
        self.val_path = None if val_path is None else location(val_path)
        self._packing = packing
        #: Settings of ``packing`` that were chosen, which rows written ahead have to agree with, defaults included. A command
        #: line sets it, since a parser gives all settings.
        self.given_packing = frozenset[str]() if packing is DEFAULT_PACKING else given_settings(packing)
        self._asked = replace(packing, multiple=lcm(packing.multiple, parallel.multiple))
        self.parallel = parallel
        self.num_workers = num_workers
        self.packs_per_batch = packs_per_batch
        self.seed = seed
        self.shuffle_buffer_size = shuffle_buffer_size
        self.max_samples_per_sequence = max_samples_per_sequence
        self.prepare = prepare
        self.group_by = group_by
        self.epochs = epochs
        self.on_damaged: OnDamaged = on_damaged
        self.on_mismatch = on_mismatch
        self.worker_timeout = worker_timeout
        self.storage_retry = storage_retry
        self._choice = EncoderChoice(
            self.path, tokenizer=tokenizer, vision=vision, encoder=encoder, group_by=group_by, storage_retry=storage_retry
        )
        #: Of rows that are replayed.
        self._row_encoder: RowEncoder | None = None
        self._stream: TrainingStream | None = None
        self._fitted_by: pl.Trainer | None = None
        #: What the run at hand was warned about.
        self._warned: set[Callable[[pl.Trainer], None]] = set()

    @property
    def packing(self) -> PackingPolicy:
        """The packing rules, with the algorithm that was chosen for the training data, once it is."""
        return self._asked if self._stream is None else self._stream.policy

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; loaded on first use.

        Raises:
            ValueError: if there is none at the given folder.
        """
        return self._choice.tokenizer

    @property
    def encoder(self) -> Encoder:
        """Record -> source; or stored row -> row."""
        return self._choice.encoder if self._row_encoder is None else self._row_encoder

    def prepare_data(self) -> None:
        """Make the example dataset, once, where ``prepare`` asks for it."""
        if self.prepare == "skimage":
            from lightning_pack.prepare import prepare_skimage, prepared

            if prepared(self.path) is None:
                rank_zero_info(f"Preparing the captioned images of scikit-image as a dataset in {self.path} (once)")
                prepare_skimage(self.path)
        if self.prepare == "stdlib":
            from lightning_pack.prepare import prepare_stdlib, prepared

            set_retry(self.storage_retry)
            if prepared(self.path) is None:
                rank_zero_info(f"Preparing the documentation of this Python as a dataset in {self.path} (once, some seconds)")
                prepare_stdlib(self.path)

    def setup(self, stage: str | None = None) -> None:
        """Open nothing yet, but know what will be read, and refuse what cannot be."""
        self._warned.clear()
        self._prepare(*self._data_parallel(self.parallel))
        if stage in (None, "fit"):
            self._set_up_training()

    def _prepare(self, rank: int, ranks: int) -> None:
        set_retry(self.storage_retry)
        for path in (self.path, self.val_path):
            if path is not None:
                require_dataset(path)
        # Workers are forked: a tokenizer's threads must not have been used before.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        replay = self._replay(self.path)
        if replay is not None:
            self._row_encoder, self._asked = replay
        self._spread = Spread(
            rank=rank, ranks=ranks, num_workers=self.num_workers, timeout=self.worker_timeout, epochs=self.epochs
        )
        check_encoder(self._asked, self.encoder)
        self.options = StreamOptions(
            path=self.path,
            encoder=self.encoder,
            policy=self._asked,
            seed=self.seed,
            shuffle_buffer_size=self.shuffle_buffer_size,
            max_samples_per_sequence=self.max_samples_per_sequence,
            packs_per_batch=self.packs_per_batch,
            on_damaged=self.on_damaged,
        )

    def _replay(self, path: str) -> tuple[RowEncoder, ReplayPolicy] | None:
        """How rows that were written ahead come as they are; None for other data."""
        return self._choice.replay(
            path,
            packing=self._packing,
            given=self.given_packing,
            multiple=self.parallel.multiple,
            packs_per_batch=self.packs_per_batch,
        )

    def _set_up_training(self) -> None:
        check_group_field(self.options)
        trainer = self.trainer
        stream = TrainingStream(
            self.options,
            spread=self._spread,
            on_mismatch=self.on_mismatch,
            check_restored=self._refuse_without_position,
        )
        # A trainer that fits again goes on in the data, as its global step does; a new trainer starts at the beginning.
        fits_again = trainer is not None and trainer is self._fitted_by and trainer.global_step > 0
        if self._stream is None or not (fits_again and stream.goes_on_from(self._stream)):
            self._stop()
            self._stream = stream
        self._stream.restored = False
        self._fitted_by = trainer
        if trainer is not None:
            self._leave_callbacks()
            # First, so that a checkpoint callback sees the batch counted.
            trainer.callbacks.insert(0, self._stream.progress)  # type: ignore[attr-defined]

    def _data_parallel(self, layout: ParallelLayout) -> tuple[int, int]:
        if self.trainer is not None:
            return layout.data_parallel(self.trainer.global_rank, world_size=self.trainer.world_size)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
            return layout.data_parallel(rank, world_size=size)
        return 0, 1

    def train_dataloader(self) -> ExactLoader:
        """The endless stream of this rank, from the beginning or from the checkpoint.

        Raises:
            ResumeError: if ``fit`` was given a checkpoint that holds no position for this class.
        """
        trainer = self.trainer
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            refuse_to_train(trainer, epochs=self.epochs)
            if not trainer.strategy.restore_checkpoint_after_setup:
                # Others restore later, and may ask for the loader before.
                self._refuse_without_position()
            self._warn(trainer, warn_without_attention)
            if self.epochs is None:
                self._warn(trainer, warn_endless)
        if self._stream is None:
            raise RuntimeError("call setup('fit') before train_dataloader()")
        loader = self._stream.loader()
        if trainer is not None and self._stream.progress not in trainer.callbacks:  # type: ignore[attr-defined]
            return SearchLoader(loader)  # type: ignore[return-value]  # for Lightning, which only iterates
        return loader

    def _warn(self, trainer: pl.Trainer, about: Callable[[pl.Trainer], None]) -> None:
        # Models that configure_model makes are there once loaders are asked for, and that happens several times. A search has
        # other callbacks and limits than the fit behind it.
        if about not in self._warned and not self._searches(trainer):
            self._warned.add(about)
            about(trainer)

    def _searches(self, trainer: pl.Trainer) -> bool:
        """Whether Lightning tries a setting out, for which it takes the callbacks of a fit away."""
        if trainer.state.fn != TrainerFn.FITTING or self._stream is None:
            return False
        return self._stream.progress not in trainer.callbacks  # type: ignore[attr-defined]

    def _refuse_without_position(self) -> None:
        path = None if self.trainer is None else self.trainer.ckpt_path
        if path is not None and self._stream is not None and not self._stream.restored:
            self._stream.refuse_or_restart(ResumeError(no_position(path, type(self))))

    def val_dataloader(self) -> PassLoader | list[Any]:
        """The split ``val``, read anew at every iteration; nothing where the data has none."""
        return self._pass("val")

    def test_dataloader(self) -> PassLoader | list[Any]:
        """The split ``test``, read anew at every iteration."""
        return self._pass("test")

    def _pass(self, split: str) -> PassLoader | list[Any]:
        if self.trainer is not None:
            self._warn(self.trainer, warn_without_attention)
        path = self.path
        if split == "val" and self.val_path is not None:
            path = self.val_path
            # A single file has no splits: all of it is for validation.
            split = "train" if path.endswith(".jsonl") else split
        if not has_split(path, split):
            if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
                raise ValueError(f"the dataset {path!r} has no split {split!r} to evaluate on")
            return []
        rank, ranks = self._data_parallel(self.parallel.evaluation)
        workers = replace(self._spread, rank=rank, ranks=ranks).workers()
        options = replace(self.options, path=path, policy=self.packing)
        if path != self.path:
            replay = self._replay(path)
            if (replay is None) != (self._row_encoder is None):
                raise ValueError(
                    f"of {self.path!r} and val_path={path!r} one holds packed rows and the other does not: give rows for both"
                )
            if replay is not None and self._row_encoder is not None:
                refuse_other_tokens(self.path, self._row_encoder.made_by, path, replay[0].made_by)
                options = replace(options, encoder=replay[0], policy=replay[1])
        if options.policy.algorithm == "auto":
            if self._stream is not None:
                self._stream.settle()
                policy = self._stream.policy
            else:
                # Evaluation without training.
                policy = settled_by_dry_run(options, of=workers.of, split=split, evaluation=True)
            options = replace(options, policy=policy)
        everyone = Agreement().everyone if must_stay_in_step(self.trainer) else None
        return PassLoader(options, workers=workers, split=split, everyone=everyone)

    def teardown(self, stage: str) -> None:
        """End the loader's workers. The position stays, so that a checkpoint can still be saved."""
        if stage == "fit":
            self._stop()
            self._leave_callbacks()

    def on_exception(self, exception: BaseException) -> None:
        """End the workers; Lightning calls no teardown after an error. Checkpoints of the error are saved by then."""
        self._stop()
        self._leave_callbacks()

    def _leave_callbacks(self) -> None:
        if self.trainer is not None:
            callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
            callbacks[:] = [callback for callback in callbacks if not isinstance(callback, TrainingProgress)]

    def _stop(self) -> None:
        if self._stream is not None:
            self._stream.progress.loader.stop()

    def state_dict(self) -> dict[str, Any]:
        """The position of every data-parallel rank, and the settings it holds for. Collective: call it on every rank."""
        if self._stream is None:
            return {}
        return self._stream.state(self.trainer, model_parallel_size=self.parallel.model_parallel_size)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the position in a checkpoint. Only ``fit`` does; a pass over validation data starts at its beginning.

        Raises:
            ResumeError: naming each setting that differs, with both values; not with ``on_mismatch="restart"``.
            StateError: naming the part of the position that is damaged; likewise.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        if self._stream is None:
            raise RuntimeError("call setup('fit') before load_state_dict()")
        self._stream.restore(state_dict)

    def compared(self, state: Any, *, ranks: int) -> tuple[ValueError | None, str | None]:
        """Why ``fit`` on so many data-parallel ranks would not go on from a checkpoint's state; else how the data was damaged.

        For a datamodule without a Trainer. The data is opened, and compared with the state, but no sample is read.

        Args:
            state: what a checkpoint holds under the name of this class.
            ranks: data-parallel ranks.

        Returns:
            The refusal and the warning of ``fit``, None where there is none.

        Raises:
            ValueError: if the data cannot be opened.
        """
        self._prepare(0, ranks)
        stream = TrainingStream(self.options, spread=self._spread)
        problem = stream.problem(state, ranks=range(ranks))
        return problem, stream.damage(state) if problem is None else None
