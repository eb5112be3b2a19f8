"""Opening Energon datasets and metadatasets, as an endless stream or as one pass, and recognising them by content."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from megatron.energon import WorkerConfig, get_loader, get_savable_loader, get_train_dataset, get_val_dataset
from megatron.energon.errors import reraise_exception
from megatron.energon.flavors.webdataset.empty_dataset_error import EmptyDatasetError
from megatron.energon.metadataset import load_dataset
from megatron.energon.savable_loader import BasicDataLoader, SavableDataLoader

from lightning_pack.energon import reader, storage
from lightning_pack.energon.task_encoder import PackTaskEncoder


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """What Energon needs to know to open a dataset for one data-parallel rank.

    Args:
        path: dataset folder, ``.jsonl`` file or metadataset ``.yaml``; on a disk, or ``msc://PROFILE/...`` in an object store.
        rank: data-parallel rank.
        world_size: number of data-parallel ranks.
        num_workers: loader processes of this rank; 0 loads in the main process.
        seed: of the order in which samples are read.
        shuffle_buffer_size: samples that a worker draws from at random before encoding; 0 keeps the order of reading.
        max_samples_per_sequence: most samples that are read one after the other from a shard; None reads whole shards.
        packs_per_batch: packs that are joined to one row.
    """

    path: str
    rank: int = 0
    world_size: int = 1
    num_workers: int = 0
    seed: int = 0
    shuffle_buffer_size: int = 0
    max_samples_per_sequence: int | None = 100
    packs_per_batch: int = 1

    def worker_config(self) -> WorkerConfig:
        """Errors stop the run: what may be left out is a marker before it can be an error."""
        return WorkerConfig(
            rank=self.rank,
            world_size=self.world_size,
            num_workers=self.num_workers,
            seed_offset=self.seed,
            global_error_handler=reraise_exception,
        )


@contextlib.contextmanager
def _opening(path: str, split: str) -> Iterator[None]:
    """Energon reports what it finds on stdout, and what it does not find in many ways."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except EmptyDatasetError as e:
        raise ValueError(f"the dataset {path!r} has no samples in its split {split!r}") from e
    except (OSError, KeyError, AssertionError, ValueError) as e:
        if isinstance(e, ValueError) and not str(e).startswith("Invalid dataset"):
            raise
        raise ValueError(
            f"{path!r} cannot be opened as an Energon dataset ({type(e).__name__}: {e}). Make one with "
            "'lightning-pack prepare FILE.jsonl OUT --tokenizer DIR' or 'energon prepare', or give a metadataset .yaml"
        ) from e


def open_stream(options: StreamOptions, encoder: PackTaskEncoder, *, split: str = "train") -> SavableDataLoader[Any]:
    """An endless, shuffled stream of packed rows; nothing is read before it is iterated.

    Raises:
        ValueError: if there is no such dataset, or no sample in the split.
    """
    with _opening(options.path, split):
        dataset = get_train_dataset(
            options.path,
            split_part=split,
            worker_config=options.worker_config(),
            batch_size=options.packs_per_batch,
            packing_buffer_size=encoder.policy.buffer_size,
            shuffle_buffer_size=options.shuffle_buffer_size or None,
            max_samples_per_sequence=options.max_samples_per_sequence,
            task_encoder=encoder,
            repeat=True,
        )
        if not dataset.can_restore_sample():
            raise ValueError(f"the samples of {options.path!r} cannot be read again by key, so the stream could not be resumed")
        # More snapshots than Energon keeps by itself: a position some batches back must be covered too.
        loader = get_savable_loader(
            dataset,
            checkpoint_every_sec=reader.SNAPSHOT_SECONDS,
            n_checkpoints=2 * max(options.num_workers, 1) + 8,
            watchdog_timeout_seconds=None,
        )
    return _ours(loader)


def open_pass(options: StreamOptions, encoder: PackTaskEncoder, *, split: str = "val") -> BasicDataLoader[Any]:
    """One pass over a split in the order of the data, the last, partial buffer included.

    Raises:
        ValueError: if there is no such dataset, or no sample in the split.
    """
    with _opening(options.path, split):
        dataset = get_val_dataset(
            options.path,
            split_part=split,
            worker_config=options.worker_config(),
            batch_size=options.packs_per_batch,
            packing_buffer_size=encoder.policy.buffer_size,
            task_encoder=encoder,
        )
        loader = get_loader(dataset, watchdog_timeout_seconds=None)
    return _ours(loader)


Loader = TypeVar("Loader", SavableDataLoader[Any], BasicDataLoader[Any])


def _ours(loader: Loader) -> Loader:
    # Energon pins memory where there is no device to pin it for.
    loader.pin_memory = torch.cuda.is_available()
    reader.tie_workers_to_this_process(loader)
    return loader


def _leaves(path: str, split: str) -> list[Any]:
    with _opening(path, split):
        found = load_dataset(path).get_datasets(
            training=False,
            split_part=split,
            worker_config=StreamOptions(path=path).worker_config(),
            max_samples_per_sequence=None,
            shuffle_over_epochs_multiplier=1,
            decoder=None,
        )
    return list(found.datasets)


def has_split(path: str, split: str) -> bool:
    """Whether the dataset has samples in ``split``. A single ``.jsonl`` file has no splits: it is all ``train``.

    Raises:
        ValueError: if there is no dataset at all.
    """
    if path.endswith(".jsonl"):
        return split == "train"
    try:
        return sum(len(leaf.dataset) for leaf in _leaves(path, split)) > 0
    except ValueError as e:
        if isinstance(e.__cause__, EmptyDatasetError | KeyError | AssertionError) and _leaves(path, "train"):
            return False
        raise


def data_fingerprint(path: str, *, split: str = "train") -> str:
    """The data by content, wherever it lies: shards, sizes, counts, blend, and the head and tail of every file.

    A change of equal size in the middle of a large shard is not seen (64 KiB at both ends of a file are read).
    """
    digest = hashlib.sha256()
    samples = files = 0
    for leaf in _leaves(path, split):
        samples += len(leaf.dataset)
        digest.update(json.dumps([leaf.weight, leaf.repetitions, _without_paths(leaf.dataset.config())], default=str).encode())
        for file in _files(leaf.dataset):
            files += 1
            size = file.size()
            digest.update(str(size).encode())
            head = min(size, 1 << 16)
            digest.update(storage.read_range(file, offset=0, size=head))
            tail = min(size - head, 1 << 16)
            digest.update(storage.read_range(file, offset=size - tail, size=tail))
    return f"{samples} samples in {files} files, sha256 {digest.hexdigest()[:16]}"


def _files(dataset: Any) -> list[Any]:
    if hasattr(dataset, "shards"):
        return [shard.path for shard in dataset.shards]
    if hasattr(dataset, "inner_datasets"):
        return [file for inner in dataset.inner_datasets for file in _files(inner)]
    return [path for path in dataset.paths if path.is_file()]


def _without_paths(config: Any) -> Any:
    # Energon marks settings that may change, such as folders, by a leading underscore.
    if isinstance(config, dict):
        return {name: _without_paths(value) for name, value in config.items() if not str(name).startswith("_")}
    if isinstance(config, list | tuple):
        return [_without_paths(value) for value in config]
    return config
