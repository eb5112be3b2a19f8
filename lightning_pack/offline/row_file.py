"""A packed row on disk: members of a tar file, readable with nothing but JSON and numpy.

``KEY.json`` says which sources the row has and where they lie; ``KEY.npy`` is int32 ``[2, L]``, the token ids and labels of
its sources end to end, without pads (labels are those of :class:`~lightning_pack.source.EncodedSource`: not shifted, -100
where a token is no target). Both carry a hash, so that a changed byte is found when the row is read.

A row with images has them too, as the data had them: ``KEY.0.png``, ``KEY.1.jpeg`` and so on in the order of their
placeholders, each with a hash in ``KEY.json``. They are decoded when the row is read, in the way of sources that are packed
while training: pixels as the model takes them would be many times as many bytes to store and to read.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_pack.boundaries import shown_offsets
from lightning_pack.media import MediaFile
from lightning_pack.offline.media_members import media_members, read_media_members
from lightning_pack.source import IGNORE

#: Version of the members of a row of tokens, and of one with media.
ROW_FORMAT, MEDIA_ROW_FORMAT = 1, 2
_FIELDS = {"format", "split", "row", "keys", "numbers", "lengths", "offsets", "group", "tokens"}
#: Names of files.
_MEMBER = re.compile(r"[0-9]+\.[a-z0-9]+")
#: cu_seqlens are int32.
_MOST = 2**31 - 1


class DamagedRowError(ValueError):
    """A row that is not what was written.

    Args:
        message: what is wrong.
    """

    #: Keys and real tokens of its sources, where they could be read.
    sources: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A packed row as it is stored.

    Args:
        split: that it belongs to.
        number: of the row in its split.
        keys: of the sources, in row order.
        numbers: of the sources in the data that they came from; each occurs once in a split.
        lengths: real tokens of each source.
        offsets: physical boundaries: 0, the end of each source, and the last one again where boundaries are fixed.
        tokens: int32 ``[2, L]``: ids and labels of the real tokens.
        group: that the sources have in common.
        files: media of each source, in the order of their placeholders; None for rows of tokens alone.
        broken: what is wrong with the files of a source, by its place; they are then not those that were written.
    """

    split: str
    number: int
    keys: Sequence[str]
    numbers: Sequence[int]
    lengths: Sequence[int]
    offsets: Sequence[int]
    tokens: np.ndarray = field(repr=False)
    group: str | None = None
    files: Sequence[Sequence[MediaFile]] | None = field(default=None, repr=False)
    broken: Mapping[int, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Energon's sample key."""
        return f"{self.split}-row{self.number:08d}"

    @property
    def digest(self) -> int:
        """A sum over the sources, which does not depend on how they are dealt out to rows."""
        total, start = 0, 0
        for i, (key, number, length) in enumerate(zip(self.keys, self.numbers, self.lengths, strict=True)):
            part = np.ascontiguousarray(self.tokens[:, start : start + length])
            hashed = hashlib.blake2b(f"{number} {length} {key}\n".encode(), digest_size=16)
            hashed.update(part.tobytes())
            for file in () if self.files is None else self.files[i]:
                hashed.update(f"{file.kind} {file.tokens} {file.nbytes} {file.check}\n".encode())
            total += int.from_bytes(hashed.digest(), "big")
            start += length
        return total % (1 << 128)

    def parts(self) -> dict[str, bytes]:
        """Content of the members, by extension."""
        array = io.BytesIO()
        np.save(array, np.ascontiguousarray(self.tokens, dtype=np.int32), allow_pickle=False)
        said: dict[str, Any] = {
            "format": ROW_FORMAT,
            "split": self.split,
            "row": self.number,
            "keys": list(self.keys),
            "numbers": list(self.numbers),
            "lengths": list(self.lengths),
            "offsets": list(self.offsets),
            "group": self.group,
            "tokens": _hash(array.getvalue()),
        }
        content: dict[str, bytes] = {}
        if self.files is not None:
            about, content = media_members(self.files)
            said |= {"format": MEDIA_ROW_FORMAT, "media": about}
        return {"json": _json(said | {"check": _hash(_json(said))}), "npy": array.getvalue(), **content}

    @classmethod
    def of(cls, parts: Mapping[str, Any], *, key: str | None = None) -> Row:
        """The row of its members.

        Args:
            parts: by extension; the JSON may be parsed already.
            key: that the members have in their shard.

        Raises:
            DamagedRowError: if they are not what was written, with the sources where they are known.
        """
        missing = [name for name in ("json", "npy") if name not in parts]
        if missing:
            raise DamagedRowError(f"a row needs a .json and a .npy part, .{missing[0]} is missing")
        try:
            said = dict(parts["json"] if isinstance(parts["json"], dict) else json.loads(parts["json"]))
            check = said.pop("check", None)
        except (ValueError, TypeError, RecursionError) as e:
            raise DamagedRowError(f"its JSON cannot be read ({type(e).__name__})") from e
        if check != _hash(_json(said)):
            raise DamagedRowError("its JSON is not what was written: the hash differs")
        known = {ROW_FORMAT: _FIELDS, MEDIA_ROW_FORMAT: _FIELDS | {"media"}}
        number = said.get("format")
        if type(number) is not int or set(said) != known.get(number):
            raise DamagedRowError(f"its format is {number!r}, this version reads {ROW_FORMAT} and {MEDIA_ROW_FORMAT}")
        _check_types(said)
        sources = tuple(zip(said["keys"], said["lengths"], strict=False))
        try:
            if _hash(parts["npy"]) != said["tokens"]:
                raise DamagedRowError("its tokens are not what was written: the hash differs")
            files, broken = (None, {}) if "media" not in said else read_media_members(said["media"], parts)
            row = cls(
                split=said["split"],
                number=said["row"],
                keys=said["keys"],
                numbers=said["numbers"],
                lengths=said["lengths"],
                offsets=said["offsets"],
                tokens=_array(parts["npy"]),
                group=said["group"],
                files=files,
                broken=broken,
            )
            if key is not None and key.rpartition("/")[2] != row.key:
                raise DamagedRowError(f"it lies under the key {key!r} and is {row.key!r}")
            row.check()
        except DamagedRowError as e:
            e.sources = sources
            raise
        return row

    def check(self) -> None:
        """Check that the boundaries describe the tokens. An empty source is no damage: who reads leaves it out.

        Raises:
            DamagedRowError: if they do not.
        """
        tokens, lengths = self.tokens, list(self.lengths)
        if tokens.dtype != np.int32 or tokens.ndim != 2 or tokens.shape != (2, sum(lengths)):
            raise DamagedRowError(
                f"its tokens are {tokens.dtype} of shape {list(tokens.shape)}, its sources say int32 [2, {sum(lengths)}]"
            )
        if not len(self.keys) == len(self.numbers) == len(lengths) or len(self.offsets) < len(lengths) + 1:
            raise DamagedRowError(
                f"it has {len(self.keys)} keys, {len(self.numbers)} numbers, {len(lengths)} lengths and "
                f"{len(self.offsets)} boundaries"
            )
        if self.files is not None and len(self.files) != len(lengths):
            raise DamagedRowError(f"it has media of {len(self.files)} sources and {len(lengths)} lengths")
        if max(self.offsets) > _MOST:
            raise DamagedRowError(f"its boundaries {shown_offsets(self.offsets)} go beyond {_MOST}")
        room = np.diff(self.offsets)
        if self.offsets[0] != 0 or (room < 0).any() or room[len(lengths) :].any():
            raise DamagedRowError(
                f"its boundaries {shown_offsets(self.offsets)} must begin at 0, never decrease, and repeat the last one after "
                f"{len(lengths)} sources"
            )
        for key, length, places in zip(self.keys, lengths, room.tolist(), strict=False):
            if not 0 <= length <= places:
                raise DamagedRowError(f"its source {key!r} has {length} tokens in {places} places")
        real = np.cumsum([0, *lengths]).tolist()
        starts = np.array([start for start, length in zip(real, lengths, strict=False) if length], dtype=np.int64)
        if len(starts) and (tokens[1, starts] != IGNORE).any():
            raise DamagedRowError("the first token of a source is a target, which would be predicted from another source")


def _check_types(said: Mapping[str, Any]) -> None:
    """A hash tells that nothing was changed, not that what was written made sense."""
    kinds: dict[str, Any] = {"split": str, "row": int, "group": str | None, "tokens": str}
    lists = {"keys": str, "numbers": int, "lengths": int, "offsets": int}
    wrong = [name for name, kind in kinds.items() if not isinstance(said[name], kind)]
    for name, kind in lists.items():
        if not isinstance(said[name], list) or any(type(value) is not kind for value in said[name]):
            wrong.append(name)
    if "media" in said and not _is_said_of_media(said["media"]):
        wrong.append("media")
    if wrong:
        raise DamagedRowError(f"its JSON has values of other types than a row has: {', '.join(wrong)}")


def _is_said_of_media(said: Any) -> bool:
    if not isinstance(said, list) or not all(isinstance(each, list) for each in said):
        return False
    kinds = {"name": str, "tokens": int, "nbytes": int, "check": str}
    return all(
        isinstance(file, dict)
        and {name: type(value) for name, value in file.items()} == kinds
        and _MEMBER.fullmatch(file["name"])
        and min(file["tokens"], file["nbytes"]) >= 0
        for each in said
        for file in each
    )


def _array(content: bytes) -> np.ndarray:
    try:
        return np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, OSError, EOFError, OverflowError, MemoryError) as e:
        raise DamagedRowError(f"its tokens are no array that can be read ({type(e).__name__})") from e


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
