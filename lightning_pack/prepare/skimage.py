"""Real captioned images that ship in a package: those of scikit-image, with what their documentation says about them.

Images are read from the installed package, captions from its sources, which are parsed and not imported. Only images are taken
whose licence is stated there: CC0, public domain, or no known copyright restrictions.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_pack.encoders import MediaRecord, VisionChatEncoder
from lightning_pack.location import is_remote, location
from lightning_pack.prepare.dataset import DatasetWriter
from lightning_pack.prepare.result import LengthSampler, PreparedDataset, check_output
from lightning_pack.prepare.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

#: Loaders of ``skimage.data`` whose documentation states a licence that lets anyone use the image.
LOADERS = (
    *("astronaut", "brick", "camera", "cell", "chelsea", "clock", "coffee", "coins", "grass", "gravel", "horse"),
    *("hubble_deep_field", "immunohistochemistry", "microaneurysms", "retina", "rocket", "text"),
)
#: What such a statement holds.
_FREE = re.compile(r"CC0|Creative Commons\s+CC0|public\s+domain|No (known )?copyright\s+restrictions", re.IGNORECASE)
#: Paragraphs that begin so tell where an image comes from, not what it shows.
_ORIGIN = re.compile(
    r"This image was|The original image|The image (was|is a)|No (known )?copyright|Released into|This image is CC0"
)
_SECTION = re.compile(r"\n\n(Returns|Notes|References|Parameters)\n-+\n")
#: Pixels along the longer side, which is more than the example model sees.
SIDE = 256
_FAMILY = "qwen3_vl"
#: Distances between the images of one chat, in the order of :data:`LOADERS`.
_COMPANY = ((), (1,), (3,), (5,), (2, 7), (4, 6))


@dataclass(frozen=True, kw_only=True)
class Captioned:
    """One image."""

    #: Of its loader.
    name: str
    #: What it is, in a few words, and all that is said about what it shows.
    title: str
    caption: str
    #: JPEG.
    content: bytes


def prepare_skimage(
    out: str | Path,
    *,
    vocab_size: int = 1024,
    shards: int = 4,
    val_fraction: float = 0.1,
    overwrite: bool = False,
    progress: bool = True,
) -> PreparedDataset:
    """Prepare scikit-image's captioned images in folder ``out``, with a tokenizer and an image processor for Qwen3-VL.

    Each image is asked about alone, and with one or two others.

    Args:
        out: destination; absent, empty, or a dataset prepared before. ``msc://PROFILE/...`` is a folder in an object store.
        vocab_size: tokens of the tokenizer.
        shards: training shards, at most; validation has its own.
        val_fraction: share of the records for validation.
        overwrite: replace a dataset that was prepared before with other settings.
        progress: show a progress bar where a dataset is uploaded.

    Raises:
        ValueError: for bad settings, if ``out`` holds something else, or without scikit-image.
    """
    if is_remote(out):
        from lightning_pack.prepare.remote import prepare_remotely

        return prepare_remotely(
            location(out),
            prepare=lambda folder: prepare_skimage(folder, vocab_size=vocab_size, shards=shards, val_fraction=val_fraction),
            overwrite=overwrite,
            progress=progress,
        )
    out = Path(out).resolve()
    folder = _package() / "data"
    options = {
        "scikit-image": importlib.metadata.version("scikit-image"),
        "vocab_size": vocab_size,
        "shards": shards,
        "val_fraction": val_fraction,
    }
    there = check_output(out, recipe="skimage", options=options, overwrite=overwrite)
    if there is not None:
        return there
    with DatasetWriter(out, shards=shards, val_fraction=val_fraction, overwrite=overwrite) as writer:
        images, skipped = captioned(folder)
        if not images:
            raise ValueError(f"{folder} holds none of the images {', '.join(LOADERS)}: install scikit-image 0.24 or later")
        chats = dict(_chats(images))
        tokenizer = train_tokenizer(
            (text for key, (record, _) in chats.items() if not writer.is_val(key) for text in _texts(record)),
            vocab_size=vocab_size,
            vision=True,
        )
        processor = image_processor()
        sampler = LengthSampler(VisionChatEncoder(tokenizer, processor, family=_FAMILY))
        for key, (record, files) in chats.items():
            sampler.add(key, MediaRecord(record, files=files, folder=None))
            writer.add(key, record, files=files)
        return writer.publish(
            recipe="skimage",
            options=options,
            tokenizer=tokenizer,
            image_processor=processor,
            lengths=sampler.statistics(),
            skipped=skipped,
        )


def image_processor() -> Qwen2VLImageProcessorPil:
    """That of Qwen3-VL, for small images: at most 25 tokens of 32 x 32 pixels."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=16,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 64 * 64, "longest_edge": 160 * 160},
    )


