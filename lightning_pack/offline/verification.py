"""Whether a folder of packed rows is what was written: every source exactly once, every byte, every boundary."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_pack.energon.dataset import _leaves
from lightning_pack.offline.manifest import MANIFEST, Manifest
from lightning_pack.offline.row_file import DamagedRowError, Row
from lightning_pack.offline.row_media import problems_beside
from lightning_pack.offline.shard_file import samples_of, sha256_of
from lightning_pack.offline.split_statistics import Shard, SplitStatistics
from lightning_pack.offline.workplace import RESUMED
from lightning_pack.prepare.progress import progress_bar

_MOST_NAMED = 20


class VerificationError(ValueError):
    """Packed rows that are not what was written."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What was found right."""

    manifest: Manifest
    sources: int
    rows: int
    shards: int
    #: Images and the like.
    files: int = 0

    def summary(self) -> str:
        """A line for people."""
        return (
            f"verified: {self.sources:,} sources, each exactly once, in {self.rows:,} rows of {self.shards} shards; hashes, "
            f"boundaries{', images' if self.files else ''} and labels are those that were written"
        )


def verify(folder: str | Path, *, progress: bool = False) -> Verified:
    """Read all packed rows in a local folder and compare them with its manifest.

    Args:
        folder: of the rows.
        progress: show a progress bar where stderr is a terminal.

    Raises:
        VerificationError: naming each shard, row and source that is not right, and a tokenizer or image processor beside rows
            with images that did not make them.
        ValueError: if there are no packed rows.
    """
    folder = Path(folder)
    manifest = Manifest.read(folder)
    if manifest is None:
        raise ValueError(
            f"there are no packed rows at {folder} ({MANIFEST} is missing): write some with 'lightning-pack prepack'"
        )
    problems: list[str] = []
    with progress_bar("verifying", total=sum(len(s.shards) for s in manifest.splits.values()), shown=progress) as advance:
        for split, found in manifest.splits.items():
            checked = _Split(manifest, split, found)
            for name, shard in found.shards.items():
                checked.shard(folder / name, shard)
                advance(1)
            problems += checked.problems_at_the_end()
    known = {name for split in manifest.splits.values() for name in split.shards}
    problems += [f"{path.name} is no shard of the manifest" for path in sorted(folder.glob("*.tar")) if path.name not in known]
    index = folder / ".nv-meta" / ".info.json"
    if not index.is_file():
        problems.append(f"Energon's index is missing ({index.relative_to(folder)})")
    elif not problems:
        problems += _problems_of_reading(folder, manifest)
    problems += problems_beside(folder, manifest)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:_MOST_NAMED])
        more = f"\n  and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise VerificationError(
            f"{folder} is damaged:\n{listed}{more}\nRestore it, or write the rows again with --overwrite (overwrite=True)"
        )
    return Verified(
        manifest=manifest,
        sources=sum(split.sources for split in manifest.splits.values()),
        rows=sum(split.rows for split in manifest.splits.values()),
        shards=len(known),
        files=sum(split.files for split in manifest.splits.values()),
    )


