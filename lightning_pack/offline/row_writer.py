"""From groups of sources to shards of rows; a shard that is complete is never written again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lightning_pack.binning import Groups, lower_bound
from lightning_pack.media_budget import within_budget
from lightning_pack.offline.manifest import write_json
from lightning_pack.offline.row_file import Row
from lightning_pack.offline.shard_file import ShardFile
from lightning_pack.offline.source_store import SourceStore
from lightning_pack.offline.split_statistics import Shard, SplitStatistics, left_out_by_reason
from lightning_pack.policy import PackingPolicy

#: Rows that make it worth having a further shard, and how many shards there are at most.
_ROWS_PER_SHARD, _MOST_SHARDS = 512, 512
#: The same for bytes of images.
_BYTES_PER_SHARD = 1 << 30


@dataclass(frozen=True, kw_only=True)
class PackedSources:
    """The rows of a split, decided and not yet written.

    Args:
        split: that they belong to.
        policy: the packing rules.
        store: the sources.
        sources: numbers of the sources, row by row.
        ends: how many sources there are up to the end of each row, 0 first.
        bound: rows that no packing can do without.
        media: whether rows hold the files of their sources.
    """

    split: str
    policy: PackingPolicy
    store: SourceStore
    sources: np.ndarray = field(repr=False)
    ends: np.ndarray = field(repr=False)
    bound: int
    media: bool = False

    @classmethod
    def of(cls, store: SourceStore, policy: PackingPolicy, *, split: str, media: bool = False) -> PackedSources:
        """Pack all sources at once; rows are in an order that the policy's seed draws, or in that of the data if it keeps it.

        Raises:
            ValueError: for numbers of bins that groups of sources do not allow.
        """
        kinds = np.unique(store.groups).tolist()
        if len(kinds) > 1 and (policy.min_bins, policy.bins_multiple_of) != (None, 1):
            raise ValueError(
                f"min_bins={policy.min_bins} and bins_multiple_of={policy.bins_multiple_of} move sources between rows, which "
                f"sources of {len(kinds)} groups do not allow: leave out the one or the other"
            )
        groups: Groups = []
        bound = 0
        for kind in kinds:
            those = np.flatnonzero(store.groups == kind)
            groups += _packed(store, those, policy)
            bound += _bound(store, those, policy)
        if policy.algorithm != "concatenative":
            # Longest first would be a curriculum.
            groups = [groups[i] for i in np.random.default_rng(policy.seed).permutation(len(groups))]
        flat = np.fromiter((i for group in groups for i in group), dtype=np.int32, count=len(store))
        ends = np.cumsum([0, *map(len, groups)], dtype=np.int64)
        return cls(split=split, policy=policy, store=store, sources=flat, ends=ends, bound=bound, media=media)

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.ends) - 1

    def shards(self, wanted: int | None) -> list[tuple[str, range]]:
        """Names of the shards and the rows in each: ``wanted`` of them, or as many as are convenient; none is empty."""
        convenient = max(-(-self.rows // _ROWS_PER_SHARD), -(-self.store.file_bytes // _BYTES_PER_SHARD), 1)
        count = min(min(convenient, _MOST_SHARDS) if wanted is None else wanted, self.rows)
        edges = [self.rows * i // count for i in range(count + 1)]
        return [(f"{self.split}-{i:04d}.tar", range(edges[i], edges[i + 1])) for i in range(count)]

    def row(self, number: int, files: Sequence[object]) -> Row:
        """A row, its sources read."""
        store = self.store
        numbers = self.sources[self.ends[number] : self.ends[number + 1]].tolist()
        read = [store.read(i, files[store.part[i]]) for i in numbers]
        layout = self.policy.layout([int(store.lengths[i]) for i in numbers])
        group = int(store.groups[numbers[0]])
        return Row(
            split=self.split,
            number=number,
            keys=[source.key for source in read],
            numbers=numbers,
            lengths=list(layout.lengths),
            offsets=layout.cu_seqlens_padded.tolist(),
            tokens=np.concatenate([source.tokens for source in read], axis=1),
            files=[source.files for source in read] if self.media else None,
            group=None if group < 0 else store.group_names[group],
        )

    def write(self, folder: Path, name: str, rows: range) -> None:
        """Write a shard and, beside it, what the manifest says of it."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(part.data.open("rb")) for part in self.store.parts]
            shard, targets = ShardFile(folder / name), 0
            try:
                for number in rows:
                    row = self.row(number, files)
                    targets += int((row.tokens[1] != -100).sum())
                    shard.add(row)
            except BaseException:
                shard.discard()
                raise
        write_shard(folder, name, shard, targets=targets)

    def statistics(self, folder: Path, shards: Sequence[str]) -> SplitStatistics:
        """Of the split, whose shards are written."""
        lengths = self.store.lengths.astype(np.int64)
        aligned = -(-lengths // self.policy.multiple) * self.policy.multiple
        written = {name: read_shard_note(folder, name) for name in shards}
        return SplitStatistics(
            sources=len(self.store),
            rows=self.rows,
            tokens=int(lengths.sum()),
            targets=sum(targets for _, targets in written.values()),
            slots=self.rows * (self.policy.row_width or self.policy.capacity),
            alignment=int((aligned - lengths).sum()),
            lower_bound=self.bound,
            left_out=left_out_by_reason(self.store.left_out),
            files=self.store.files,
            file_bytes=self.store.file_bytes,
            media_tokens=int(self.store.media_tokens.sum(dtype=np.int64)),
            shards={name: shard for name, (shard, _) in written.items()},
        )


def _packed(store: SourceStore, those: np.ndarray, policy: PackingPolicy) -> Groups:
    """Sources that may share rows, packed; where media are limited, what is too much for its row is packed again."""
    groups: Groups = []
    while len(those):
        packed = policy.pack(store.lengths[those].tolist())
        if policy.media_budget.limits:
            packed = within_budget(
                packed,
                budget=policy.media_budget,
                costs=list(zip(store.media_tokens[those].tolist(), store.media_bytes[those].tolist(), strict=True)),
                must_leave=[False] * len(those),
                in_order=policy.packer == "concatenative",
            )
        groups += [those[group].tolist() for group in packed]
        those = np.delete(those, [i for group in packed for i in group])
    return groups


def _bound(store: SourceStore, those: np.ndarray, policy: PackingPolicy) -> int:
    """Rows that sources which may share rows cannot do without."""
    bounds = [lower_bound([policy.aligned(length) for length in store.lengths[those].tolist()], policy.capacity)]
    for column, limit in ((store.media_tokens, policy.max_media_tokens), (store.media_bytes, policy.max_media_bytes)):
        if limit is not None:
            bounds.append(-(-int(column[those].sum(dtype=np.int64)) // limit))
    return max(bounds)


def write_shard(folder: Path, name: str, shard: ShardFile, *, targets: int) -> None:
    """Publish a shard, and then what the manifest says of it."""
    sha256 = shard.publish()
    said = {"rows": shard.rows, "bytes": shard.bytes, "sha256": sha256, "digest": f"{shard.digest:032x}"}
    write_json(_note(folder, name), {"shard": said, "targets": targets})


def read_shard_note(folder: Path, name: str) -> tuple[Shard, int]:
    """What the manifest says of a shard, and its number of targets."""
    said = json.loads(_note(folder, name).read_text())
    return Shard(**said["shard"]), said["targets"]


def is_written(folder: Path, name: str) -> bool:
    """Whether a shard is complete."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        shard, _ = read_shard_note(folder, name)
        return (folder / name).stat().st_size == shard.bytes
    return False


def _note(folder: Path, name: str) -> Path:
    return folder.parent / f"{name}.json"
