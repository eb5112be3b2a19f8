"""Images of every kind that data has: what the model sees of them, and what is refused in words that help."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from lightning_pack.encoders.base import LeaveOut
from lightning_pack.encoders.images import EncodedImage
from lightning_pack.source import EncodedSource
from tests.tiny_vision import chat, image_processor, picture, vision_encoder


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def encoded(image: Any, **fields: Any) -> EncodedSource:
    return vision_encoder()("sample-7", {**chat(0, 1), "images": [image], **fields})


def photograph() -> Image.Image:
    return Image.open(io.BytesIO(picture(2)))


def half_transparent() -> Image.Image:
    image = photograph().convert("RGBA")
    image.putalpha(Image.fromarray(np.tile(np.arange(66, dtype=np.uint8), (180, 1))))
    return image


def palette() -> Image.Image:
    return photograph().convert("P")


CLEAR: dict[str, bytes] = {
    "RGBA": saved(half_transparent(), "PNG"),
    "LA": saved(half_transparent().convert("LA"), "PNG"),
    "palette with one colour": saved(palette(), "PNG", transparency=palette().getpixel((0, 0))),
    "palette with many": saved(palette(), "PNG", transparency=bytes(range(256))),
    "GIF": saved(palette(), "GIF", transparency=palette().getpixel((0, 0))),
}


@pytest.mark.parametrize("name", CLEAR)
def test_what_is_transparent_is_seen_as_by_the_processor(name: str) -> None:
    with Image.open(io.BytesIO(CLEAR[name])) as image:
        image.load()
        expected = image_processor("qwen3_vl")(images=[image], return_tensors="pt")["pixel_values"]
        without = image_processor("qwen3_vl")(images=[image.convert("RGBA").convert("RGB")], return_tensors="pt")
    # The colours below are others than white.
    assert not torch.equal(expected, without["pixel_values"])
    assert torch.equal(encoded(CLEAR[name]).completed().media["pixel_values"], expected)


@pytest.mark.parametrize("kind", ["TIFF", "WEBP", "PNG"])
@pytest.mark.parametrize("orientation", [2, 3, 6, 7])
def test_an_image_of_every_kind_is_turned_once(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = saved(photograph(), kind, exif=exif)
    with Image.open(io.BytesIO(content)) as opened:
        expected = ImageOps.exif_transpose(opened).convert("RGB")
    assert not np.array_equal(np.asarray(expected), np.asarray(photograph()))
    image = EncodedImage("turned", content=content)
    assert np.array_equal(np.asarray(image.decoded()), np.asarray(expected))
    assert image.size() == expected.size[::-1]


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "PA", "RGBa", "La"])
def test_pillow_images_that_no_png_holds(mode: str) -> None:
    image = photograph().convert("RGBA").convert(mode) if mode in ("RGBa", "La") else photograph().convert(mode)
    source = encoded(image).completed()
    assert source.media["image_grid_thw"].shape == (1, 3)


def test_notes_that_are_damaged_leave_the_image_whole() -> None:
    content = saved(photograph(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\xff\x01\x12\0\x02\0\0\0\x08garb")
    with pytest.warns(UserWarning, match="Truncated File Read"), Image.open(io.BytesIO(content)) as opened:
        opened.getexif()
    assert encoded(content).completed().media_tokens > 0


def test_contents_come_as_any_bytes() -> None:
    expected = encoded(picture(1)).completed().media["pixel_values"]
    for given in (bytearray(picture(1)), memoryview(picture(1))):
        assert torch.equal(encoded(given).completed().media["pixel_values"], expected)


RAW = base64.b64encode(picture(0, kind="JPEG")).decode()
WRONG: dict[str, tuple[Any, str, str]] = {
    "base64 without its address": (RAW, "image", r"\.\.\. of [\d,]+ characters \(base64 is given as 'data:image/png;base64"),
    "no letters of base64": ("data:image/png;base64,\u00e9", "image", "base64 that is broken"),
    "a zero byte": ("/a\0b.png", "image", "is not there"),
    "nothing": (None, "corrupt", "given as NoneType: give its name"),
    "an object": ({"bytes": "abc", "path": None}, "corrupt", "given as dict: give its name"),
    "a path": (Path("a.png"), "corrupt", r"given as PosixPath: give its name"),
    "no pixels": (Image.new("RGB", (0, 5)), "image", r"the size \(0, 5\): it has no pixels"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_image_is_said_in_few_words(case: str) -> None:
    given, reason, message = WRONG[case]
    with pytest.raises(LeaveOut, match=message) as caught:
        encoded(given)
    assert caught.value.reason == reason
    assert "'sample-7'" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_base64_of_a_photograph_begins_like_a_path_and_is_too_long_for_one() -> None:
    assert RAW.startswith("/")
    assert len(RAW) > 255


@pytest.mark.parametrize("field", ["videos", "video", "audios", "audio"])
def test_videos_and_sounds_of_a_record_are_not_passed_over(field: str) -> None:
    with pytest.raises(LeaveOut, match=f"the record has '{field}', which is not supported: give frames") as caught:
        encoded(picture(0), **{field: ["a.mp4"]})
    assert caught.value.reason == "corrupt"
    # Datasets have such columns for all records.
    assert encoded(picture(0), **{field: []}).media_tokens > 0


def test_a_damaged_image_is_one_whatever_its_reader_raises() -> None:
    content = bytearray(saved(photograph().convert("RGBA"), "DDS"))
    assert EncodedImage("a.dds", bytes(content)).size()
    content[80:84] = bytes(4)  # the kind of its pixels
    with pytest.raises(NotImplementedError):
        Image.open(io.BytesIO(bytes(content)))
    with pytest.raises(LeaveOut, match=r"image 'a\.dds' cannot be read \(NotImplementedError: ") as caught:
        EncodedImage("a.dds", bytes(content)).size()
    assert caught.value.reason == "image"


@pytest.mark.parametrize("kind", ["GIF", "PNG"])
def test_of_an_animation_the_first_frame_is_seen(kind: str) -> None:
    first, second = (Image.new("RGB", (60, 40), color) for color in ("red", "blue"))
    content = saved(first, kind, save_all=True, append_images=[second])
    with Image.open(io.BytesIO(content)) as image:
        assert image.n_frames == 2
    assert EncodedImage("a", content).decoded().getcolors() == [(2400, (255, 0, 0))]


def test_postscript_is_not_run() -> None:
    content = saved(photograph().convert("RGB"), "EPS")
    assert content.startswith(b"%!PS")
    with pytest.raises(LeaveOut, match=r"'a\.eps' is PostScript, a program, which would be run: store it as PNG"):
        EncodedImage("a.eps", content).size()
