"""Lines whose chats have images: the images are read, checked by their headers, and go into the dataset."""

from __future__ import annotations

from pathlib import Path

from lightning_pack.encoders import LeaveOut, MediaRecord
from lightning_pack.encoders.image_parts import read_image_chat
from lightning_pack.encoders.images import IMAGE_ENDINGS, EncodedImage
from lightning_pack.prepare.lines import json_object, notes


class ImageLineParser:
    """Parses a line to a record that names its images by members of the sample, and these.

    Args:
        folder: that paths start from.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def __call__(self, line: bytes) -> MediaRecord:
        """The record of one line.

        Raises:
            LeaveOut: if it has none, or one of its images cannot be read.
        """
        fields = json_object(line)
        messages, images = read_image_chat(MediaRecord(fields, files={}, folder=self._folder))
        files = {}
        for number, image in enumerate(images):
            # By its header; a file that ends too early is left out in training.
            image.size()
            files[f"{number}.{_ending(image)}"] = image.read()
        return MediaRecord({"messages": messages, "images": list(files), **notes(fields)}, files=files)


def _ending(image: EncodedImage) -> str:
    kind = image.kind()
    if kind == "mpo":
        # Photographs of several views are JPEG files.
        return "jpeg"
    if kind not in IMAGE_ENDINGS:
        raise LeaveOut(
            "image",
            f"image {image.name!r} is of the kind {kind!r}, not one of {', '.join(IMAGE_ENDINGS)}",
            "unknown image kind",
        )
    return kind
