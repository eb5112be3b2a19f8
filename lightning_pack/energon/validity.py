"""Whether a saved position can be one in the data that is open.

Energon hands every value of a state to the worker it belongs to and notices much later: a bare assertion, an index error while
a buffer is read again, a random number that cannot be drawn. Here the state is laid beside the datasets that it is for, in the
main process, before any worker starts.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.rng import WorkerRng
from megatron.energon.state import FlexState
from megatron.energon.wrappers import BlendDataset, MapDataset, RepeatDataset, ShuffleBufferDataset
from megatron.energon.wrappers.base import BaseWrapperDataset, SampleIndex
from megatron.energon.wrappers.buffer import SavableSampleBuffer

from lightning_pack.energon.dataset import StreamOptions, open_share
from lightning_pack.energon.fields import MOST_COUNT, StateError, count, damaged, list_of, number, restore_key, shown
from lightning_pack.energon.position import HASH_BYTES, StagePosition
from lightning_pack.energon.reader import Workers
from lightning_pack.energon.reading import Reading
from lightning_pack.energon.state import MOST_BYTES, from_plain
from lightning_pack.energon.worker import Whereabouts
from lightning_pack.policy import PackingPolicy

#: A position may pass over so many buffers of sources; a part of the data that gets lost adds one at most.
MOST_BUFFERS_PASSED_OVER = 64


def refuse_scattered(positions: list[Any], *, streams: int, epochs: int | None) -> None:
    """Check that the states of the ranks' loaders are those of one run: each logical worker once, all in the same pass.

    Args:
        positions: of all ranks; what ``ExactLoader.state()`` gave, read back from a checkpoint, or anything else.
        streams: how many logical workers there are over all ranks.
        epochs: passes over the data; None is an endless stream.

    Raises:
        StateError: naming the part that is not.
    """
    each = streams // len(positions)
    seen: set[int] = set()
    for rank, position in enumerate(positions):
        where = f"ranks[{rank}].loader"
        _holds(position, {"epoch", "workers"}, where)
        number(0, epochs or 0)(position["epoch"], f"{where}.epoch")
        if position["epoch"] != positions[0]["epoch"]:
            raise damaged(f"{where}.epoch", f"{position['epoch']} passes are done, and {positions[0]['epoch']} on another rank")
        if type(position["workers"]) is not list or len(position["workers"]) != each:
            raise damaged(f"{where}.workers", f"it should hold a list of {each}")
        for i, saved in enumerate(position["workers"]):
            place = f"{where}.workers[{i}]"
            _holds(saved, {"worker", "at"}, place)
            number(0, streams - 1)(saved["worker"], f"{place}.worker")
            if saved["worker"] in seen:
                raise damaged(f"{place}.worker", f"worker {saved['worker']} is there twice")
            seen.add(saved["worker"])


def refuse_impossible(
    position: Any, *, options: StreamOptions, workers: Workers, epochs: int | None, where: str = "loader"
) -> None:
    """Check the state of an :class:`~lightning_pack.energon.ExactLoader` against the data that it would go on in.

    Args:
        position: of a rank, which :func:`refuse_scattered` has let through.
        options: of the stream; it is opened, but nothing is read and no worker is started.
        workers: those of this rank.
        epochs: passes over the data; None is an endless stream.
        where: what the errors call the position.

    Raises:
        StateError: if no loader could have stood there.
    """
    epoch = None if epochs is None else position["epoch"]
    for i, saved in enumerate(position["workers"]):
        at, place = saved["at"], f"{where}.workers[{i}].at"
        if at is None:
            continue
        if epoch == epochs and epochs is not None:
            raise damaged(place, f"all {epochs} passes over the data are said to be done")
        _stage(at, options.policy, place)
        parts = {name: from_plain(b"" if part is None else part, where=f"{place}.{name}") for name, part in at.items()}
        share = open_share(options, saved["worker"], Whereabouts(), split="train", of=workers.of, epoch=epoch)
        _dataset(share.dataset, parts["start"], f"{place}.start", 0)
        _keys(share.dataset, at["carried"], f"{place}.carried", 0)


def _stage(at: Any, policy: PackingPolicy, where: str) -> None:
    """A :class:`~lightning_pack.energon.stage.StagePosition` in plain containers, but for its ``start``."""
    _holds(at, {f.name for f in fields(StagePosition)}, where)
    size, windowed = policy.buffer_size, policy.window_size if policy.balance is not None else 0
    for name, most in (
        *(("buffer", MOST_COUNT), ("emitted", size), ("read", MOST_COUNT)),
        *(("window", MOST_COUNT if windowed else 0), ("window_emitted", windowed)),
    ):
        number(0, most)(at[name], f"{where}.{name}")
    carried, entered = at["carried"], at["entered"]
    list_of(restore_key)(carried, f"{where}.carried")
    list_of(number(0, max(at["read"] - 1, 0)))(entered, f"{where}.entered")
    if len(carried) != len(entered) or len(carried) > (size if policy.carry_over else 0) or sorted(entered) != entered:
        raise damaged(f"{where}.carried", f"{len(carried)} sources cannot have stayed in a buffer of {size}, with this history")
    # A pack has a source at least.
    noted = 1 if at["emitted"] or carried else 0
    emitted, gone = at["emitted"], at["window_emitted"]
    for name, least, most in (
        ("skip", 0, min(MOST_BUFFERS_PASSED_OVER * size, MOST_BYTES // HASH_BYTES)),
        ("given", emitted, size if emitted else 0),
        ("digest", noted, noted),
        ("window_given", gone, min(gone * policy.capacity, MOST_BYTES // HASH_BYTES)),
    ):
        hashes = b"" if at[name] is None else at[name]
        if type(hashes) is not bytes or not least * HASH_BYTES <= len(hashes) <= most * HASH_BYTES or len(hashes) % HASH_BYTES:
            raise damaged(
                f"{where}.{name}",
                f"{shown(at[name])} is no row of {least} to {most} hashes of {HASH_BYTES} bytes, after {emitted} packs",
            )


def _holds(value: Any, names: set[str], where: str) -> None:
    if type(value) is not dict or set(value) != names:
        raise damaged(where, f"{shown(value)} does not hold {', '.join(sorted(names))}")


def _dataset(dataset: SavableDataset[Any], state: Any, where: str, worker: int) -> None:
    """A dataset, the datasets inside it, and its buffers."""
    name = type(dataset).__name__
    if type(state) is not FlexState:
        raise damaged(where, f"{shown(state)} is no state of a {name}")
    if state.get("__class__") != name:
        raise damaged(where, f"the state of a {shown(state.get('__class__'))} stands where that of a {name!r} belongs")
    where = f"{where}.{name}" if not isinstance(dataset, SavableSampleBuffer) else where
    saves = {"__class__", *dataset._savable_fields}
    inner: tuple[SavableDataset[Any], ...] = ()
    if isinstance(dataset, BaseWrapperDataset) and not isinstance(dataset, SavableSampleBuffer):
        saves, inner = saves | {"datasets"}, dataset.datasets
    if not saves <= set(state) or (type(dataset).save_state in _SAVES_ITS_FIELDS and set(state) != saves):
        raise damaged(where, f"it should hold {sorted(saves)} and holds {sorted(shown(key) for key in state)[:12]}")
    for field in dataset._savable_fields:
        part, value, place = getattr(dataset, field, None), state.get(field), f"{where}.{field}"
        if isinstance(part, SavableDataset):
            _dataset(part, value, place, worker)
        elif isinstance(part, WorkerRng):
            if type(value) is not FlexState or set(value) != {"rng"}:
                raise damaged(place, f"{shown(value)} is no state of random numbers")
        elif isinstance(part, SampleIndex):
            count(value, place)
    for kind, check in _CHECKS.items():
        if isinstance(dataset, kind):
            check(dataset, state, where, worker)
    if inner:
        states = state.get("datasets")
        if type(states) is not list or len(states) != len(inner):
            raise damaged(where, f"it should hold the states of {len(inner)} datasets")
        for i, (each, saved) in enumerate(zip(inner, states, strict=True)):
            _dataset(each, saved, where.rpartition(".")[0] if len(inner) == 1 else f"{where}[{i}]", worker)


_SAVES_ITS_FIELDS = (SavableDataset.save_state, BaseWrapperDataset.save_state, SavableSampleBuffer.save_state)


def _reader(dataset: WebdatasetSampleLoaderDataset, state: FlexState, where: str, worker: int) -> None:
    offsets = dataset.workers_slice_offsets[worker]
    slices = max(len(offsets) - 1, 0)
    pending, taken = state["_pending_slice_indexes"], state["_pending_slices_offset"]
    active = state["_active_slice_state"]
    if (pending is None) != (taken is None):
        raise damaged(f"{where}._pending_slice_indexes", "the slices still to be read and the number read must come together")
    if pending is not None:
        for i, index in enumerate(pending):
            if index >= slices:
                raise damaged(f"{where}._pending_slice_indexes[{i}]", f"slice {index} is beyond the data, which has {slices}")
        over = 1 if dataset.shuffle_over_epochs is None else dataset.shuffle_over_epochs
        if over > 0 and taken + len(pending) != slices * over:
            raise damaged(
                f"{where}._pending_slices_offset", f"{taken} slices read and {len(pending)} to be read are not {slices * over}"
            )
    if len(active) != dataset.parallel_slice_iters:
        raise damaged(f"{where}._active_slice_state", f"{len(active)} slices are open; {dataset.parallel_slice_iters} must be")
    for i, slice_state in enumerate(active):
        if slice_state is None:
            continue
        place = f"{where}._active_slice_state[{i}]"
        if slice_state.index >= slices or pending is None:
            raise damaged(place, f"slice {slice_state.index} is beyond the data, which has {slices}")
        first, end = offsets[slice_state.index], offsets[slice_state.index + 1]
        if not first <= slice_state.current < max(end, first + 1):
            raise damaged(place, f"sample {slice_state.current} is not in its slice, {first} to {end - 1}")


def _buffer(dataset: SavableSampleBuffer[Any], state: FlexState, where: str, worker: int) -> None:
    _keys(dataset.dataset, state["_restore_keys"], f"{where}._restore_keys", worker)


def _keys(dataset: SavableDataset[Any], keys: list[tuple[Any, ...]], where: str, worker: int) -> None:
    for i, key in enumerate(keys):
        try:
            _key(dataset, key, where, worker)
        except StateError:
            # The place is named for errors only.
            _key(dataset, key, f"{where}[{i}]", worker)


def _map(dataset: MapDataset[Any, Any], state: FlexState, where: str, worker: int) -> None:
    key, offset = state["_generator_sample_key"], state["_generator_offset"]
    if key is None and offset is None:
        return
    if key is None or offset is None or not inspect.isgeneratorfunction(dataset.map_fn):
        raise damaged(f"{where}._generator_sample_key", "no sample can be half done here")
    _key(dataset.dataset, key, f"{where}._generator_sample_key", worker)


def _shuffle(dataset: ShuffleBufferDataset[Any], state: FlexState, where: str, worker: int) -> None:
    _at_most(len(state["_active_buffer"]["_restore_keys"]), dataset.size, where)


def _at_most(held: int, size: int, where: str) -> None:
    if held > size:
        raise damaged(where, f"{held} samples are in a buffer of {size}")


def _blend(dataset: BlendDataset[Any], state: FlexState, where: str, worker: int) -> None:
    exhausted = state["exhausted"]
    if len(exhausted) != len(dataset.datasets):
        raise damaged(f"{where}.exhausted", f"{len(exhausted)} datasets, and the data has {len(dataset.datasets)}")
    if all(exhausted):
        raise damaged(f"{where}.exhausted", "all datasets are said to have ended, and the blend begins again where they have")
    for i, (ended, inner) in enumerate(zip(exhausted, dataset.datasets, strict=True)):
        endless = isinstance(inner, RepeatDataset) and inner.repeats is None
        if ended and endless and inner.dataset.len_worker(worker) > 0:
            raise damaged(f"{where}.exhausted[{i}]", "a dataset that is repeated for ever is said to have ended")


_CHECKS: dict[type[Any], Any] = {
    BlendDataset: _blend,
    MapDataset: _map,
    SavableSampleBuffer: _buffer,
    ShuffleBufferDataset: _shuffle,
    WebdatasetSampleLoaderDataset: _reader,
}
_PASSES_KEYS_ON = (BaseWrapperDataset.restore_sample, ShuffleBufferDataset.restore_sample)


def _key(dataset: SavableDataset[Any], key: tuple[Any, ...], where: str, worker: int) -> None:
    """Follow a sample's key down to the file, as Energon will when it reads the sample again."""
    rest = key
    while True:
        if isinstance(dataset, WebdatasetSampleLoaderDataset):
            offsets = dataset.workers_slice_offsets[worker]
            fits = len(rest) == 2 and rest[0] == "Webdataset" and type(rest[1]) is int
            if not fits or not len(offsets) or not offsets[0] <= rest[1] < offsets[-1]:
                raise damaged(where, f"there is no sample {_words(key)} in the data of this worker")
            return
        numbers = 0
        if isinstance(dataset, MapDataset):
            numbers = 2 if inspect.isgeneratorfunction(dataset.map_fn) else 1
        elif isinstance(dataset, Reading):
            numbers = 1
        elif type(dataset).restore_sample not in _PASSES_KEYS_ON:
            return
        elif len(dataset.datasets) > 1:
            numbers = 1
        if numbers:
            name, found = rest[:1], rest[1 : 1 + numbers]
            if name != (type(dataset).__name__,) or len(found) != numbers or any(type(n) is not int for n in found):
                raise damaged(where, f"{_words(key)} is not the key of a sample of this data")
            rest = rest[1 + numbers :]
        several = isinstance(dataset, BaseWrapperDataset) and len(dataset.datasets) > 1
        if several and found[0] >= len(dataset.datasets):
            raise damaged(where, f"{_words(key)} is not the key of a sample of this data")
        dataset = dataset.datasets[found[0] if several else 0]


def _words(key: tuple[Any, ...]) -> str:
    return "/".join(shown(part).strip("'") for part in key[:16])
