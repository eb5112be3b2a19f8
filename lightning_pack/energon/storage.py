"""Datasets in an object store, ``msc://PROFILE/BUCKET/FOLDER``: an outage is waited for, and never becomes a skipped sample.

Energon reads such paths through the multi-storage client, whose own retries leave out the plainest outages, a refused
connection and the statuses 500, 502 and 504, and whose ``open`` downloads a whole shard for a few samples. So the client
of each :class:`~megatron.energon.epathlib.EPath` is an :class:`ObjectStore` here: it repeats a request for a bounded time,
reads large objects by ranges, and has a connection of its own in every process, because forked workers that share one would
read each other's answers. Paths on local disks are left alone.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import io
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import multistorageclient as msc
from megatron.energon.epathlib import EPath
from megatron.energon.epathlib import epath as energon_paths
from multistorageclient.types import Range

from lightning_pack.energon.outage import StorageError, StorageRetry, current_retry, patiently, use_retry
from lightning_pack.location import is_remote, location

#: Objects up to this many bytes are read at once; of others, so many at first and then twice as many each time.
WHOLE = 8 << 20
FIRST_RANGE = 256 << 10
_S3_LIKE = ("s3", "s8k", "gcs_s3", "ais_s3", "s3_cuobject")
_LOCAL = ("__filesystem__", "default")

_stores: dict[str, ObjectStore] = {}


def set_retry(retry: StorageRetry) -> None:
    """Choose how long a store may be away, for all reading of this process and of the workers that it starts from now on."""
    if retry != current_retry():
        use_retry(retry)
        for store in _stores.values():
            store.forget_client()


class ObjectStore:
    """What Energon uses of a storage client, patiently. One for each profile, the same object before and after a fork."""

    def __init__(self, profile: str) -> None:
        self.profile = profile
        self._client: Any = None
        self._process = 0

    @property
    def client(self) -> Any:
        """This process's own client."""
        if self._process != os.getpid():
            self._client, self._process = self._connect(), os.getpid()
        return self._client

    def forget_client(self) -> None:
        """Make a new client when one is needed next."""
        self._process = 0

    def _connect(self) -> Any:
        try:
            config, _ = msc.StorageClientConfig.read_msc_config()
            if self.profile not in (config or {}).get("profiles", {}):
                # Of rclone's configuration, or none: then this says so.
                return msc.StorageClient(msc.StorageClientConfig.from_file(profile=self.profile))
            config = bounded(config or {}, self.profile)
            return msc.StorageClient(msc.StorageClientConfig.from_dict(config, profile=self.profile))
        except ImportError as error:
            raise StorageError(
                f"msc://{self.profile} needs a package that is not installed ({error}): for S3, "
                "pip install 'lightning-pack[s3]'; for others the extra of multi-storage-client that is named like the store"
            ) from error

    def _url(self, path: str) -> str:
        return f"msc://{self.profile}/{path.lstrip('/')}"

    def _ask(self, method: str, path: str, *args: Any, **options: Any) -> Any:
        return patiently(lambda: getattr(self.client, method)(path, *args, **options), what=f"{method} of {self._url(path)}")

    def open(self, path: str, mode: str = "rb", *, prefetch_file: bool | None = None) -> Any:
        """A file that waits for outages while it is read; one that is written is uploaded when it is closed."""
        if mode not in ("r", "rb"):
            return self.client.open(path, mode)
        size = self.info(path).content_length
        file = RangeFile(self, path, size, at_once=size <= WHOLE or bool(prefetch_file) or mode == "r")
        return io.StringIO(file.read().decode()) if mode == "r" else file

    def read(self, path: str, *, offset: int, size: int) -> bytes:
        """``size`` bytes of an object from ``offset`` on."""

        def read() -> bytes:
            data = self.client.read(path, byte_range=Range(offset=offset, size=size))
            data = bytes(data.to_bytes() if hasattr(data, "to_bytes") else data)
            if len(data) != size:
                raise ConnectionError(f"{len(data)} bytes came of the {size} from {offset} on")
            return data

        return patiently(read, what=f"reading {self._url(path)}") if size else b""

    def info(self, path: str) -> Any:
        """Size, time and type of an object."""
        return self._ask("info", path)

    def is_file(self, path: str) -> bool:
        """Whether there is such an object."""
        return bool(self._ask("is_file", path))

    def download_file(self, path: str, local_path: str) -> None:
        """Copy an object to a local file."""
        self._ask("download_file", path, local_path)

    def upload_file(self, path: str, local_path: str) -> None:
        """Copy a local file to an object."""
        self._ask("upload_file", path, local_path)

    def copy(self, path: str, target: str) -> None:
        """Copy an object within the store."""
        self._ask("copy", path, target)

    def delete(self, path: str) -> None:
        """Delete an object; none need be there, since an attempt that seemed to fail may have done it."""
        with contextlib.suppress(FileNotFoundError):
            self._ask("delete", path)

    def list_recursive(self, path: str) -> Sequence[Any]:
        """All objects below a folder."""
        return patiently(lambda: [*self.client.list_recursive(path=path)], what=f"listing {self._url(path)}")

    def glob(self, pattern: str) -> Sequence[str]:
        """Objects that match a pattern."""
        return [*self._ask("glob", pattern)]

    def get_posix_path(self, path: str) -> str | None:
        """None: nothing here is a local file."""
        return None

    def list(self, path: str) -> Sequence[Any]:
        """What is in a folder."""
        return patiently(lambda: [*self.client.list(path=path)], what=f"listing {self._url(path)}")


