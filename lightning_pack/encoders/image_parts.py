"""The images of a chat: where they are in the messages, and which they are.

An image part of a message names its image, or takes the next of those that are named nowhere else::

    {"role": "user", "content": [{"type": "image", "image": "0.jpg"}, {"type": "text", "text": "What is this?"}]}
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]}

A name is that of a member of the sample, whatever its ending, with or without its key, of a file (relative to the ``.jsonl``
file), or a ``data:`` address. Without names the images come from the record's ``images`` (or ``image``), a list of names in the
order of the parts, or, where there is no such field, are the image members of the sample in the order of the shard. Each image
member is shown: one that neither a part nor the list names leaves the sample out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_pack.encoders.base import LeaveOut
from lightning_pack.encoders.image_names import find_image
from lightning_pack.encoders.images import EncodedImage, is_image_name
from lightning_pack.encoders.messages import Message, checked_text, read_messages

#: Fields of a record with media that no encoder reads.
_OTHER_MEDIA = ("videos", "video", "audios", "audio")
#: Fields of a part that name its image.
_NAMES = ("image", "path", "url", "image_url")


def read_image_chat(
    record: Mapping[str, Any], *, key: str = "", image_root: str | None = None
) -> tuple[list[Message], list[EncodedImage]]:
    """The checked turns of a record, with ``{"type": "image"}`` in the place of each image, and the images in that order.

    Args:
        record: a :class:`~lightning_pack.encoders.images.MediaRecord`, or any other mapping, which has no files.
        key: of the sample, with which a record may name its members too, as they are called in the shard.
        image_root: folder that relative paths start from; None takes that of the record.

    Raises:
        LeaveOut: if the turns are not in order, a part is not understood, images and image parts do not match, or there is a
            video or a sound.
    """
    for name in _OTHER_MEDIA:
        if record.get(name):
            raise LeaveOut(
                "corrupt",
                f"the record has {name!r}, which is not supported: give frames of a video as images",
                "video or audio",
            )
    parts = _Parts()
    messages = read_messages(record, content=parts.content)
    files: Mapping[str, bytes] = getattr(record, "files", {})

    def member(name: Any) -> Any:
        short = name.removeprefix(f"{key}.") if isinstance(name, str) else name
        return short if isinstance(short, str) and short in files else name

    images = [name for name in files if is_image_name(name)]
    parts.named = [member(name) for name in parts.named]
    listed = _listed(record)
    unnamed = parts.named.count(None)
    if listed is None:
        # Those that a part names are not taken again.
        rest: list[Any] = [name for name in images if name not in parts.named]
        origin = f"the sample brings {rest or 'none'} beside those that are named"
        if others := [name for name in files if name not in images and name not in parts.named]:
            origin += f" (and {others}, which would be images if they were named)"
    else:
        rest, origin = [member(name) for name in listed], f"the record lists {len(listed)}"
    if unnamed != len(rest):
        raise LeaveOut(
            "corrupt",
            f"{unnamed} image parts of the messages name no image, and {origin}: each image needs its place in a message, as "
            '{"type": "image"}, and each place its image',
            "images do not match",
        )
    if unseen := [name for name in images if name not in rest and name not in parts.named]:
        raise LeaveOut(
            "corrupt",
            f"the sample brings the images {unseen}, and neither a part of its messages nor the record's list names them: name "
            "each where it is seen, or leave it out of the sample",
            "images do not match",
        )
    order = iter(rest)
    folder = image_root if image_root is not None else getattr(record, "folder", None)
    names = [next(order) if name is None else name for name in parts.named]
    return messages, [find_image(name, files=files, folder=folder) for name in names]


def _listed(record: Mapping[str, Any]) -> list[Any] | None:
    given = [name for name in ("images", "image") if record.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise LeaveOut("corrupt", "the record has 'images' and 'image': keep one of them", "ambiguous fields")
    images = record[given[0]]
    return list(images) if isinstance(images, list | tuple) else [images]


class _Parts:
    """Reads contents, and notes what each image part names."""

    def __init__(self) -> None:
        self.named: list[Any] = []

    def content(self, value: Any, what: str, problem: str) -> Any:
        if not isinstance(value, list):
            return checked_text(value, what, problem)
        if not value:
            raise LeaveOut("empty", f"{what} is an empty list", problem)
        parts = [self._part(part, f"part {number} of {what}", problem) for number, part in enumerate(value, 1)]
        if not any(part["type"] == "image" or part["text"].strip() for part in parts):
            raise LeaveOut("empty", f"{what} is blank", problem)
        return parts

    def _part(self, part: Any, what: str, problem: str) -> dict[str, str]:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise LeaveOut("corrupt", f"{what} is a {type(part).__name__}, not an object", "part not an object")
        kind = part.get("type")
        used = {"type", "text"} if kind == "text" else {"type", *_NAMES}
        unused = sorted(str(name) for name, value in part.items() if name not in used and value is not None)
        if kind in ("text", "image", "image_url") and unused:
            raise LeaveOut("corrupt", f"{what} has the fields {unused}, which are not used", "unused fields")
        if kind == "text":
            text = part.get("text")
            if isinstance(text, str) and not text.strip():
                # Blanks between two images.
                return {"type": "text", "text": text}
            return {"type": "text", "text": checked_text(text, what, problem)}
        if kind in ("image", "image_url"):
            self.named.append(_named(part, what))
            return {"type": "image"}
        if kind == "video":
            raise LeaveOut("corrupt", f"{what} is a video, which is not supported: give its frames as images", "video")
        raise LeaveOut("corrupt", f"{what} has the type {kind!r}, not 'text' or 'image'", "unknown part")


def _named(part: Mapping[str, Any], what: str) -> Any:
    given = [part[name] for name in _NAMES if part.get(name) is not None]
    if len(given) > 1:
        raise LeaveOut("corrupt", f"{what} names its image {len(given)} times", "ambiguous fields")
    if not given:
        return None
    if isinstance(given[0], Mapping):
        if not isinstance(given[0].get("url"), str):
            raise LeaveOut("corrupt", f"{what} has an 'image_url' without 'url'", "image not named")
        # How finely an image is seen is the image processor's part; "auto" asks for nothing else.
        unused = {name: value for name, value in given[0].items() if (name, value) != ("detail", "auto") and value is not None}
        del unused["url"]
        if unused:
            raise LeaveOut("corrupt", f"{what} has an 'image_url' with {unused!r}, which is not used", "unused fields")
        return given[0]["url"]
    return given[0]
