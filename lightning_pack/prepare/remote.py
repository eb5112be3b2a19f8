"""Datasets in an object store: prepared in a local folder and uploaded, so that an unfinished upload never looks finished.

A store cannot rename a folder. So ``lightning_pack.unfinished.json`` is written first and deleted last, what Energon knows a
dataset by is uploaded near the end, and an overwritten dataset loses that before anything else. A run that reads a dataset
while it is overwritten fails; a new folder is the better place for new data.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron.energon.epathlib import EPath

import lightning_pack.energon.storage  # noqa: F401 - makes Energon's paths patient
from lightning_pack.prepare.dataset import runs
from lightning_pack.prepare.progress import progress_bar
from lightning_pack.prepare.result import (
    FORMAT,
    MARKER,
    PreparedDataset,
    read_marker,
    refuse_foreign,
    refuse_other_settings,
)

#: Object that only an unfinished dataset holds: who began it.
UNFINISHED = "lightning_pack.unfinished.json"
#: What Energon knows a dataset by: its index, and in that before all else this.
_INDEX, _INFO = ".nv-meta/", ".nv-meta/.info.json"


def prepare_remotely(
    out: str, *, prepare: Callable[[Path], PreparedDataset], overwrite: bool, progress: bool
) -> PreparedDataset:
    """Prepare a dataset in a folder that is given to ``prepare``, and upload it to ``out``.

    Where the same dataset is there already, that one stays.

    Raises:
        ValueError: if something else is there, or another process is just writing it.
        StorageError: if the store is away for too long; the same call starts the upload again.
    """
    target = EPath(out)
    _refuse(target, overwrite=overwrite)
    with tempfile.TemporaryDirectory(prefix="lightning-pack-") as folder:
        made = prepare(Path(folder) / "dataset")
        if not overwrite:
            there = prepared_remotely(out)
            if there is not None:
                refuse_other_settings(there, recipe=made.recipe, options=made.options)
                return there
        found = _refuse(target, overwrite=overwrite)
        _upload(Path(folder), target, found, progress=progress)
    return replace(made, path=out)


def prepared_remotely(out: str) -> PreparedDataset | None:
    """The finished dataset at ``out``, or None where there is none."""
    target = EPath(out)
    found = _found(target)
    if MARKER not in found or UNFINISHED in found:
        return None
    return read_marker(out, (target / MARKER).read_text(), found={name.split("/")[0] for name in found})


def _found(target: EPath) -> set[str]:
    return {file.relative_to(target) for file in target.walk()}


def _refuse(target: EPath, *, overwrite: bool) -> set[str]:
    if target.is_file():
        raise ValueError(f"{target} is an object, not a folder: choose another folder")
    found = _found(target)
    if UNFINISHED in found:
        writer = json.loads((target / UNFINISHED).read_text())
        gone = writer["host"] == platform.node() and (writer["pid"] == os.getpid() or not runs(writer["pid"]))
        if not gone and not overwrite:
            raise ValueError(
                f"process {writer['pid']} on {writer['host']} is preparing {target}, or was stopped while it did: wait for it, "
                "or start again with --overwrite (overwrite=True)"
            )
    refuse_foreign(str(target), {name.split("/")[0] for name in found}, marks=(MARKER, UNFINISHED))
    return found


def _upload(folder: Path, target: EPath, found: set[str], *, progress: bool) -> None:
    dataset = folder / "dataset"
    files = {str(file.relative_to(dataset)): file for file in dataset.rglob("*") if file.is_file()}
    (folder / UNFINISHED).write_text(json.dumps({"format": FORMAT, "host": platform.node(), "pid": os.getpid()}) + "\n")
    EPath(folder / UNFINISHED).copy(target / UNFINISHED)
    for name in sorted(found - {UNFINISHED}, key=_late, reverse=True):
        (target / name).unlink()
    size = sum(file.stat().st_size for file in files.values())
    with progress_bar(f"uploading to {target}", total=size, shown=progress) as advance:
        for name in sorted(files, key=_late):
            EPath(files[name]).copy(target / name)
            advance(files[name].stat().st_size)
    (target / UNFINISHED).unlink()


def _late(name: str) -> tuple[int, str]:
    """In this order a dataset becomes visible at the end of an upload; in the opposite one it goes away at once."""
    return (name.startswith(_INDEX) + (name == _INFO) + 3 * (name == MARKER), name)