class RangeFile(io.RawIOBase):
    """An object opened for reading."""

    def __init__(self, store: ObjectStore, path: str, size: int, *, at_once: bool) -> None:
        self._store, self._path, self._size, self._at_once = store, path, size, at_once
        self._position = 0
        self._start, self._held, self._ahead = 0, b"", FIRST_RANGE

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position; nothing is asked of the store."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int | None = -1) -> bytes:
        """As many bytes as are asked for, or all to the end."""
        rest = max(self._size - self._position, 0)
        size = rest if size is None or size < 0 else min(size, rest)
        if not size:
            return b""
        at = self._position - self._start
        if not 0 <= at <= at + size <= len(self._held):
            self._fetch(size)
            at = self._position - self._start
        self._position += size
        return self._held[at : at + size]

    def _fetch(self, size: int) -> None:
        if self._at_once:
            self._start, self._held = 0, self._store.read(self._path, offset=0, size=self._size)
            return
        # Whoever reads on will read more; whoever jumps reads one sample.
        kept = self._position - self._start
        reads_on = 0 <= kept <= len(self._held)
        tail = self._held[kept:] if reads_on else b""
        self._ahead = min(2 * self._ahead, WHOLE) if reads_on and self._held else FIRST_RANGE
        offset = self._position + len(tail)
        wanted = min(max(size - len(tail), self._ahead), self._size - offset)
        self._held = tail + self._store.read(self._path, offset=offset, size=wanted)
        self._start = self._position


def bounded(config: dict[str, Any], profile: str) -> dict[str, Any]:
    """A configuration whose requests take bounded time and are repeated here alone, unless the user has said otherwise."""
    config = copy.deepcopy(config)
    settings = config["profiles"][profile]
    settings.setdefault("retry", {"attempts": 1, "delay": 0.1})
    provider = settings.get("storage_provider", {})
    if provider.get("type") in _S3_LIKE:
        options = provider.setdefault("options", {})
        options.setdefault("connect_timeout", current_retry().request_seconds)
        options.setdefault("read_timeout", current_retry().request_seconds)
        options.setdefault("retries", {"mode": "standard", "total_max_attempts": 1})
    return config


class _PatientClients:
    """Stands in Energon's paths for the module of the multi-storage client."""

    def __getattr__(self, name: str) -> Any:
        return getattr(msc, name)

    def resolve_storage_client(self, url: str) -> tuple[Any, str]:
        profile = url.removeprefix("msc://").split("/")[0]
        if profile in _LOCAL:
            return msc.resolve_storage_client(url)
        store = _stores.get(profile) or ObjectStore(profile)
        if profile not in _stores and store.client.get_posix_path("") is not None:
            return msc.resolve_storage_client(url)
        _stores[profile] = store
        return store, ""


energon_paths.msc = _PatientClients()


def read_range(file: EPath, *, offset: int, size: int) -> bytes:
    """Bytes within a file, wherever it is, without reading the others."""
    if isinstance(file.fs, ObjectStore):
        return file.fs.read(file._internal_str_path, offset=offset, size=size)
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(size)


def local_folder(path: str | Path) -> Path:
    """A folder on the local disk: the path itself, or a copy of a folder in an object store that lasts as long as this process.

    Raises:
        ValueError: if the folder in the store is empty.
    """
    if not is_remote(path):
        return Path(path)
    source = EPath(location(path))
    files = list(source.walk())
    if not files:
        raise ValueError(f"there is nothing at {source}: check the path and the profile")
    target = Path(tempfile.mkdtemp(prefix="lightning-pack-"))
    atexit.register(_remove, target, os.getpid())
    for file in files:
        local = target / file.relative_to(source)
        local.parent.mkdir(parents=True, exist_ok=True)
        file.copy(EPath(local))
    return target


def _remove(folder: Path, process: int) -> None:
    # A forked worker that ends leaves it to the process that made it.
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
