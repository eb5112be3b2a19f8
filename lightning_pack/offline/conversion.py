"""Rows that others decided, as packed rows of ours: the same sources in the same rows, in the same order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_pack.encoders import Encoder, RecordEncoder, load_tokenizer
from lightning_pack.encoders.tokenizer import padding_id
from lightning_pack.energon.fingerprint import library_fingerprint
from lightning_pack.offline.chat_rows import read_chat_rows
from lightning_pack.offline.collated import read_collated
from lightning_pack.offline.given_row import GivenRow, GivenRowError
from lightning_pack.offline.manifest import Manifest, global_policy
from lightning_pack.offline.megatron_bridge import read_npy, read_parquet
from lightning_pack.offline.prepacking import PackedRows
from lightning_pack.offline.row_writer import read_shard_note, write_shard
from lightning_pack.offline.shard_file import ShardFile, sha256_of
from lightning_pack.offline.split_statistics import SplitStatistics, left_out_by_reason
from lightning_pack.offline.verification import verify
from lightning_pack.offline.workplace import Workplace, check_destination, refuse_other
from lightning_pack.overlength import Overlength
from lightning_pack.policy_checks import refuse_media
from lightning_pack.source import IGNORE, LeftOut

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Formats, by the names that a manifest gives them.
FORMATS = ("megatron-bridge", "chat-rows", "collated")
_SUFFIXES = {
    ".parquet": "megatron-bridge",
    ".pq": "megatron-bridge",
    ".npy": "megatron-bridge",
    ".npz": "collated",
    ".pt": "collated",
}
_ROWS_PER_SHARD = 512
#: Tokens that no row exceeds.
_UNBOUNDED = 1 << 30
#: What is to be known of formats that store no real lengths.
PADS_COUNT = (
    "pads that were put into a source before it was packed cannot be told from its tokens in this format (ids are never looked "
    "at), so they count as tokens; the loss does not count them"
)


def convert(
    source: str | Path,
    out: str | Path,
    *,
    val: str | Path | None = None,
    capacity: int | None = None,
    multiple: int = 1,
    overlength: Overlength | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    encoder: Encoder | None = None,
    pad_id: int | None = None,
    on_bad_row: str = "error",
    overwrite: bool = False,
) -> PackedRows:
    """Convert packed rows of another system into rows that :class:`~lightning_pack.EnergonPackDataModule` replays.

    The format is seen by the file: Megatron-Bridge's Parquet and ``.npy`` (:mod:`lightning_pack.offline.megatron_bridge`),
    packed chats of NeMo-RL and Megatron-LM (:mod:`~lightning_pack.offline.chat_rows`) and collated batches
    (:mod:`~lightning_pack.offline.collated`).

    Args:
        source: file, or a folder of files of one format, which are read in the order of their names.
        out: folder for the rows; absent or empty, or such rows.
        val: likewise, for the split ``val``.
        capacity: most places of a row; needed for chats, else None takes those of the longest row.
        multiple: of the places that each source takes up.
        overlength: for chats: what happens to a conversation for which its row has no room; None is ``"drop"``.
        tokenizer: for chats: folder of the tokenizer, or the tokenizer. For tokens it only gives the pad id and comes along.
        encoder: for chats: in place of the tokenizer.
        pad_id: fills gaps; None takes that of the tokenizer or encoder, else 0 (gaps are never seen by attention or loss).
        on_bad_row: ``"error"``, or ``"skip"`` to leave a row out that does not say what it must, and count it; of a row of
            chats, the conversation that cannot be understood.
        overwrite: whether to replace other rows.

    Raises:
        GivenRowError: naming the row, and what it should say.
        ValueError: for a file of no known format, settings that are not used or missing, or other rows at ``out``.
        VerificationError: if the rows are there already and are damaged.
    """
    if on_bad_row not in ("error", "skip"):
        raise ValueError(f"on_bad_row={on_bad_row!r} is not one of 'error', 'skip'")
    if pad_id is not None and (type(pad_id) is not int or pad_id < 0):
        raise ValueError(f"pad_id={pad_id!r}: a token id is needed, a whole number of at least 0")
    files = {"train": _files(source)} | ({} if val is None else {"val": _files(val)})
    forms = {_format(file) for found in files.values() for file in found}
    if len(forms) > 1:
        raise ValueError(
            f"{source} and {val} hold rows of several formats ({', '.join(sorted(forms))}): convert them one by one"
        )
    (form,) = forms
    loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    if form == "chat-rows":
        encoder = _chat_encoder(loaded, encoder)
        if capacity is None:
            raise ValueError(
                "packed chats are not tokenized yet, so their rows need a capacity: give --capacity (capacity=...)"
            )
    else:
        for name, value in (("overlength", overlength), ("encoder", encoder)):
            if value is not None:
                raise ValueError(f"{name}={value!r} is not used: the rows of {form} are tokens already")
    if pad_id is None:
        pad_id = encoder.pad_id if encoder is not None else 0 if loaded is None else padding_id(loaded)
    packing: dict[str, Any] = {"multiple": multiple} | ({} if capacity is None else {"capacity": capacity})
    if form == "chat-rows":
        packing["overlength"] = overlength or "drop"
    out = Path(out).resolve()
    asked = Manifest(
        origin=form,
        # An unknown capacity is found out while the rows are written.
        packing=packing,
        encoder={} if encoder is None else encoder.fingerprint(),
        data={split: [f"{file.name}: sha256 {sha256_of(file)}" for file in found] for split, found in files.items()},
        versions=library_fingerprint(),
        pad_id=pad_id,
        splits={},
    )
    # What is no multiple is refused there.
    step = multiple if isinstance(multiple, int) and multiple > 0 else 1
    policy = global_policy(**{"capacity": _UNBOUNDED // step * step} | packing)
    place = Workplace(out)
    with place.held():
        found = check_destination(out, overwrite=overwrite)
        if found is not None:
            known = asked if capacity is not None else replace(asked, packing=packing | {"capacity": found.packing["capacity"]})
            refuse_other(out, found, known.settings())
            return PackedRows(path=out, manifest=verify(out).manifest, fresh=False)
        place.begin(asked.settings(), overwrite=overwrite)
        read: dict[str, Any] = {".parquet": read_parquet, ".pq": read_parquet, ".npy": read_npy}
        written = {}
        widest = 0
        for split, those in files.items():
            writer = _Writer(place.dataset, split, multiple=multiple, capacity=capacity, skip=on_bad_row == "skip")
            for file in those:
                if form == "chat-rows":
                    assert encoder is not None
                    rows = read_chat_rows(file, encoder=encoder, policy=policy, skip=on_bad_row == "skip")
                else:
                    rows = read.get(file.suffix, read_collated)(file)
                writer.add_all(rows)
            written[split] = writer
            widest = max(widest, writer.widest)
        slots = capacity or widest
        manifest = replace(
            asked,
            packing=packing | {"capacity": capacity or -(-widest // multiple) * multiple},
            splits={split: writer.statistics(slots) for split, writer in written.items()},
        )
        kept = loaded if encoder is None else getattr(encoder, "tokenizer", None)
        if kept is not None:
            kept.save_pretrained(str(place.dataset / "tokenizer"))
        place.publish(manifest, [name for each in manifest.splits.values() for name in each.shards], overwrite=overwrite)
    return PackedRows(path=out, manifest=manifest, fresh=True)


def _files(source: str | Path) -> list[Path]:
    path = Path(source)
    if not path.exists():
        raise ValueError(f"there is no file or folder {str(source)!r}")
    found = sorted(file for file in path.iterdir() if _known(file)) if path.is_dir() else [path]
    if not found:
        raise ValueError(f"{path} holds no file of packed rows: {', '.join([*_SUFFIXES, '.jsonl'])} are known")
    return found


def _known(file: Path) -> bool:
    return file.suffix in _SUFFIXES or file.suffix == ".jsonl"


def _format(file: Path) -> str:
    if file.suffix in _SUFFIXES:
        return _SUFFIXES[file.suffix]
    if file.suffix != ".jsonl":
        raise ValueError(f"{file} is of no known format: {', '.join([*_SUFFIXES, '.jsonl'])} are known")
    with file.open(encoding="utf-8-sig") as opened:
        first = next((line for line in opened if line.strip()), "")
    if not first:
        raise ValueError(f"{file} holds no rows: it has no line with text")
    try:
        record: Any = json.loads(first)
    except ValueError:
        record = None
    if isinstance(record, Mapping) and "messages" in record:
        return "chat-rows"
    if isinstance(record, Mapping) and "packed_cu_seqlens" in record:
        return "collated"
    raise ValueError(
        f"the first line of {file} is neither a packed chat ('messages') nor a collated batch ('packed_cu_seqlens')"
    )


def _chat_encoder(tokenizer: Any, encoder: Encoder | None) -> Encoder:
    if (tokenizer is None) == (encoder is None):
        raise ValueError(
            "packed chats are not tokenized yet: give --tokenizer DIR (tokenizer=...), or an encoder, and not both"
        )
    refuse_media(encoder, "rows that are converted")
    return RecordEncoder(tokenizer) if encoder is None else encoder


@dataclass
class _Writer:
    """Writes the rows of a split, and counts."""

    folder: Path
    split: str
    multiple: int
    capacity: int | None
    skip: bool
    rows: int = 0
    sources: int = 0
    tokens: int = 0
    alignment: int = 0
    widest: int = 0
    gone: list[LeftOut] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    _shard: ShardFile | None = None
    _targets: int = 0

    def add_all(self, rows: Iterator[GivenRow | GivenRowError]) -> None:
        """Write the rows of a file."""
        try:
            for given in rows:
                self._add(given)
        except BaseException:
            if self._shard is not None:
                self._shard.discard()
            raise

    def _add(self, given: GivenRow | GivenRowError) -> None:
        try:
            if isinstance(given, GivenRowError):
                raise given
            make = partial(given.row, split=self.split, number=self.rows, first_source=self.sources)
            row, gone = make(multiple=self.multiple, capacity=self.capacity)
        except GivenRowError:
            if not self.skip:
                raise
            tokens = 0 if isinstance(given, GivenRowError) else sum(len(source.ids) for source in given.sources)
            self.gone.append(LeftOut(given.place, "corrupt", tokens))
            return
        self.gone += gone
        if row is None:
            return
        if self._shard is None:
            self.shards.append(f"{self.split}-{len(self.shards):04d}.tar")
            self._shard, self._targets = ShardFile(self.folder / self.shards[-1]), 0
        self._shard.add(row)
        self._targets += int((row.tokens[1] != IGNORE).sum())
        self.rows += 1
        self.sources += len(row.keys)
        self.tokens += sum(row.lengths)
        self.alignment += sum(-length % self.multiple for length in row.lengths)
        self.widest = max(self.widest, row.offsets[-1])
        if self._shard.rows == _ROWS_PER_SHARD:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._shard is not None:
            write_shard(self.folder, self.shards[-1], self._shard, targets=self._targets)
            self._shard = None

    def statistics(self, capacity: int) -> SplitStatistics:
        """Of what was written."""
        self._end_shard()
        if not self.rows:
            told = ", ".join(f"{gone.key} ({gone.reason})" for gone in self.gone[:3])
            raise ValueError(
                f"no row for the split {self.split!r} can be trained on: "
                + (f"{len(self.gone)} rows or sources of it are left out, such as {told}" if told else "its files hold no rows")
            )
        notes = {name: read_shard_note(self.folder, name) for name in self.shards}
        return SplitStatistics(
            sources=self.sources,
            rows=self.rows,
            tokens=self.tokens,
            targets=sum(targets for _, targets in notes.values()),
            slots=self.rows * capacity,
            alignment=self.alignment,
            lower_bound=0,
            left_out=left_out_by_reason(self.gone),
            shards={name: shard for name, (shard, _) in notes.items()},
        )
