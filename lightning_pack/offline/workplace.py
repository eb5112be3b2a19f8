"""Where rows are written before they are complete: a hidden folder beside the destination, which a later run goes on from.

``.NAME.prepack`` holds the settings, what is encoded, and the shards that are written. The last step renames the dataset in it
to the destination, so that a folder of rows is complete or not there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_pack.offline.manifest import MANIFEST, Manifest, different, write_json
from lightning_pack.prepare.dataset import index_shards

_SETTINGS = "settings.json"
#: Origin of rows whose writing goes on where it was ended.
RESUMED = "prepack"
#: Seconds in which the processes of a run that was killed notice it.
_LAST_BREATH = 3.0
#: What a disk that takes no more answers.
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS))


@dataclass(frozen=True)
class Workplace:
    """The folder in which rows for ``out`` are written."""

    out: Path

    @property
    def folder(self) -> Path:
        """For what is needed until the rows are complete."""
        return self.out.with_name(f".{self.out.name}.prepack")

    @property
    def dataset(self) -> Path:
        """What becomes ``out``."""
        return self.folder / "dataset"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Only one run at a time works here.

        Raises:
            ValueError: if another run does; and from what is done here, where the disk is full or may not be written.
        """
        self.out.parent.mkdir(parents=True, exist_ok=True)
        # Beside the folder, which is removed in the end.
        path = self.folder.with_name(f"{self.folder.name}.lock")
        until = time.monotonic() + _LAST_BREATH
        with contextlib.ExitStack() as stack:
            while True:
                file = stack.enter_context(path.open("w"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                        break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise ValueError(
                            f"another run writes rows for {self.out}: wait for it, or choose another folder"
                        ) from None
                # The run before has removed it, or goes on.
                stack.close()
                time.sleep(0.1)
            try:
                yield
            except OSError as e:
                if e.errno not in _FULL:
                    raise
                raise ValueError(
                    f"the rows for {self.out} cannot be written ({e}): make room there, or choose a folder on another disk; "
                    "the same command goes on where this one stopped"
                ) from e
            finally:
                path.unlink(missing_ok=True)

    def begin(self, settings: Mapping[str, Any], *, overwrite: bool) -> None:
        """Begin, or go on with what is there.

        Raises:
            ValueError: if what is there was begun with other settings, naming each; not with ``overwrite``.
        """
        # Settings cross a JSON file.
        now = json.loads(json.dumps(settings))
        before = None
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            before = json.loads((self.folder / _SETTINGS).read_text())
            if before["origin"] != RESUMED:
                # Of a conversion, which is quick and begins again.
                before = None
        if before is not None:
            if before == now and self.dataset.is_dir():
                return
            if before != now and not overwrite:
                raise ValueError(
                    f"rows for {self.out} were begun with other settings:\n" + "\n".join(different(before, now)) + "\nSet them "
                    "back to go on, or begin again with --overwrite (overwrite=True)"
                )
        self.clear()
        self.dataset.mkdir(parents=True)
        write_json(self.folder / _SETTINGS, now)

    def clear(self) -> None:
        """Remove what is needed no more."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def publish(self, manifest: Manifest, shards: Sequence[str], *, overwrite: bool) -> None:
        """Index the shards, write the manifest, and put everything in its place."""
        # Of a run that was killed just here.
        shutil.rmtree(self.dataset / ".nv-meta", ignore_errors=True)
        keep = {*shards, "tokenizer"}
        for entry in self.dataset.iterdir():
            if entry.name not in keep:
                entry.unlink()
        index_shards(self.dataset, list(shards))
        # Energon draws a random id for the index; the same content gets the same id here.
        (self.dataset / ".nv-meta" / "index.uuid").write_text(str(uuid.uuid5(uuid.NAMESPACE_OID, manifest.digest)))
        manifest.write(self.dataset)
        replaced = self.folder / "replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        if self.out.exists():
            if overwrite:
                self.out.rename(replaced)
            else:
                # Empty, as was checked.
                os.rmdir(self.out)
        try:
            self.dataset.rename(self.out)
        except BaseException:
            if replaced.exists() and not self.out.exists():
                replaced.rename(self.out)
            raise
        self.clear()


def check_destination(out: Path, *, overwrite: bool) -> Manifest | None:
    """The rows that stand at ``out`` already, if they are complete; None if the place is free, or may be overwritten.

    Raises:
        ValueError: if anything else stands there; that is never deleted.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, not a folder: choose another folder")
    found = Manifest.read(out)
    if found is None and out.exists() and any(out.iterdir()):
        raise ValueError(
            f"{out} is not empty and holds no packed rows ({MANIFEST} is missing or of another kind), so it is left alone "
            "(even with --overwrite): choose another folder, or empty it yourself"
        )
    return None if overwrite else found


def refuse_other(out: Path, found: Manifest, settings: Mapping[str, Any]) -> None:
    """Make sure that complete rows are those that are asked for.

    Raises:
        ValueError: naming each setting that differs, with both values.
    """
    lines = different(found.settings(), json.loads(json.dumps(settings)))
    if lines:
        raise ValueError(
            f"{out} holds rows of other settings:\n" + "\n".join(lines) + "\nWrite them again with --overwrite "
            "(overwrite=True), or choose another folder"
        )
