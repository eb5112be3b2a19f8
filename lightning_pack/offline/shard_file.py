"""A shard of packed rows: a tar file that is written row by row, and read again."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from lightning_pack.offline.row_file import Row


class ShardFile:
    """Writes rows into a tar file that appears under its name when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._file = self._unfinished.open("wb")
        self._hash = hashlib.sha256()
        self.rows = self.bytes = self.digest = 0

    def add(self, row: Row) -> None:
        """Write one row."""
        for extension, data in row.parts().items():
            # A fresh TarInfo has no owner and no time: the bytes depend on the row alone.
            member = tarfile.TarInfo(f"{row.key}.{extension}")
            member.size = len(data)
            self._write(member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE))
        self.rows += 1
        self.digest = (self.digest + row.digest) % (1 << 128)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def publish(self) -> str:
        """Put the file in its place; returns its sha256."""
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._unfinished.replace(self._path)
        return self._hash.hexdigest()

    def discard(self) -> None:
        """Remove what is not published."""
        self._file.close()
        self._unfinished.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """Hash of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def samples_of(path: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Keys and members of the samples of a tar file, in order.

    Raises:
        tarfile.TarError: where the file is damaged.
    """
    key, parts = None, dict[str, bytes]()
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            name, _, extension = member.name.partition(".")
            if name != key or extension in parts:
                if key is not None:
                    yield key, parts
                key, parts = name, {}
            file = tar.extractfile(member) if member.isfile() else None
            if file is None:
                # Nothing that a link leads to was written as part of a row.
                raise tarfile.ReadError(f"its member {member.name!r} is no file")
            parts[extension] = file.read()
            # A TarFile remembers every member.
            tar.members = []  # type: ignore[attr-defined]
    if key is not None:
        yield key, parts
