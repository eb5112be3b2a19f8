"""Images as they are kept: found by name, measured by their headers, decoded late."""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lightning_pack.encoders.base import LeaveOut

if TYPE_CHECKING:
    from PIL.Image import Image

#: Endings of the members of a sample that are images also where nobody names them.
IMAGE_ENDINGS = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"),
    # Whether these can be read depends on Pillow.
    *("avif", "heic", "heif"),
)
#: Whose values Pillow turns to 8-bit RGB without loss of range.
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
#: Of these, those with a channel that says how much is seen.
_SEEN_THROUGH = ("LA", "La", "PA", "RGBA", "RGBa")
_TIFF_WIDTH, _TIFF_HEIGHT, _ORIENTATION = 0x0100, 0x0101, 0x0112
#: How an image of each orientation is turned, by Pillow's ``Transpose``.
_TURNS = dict(
    zip(
        range(2, 9),
        ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"),
        strict=True,
    )
)
#: What Pillow raises for files that are no images, or whose content ends too early; readers of some formats, such as AVIF,
#: give up with a RuntimeError.
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, RuntimeError, struct.error, zlib.error)


#: Formats that are named where another cannot be read.
_COMMON = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class MediaRecord(dict[str, Any]):
    """The fields of a record, and the files that came with it.

    Args:
        fields: of the record.
        files: other members of the sample by their names without the sample key, such as ``0.jpg``, in the order of the shard.
            Those with another ending than :data:`IMAGE_ENDINGS` are images only where they are named.
        folder: that relative paths start from; None where there is none.
    """

    def __init__(self, fields: Mapping[str, Any], *, files: Mapping[str, bytes], folder: str | None = None) -> None:
        super().__init__(fields)
        self.files = dict(files)
        self.folder = folder


@dataclass(frozen=True)
class EncodedImage:
    """An image whose pixels are not decoded: its file's content, or where that lies.

    Args:
        name: for messages.
        content: of the file.
        path: of the file, where the content is not in memory.
    """

    name: str
    content: bytes | None = field(default=None, repr=False)
    path: str | None = None

    @property
    def held(self) -> int:
        """Bytes in memory."""
        return 0 if self.content is None else len(self.content)

    def size(self) -> tuple[int, int]:
        """Height and width in pixels, as the image is to be seen; only the file's header is read.

        Raises:
            LeaveOut: as ``image``, if it is no image whose colours can be used.
        """
        opened = self._opened()
        try:
            with opened as image:
                width, height = _stored_size(image)
                turned = _orientation(image) in (5, 6, 7, 8)
        except _BROKEN as error:
            raise self._broken(error) from error
        return (width, height) if turned else (height, width)

    def kind(self) -> str:
        """Name of the file's format, such as ``jpeg``.

        Raises:
            LeaveOut: as ``image``, if it is no image whose colours can be used.
        """
        with self._opened() as image:
            return str(image.format).lower()

    def read(self) -> bytes:
        """The file's content.

        Raises:
            LeaveOut: as ``image``, if it cannot be read.
        """
        if self.content is not None:
            return self.content
        file = self._file()
        try:
            return Path(file).read_bytes() if isinstance(file, str) else file.read()
        except OSError as error:
            raise self._broken(error) from error

    def decoded(self) -> Image:
        """The pixels, RGB with 8 bits a channel, turned as the image is to be seen; what is transparent lies on white.

        Raises:
            LeaveOut: as ``image``, if the file is broken.
        """
        import PIL.Image

        opened = self._opened()
        try:
            with opened as image:
                # Pillow turns this kind as it reads the pixels.
                way = None if image.format == "TIFF" else _TURNS.get(_orientation(image))
                rgb = on_white(image)
                return rgb if way is None else rgb.transpose(PIL.Image.Transpose[way])
        except _BROKEN as error:
            raise self._broken(error) from error

    def _opened(self) -> Image:
        import PIL.Image

        # Outside: a store that is away is not the image's fault.
        file = self._file()
        try:
            with warnings.catch_warnings():
                # Large images are the business of the image processor, which makes them smaller.
                warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
                # And notes that are damaged do not make an image so.
                warnings.simplefilter("ignore", UserWarning)
                image = PIL.Image.open(file)
        except (*_BROKEN, PIL.Image.DecompressionBombError) as error:
            raise self._broken(error) from error
        if image.format == "EPS":
            raise LeaveOut(
                "image", f"image {self.name!r} is PostScript, a program, which would be run: store it as PNG", "PostScript"
            )
        if image.mode not in MODES:
            raise LeaveOut(
                "image",
                f"image {self.name!r} has values of mode {image.mode!r}, not 8 bits a channel: they would be cut off or scaled "
                "twice; save it as an 8-bit image",
                "image not 8-bit",
            )
        if min(image.size) < 1:
            raise LeaveOut("image", f"image {self.name!r} has the size {image.size}: it has no pixels", "image without pixels")
        return image

    def _file(self) -> IO[bytes] | str:
        if self.content is not None:
            return io.BytesIO(self.content)
        assert self.path is not None
        if "://" not in self.path:
            return self.path
        from megatron.energon.epathlib import EPath

        try:
            with EPath(self.path).open("rb") as file:
                return io.BytesIO(file.read())
        except FileNotFoundError as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> LeaveOut:
        import PIL

        if isinstance(error, PIL.UnidentifiedImageError):
            what = f"is not an image that Pillow can read ({_readable()})"
        else:
            # Addresses would make the same fault another text in each run.
            what = f"cannot be read ({type(error).__name__}: {_ADDRESS.sub('', str(error))})"
        return LeaveOut("image", f"image {self.name!r} {what}", "image unreadable")


def on_white(image: Image) -> Image:
    """RGB, with white behind what is transparent, as image processors of transformers have it."""
    import PIL.Image

    image.load()
    if image.mode not in _SEEN_THROUGH and image.info.get("transparency") is None:
        return image.convert("RGB")
    seen = image.convert("LA") if image.mode == "La" else image
    seen = seen.convert("RGBA")
    return PIL.Image.alpha_composite(PIL.Image.new("RGBA", seen.size, "white"), seen).convert("RGB")


def _stored_size(image: Image) -> tuple[int, int]:
    """Width and height of the pixels in the file; of turned TIFF files Pillow tells the one or the other, by its version."""
    tags = getattr(image, "tag_v2", None)
    return image.size if tags is None else (int(tags[_TIFF_WIDTH]), int(tags[_TIFF_HEIGHT]))


def _orientation(image: Image) -> int:
    """How the image is turned, 1 to 8, by the header; what a PNG says behind its pixels is not read, for that decodes them."""
    import PIL.Image

    with warnings.catch_warnings():
        # Damaged notes, as where the file is opened.
        warnings.simplefilter("ignore", UserWarning)
        value = PIL.Image.Image.getexif(image).get(_ORIENTATION, 1)
    return value if isinstance(value, int) else 1


def _readable() -> str:
    import PIL.Image

    PIL.Image.init()
    return f"here it reads {', '.join(name for name in _COMMON if name in PIL.Image.OPEN)} and more"


def is_image_name(name: str) -> bool:
    """Whether a member of a sample is an image by its ending."""
    return name.rpartition(".")[2].lower() in IMAGE_ENDINGS