def _problems_of_reading(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the rows that Energon would find."""
    problems = []
    for split, said in manifest.splits.items():
        try:
            leaves, _ = _leaves(str(folder), split)
        except ValueError as e:
            problems.append(f"split {split!r}: {e}")
            continue
        rows = sum(len(leaf.dataset) for leaf in leaves)
        if rows != said.rows:
            problems.append(f"split {split!r}: Energon's index has {rows} rows, the manifest says {said.rows}")
    return problems


def _places(path: Path) -> list[int]:
    """Where each sample of a tar file begins, and where the last one ends."""
    places, key, end = list[int](), None, 0
    with tarfile.open(path, "r:") as tar:
        while (member := tar.next()) is not None:
            name = member.name.partition(".")[0]
            if name != key:
                places.append(member.offset)
            key, end = name, tar.offset
            # A TarFile remembers every member.
            tar.members = []  # type: ignore[attr-defined]
    return [*places, end]


class _Split:
    """What is seen of a split, shard by shard."""

    def __init__(self, manifest: Manifest, split: str, found: SplitStatistics) -> None:
        self._split, self._found = split, found
        self._policy = manifest.policy()
        self._own = manifest.origin == RESUMED
        self._media = manifest.media
        self._seen = np.zeros(found.sources, dtype=bool)
        self._row_seen = np.zeros(found.rows, dtype=bool)
        self._digest = 0
        self._problems: list[str] = []

    def shard(self, path: Path, shard: Shard) -> None:
        """Read a shard."""
        if not path.is_file():
            self._problems.append(f"{path.name} is missing, with {shard.rows} rows")
            return
        rows, before = 0, len(self._problems)
        try:
            for key, parts in samples_of(path):
                rows += 1
                try:
                    self._row(Row.of(parts, key=key), f"{path.name}: row {key}")
                except DamagedRowError as e:
                    listed = f"; its sources: {', '.join(key for key, _ in e.sources[:3])}, ..." if e.sources else ""
                    self._problems.append(f"{path.name}: row {key}: {e}{listed}")
        except (tarfile.TarError, OSError) as e:
            self._problems.append(f"{path.name}: cannot be read after row {rows} ({type(e).__name__}: {e})")
        if rows != shard.rows:
            self._problems.append(f"{path.name} has {rows} rows, the manifest says {shard.rows}")
        if len(self._problems) == before and sha256_of(path) != shard.sha256:
            self._problems.append(
                f"{path.name} is not the file that was written: its hash differs, though its rows can be read"
            )
        index = path.with_name(f"{path.name}.idx")
        if not index.is_file():
            self._problems.append(f"Energon's index of {path.name} is missing")
        elif len(self._problems) == before and index.read_bytes() != np.array(_places(path), dtype="<u8").tobytes():
            self._problems.append(f"Energon's index of {path.name} is not that of its rows, so others would be read, or none")

    def _row(self, row: Row, place: str) -> None:
        if row.split != self._split:
            self._problems.append(f"{place} belongs to the split {row.split!r}")
            return
        if not 0 <= row.number < len(self._row_seen):
            self._problems.append(f"{place}: there are {len(self._row_seen)} rows")
        elif self._row_seen[row.number]:
            self._problems.append(f"{place} is there twice")
        else:
            self._row_seen[row.number] = True
        for key, number in zip(row.keys, row.numbers, strict=True):
            if not 0 <= number < len(self._seen):
                self._problems.append(f"{place}: source {key!r} has number {number}, and there are {len(self._seen)}")
            elif self._seen[number]:
                self._problems.append(f"{place}: source {key!r} (number {number}) is there twice")
            else:
                self._seen[number] = True
        self._digest += row.digest
        self._problems += [f"{place}: source {row.keys[i]!r}: {problem}" for i, problem in row.broken.items()]
        self._check_media(row, place)
        if not self._own:
            rooms = np.diff(row.offsets)
            if row.offsets[-1] > self._policy.capacity or (rooms % self._policy.multiple).any():
                self._problems.append(
                    f"{place}: boundaries {list(row.offsets)[:8]} go beyond capacity={self._policy.capacity}, or are not "
                    f"multiples of {self._policy.multiple}"
                )
            return
        try:
            if self._policy.layout(row.lengths).cu_seqlens_padded.tolist() != list(row.offsets):
                self._problems.append(f"{place}: boundaries {list(row.offsets)[:8]} are not those of the policy")
        except ValueError as e:
            self._problems.append(f"{place}: {e}")

    def _check_media(self, row: Row, place: str) -> None:
        if (row.files is not None) != self._media:
            told = ("media", "has none") if self._media else ("tokens alone", "has media")
            self._problems.append(f"{place}: by the manifest rows hold {told[0]}, and this one {told[1]}")
        files = [file for each in row.files or () for file in each]
        tokens, nbytes = sum(file.tokens for file in files), sum(file.nbytes for file in files)
        if not self._policy.media_budget.allows(tokens, nbytes):
            self._problems.append(
                f"{place}: {tokens} tokens and {nbytes} bytes of its media are beyond the limits of the policy"
            )

    def problems_at_the_end(self) -> list[str]:
        """What is wrong with the split."""
        missing = np.flatnonzero(~self._seen)
        if len(missing):
            named = ", ".join(map(str, missing[:5].tolist()))
            self._problems.append(
                f"split {self._split!r}: {len(missing)} of {len(self._seen)} sources are missing, such as {named}"
            )
        gone = np.flatnonzero(~self._row_seen)
        if len(gone):
            named = ", ".join(f"{self._split}-row{number:08d}" for number in gone[:5].tolist())
            self._problems.append(
                f"split {self._split!r}: {len(gone)} of {len(self._row_seen)} rows are missing, such as {named}"
            )
        if not self._problems and self._digest % (1 << 128) != self._found.digest:
            self._problems.append(f"split {self._split!r}: the sources are not those that were encoded: their hash differs")
        return self._problems
