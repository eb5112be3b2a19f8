"""Writes an Energon dataset: the same records always give the same files, and an unfinished one never looks finished.

Everything is written into a hidden folder beside the destination, ``.NAME.partial-PID``, which is renamed to the destination
as the very last step. What a killed process leaves behind is removed by the next preparation of the same destination.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import platform
import shutil
import tarfile
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from lightning_pack.prepare.result import FORMAT, MARKER, LengthStatistics, PreparedDataset, check_output

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: One file is held open for each shard, so there may not be too many.
MOST_SHARDS = 512
_HOST = ".host"


class ShardWriter:
    """Deals the records of one split to tar files in turn: ``train-0000.tar``, ``train-0001.tar`` and so on."""

    def __init__(self, folder: Path, split: str, shards: int) -> None:
        self._folder, self._split, self._shards = folder, split, shards
        self._files: list[BinaryIO] = []
        self.count = 0

    def add(self, key: str, record: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Write one record as the member ``KEY.json``, and each of the files as ``KEY.NAME`` behind it."""
        index = self.count % self._shards
        if index == len(self._files):
            self._files.append((self._folder / f"{self._split}-{index:04d}.tar").open("xb"))
        record_json = json.dumps(record, ensure_ascii=False, sort_keys=True).encode()
        for name, data in {"json": record_json, **files}.items():
            # A fresh TarInfo has no owner and no time, so the bytes depend on the record alone. The blocks are written here
            # because a TarFile remembers every member, too much for millions of them.
            member = tarfile.TarInfo(f"{key}.{name}")
            member.size = len(data)
            self._files[index].write(member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE))
        self.count += 1

    def close(self) -> dict[str, int]:
        """Finish the files; returns the number of records in each."""
        for file in self._files:
            if not file.closed:
                file.write(bytes(2 * tarfile.BLOCKSIZE))
                file.close()
        return {
            f"{self._split}-{index:04d}.tar": len(range(index, self.count, self._shards)) for index in range(len(self._files))
        }


