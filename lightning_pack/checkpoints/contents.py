"""What a checkpoint holds of a packed run, as typed values: made from a file that may be damaged, or a stranger's."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_pack.checkpoints.file import read_checkpoint, size_of
from lightning_pack.energon.fields import StateError, count, count_or_none, damaged, list_of, number, restore_key
from lightning_pack.energon.loader import Standing
from lightning_pack.resume import COUNTS, STATE_VERSION, ResumeError, refuse_damaged_rank, saved_settings
from lightning_pack.rewind import ResumePoint
from lightning_pack.topology import Topology, topology

_ENTRIES = {"version", "settings", "ranks"}
_DATAMODULE = "EnergonPackDataModule"


@dataclass(frozen=True, kw_only=True)
class StreamPlace:
    """Where the stream of a logical worker stands.

    Args:
        rank: data-parallel rank that read it.
        worker: its number among those of all ranks.
        buffer: number of the packing buffer whose packs come next.
        packs_emitted: how many of them were trained on.
        samples_read: samples of its share that were read before that buffer was filled, of all datasets of a blend.
        share_passes: how often each dataset of a blend had been read to its end by then.
        buffered: sources that wait in shuffle buffers.
        carried: sources that waited in the packing buffer before it was filled up; what it was filled up with is read again.
        window: number of the window of packs that is emitted, where packs are balanced.
        window_emitted: how many of its packs were trained on.
    """

    rank: int
    worker: int
    buffer: int = 0
    packs_emitted: int = 0
    samples_read: int = 0
    share_passes: tuple[int, ...] = (0,)
    buffered: int = 0
    carried: int = 0
    window: int = 0
    window_emitted: int = 0


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands in its data.

    Args:
        ranks: data-parallel ranks.
        num_workers: loader workers of each rank.
        passes_done: passes over the data that are complete; 0 in an endless stream.
        passes: how many there are; None is an endless stream.
        places: of all logical workers, those of a rank in the order in which their next rows come.
        counts: rows, sources, real tokens trained on and sources left out since the run began, of all ranks.
        point: what the run does next; None for a state that was saved without a Trainer.
        settings: that the position holds for.
    """

    ranks: int
    num_workers: int
    passes_done: int
    passes: int | None
    places: tuple[StreamPlace, ...]
    counts: Mapping[str, int]
    point: ResumePoint | None
    settings: Mapping[str, Any]

    @property
    def topology(self) -> Topology:
        """Ranks and workers."""
        return Topology(self.ranks, self.num_workers)


