"""A checkpoint's contents in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from time import localtime, strftime
from typing import Any

from lightning_pack.checkpoints.contents import Contents, DataState, Position, StreamPlace
from lightning_pack.checkpoints.file import UnreadableCheckpointError, read_checkpoint
from lightning_pack.checkpoints.run_folder import found_in
from lightning_pack.energon.fields import shown

#: Lines of a list that are shown, and streams.
_MOST_LINES, _MOST_STREAMS = 8, 32
_NEXT = {
    "epoch": "begins the next epoch",
    "batch": "goes on in the epoch",
    "validation": "runs validation if it is due, then goes on",
    "epoch_end": "ends the epoch",
}


def described(contents: Contents) -> Iterator[str]:
    """Line by line."""
    kind = ", sharded" if contents.sharded else ""
    wrote = "" if contents.lightning is None else f", written with Lightning {_plain(contents.lightning)}"
    yield f"{contents.path}: {_bytes(contents.bytes)}{kind}{wrote}"
    yield f"  training   step {_number(contents.step)}, epoch {_number(contents.epoch)}"
    if not contents.trainable:
        yield "             weights only: there is no state of an optimizer, so no training can be resumed from it"
    if contents.data is None:
        yield "  data       none: no position of an EnergonPackDataModule or of a subclass of it"
        yield f"             entries: {', '.join(_plain(name) for name in contents.entries[:40])}"
        return
    yield from _data(contents.data)


def _data(data: DataState) -> Iterator[str]:
    yield f"  data       state of {_plain(data.datamodule)}, version {_number(data.version)}, {_bytes(data.bytes)}"
    if data.position is None:
        yield f"             cannot be read: {data.problem}"
        return
    position = data.position
    counts = position.counts
    yield (
        f"  trained    {_many(counts['rows'], 'row')}, {_many(counts['sources'], 'source')}, "
        f"{_many(counts['real_tokens'], 'real token')}; {_many(counts['left_out'], 'source')} left out"
    )
    if position.point is not None:
        epoch, batch = position.point.epoch, position.point.batch
        within = "" if position.point.next == "epoch" else f" and {_many(batch, 'batch', 'batches')} of the next one"
        yield f"  next       {_many(epoch, 'epoch')}{within} completed; a resumed run {_NEXT[position.point.next]}"
    streams = position.topology.streams
    yield f"  ranks      {_many(position.ranks, 'data-parallel rank')}, num_workers {position.num_workers} on each"
    if position.passes is None:
        yield f"             resumes with: {', '.join(_few(position.topology.legal()))}"
    yield from _places(position, streams)
    yield "  settings   that decide which batches come"
    for name, value in position.settings.items():
        yield from _setting(name, value)


def _places(position: Position, streams: int) -> Iterator[str]:
    if position.passes is None:
        yield f"  position   in an endless stream, dealt out to {_many(streams, 'worker')}"
    else:
        yield f"  position   {position.passes_done} of {_many(position.passes, 'pass', 'passes')} over the data done"
    buffered = sum(place.buffered for place in position.places)
    carried = sum(place.carried for place in position.places)
    yield f"             {_many(buffered, 'source')} in shuffle buffers, {carried} carried over in packing buffers (as keys)"
    for place in position.places[:_MOST_STREAMS]:
        yield f"             {_place(place)}"
    if len(position.places) > _MOST_STREAMS:
        yield f"             and {_many(len(position.places) - _MOST_STREAMS, 'more worker')} (--json lists all)"


def _place(place: StreamPlace) -> str:
    passes = sorted(set(place.share_passes)) or [0]
    read = f"{passes[0]}" if len(passes) == 1 else f"{passes[0]} to {passes[-1]}"
    return (
        f"rank {place.rank}, worker {place.worker}: buffer {place.buffer}, {_many(place.packs_emitted, 'pack')} of it trained; "
        f"begun after {_many(place.samples_read, 'sample')} ({read} passes over its share), {place.buffered} in shuffle buffers"
        f", {place.carried} carried over"
        + (f"; {_many(place.window_emitted, 'pack')} of window {place.window} trained" if place.window_emitted else "")
    )


def _setting(name: str, value: object) -> Iterator[str]:
    if isinstance(value, list | tuple) and len(value) > 1:
        yield f"    {_plain(name)}: {len(value)}"
        yield from (f"      {_plain(line)}" for line in value[:_MOST_LINES])
        if len(value) > _MOST_LINES:
            yield f"      and {len(value) - _MOST_LINES} more (--json lists all)"
        return
    text = repr(value[0] if isinstance(value, list | tuple) and value else value)
    yield f"    {_plain(name)}: {text if len(text) <= 100 else f'{text[:80]}... ({len(text)} characters)'}"


def listed(folder: Path) -> Iterator[str]:
    """The checkpoints of a folder, newest first, a line for each.

    Raises:
        UnreadableCheckpointError: if there is none.
    """
    found = found_in(folder)
    yield f"{folder}: {_many(len(found), 'checkpoint')}, newest first"
    names = [str(path.relative_to(folder)) for path in found]
    width = max(map(len, names))
    for path, name in zip(found, names, strict=True):
        saved = strftime("%Y-%m-%d %H:%M:%S", localtime(path.stat().st_mtime))
        contents, problem = _tried(path)
        yield f"  {_plain(name):{width}}  {saved}  {f'CANNOT BE READ: {problem}' if contents is None else _line(contents)}"


def overview(folder: Path) -> list[dict[str, Any]]:
    """The same for JSON: a name, step, rows trained and problem for each.

    Raises:
        UnreadableCheckpointError: if there is none.
    """
    rows = []
    for path in found_in(folder):
        contents, problem = _tried(path)
        data = None if contents is None else contents.data
        rows.append(
            {
                "name": str(path.relative_to(folder)),
                "step": None if contents is None else contents.step,
                "rows": None if data is None or data.position is None else data.position.counts["rows"],
                "problem": problem if data is None else data.problem,
            }
        )
    return rows


def _tried(path: Path) -> tuple[Contents, None] | tuple[None, str]:
    try:
        return Contents.of(read_checkpoint(path, others=False), path), None
    except (UnreadableCheckpointError, OSError) as e:
        return None, str(e).replace(f"{path} ", "", 1)


def _line(contents: Contents) -> str:
    if contents.data is None:
        place = "no position in the data"
    elif contents.data.position is None:
        place = f"position in the data CANNOT BE READ: {contents.data.problem}"
    else:
        place = f"{_many(contents.data.position.counts['rows'], 'row')} trained"
    weights = "" if contents.trainable else ", weights only"
    return f"step {_number(contents.step)}, {_bytes(contents.bytes)}, {place}{weights}"


def _few(lines: Sequence[str]) -> Sequence[str]:
    return lines if len(lines) <= 12 else [*lines[:6], "...", *lines[-6:]]


def _many(n: int, noun: str, plural: str | None = None) -> str:
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def _number(value: int | None) -> str:
    return "unknown" if value is None else shown(value)


def _bytes(size: int) -> str:
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size} bytes"
        size /= 1000  # type: ignore[assignment]
    return f"{size:,.3g} GB"


def _plain(text: object) -> str:
    """A text of the file for a terminal: nothing in it may command that."""
    return repr(str(text)[:200])[1:-1]
