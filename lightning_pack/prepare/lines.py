"""Lines of a file, one JSON object each: good ones, bad ones, and what is wrong with these."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_pack.encoders import LeaveOut, read_record

#: Bad lines that an error tells of one by one.
TOLD = 20
#: Fields that an encoder reads, which come as the form that they were understood as.
_READ = frozenset({"messages", "prompt", "completion", "text", "images", "image", "tools"})


class LineReader:
    """Reads lines, counts good and bad ones, and hashes them all.

    Args:
        parse: line -> record; raises :class:`LeaveOut` for a bad one.
    """

    def __init__(self, parse: Callable[[bytes], dict[str, Any]]) -> None:
        self._parse = parse
        self.content = hashlib.sha256()
        self.number = self.good = 0
        #: Bad lines by fault.
        self.bad: Counter[str] = Counter()
        self._told: list[str] = []
        self._opens = b""

    def read(self, line: bytes) -> dict[str, Any] | None:
        """The record of the next line, with nothing in it but its form; None for a blank line or a bad one."""
        self.number += 1
        self.content.update(line)
        if self.number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            return None
        if not self._opens:
            self._opens = line.strip()
        try:
            record = self._parse(line)
        except LeaveOut as fault:
            self.bad[fault.problem] += 1
            if len(self._told) < TOLD:
                self._told.append(f"  line {self.number}: {fault}")
            return None
        self.good += 1
        return record

    def hint(self) -> str:
        """What kind of file it rather is, if that can be told, as a line."""
        if self._opens.startswith(b"[") or (self._opens == b"{" and not self.good):
            return "It looks like one JSON value over several lines; one object a line is needed: jq -c '.[]' FILE > NEW\n"
        if self.bad["not UTF-8"]:
            return "Text in another encoding is converted with, for example, iconv -f LATIN1 -t UTF-8 FILE > NEW\n"
        return ""

    def report(self, file: Path) -> str:
        """What is wrong with the file, and the ways out."""
        count = self.bad.total()
        first = f", the first {TOLD} of them" if count > TOLD else ""
        return (
            f"{file} has {count} bad line{'s' * (count > 1)} of {self.number}{first}:\n" + "\n".join(self._told) + "\n"
            f"{self.hint()}"
            'Correct the file, or leave such lines out with --on-bad-line skip (on_bad_line="skip")'
        )


#: First bytes of what is no text in UTF-8, and what to do about it.
_OTHER_KINDS = {
    b"\x1f\x8b": "is compressed: unpack it first (gunzip)",
    b"BZh": "is compressed: unpack it first (bunzip2)",
    b"\xfd7zXZ": "is compressed: unpack it first (unxz)",
    b"\x28\xb5\x2f\xfd": "is compressed: unpack it first (unzstd)",
    b"PK\x03\x04": "is a zip archive: unpack it first (unzip)",
    b"PAR1": "is a Parquet file: write its records as JSON, one object a line (pandas: to_json(lines=True, orient='records'))",
    b"\xff\xfe": "is UTF-16 text: convert it first (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "is UTF-16 text: convert it first (iconv -f UTF-16 -t UTF-8)",
}


def refuse_other_kind(file: Path) -> None:
    """Check, by its first bytes, that a file may hold lines of JSON.

    Raises:
        ValueError: for compressed files, Parquet and UTF-16, saying how they become such lines.
    """
    with file.open("rb") as stream:
        begins = stream.read(8)
    for mark, problem in _OTHER_KINDS.items():
        if begins.startswith(mark):
            raise ValueError(f"{file} {problem}")


def parse_line(line: bytes) -> dict[str, Any]:
    """The record of one line.

    Raises:
        LeaveOut: if it has none.
    """
    fields = json_object(line)
    record = read_record(fields)
    return ({"text": record} if isinstance(record, str) else {"messages": record}) | notes(fields)


def notes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that no encoder reads, if they are a string, a number or a truth value: sources may be grouped by them.

    >>> notes({"text": "Hi", "language": "en", "year": 2020, "checked": None, "meta": {"by": "me"}})
    {'language': 'en', 'year': 2020}
    """
    return {name: value for name, value in fields.items() if name not in _READ and isinstance(value, str | int | float)}


def json_object(line: bytes) -> Mapping[str, Any]:
    """The JSON object of one line.

    Raises:
        LeaveOut: if it has none.
    """
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise LeaveOut("corrupt", f"not UTF-8: {error.reason} at byte {error.start}", "not UTF-8") from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise LeaveOut("corrupt", f"not JSON: {error.msg} at column {error.colno}", "not JSON") from None
    except (ValueError, RecursionError) as error:
        raise LeaveOut("corrupt", f"not JSON that can be read: {error}", "not JSON") from None
    if not isinstance(value, Mapping):
        raise LeaveOut("corrupt", f"not an object but a {type(value).__name__}", "not an object")
    return value
