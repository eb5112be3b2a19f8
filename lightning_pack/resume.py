"""What a checkpoint's position holds for, and the refusal to go on from it with other settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from lightning_pack.energon.fields import count, damaged, shown, torch_random
from lightning_pack.energon.fingerprint import changed_files, same_index
from lightning_pack.energon.state import from_plain
from lightning_pack.flat_settings import flat
from lightning_pack.topology import RANKS, WORKERS, Topology, many, topology

#: Version of the datamodule's state in a checkpoint.
STATE_VERSION = 3
#: What each rank counts of what it trained on.
COUNTS = ("rows", "sources", "real_tokens", "left_out")

NEW_RUN = "Or start a new run; LightningModule.load_from_checkpoint gives it the weights."
RESTART = "on_mismatch='restart' keeps weights and optimizer and starts the data over."
_FILES = "data.files"
_MOST_FILES_NAMED = 8
_MOST_SHOWN, _MOST_LINES = 120, 60


class ResumeError(ValueError):
    """A checkpoint that cannot be continued exactly with the settings of this run."""


def no_position(path: object, datamodule: type) -> str:
    """The reason to refuse a checkpoint that holds no state of a class of datamodule."""
    return (
        f"the checkpoint {str(path)!r} holds no position in the data for {datamodule.__qualname__}: it was saved by another "
        f"datamodule, or by a subclass of this one, which keeps it under its own name. {RESTART} {NEW_RUN}"
    )


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as a checkpoint keeps them: :func:`flat`, of plain values only, none of them shared with anyone.

    Raises:
        ValueError: naming the setting that is no plain value.
    """
    return {name: _copied(value, name) for name, value in flat(settings).items()}


def _copied(value: Any, name: str) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_copied(item, name) for item in value)
    if type(value) is dict:
        return {key: _copied(item, name) for key, item in value.items()}
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    raise ValueError(
        f"the setting {name} is {shown(value)} ({type(value).__name__}), which a checkpoint cannot hold: a fingerprint() must "
        "consist of dicts, lists, numbers and strings"
    )


def refuse_other_topology(saved: Topology, now: Topology) -> Literal["same", "redistribute"]:
    """Whether a position of one topology holds for another, and how.

    Returns:
        ``"same"``, or ``"redistribute"`` where ranks or workers differ and their product does not: the parts of the data are
        the same and only change hands.

    Raises:
        ResumeError: for another product, with both topologies and the legal choices.
    """
    if saved == now:
        return "same"
    if saved.streams == now.streams:
        return "redistribute"
    legal = saved.legal()
    listed = ", ".join(legal) if len(legal) <= 24 else ", ".join([*legal[:12], "...", *legal[-12:]])
    raise ResumeError(
        "\n".join(saved.differs_from(now))
        + f"\n  (the data was dealt out to {many(saved.streams, 'stream')} and would be to {now.streams}; legal: {listed})"
    )


def refuse_redistribution(saved: Topology, now: Topology) -> None:
    """Refuse what :func:`refuse_other_topology` calls ``"redistribute"``.

    Raises:
        ResumeError: always.
    """
    reason = "  (passes over the data end at another row on other ranks; only an endless stream can be spread anew)"
    raise _refusal([*saved.differs_from(now), reason])


def different_settings(saved: Mapping[str, Any], now: Mapping[str, Any], *, damage_ok: bool = False) -> list[str]:
    """A line for each setting that differs, and for each file of the data; ranks and workers are not compared here.

    With ``damage_ok``, files may have another content, or be missing, as long as the index is the same.
    """
    lines = []
    for name in {**saved, **now}:
        old, new = saved.get(name, "not set"), now.get(name, "not set")
        if name in (RANKS, WORKERS) or old == new:
            continue
        if name == _FILES and all(type(files) is list and all(type(f) is str for f in files) for files in (old, new)):
            files = [] if damage_ok and same_index(old, new) else changed_files(old, new)
            lines += [f"  data: {line}" for line in files[:_MOST_FILES_NAMED]]
            if len(files) > _MOST_FILES_NAMED:
                lines.append(f"  data: and {len(files) - _MOST_FILES_NAMED} more files")
        else:
            lines.append("  {}: {} in the checkpoint, {} now".format(name[:_MOST_SHOWN], *_apart(repr(old), repr(new))))
    return lines


