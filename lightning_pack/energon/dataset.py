"""Opening Energon datasets and metadatasets, as an endless stream or as one pass."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.energon import WorkerConfig, get_train_dataset, get_val_dataset
from megatron.energon.errors import reraise_exception
from megatron.energon.flavors.webdataset.empty_dataset_error import EmptyDatasetError
from megatron.energon.metadataset import load_dataset
from megatron.energon.metadataset.loader_interface import DatasetBlendMode

from lightning_pack.encoders import Encoder
from lightning_pack.energon import storage as storage  # Energon reads object stores through it from here on.
from lightning_pack.energon.metadataset import EXAMPLE, metadataset_problem
from lightning_pack.energon.reading import OnDamaged
from lightning_pack.energon.stage import PackingStage
from lightning_pack.energon.task_encoder import PackTaskEncoder, task_encoder
from lightning_pack.energon.worker import Whereabouts
from lightning_pack.policy import PackingPolicy


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """What decides which rows come from a dataset, and in which order.

    Args:
        path: dataset folder, ``.jsonl`` file or metadataset ``.yaml``; on a disk, or ``msc://PROFILE/...`` in an object store.
        encoder: record -> source.
        policy: the packing rules.
        seed: of the order in which samples are read.
        shuffle_buffer_size: samples that a worker draws from at random before encoding; 0 keeps the order of reading.
        max_samples_per_sequence: most samples that are read one after the other from a shard; None reads whole shards.
        packs_per_batch: packs that are joined to one row.
        on_damaged: whether a sample that cannot be read ends the run or is left out.
    """

    path: str
    encoder: Encoder
    policy: PackingPolicy
    seed: int = 0
    shuffle_buffer_size: int = 0
    max_samples_per_sequence: int | None = 100
    packs_per_batch: int = 1
    on_damaged: OnDamaged = "error"


def worker_config(*, number: int = 0, of: int = 1, seed: int = 0) -> WorkerConfig:
    """Energon's view of a logical worker: a rank with one worker of its own, so that nothing depends on where it runs.

    Errors stop the run: what may be left out is a marker before it can be an error.
    """
    return WorkerConfig(rank=number, world_size=of, num_workers=1, seed_offset=seed, global_error_handler=reraise_exception)


@contextlib.contextmanager
def _opening(path: str, split: str) -> Iterator[None]:
    """Energon reports what it finds on stdout, and what it does not find in many ways."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except EmptyDatasetError as e:
        raise ValueError(f"the dataset {path!r} has no samples in its split {split!r}") from e
    except Exception as e:
        problem = metadataset_problem(path, e, split=split)
        if problem is not None:
            raise ValueError(
                f"{path!r} {problem}. Give a dataset folder, a .jsonl file, or a metadataset, which looks like this (paths "
                f"start where it lies):\n{EXAMPLE}"
            ) from e
        if not isinstance(e, OSError | KeyError | AssertionError) and not str(e).startswith("Invalid dataset"):
            raise
        raise ValueError(
            f"{path!r} cannot be opened as an Energon dataset ({type(e).__name__}: {e}). Make one with "
            "'lightning-pack prepare FILE.jsonl OUT --tokenizer DIR' or 'energon prepare', or give a metadataset .yaml"
        ) from e


def open_share(
    options: StreamOptions, number: int, whereabouts: Whereabouts, *, split: str, of: int, epoch: int | None
) -> PackingStage:
    """The share of one logical worker of a shuffled training stream; nothing is read before it is iterated.

    Args:
        options: of the stream.
        number: of the logical worker.
        whereabouts: is told what is read.
        split: of the dataset.
        of: how many logical workers there are over all ranks.
        epoch: None opens an endless stream; a number opens that pass over the data, each in an order of its own.

    Raises:
        ValueError: if there is no such dataset, or no sample in the split.
    """
    seed = options.seed if not epoch else int.from_bytes(hashlib.sha256(f"{options.seed},{epoch}".encode()).digest()[:6])
    config = worker_config(number=number, of=of, seed=seed)
    with _opening(options.path, split):
        stage = get_train_dataset(
            options.path,
            split_part=split,
            worker_config=config,
            batch_size=options.packs_per_batch,
            shuffle_buffer_size=None,
            max_samples_per_sequence=options.max_samples_per_sequence,
            task_encoder=_task_encoder(options, whereabouts, finite=epoch is not None, shuffle=True),
            repeat=epoch is None,
        )
    if not stage.can_restore_sample():
        raise ValueError(f"the samples of {options.path!r} cannot be read again by key, so the stream could not be resumed")
    return stage


def open_evaluation_share(
    options: StreamOptions, number: int, whereabouts: Whereabouts, *, split: str, of: int
) -> PackingStage:
    """The share of one logical worker of a split, once and in the order of the data.

    Raises:
        ValueError: if there is no such dataset, or no sample in the split.
    """
    with _opening(options.path, split):
        return get_val_dataset(
            options.path,
            split_part=split,
            worker_config=worker_config(number=number, of=of),
            batch_size=options.packs_per_batch,
            task_encoder=_task_encoder(options, whereabouts, finite=True, shuffle=False),
        )


def _task_encoder(options: StreamOptions, whereabouts: Whereabouts, *, finite: bool, shuffle: bool) -> PackTaskEncoder:
    return task_encoder(
        options.encoder,
        policy=options.policy,
        shuffle_buffer_size=options.shuffle_buffer_size if shuffle else 0,
        packs_per_batch=options.packs_per_batch,
        finite=finite,
        on_damaged=options.on_damaged,
        whereabouts=whereabouts,
    )


def has_end(path: str, split: str) -> bool:
    """Whether a pass over the data has an end; a blend by weights repeats its datasets for ever."""
    return bool(_load(path, split).blend_mode != DatasetBlendMode.DATASET_WEIGHT)


def refuse_endless(path: str, split: str) -> None:
    """Check that a pass over the data has an end.

    Raises:
        ValueError: for a blend by weights, which repeats its datasets for ever.
    """
    if not has_end(path, split):
        raise ValueError(
            f"{path!r} blends its datasets by weights, which has no end: use blend_epochized with repetitions in the "
            "metadataset, or leave out epochs and set max_steps"
        )


def _leaves(path: str, split: str) -> tuple[list[Any], str]:
    """The datasets that a path leads to, and how they are mixed."""
    found = _load(path, split)
    return list(found.datasets), str(found.blend_mode)


def _load(path: str, split: str) -> Any:
    with _opening(path, split):
        return load_dataset(path).get_datasets(
            training=False,
            split_part=split,
            worker_config=worker_config(),
            max_samples_per_sequence=None,
            shuffle_over_epochs_multiplier=1,
            decoder=None,
        )


def sample_count(path: str, split: str) -> int:
    """Samples in a split, of all datasets that the path leads to.

    Raises:
        ValueError: if it cannot be opened.
    """
    return sum(len(leaf.dataset) for leaf in _leaves(path, split)[0])


def has_split(path: str, split: str) -> bool:
    """Whether the dataset has samples in ``split``. A single ``.jsonl`` file has no splits: it is all ``train``.

    Raises:
        ValueError: if there is no dataset at all.
    """
    if path.endswith(".jsonl"):
        return split == "train"
    try:
        return sample_count(path, split) > 0
    except ValueError as e:
        if isinstance(e.__cause__, EmptyDatasetError | KeyError | AssertionError) and _leaves(path, "train")[0]:
            return False
        raise
