"""Where samples lie in a shard, from indices that are read once."""

from __future__ import annotations

import numpy as np
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar import ITAR_SUFFIX, CachedItarOffsetReader
from megatron.energon.flavors.webdataset.itar_reader import ITarReader, ShardInfosITarReader

#: Bytes of an index that is held in memory, 8 for each sample. A larger one is read as Energon does.
MOST_BYTES = 8 << 20


class ShardIndex(CachedItarOffsetReader):
    """Energon opens the index of a shard again for every sample that does not follow the one before; here it is read once.

    A resumed run reads the samples of its shuffle buffer by key, so most of them do not follow one another.
    """

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        self._indices: dict[str, np.ndarray | None] = {}

    def get_itar_byte_offset(self, tar_file: str | EPath, sample_offset: int = 0) -> tuple[int, int]:
        """First byte and number of bytes of a sample; none where the index ends with it."""
        path = str(tar_file)
        # Those used last are at the end.
        index = self._indices[path] = self._indices.pop(path) if path in self._indices else _read(path)
        if len(self._indices) > self.cache_size:
            del self._indices[next(iter(self._indices))]
        if index is None:
            return super().get_itar_byte_offset(tar_file, sample_offset)
        if not 0 <= sample_offset < len(index):
            raise IndexError(f"the index of {path} has no sample {sample_offset}")
        first, *end = (int(place) for place in index[sample_offset : sample_offset + 2])
        return first, end[0] - first if end else 0


def _read(path: str) -> np.ndarray | None:
    file = EPath(path).with_suffix(ITAR_SUFFIX)
    size = file.size()
    if size > MOST_BYTES:
        return None
    with file.open("rb") as f:
        return np.frombuffer(f.read(size // 8 * 8), dtype="<u8")


def hold_indices(reader: ITarReader) -> None:
    """Let a reader of shards hold their indices in memory."""
    if isinstance(reader, ShardInfosITarReader):
        reader.cached_offset_reader = ShardIndex(reader.cached_offset_reader.cache_size)
