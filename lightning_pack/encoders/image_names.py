"""From what a record says of an image to the image."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_pack.encoders.base import LeaveOut
from lightning_pack.encoders.images import MODES, EncodedImage, on_white

#: That a PNG file holds as they are.
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
#: Characters of a name that are shown.
_SHOWN = 80


def find_image(named: Any, *, files: Mapping[str, bytes], folder: str | None) -> EncodedImage:
    """The image that a record names.

    Args:
        named: the name of a member of the sample, a path, a ``data:`` address with base64, or an image itself: the content of a
            file, a Pillow image, or a uint8 array or tensor.
        files: members of the sample.
        folder: that relative paths start from.

    Raises:
        LeaveOut: as ``corrupt``, if the record names no image; as ``image``, if there is none of that name, or its values are
            not 8 bits.
    """
    if isinstance(named, bytes | bytearray | memoryview):
        return EncodedImage("(bytes)", content=bytes(named))
    if not isinstance(named, str):
        return _from_pixels(named)
    if named in files:
        return EncodedImage(named, content=files[named])
    if named.startswith("data:"):
        return _from_address(named)
    if named.startswith(("http://", "https://")):
        raise LeaveOut(
            "corrupt", f"image {_short(named)} is on the web: nothing is downloaded, keep it beside the data", "image on web"
        )
    named = named.removeprefix("file://")
    if folder is None and not os.path.isabs(named) and "://" not in named:
        having = f"the sample has {sorted(files)}" if files else "the sample has no image of its own"
        raise LeaveOut(
            "image",
            f"image {_short(named)} is not there: {having}, and a relative path needs a .jsonl file to start from, or "
            "image_root=",
            "image missing",
        )
    path = named if os.path.isabs(named) or "://" in named else f"{folder}/{named}"
    if "://" not in path and not _is_file(path):
        raise LeaveOut("image", f"image {_short(named)} is not there: no file {_short(path)}", "image missing")
    return EncodedImage(named, path=path)


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        # Too long for a name, as base64 without its 'data:' is, or with a zero byte.
        return False


def _short(name: str) -> str:
    """For messages: a name may be a whole image by mistake."""
    if len(name) <= _SHOWN:
        return repr(name)
    return f"{name[:_SHOWN]!r}... of {len(name):,} characters (base64 is given as 'data:image/png;base64,...')"


def _from_address(address: str) -> EncodedImage:
    head, _, body = address.partition(",")
    if not head.endswith(";base64"):
        raise LeaveOut("corrupt", f"an image is given as {head[:60]!r}: only base64 is read there", "image not base64")
    try:
        return EncodedImage("(base64)", content=base64.b64decode(body, validate=True))
    except ValueError as error:
        raise LeaveOut("image", f"an image is given as base64 that is broken ({error})", "image unreadable") from error


def _from_pixels(pixels: Any) -> EncodedImage:
    """Kept as PNG, which loses nothing and is small in the buffer."""
    import numpy as np
    import PIL.Image

    if not isinstance(pixels, PIL.Image.Image):
        try:
            values = np.asarray(pixels)
        except Exception as error:
            raise _unknown(pixels) from error
        if values.dtype == object or not values.ndim:
            raise _unknown(pixels)
        if values.dtype != np.uint8:
            raise LeaveOut(
                "image",
                f"an image is given as {type(pixels).__name__} of {values.dtype}: the image processor would scale its values "
                "again; give the file's content, a Pillow image, or uint8 values 0 to 255",
                "image not 8-bit",
            )
        if values.ndim == 3 and values.shape[0] in (1, 3, 4) and values.shape[-1] not in (1, 3, 4):
            # Channels first, as decoders to tensors give them.
            values = values.transpose(1, 2, 0)
        if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[-1] not in (1, 3, 4)) or not values.size:
            raise LeaveOut("image", f"an image is given as values of shape {list(values.shape)}", "image of unknown shape")
        pixels = PIL.Image.fromarray(values[..., 0] if values.shape[2:] == (1,) else values)
    if min(pixels.size) < 1:
        raise LeaveOut("image", f"an image is given with the size {pixels.size}: it has no pixels", "image without pixels")
    if pixels.mode in MODES and pixels.mode not in _PNG_MODES:
        pixels = on_white(pixels)
    file = io.BytesIO()
    try:
        pixels.save(file, format="PNG")
    except OSError as error:
        raise LeaveOut(
            "image", f"an image of mode {pixels.mode!r} is not 8 bits a channel ({error})", "image not 8-bit"
        ) from error
    return EncodedImage("(pixels)", content=file.getvalue())


def _unknown(given: Any) -> LeaveOut:
    return LeaveOut(
        "corrupt",
        f"an image is given as {type(given).__name__}: give its name, a 'data:' address, the file's content, a Pillow image, "
        "or uint8 values 0 to 255",
        "image of unknown type",
    )
