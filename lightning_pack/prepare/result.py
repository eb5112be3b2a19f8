"""What a finished preparation is, and what may stand where one is asked for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_pack.encoders import Encoder, LeaveOut
from lightning_pack.flat_settings import flat
from lightning_pack.location import is_remote, location

#: File that only a finished dataset holds, and the version of its content.
MARKER = "lightning_pack.json"
FORMAT = 1
#: Options that are hashes, which say nothing to people, and what it means that they differ.
_HASHED = {
    "content": "the input file changed since, or is another one",
    "tokenizer.backend": "the tokenizer has another vocabulary, or cuts texts by other rules",
    "tokenizer.chat_template": "the tokenizer has another chat template",
    "settings": "the image processor has other settings",
}


@dataclass(frozen=True, kw_only=True)
class LengthStatistics:
    """Lengths in tokens of some records, taken evenly from the whole dataset."""

    #: Records measured, those that the encoder leaves out not among them.
    count: int
    total: int
    median: int
    p95: int
    longest: int
    #: Records that the encoder leaves out, by reason.
    left_out: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, measured: Iterable[int | str]) -> LengthStatistics:
        """Statistics of lengths, and of reasons why there is no length."""
        measured = list(measured)
        lengths = sorted(value for value in measured if isinstance(value, int)) or [0]
        reasons = Counter(value for value in measured if isinstance(value, str))
        return cls(
            count=len(measured) - reasons.total(),
            total=sum(lengths),
            median=lengths[len(lengths) // 2],
            p95=lengths[len(lengths) * 95 // 100],
            longest=lengths[-1],
            left_out=dict(sorted(reasons.items())),
        )

    def summary(self) -> str:
        """One line for people."""
        text = (
            f"tokens of {self.count:,} records taken evenly: total {self.total:,}, median {self.median:,}, "
            f"95th percentile {self.p95:,}, longest {self.longest:,}"
        )
        if self.left_out:
            gone = ", ".join(f"{reason} {count:,}" for reason, count in self.left_out.items())
            text += f"; {sum(self.left_out.values()):,} more will be left out in training ({gone})"
        return text


class LengthSampler:
    """Measures at most ``most`` records of a stream of unknown length, evenly spaced.

    Every ``stride``-th record is encoded; where that becomes too many, every second is forgotten and the stride doubles.
    """

    def __init__(self, encoder: Encoder, *, most: int = 2000) -> None:
        self.encoder = encoder
        self.most = most
        self._measured: list[int | str] = []
        self._stride, self._seen = 1, 0

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """See the next record of the stream."""
        if len(self._measured) == self.most:
            self._measured, self._stride = self._measured[::2], self._stride * 2
        if self._seen % self._stride == 0:
            try:
                self._measured.append(len(self.encoder(key, record)))
            except LeaveOut as gone:
                self._measured.append(gone.reason)
        self._seen += 1

    def statistics(self) -> LengthStatistics:
        """Of what was measured so far."""
        return LengthStatistics.of(self._measured)


@dataclass(frozen=True, kw_only=True)
class PreparedDataset:
    """A finished dataset that Energon can load."""

    #: Its folder; text where that is in an object store.
    path: Path | str
    #: ``"stdlib"``, ``"skimage"`` or ``"jsonl"``.
    recipe: str
    #: What decides the content; the same options give the same files.
    options: Mapping[str, Any]
    #: Number of records in each split.
    train: int
    val: int
    #: Number of records in each shard, by its file name.
    shards: Mapping[str, int]
    lengths: LengthStatistics
    #: Lines or files of the input that were skipped, by reason.
    skipped: Mapping[str, int] = field(default_factory=dict)
    #: Whether this call wrote it; False where it was there already.
    fresh: bool = True

    @classmethod
    def of(cls, path: Path | str, state: Mapping[str, Any], *, fresh: bool) -> PreparedDataset:
        """The dataset that :data:`MARKER` describes."""
        return cls(
            path=path,
            recipe=state["recipe"],
            options=state["options"],
            train=state["counts"]["train"],
            val=state["counts"]["val"],
            shards=state["shards"],
            lengths=LengthStatistics(**state["lengths"]),
            skipped=state["skipped"],
            fresh=fresh,
        )

    @property
    def tokenizer(self) -> Path | str:
        """Folder of the tokenizer that belongs to the dataset."""
        return self.path / "tokenizer" if isinstance(self.path, Path) else f"{self.path}/tokenizer"

    def summary(self) -> str:
        """A few lines for people."""
        lines = [
            f"{'prepared' if self.fresh else 'already prepared'}: {self.path} ({self.recipe}), {self.train:,} training and "
            f"{self.val:,} validation records in {len(self.shards)} shards",
            self.lengths.summary(),
        ]
        if self.skipped:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.skipped.items())
            lines.append(f"skipped {sum(self.skipped.values()):,}: {reasons}")
        return "\n".join(lines)


def prepared(out: str | Path) -> PreparedDataset | None:
    """The finished dataset in folder ``out``, or None where there is none.

    Raises:
        ValueError: if it was finished once, but is damaged or of a later format.
    """
    if is_remote(out):
        from lightning_pack.prepare.remote import prepared_remotely

        return prepared_remotely(location(out))
    out = Path(out)
    if not (out / MARKER).is_file():
        return None
    return read_marker(out, (out / MARKER).read_text(), found={entry.name for entry in out.iterdir()})


def read_marker(out: Path | str, text: str, *, found: Collection[str]) -> PreparedDataset:
    """The dataset that the text of :data:`MARKER` describes, where ``found`` are the names in its folder.

    Raises:
        ValueError: if it is damaged or of a later format.
    """
    ways_out = "prepare it again with --overwrite (overwrite=True), or choose another folder"
    try:
        state = json.loads(text)
        if state["format"] != FORMAT:
            raise ValueError(f"{out}/{MARKER} has format {state['format']}, this version reads {FORMAT}: {ways_out}")
        dataset = PreparedDataset.of(out, state, fresh=False)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{out}/{MARKER} is damaged ({type(error).__name__}: {error}): {ways_out}") from error
    missing = [name for name in (*dataset.shards, ".nv-meta", "tokenizer") if name not in found]
    if missing:
        raise ValueError(f"{out} is damaged, {', '.join(missing)} is missing: {ways_out}")
    return dataset


def check_output(out: Path, *, recipe: str, options: Mapping[str, Any], overwrite: bool) -> PreparedDataset | None:
    """What stands at ``out`` already, if it is just what is asked for; None if the place is free, or may be overwritten.

    Raises:
        ValueError: if something else stands there.
    """
    check_ours(out)
    if overwrite:
        return None
    dataset = prepared(out)
    if dataset is None:
        return None
    refuse_other_settings(dataset, recipe=recipe, options=options)
    return dataset


def refuse_other_settings(dataset: PreparedDataset, *, recipe: str, options: Mapping[str, Any]) -> None:
    """Make sure that a dataset is what is asked for.

    Raises:
        ValueError: naming each setting that differs, with both values.
    """
    old = flat({"recipe": dataset.recipe, **dataset.options})
    new = flat({"recipe": recipe, **options})
    differ = [name for name in dict.fromkeys([*old, *new]) if old.get(name, "absent") != new.get(name, "absent")]
    if not differ:
        return
    way_out = "Prepare it again with --overwrite (overwrite=True), or choose another folder"
    if differ == ["content"]:
        raise ValueError(
            f"{dataset.path} was prepared from other lines: the input file changed since, or is another one; all settings and "
            f"the tokenizer are the same. {way_out}"
        )
    lines = [f"  {name}: {_difference(name, old.get(name, 'absent'), new.get(name, 'absent'))}" for name in differ]
    raise ValueError(f"{dataset.path} was prepared with other settings:\n" + "\n".join(lines) + f"\n{way_out}")


def _difference(name: str, there: Any, asked: Any) -> str:
    if name in _HASHED and "absent" not in (there, asked) and None not in (there, asked):
        return _HASHED[name]
    return f"{there!r} there, {asked!r} asked for"


def check_ours(out: Path) -> None:
    """Make sure that ``out`` is absent, empty, or a dataset of ours and nothing more.

    Raises:
        ValueError: if it holds anything else; that is never deleted.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file, not a folder: choose another folder")
    try:
        found = {entry.name for entry in out.iterdir()}
    except FileNotFoundError:
        return  # another process is just replacing it
    refuse_foreign(str(out), found)


def refuse_foreign(out: str, found: Collection[str], *, marks: Sequence[str] = (MARKER,)) -> None:
    """Make sure that what is in a folder is a dataset of ours and nothing more, known by one of ``marks``, or nothing.

    Raises:
        ValueError: if there is anything else; that is never deleted.
    """
    if found and not any(mark in found for mark in marks):
        raise ValueError(
            f"{out} is not empty and was not prepared by lightning-pack, so it is left alone (even with --overwrite): "
            "choose another folder, or empty it yourself"
        )
    shards = {name for name in found if name.removesuffix(".idx").endswith(".tar") and name.startswith(("train-", "val-"))}
    foreign = sorted(set(found) - shards - {*marks, ".nv-meta", "tokenizer"})
    if foreign:
        raise ValueError(f"{out} holds {', '.join(foreign)} besides the dataset: move that away, or choose another folder")