def captioned(folder: Path) -> tuple[list[Captioned], dict[str, int]]:
    """The images of ``skimage/data`` whose licence is stated, in the order of their names, and how many are not usable."""
    tree = ast.parse((folder / "_fetchers.py").read_text(encoding="utf-8"))
    documented = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found, missing = [], 0
    for name in LOADERS:
        node = documented.get(name)
        text = inspect.cleandoc(ast.get_docstring(node) or "") if node is not None else ""
        file = _file(node) if node is not None else None
        if not _FREE.search(text) or file is None or not (folder / file).is_file():
            missing += 1
            continue
        title, caption = _caption(text)
        found.append(Captioned(name=name, title=title, caption=caption, content=_small(folder / file)))
    return found, {"image without file or licence": missing} if missing else {}


def _package() -> Path:
    spec = importlib.util.find_spec("skimage")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the images come with scikit-image, which is not installed: pip install 'lightning-pack[vision]'")
    return Path(spec.submodule_search_locations[0])


def _file(loader: ast.FunctionDef) -> str | None:
    """Name of the file that a loader reads."""
    for node in ast.walk(loader):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"data/\w+\.(png|jpg)", node.value):
            return node.value.removeprefix("data/")
    return None


def _caption(text: str) -> tuple[str, str]:
    said = _SECTION.split(text, maxsplit=1)[0]
    paragraphs = [" ".join(paragraph.split()) for paragraph in said.split("\n\n")]
    shown = [paragraph for paragraph in paragraphs if not _ORIGIN.match(paragraph)]
    title = shown[0].rstrip(".")
    return title, " ".join([f"{title}.", *shown[1:]])


def _small(path: Path) -> bytes:
    from PIL import Image

    with Image.open(path) as opened:
        image = opened.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=90)
    return file.getvalue()


def _chats(images: Sequence[Captioned]) -> Iterator[tuple[str, tuple[dict[str, Any], dict[str, bytes]]]]:
    """Keys, records and files."""
    for number, image in enumerate(images):
        for company in _COMPANY:
            others = [images[(number + distance) % len(images)] for distance in company]
            if image in others:
                continue
            shown = [image, *others]
            key = "-".join(one.name for one in shown)
            files = {f"{i}.jpg": one.content for i, one in enumerate(shown)}
            yield key, ({"messages": _messages(shown), "images": list(files)}, files)


def _messages(shown: Sequence[Captioned]) -> list[dict[str, Any]]:
    if len(shown) == 1:
        return [
            _user({"type": "image"}, "What is in this picture?"),
            {"role": "assistant", "content": f"{shown[0].title}."},
            _user("Tell me more about it."),
            {"role": "assistant", "content": shown[0].caption},
        ]
    parts = [part for i in range(len(shown)) for part in (f"Picture {i + 1}: ", {"type": "image"}, "\n")]
    answer = " ".join(f"Picture {i + 1}: {image.title}." for i, image in enumerate(shown))
    return [_user(*parts, "What do the pictures show?"), {"role": "assistant", "content": answer}]


def _user(*parts: str | dict[str, str]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]}


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    for message in record["messages"]:
        if isinstance(message["content"], str):
            yield message["content"]
        else:
            yield from (part["text"] for part in message["content"] if part["type"] == "text")