@dataclass(frozen=True, kw_only=True)
class DataState:
    """The datamodule's entry of a checkpoint.

    Args:
        datamodule: name of the class that saved it.
        version: of the state's form; None if there is none.
        bytes: that it takes in a file.
        position: None if it cannot be read.
        problem: why it cannot be read.
    """

    datamodule: str
    version: int | None
    bytes: int
    position: Position | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A checkpoint.

    Args:
        path: file or folder.
        bytes: on disk.
        sharded: whether it is a folder with weights in several files.
        step: optimizer steps that were completed.
        epoch: the Trainer's, counted from 0.
        lightning: version that wrote it.
        trainable: whether the optimizer's state is there, so that training can go on.
        entries: names of everything that is in it.
        data: the datamodule's entry; None if there is none of ours.
    """

    path: str
    bytes: int
    sharded: bool
    step: int | None
    epoch: int | None
    lightning: str | None
    trainable: bool
    entries: tuple[str, ...]
    data: DataState | None

    @classmethod
    def read(cls, path: Path) -> Contents:
        """Read a checkpoint.

        Raises:
            UnreadableCheckpointError: if it cannot be read; a damaged position of a readable one becomes a ``problem``.
        """
        return cls.of(read_checkpoint(path), path)

    @classmethod
    def of(cls, checkpoint: Mapping[Any, Any], path: Path) -> Contents:
        """What a checkpoint that has been read holds."""
        numbers = {name: value if type(value := checkpoint.get(name)) is int else None for name in ("global_step", "epoch")}
        version = checkpoint.get("pytorch-lightning_version")
        name = state_name(checkpoint)
        return cls(
            path=str(path),
            bytes=size_of(path),
            sharded=path.is_dir(),
            step=numbers["global_step"],
            epoch=numbers["epoch"],
            lightning=version if isinstance(version, str) else None,
            # Sharded ones keep the optimizer's state with the weights.
            trainable="lr_schedulers" in checkpoint,
            entries=tuple(str(entry) for entry in checkpoint),
            data=None if name is None else _data_state(name, checkpoint[name]),
        )


def state_name(checkpoint: Mapping[Any, Any]) -> str | None:
    """The name of the entry that our datamodule, or a subclass of it, keeps its state under."""
    if _DATAMODULE in checkpoint:
        return _DATAMODULE
    fitting = (name for name, value in checkpoint.items() if isinstance(name, str) and type(value) is dict)
    return next((name for name in fitting if set(checkpoint[name]) == _ENTRIES), None)


def _data_state(name: str, state: Any) -> DataState:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    version = state.get("version") if type(state) is dict else None
    made = DataState(datamodule=name, version=version if type(version) is int else None, bytes=buffer.tell())
    try:
        return replace(made, position=_position(state))
    except ResumeError:
        return replace(made, problem=f"it has another form than this release reads, which is version {STATE_VERSION}")
    except StateError as e:
        return replace(made, problem=str(e))


def _position(state: Any) -> Position:
    settings = saved_settings(state)
    spread = topology(settings)
    passes = settings.get("epochs")
    count_or_none(passes, "settings.epochs")
    standings = [_standing(saved, f"ranks[{rank}]", passes) for rank, saved in enumerate(state["ranks"])]
    plain = state["ranks"][0]["point"]
    try:
        point = None if plain is None else ResumePoint.from_plain(plain)
    except (TypeError, ValueError) as e:
        raise damaged("ranks[0].point", str(e)) from e
    return Position(
        ranks=spread.ranks,
        num_workers=spread.workers,
        passes_done=standings[0].epoch,
        passes=passes,
        places=tuple(place for rank, standing in enumerate(standings) for place in _places(rank, standing)),
        counts={name: sum(saved["counts"][name] for saved in state["ranks"]) for name in COUNTS},
        point=point,
        settings=settings,
    )


def _standing(saved: Any, where: str, passes: int | None) -> Standing:
    refuse_damaged_rank(saved, where=where)
    try:
        standing = Standing.of(saved["loader"])
    except StateError:
        raise
    except (TypeError, LookupError, AttributeError, ValueError) as e:
        raise damaged(f"{where}.loader", "it should hold epoch and workers") from e
    number(0, passes or 0)(standing.epoch, f"{where}.loader.epoch")
    for i, (worker, at) in enumerate(standing.workers):
        place = f"{where}.loader.workers[{i}]"
        count(worker, place)
        if at is not None:
            count(at.buffer, f"{place}.buffer")
            count(at.emitted, f"{place}.emitted")
            list_of(restore_key)(at.carried, f"{place}.carried")
            count(at.window, f"{place}.window")
            count(at.window_emitted, f"{place}.window_emitted")
    return standing


def _places(rank: int, standing: Standing) -> Iterator[StreamPlace]:
    for worker, at in standing.workers:
        if at is None:
            yield StreamPlace(rank=rank, worker=worker)
            continue
        parts = list(_parts(at.start))
        readers = [part for part in parts if "_sample_count" in part]
        yield StreamPlace(
            rank=rank,
            worker=worker,
            buffer=at.buffer,
            packs_emitted=at.emitted,
            samples_read=sum(reader["_sample_count"] for reader in readers),
            share_passes=tuple(reader.get("_epoch_count", 0) for reader in readers),
            buffered=sum(len(part.get("_restore_keys", ())) for part in parts),
            carried=len(at.carried),
            window=at.window,
            window_emitted=at.window_emitted,
        )


def _parts(state: Any) -> Iterator[Mapping[str, Any]]:
    """The states of all datasets inside each other."""
    if isinstance(state, dict):
        yield state
        for value in state.values():
            yield from _parts(value)
    elif isinstance(state, list):
        for value in state:
            yield from _parts(value)
