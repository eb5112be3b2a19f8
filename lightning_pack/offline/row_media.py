"""What makes tensors of the images in rows: the encoder that is given, or the image processor that lies beside the rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_pack.encoders import Encoder, load_image_processor, load_tokenizer, tokenizer_fingerprint, vision_family
from lightning_pack.encoders.image_processor import image_processor_fingerprint
from lightning_pack.encoders.image_reader import ImageReader
from lightning_pack.encoders.vision_checks import check_image_processor, known_token
from lightning_pack.energon.storage import local_folder
from lightning_pack.flat_settings import flat
from lightning_pack.media import MediaStore
from lightning_pack.offline.manifest import Manifest, ManifestError

#: Of encoders whose images need no more than family, image processor and placeholder.
_VISION_CHAT = "vision_chat"


def row_image_processor(path: str, manifest: Manifest, *, encoder: Encoder | None, folder: str | Path) -> Any:
    """The image processor for rows with images; None where there are none, or an encoder is given.

    Args:
        path: of the rows, for errors.
        manifest: theirs.
        encoder: that is given.
        folder: of the image processor, on a disk or in an object store.

    Raises:
        ManifestError: for rows that an encoder of one's own made, which is not given.
        ValueError: if there is no image processor.
    """
    if not manifest.media or encoder is not None:
        return None
    if manifest.encoder.get("encoder") != _VISION_CHAT:
        raise ManifestError(
            f"the rows in {path!r} hold images or the like of an encoder of your own ({dict(manifest.encoder)}): give it "
            "(encoder=...), for it makes tensors of them"
        )
    return load_image_processor(local_folder(folder))


def row_media(path: str, manifest: Manifest, *, encoder: Encoder | None, image_processor: Any, tokenizer: Any) -> MediaStore:
    """What makes tensors of the images in rows, which agree with all that is given.

    Args:
        path: of the rows, for errors.
        manifest: theirs.
        encoder: that is given.
        image_processor: of :func:`row_image_processor`.
        tokenizer: of the rows, loaded; not used where an encoder is given.

    Raises:
        ManifestError: for an encoder that makes none, and for a tokenizer beside the rows that is not the one that made them.
        ValueError: for a family that is not registered here, or that does not fit the image processor.
    """
    if encoder is not None:
        if not isinstance(encoder, MediaStore):
            raise ManifestError(
                f"the rows in {path!r} hold images or the like, and {type(encoder).__name__} makes no tensors of them: give it "
                "the methods files_of and with_files of lightning_pack.media.MediaStore"
            )
        return encoder
    # Its placeholder says where the images are.
    lines = _differences(manifest, {"tokenizer": tokenizer_fingerprint(tokenizer)})
    if lines:
        raise ManifestError(
            f"the tokenizer beside the rows in {path!r} is not the one that made them:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nRestore it, or give the one that made them (tokenizer=...)"
        )
    family = vision_family(str(manifest.encoder["family"]))
    check_image_processor(image_processor, family)
    return ImageReader(image_processor, family, known_token(tokenizer, family))


def problems_beside(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the tokenizer and the image processor that lie beside rows with images, in a local folder.

    Rows may be read with others that are given, so it is no problem if none lie there.
    """
    beside = folder / "tokenizer"
    if not manifest.media or manifest.encoder.get("encoder") != _VISION_CHAT or not beside.is_dir():
        return []
    problems = []
    for name, of in (("tokenizer", _tokenizer_at), ("image_processor", _image_processor_at)):
        try:
            lines = _differences(manifest, {name: of(beside)})
        except ValueError as e:
            problems.append(str(e))
            continue
        problems += [f"the {name.replace('_', ' ')} beside the rows is not the one that made them: {line}" for line in lines]
    return problems


def _tokenizer_at(folder: Path) -> dict[str, Any]:
    return tokenizer_fingerprint(load_tokenizer(folder))


def _image_processor_at(folder: Path) -> dict[str, Any]:
    return image_processor_fingerprint(load_image_processor(folder))


def _differences(manifest: Manifest, parts: Mapping[str, Any]) -> list[str]:
    """A line for each value in which parts of the encoder's fingerprint are not those of the rows."""
    then, now = flat({name: manifest.encoder.get(name, {}) for name in parts}), flat(parts)
    names = [name for name in dict.fromkeys([*then, *now]) if then.get(name) != now.get(name)]
    return [f"encoder.{name}: {then.get(name)!r} in the rows, {now.get(name)!r} now" for name in names]