def _apart(old: str, new: str) -> tuple[str, str]:
    """Two texts, long ones cut to where they begin to differ."""
    if max(len(old), len(new)) <= _MOST_SHOWN:
        return old, new
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(same - _MOST_SHOWN // 4, 0)
    cut = ((text, text[start : start + _MOST_SHOWN]) for text in (old, new))
    first, second = (
        f"{'...' if start else ''}{part}{'...' if start + len(part) < len(text) else ''} ({len(text)} characters)"
        for text, part in cut
    )
    return first, second


def _refusal(lines: list[str]) -> ResumeError:
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"  and {len(lines) - _MOST_LINES} more"]
    listed = "\n".join(lines)
    return ResumeError(
        "the run cannot continue exactly, because these settings decide which batches come:\n"
        f"{listed}\nSet them back to resume. {RESTART} {NEW_RUN}"
    )


def _saved_settings(settings: Any) -> dict[str, Any]:
    found = from_plain(settings, where="settings")
    if type(found) is not dict or any(type(name) is not str for name in found):
        raise damaged("settings", "they should have names")
    try:
        return plain_settings(found)
    except ValueError as e:
        raise damaged("settings", str(e)) from e


def saved_settings(state: Any) -> dict[str, Any]:
    """The settings that a checkpoint's state holds for.

    Raises:
        ResumeError: for a state of another version.
        StateError: if the state is not one that this package writes.
    """
    # A tensor, which it may be by damage, has no truth.
    if state is None or (type(state) is dict and not state):
        raise ResumeError(
            "the checkpoint's data position is empty: the checkpoint was not saved while training, or its position was taken "
            f"out. {RESTART} {NEW_RUN}"
        )
    found = state.get("version") if type(state) is dict else None
    if type(found) is not int or found != STATE_VERSION:
        raise ResumeError(
            f"the checkpoint's data position has version {shown(found)}, this package reads version {STATE_VERSION}: resume "
            f"with the release that wrote it. {RESTART} {NEW_RUN}"
        )
    if set(state) != {"version", "settings", "ranks"} or type(state["settings"]) is not dict:
        raise damaged("its outermost part", "it should hold version, settings and ranks")
    saved = _saved_settings(state["settings"])
    ranks = topology(saved).ranks
    if type(state["ranks"]) is not list or len(state["ranks"]) != ranks:
        raise damaged("ranks", f"it should hold a list of {ranks}")
    return saved


def refuse_other_settings(
    state: Any, *, settings: Mapping[str, Any], damage_ok: bool = False
) -> Literal["same", "redistribute"]:
    """Compare the settings of a checkpoint's state with those of this run.

    Returns:
        The verdict of :func:`refuse_other_topology`.

    Raises:
        ResumeError: naming each setting that differs, with both values; or for a state of another version.
        StateError: if the state is not one that this package writes.
    """
    saved = saved_settings(state)
    before, now = topology(saved), topology(settings)
    lines = different_settings(saved, settings, damage_ok=damage_ok)
    verdict: Literal["same", "redistribute"] = "same"
    try:
        verdict = refuse_other_topology(before, now)
    except ResumeError as e:
        lines.append(str(e))
    if lines:
        raise _refusal(lines)
    return verdict


def refuse_damaged_rank(saved: Any, *, where: str) -> None:
    """Check what a rank saved beside the loader's position.

    Args:
        saved: an entry of the state's ``ranks``.
        where: what the errors call the entry.

    Raises:
        StateError: if it is not one that this package writes.
    """
    for value, names, place in (
        (saved, {"loader", "counts", "random", "point"}, where),
        (saved.get("counts") if type(saved) is dict else None, set(COUNTS), f"{where}.counts"),
    ):
        if type(value) is not dict or set(value) != names:
            raise damaged(place, f"it should hold {', '.join(sorted(names))}")
    for name, value in saved["counts"].items():
        count(value, f"{where}.counts.{name}")
    drawn = saved["random"]
    if drawn is None:
        return
    if type(drawn) is not dict or set(drawn) != {"cpu", "device"}:
        raise damaged(f"{where}.random", "it should hold cpu and device")
    torch_random(from_plain(drawn["cpu"], where=f"{where}.random.cpu"), f"{where}.random.cpu")
    device = from_plain(drawn["device"], where=f"{where}.random.device")
    if device is not None and (type(device) is not torch.Tensor or device.shape != (16,)):
        raise damaged(f"{where}.random.device", "this is no state of a device's random numbers")
