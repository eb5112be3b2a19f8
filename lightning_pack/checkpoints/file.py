"""Reading a checkpoint safely, and saying why one cannot be read."""

from __future__ import annotations

import re
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

#: What Lightning's sharded checkpoints (FSDP, ModelParallel: folders) keep in a file beside the weights.
META = "meta.pt"
#: Of checkpoints that are files.
SUFFIXES = (".ckpt", ".pt", ".pth")


class UnreadableCheckpointError(ValueError):
    """A checkpoint that is damaged, cut off, or holds more than plain values."""


def content_file(path: Path) -> Path:
    """The file that holds everything but the weights of a sharded checkpoint; of others, the checkpoint itself.

    Raises:
        UnreadableCheckpointError: if there is none.
    """
    if path.is_dir():
        if (path / META).is_file():
            return path / META
        if is_sharded(path):
            raise UnreadableCheckpointError(f"{path} is a sharded checkpoint without its {META}, so its writing was cut off")
        raise UnreadableCheckpointError(f"{path} is a folder that holds no {META}, so it is no checkpoint that Lightning wrote")
    if not path.exists():
        raise UnreadableCheckpointError(
            f"there is no checkpoint at {str(path)!r}: name one, or the folder that a run saved to (in its "
            "configuration, the dirpath of the checkpoint callback)"
        )
    return path


def is_sharded(folder: Path) -> bool:
    """Whether a folder is a checkpoint itself, complete or not, and no folder of checkpoints."""
    return (folder / META).is_file() or (folder / ".metadata").is_file() or any(folder.glob("*.distcp"))


def size_of(path: Path) -> int:
    """Bytes on disk."""
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else (path,)) if file.is_file())


def read_checkpoint(path: Path, *, others: bool = True) -> dict[str, Any]:
    """What a checkpoint holds. No code of the file is run, and weights stay on disk until they are looked at.

    Args:
        path: file, or folder of a sharded checkpoint.
        others: whether errors name another checkpoint of the folder that can be read.

    Raises:
        UnreadableCheckpointError: naming the file, what is wrong with it, and the newest other one that can be read.
        OSError: if the file may not be read.
    """
    try:
        return _read(path)
    except UnreadableCheckpointError as e:
        if others and path.exists():
            raise UnreadableCheckpointError(f"{e}.{_way_out(path)}") from e.__cause__
        raise


def _read(path: Path) -> dict[str, Any]:
    file = content_file(path)
    try:
        content = _load(file)
    except (PermissionError, FileNotFoundError):
        raise
    except Exception as e:  # torch raises whatever the bytes of the file lead to
        raise UnreadableCheckpointError(_why(file, e)) from e
    if not isinstance(content, dict):
        raise UnreadableCheckpointError(f"{file} holds a {type(content).__name__}, so it is no checkpoint that Lightning wrote")
    if path.is_dir() and not (path / ".metadata").is_file():
        raise UnreadableCheckpointError(f"{path} holds no .metadata, so its weights cannot be read")
    return content


def verify(path: Path) -> int:
    """Read all of a checkpoint and compare it with the checksums that it was written with.

    Returns:
        How many parts have been compared.

    Raises:
        UnreadableCheckpointError: naming the part that changed.
    """
    file = content_file(path)
    try:
        with zipfile.ZipFile(file) as archive:
            parts, broken = len(archive.namelist()), archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, OSError) as e:
        raise UnreadableCheckpointError(f"{file} is damaged ({type(e).__name__}: {e}).{_way_out(path)}") from e
    if broken is not None:
        raise UnreadableCheckpointError(
            f"{file} is damaged: its part {broken!r} is not as it was written (its checksum differs).{_way_out(path)}"
        )
    return parts


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, files and sharded ones, newest first."""
    found = [
        each
        for each in folder.iterdir()
        if (each.suffix in SUFFIXES and each.is_file()) or (each.is_dir() and is_sharded(each))
    ]
    return sorted(found, key=lambda each: (each.stat().st_mtime_ns, each.name), reverse=True)


def _load(file: Path) -> Any:
    with warnings.catch_warnings():
        # About the protocol of files that torch.save has not written.
        warnings.simplefilter("ignore")
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))


def _why(file: Path, error: Exception) -> str:
    if file.stat().st_size == 0:
        return f"{file} is empty: its writing was cut off"
    with file.open("rb") as stream:
        begins = stream.read(4)
    if begins == b"PK\x03\x04" and not zipfile.is_zipfile(file):
        return f"{file} is cut off: its writing was interrupted, or it was not copied in full"
    if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return (
            f"{file} holds objects of {named[1]}, and reading those could run code of the file, so it is refused. Checkpoints "
            "consist of tensors, lists, dicts, numbers and strings; where your own module or callback saves something else, "
            "let it save such values instead"
        )
    if not zipfile.is_zipfile(file):
        return f"{file} is no checkpoint that torch.save wrote, or its beginning is damaged"
    return f"{file} cannot be read as a checkpoint: it is damaged ({type(error).__name__})"


def _way_out(path: Path) -> str:
    for other in checkpoints_in(path.parent):
        if other.resolve() == path.resolve():
            continue
        try:
            content = _read(other)
        except (UnreadableCheckpointError, OSError):
            continue
        if "lr_schedulers" in content:
            return f" Take another checkpoint; the newest in this folder that can be read is {other}"
    return " Take another checkpoint; there is no other in this folder that can be read"
