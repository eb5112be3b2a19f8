"""The images of a packed row among the members of its tar file, and what the row says of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_pack.media import MediaFile


def media_members(files: Sequence[Sequence[MediaFile]]) -> tuple[list[list[dict[str, Any]]], dict[str, bytes]]:
    """What a row says of the files of each source, as plain values, and their content by extension.

    Files are numbered through the row: ``0.png``, ``1.jpeg`` and so on.
    """
    number = itertools.count()
    said: list[list[dict[str, Any]]] = []
    content: dict[str, bytes] = {}
    for each in files:
        said.append([])
        for file in each:
            name = f"{next(number)}.{file.kind}"
            said[-1].append({"name": name, "tokens": file.tokens, "nbytes": file.nbytes, "check": file.check})
            content[name] = file.content
    return said, content


def read_media_members(
    said: Sequence[Sequence[Mapping[str, Any]]], parts: Mapping[str, Any]
) -> tuple[list[list[MediaFile]], dict[int, str]]:
    """The files of each source, and what is wrong with those of a source that are not what was written.

    Args:
        said: by the row.
        parts: content of its members, by extension.
    """
    files: list[list[MediaFile]] = []
    broken: dict[int, str] = {}
    for place, each in enumerate(said):
        files.append([])
        for one in each:
            name, content = one["name"], parts.get(one["name"])
            kind = name.partition(".")[2]
            files[-1].append(MediaFile(content or b"", kind=kind, tokens=one["tokens"], nbytes=one["nbytes"]))
            if content is None:
                broken.setdefault(place, f"its file {name} is missing")
            elif files[-1][-1].check != one["check"]:
                broken.setdefault(place, f"its file {name} is not what was written: the hash differs")
    return files, broken
