"""The folders that a run writes its checkpoints to, which belong to one run at a time."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pack.checkpoints.file import checkpoints_in

#: A run holds a lock on this file in every folder of its checkpoints; the kernel releases it however the process ends.
LOCK = ".lightning-pack.lock"

#: A run that ends at the same moment takes the file away once.
_TRIES = 100

#: Locked files of this process. A loader's worker that outlives a killed run for seconds must not keep the folder locked.
_held: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def own_folders(trainer: Trainer) -> Iterator[None]:
    """Keep other runs out of the folders that a trainer's checkpoints go to.

    Folders whose names a logger numbers are a run's own anyway. Folders of other file systems (``s3://``) and those that
    cannot be locked are left alone, and only the process of global rank 0 does anything.

    Raises:
        ValueError: if another run writes to one of the folders.
    """
    with ExitStack() as stack:
        if _saves(trainer):
            for folder in sorted({*_checkpoint_folders(trainer).values(), *_root(trainer)}):
                stack.enter_context(_own(folder))
        yield


def warn_of_older_checkpoints(trainer: Trainer) -> None:
    """Tell of checkpoints that a run from the beginning may replace, once for each folder."""
    if not _saves(trainer):
        return
    told = set()
    for callback, folder in _checkpoint_folders(trainer).items():
        # With the counter no file is replaced.
        if callback._enable_version_counter or folder in told or not (callback.save_top_k or callback.save_last):
            continue
        found = [path for path in checkpoints_in(folder) if path.suffix == callback.FILE_EXTENSION] if folder.is_dir() else []
        if not found:
            continue
        told.add(folder)
        last = folder / f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}"
        old = last if last in found else found[0]
        listed = ", ".join(path.name for path in found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        rank_zero_warn(
            f"{folder} holds checkpoints of an earlier run ({listed}): a new run begins, and its checkpoints replace those of "
            f"the same names; --ckpt_path {old} goes on with the earlier run instead"
        )


def _saves(trainer: Trainer) -> bool:
    """Whether this process writes checkpoints."""
    # Lightning sets it where type checkers do not see it.
    return trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]


def _checkpoint_folders(trainer: Trainer) -> dict[ModelCheckpoint, Path]:
    """The local folder of each callback whose folder is known before training and the same in every run."""
    folders = {}
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        folder = callback.dirpath
        if folder is None and not trainer.loggers:
            folder = os.path.join(trainer.default_root_dir, "checkpoints")
        if folder is not None and "://" not in str(folder):
            folders[callback] = Path(folder).resolve()
    return folders


def _root(trainer: Trainer) -> list[Path]:
    """The trainer's own folder where a run saves into it, unless it is just where the command was started."""
    root = str(trainer.default_root_dir)
    if trainer.loggers or "://" in root:
        return []
    folder = Path(root).resolve()
    return [] if folder == Path.cwd() else [folder]


@contextmanager
def _own(folder: Path) -> Iterator[None]:
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    file = folder / LOCK
    descriptor = _lock(file)
    try:
        yield
    finally:
        if descriptor is not None:
            # While it is still locked, so that the file removed is this run's.
            file.unlink(missing_ok=True)
            _held.discard(descriptor)
            os.close(descriptor)
        for path in made:
            try:
                path.rmdir()
            except OSError:  # it is used
                break


def _lock(file: Path) -> int | None:
    """A descriptor of the locked file; None where files cannot be locked."""
    for _ in range(_TRIES):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # the run before has just removed its folder
            continue
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The run before may have removed the file since it was opened: what is locked then is nobody's.
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                _held.add(descriptor)
                return descriptor
        except FileNotFoundError:
            pass
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace")
            os.close(descriptor)
            raise ValueError(
                f"{file.parent}: another run{f' ({holder})' if holder else ''} writes its checkpoints there, and each would "
                "replace the other's: wait until it has ended, or write elsewhere, with --trainer.default_root_dir and the "
                "dirpath of the checkpoint callbacks"
            ) from None
        except OSError:
            file.unlink(missing_ok=True)
            os.close(descriptor)
            return None
        os.close(descriptor)
    return None