class DatasetWriter:
    """Context manager that collects records and publishes them as one dataset, or leaves nothing behind.

    A record goes to validation by a hash of its key. Where both splits are wanted and there are two records, neither is empty:
    the last record goes where one is missing.

    Args:
        out: the destination folder, an absolute path without links.
        shards: training shards, at most; validation has its own, in proportion.
        val_fraction: share of the records that go to validation, 0 for none.
        overwrite: whether a dataset that stands at ``out`` is replaced.

    Raises:
        ValueError: for values out of range.
    """

    def __init__(self, out: Path, *, shards: int, val_fraction: float, overwrite: bool = False) -> None:
        if isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= MOST_SHARDS:
            raise ValueError(f"shards={shards!r}: a whole number from 1 to {MOST_SHARDS} is needed")
        if isinstance(val_fraction, bool) or not isinstance(val_fraction, (int, float)) or not 0 <= val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction!r}: a number from 0 to less than 1 is needed")
        self.out = out
        self.val_fraction, self.overwrite = val_fraction, overwrite
        self.folder = self.out.with_name(f".{self.out.name}.partial-{os.getpid()}")
        self._train = ShardWriter(self.folder, "train", shards)
        self._val = ShardWriter(self.folder, "val", max(1, round(shards * val_fraction)))
        self._held: tuple[str, Mapping[str, Any], Mapping[str, bytes]] | None = None

    def __enter__(self) -> DatasetWriter:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(self.out)
        try:
            self.folder.mkdir()
        except FileExistsError:
            raise ValueError(f"{self.folder} belongs to a preparation on another machine: wait for it, or remove it") from None
        try:
            (self.folder / _HOST).write_text(platform.node())
        except BaseException:
            # Without its host the folder would pass for that of another machine, and stay for ever.
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self._close()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def is_val(self, key: str) -> bool:
        """Whether a record goes to validation, by its key."""
        digest = hashlib.sha256(key.encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.val_fraction * 2**64

    def add(self, key: str, record: Mapping[str, Any], *, files: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Add one record, and files of it, under a key that is unique, at most 90 bytes, and has no dot and no slash."""
        if not key or len(key.encode()) > 90 or "." in key or "/" in key:
            raise ValueError(f"key {key!r}: 1 to 90 bytes without dots and slashes are needed")
        self._write_held()
        self._held = (key, record, files)

    def _write_held(self, *, last: bool = False) -> None:
        if self._held is None:
            return
        key, record, files = self._held
        self._held = None
        val = self.is_val(key)
        if last and self.val_fraction:
            if self._train.count and not self._val.count:
                val = True
            if not self._train.count:
                val = False
        (self._val if val else self._train).add(key, record, files)

    def _close(self) -> dict[str, int]:
        return {**self._train.close(), **self._val.close()}

    def publish(
        self,
        *,
        recipe: str,
        options: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        lengths: LengthStatistics,
        skipped: Mapping[str, int],
        image_processor: Any = None,
    ) -> PreparedDataset:
        """Finish the dataset and put it in its place.

        Where another process has put the same dataset there meanwhile, that one stays. An image processor is saved in the
        folder of the tokenizer.

        Raises:
            ValueError: if there are no records, or another process has put something else there meanwhile.
        """
        self._write_held(last=True)
        shards = self._close()
        if not shards:
            raise ValueError(f"there are no records for {self.out}")
        tokenizer.save_pretrained(str(self.folder / "tokenizer"))
        if image_processor is not None:
            image_processor.save_pretrained(str(self.folder / "tokenizer"))
        state: dict[str, Any] = {
            "format": FORMAT,
            "recipe": recipe,
            "options": options,
            "counts": {"train": self._train.count, "val": self._val.count},
            "shards": shards,
            "lengths": asdict(lengths),
            "skipped": dict(skipped),
        }
        text = json.dumps(state, indent=2) + "\n"
        index_shards(self.folder, list(shards))
        # Energon draws a random id for the index; the same content gets the same id here.
        (self.folder / ".nv-meta" / "index.uuid").write_text(str(uuid.uuid5(uuid.NAMESPACE_OID, text)))
        (self.folder / MARKER).write_text(text)
        (self.folder / _HOST).unlink()
        other = self._move(recipe, options)
        if other is not None:
            return other
        return PreparedDataset.of(self.out, state, fresh=True)

    def _move(self, recipe: str, options: Mapping[str, Any]) -> PreparedDataset | None:
        replaced = self.out.with_name(f".{self.out.name}.replaced-{os.getpid()}")
        while True:
            other = check_output(self.out, recipe=recipe, options=options, overwrite=self.overwrite)
            if other is not None:
                return other
            try:
                if self.overwrite and (self.out / MARKER).exists():
                    with contextlib.suppress(FileNotFoundError):
                        self.out.rename(replaced)
                self.folder.rename(self.out)
            except BaseException as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    # Another process was faster: look again at what it put there.
                    shutil.rmtree(replaced, ignore_errors=True)
                    continue
                if replaced.exists() and not self.out.exists():
                    replaced.rename(self.out)
                raise
            shutil.rmtree(replaced, ignore_errors=True)
            return None


def index_shards(folder: Path, shards: list[str]) -> None:
    """Write Energon's index, splits and dataset description for tar files in ``folder``, without questions and output."""
    from megatron.energon.flavors.webdataset import BaseWebdatasetFactory

    splits = [split for split in ("train", "val", "test") if any(name.startswith(f"{split}-") for name in shards)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            BaseWebdatasetFactory.prepare_dataset(
                folder,
                shards,
                # Energon matches at the beginning only, and takes backslashes and braces as its own.
                split_parts_patterns=[(split, f"{split}-[0-9]+[.]tar$") for split in splits],
                shuffle_seed=None,
                workers=1,
            )
        except SystemExit as error:
            raise ValueError(f"Energon cannot index {folder}: {said.getvalue().strip()}") from error
    (folder / ".nv-meta" / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")


def remove_stale(out: Path) -> None:
    """Remove what dead processes left beside ``out``; a dataset that one had moved away is put back where it was."""
    for kind in ("partial", "replaced"):
        prefix = f".{out.name}.{kind}-"
        for path in sorted(out.parent.iterdir()):
            pid = path.name.removeprefix(prefix)
            if not path.name.startswith(prefix) or not pid.isdigit() or _alive(int(pid), path):
                continue
            if kind == "replaced" and not out.exists():
                with contextlib.suppress(OSError):
                    path.rename(out)
                    continue
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int, folder: Path) -> bool:
    """Whether the process that owns ``folder`` may still write; what carries this process's own id is of an earlier one."""
    with contextlib.suppress(OSError):
        if (folder / _HOST).read_text() != platform.node():
            return True
    return pid != os.getpid() and runs(pid)


def runs(pid: int) -> bool:
    """Whether there is a process of this id on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
