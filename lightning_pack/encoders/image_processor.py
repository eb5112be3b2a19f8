"""Loading an image processor from a folder, and telling whether two are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_pack.encoders.tokenizer import content_hash


def load_image_processor(path: str | Path) -> Any:
    """The image processor saved in a local folder, computing with Pillow; nothing is downloaded.

    Pillow also where torchvision is installed: a run may then be continued on a machine without it.

    Raises:
        ValueError: if there is no such folder, or no image processor in it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"image processor folder {str(path)!r} does not exist: give a local folder that image_processor.save_pretrained() "
            "or processor.save_pretrained() wrote; nothing is downloaded"
        )
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(str(folder), local_files_only=True, backend="pil")
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ValueError(
            f"no image processor can be loaded from {str(folder)!r} ({type(error).__name__}: {str(error).strip()[:300]}): "
            "write one there with image_processor.save_pretrained()"
        ) from error


def image_processor_fingerprint(processor: Any) -> dict[str, Any]:
    """Its class, and a content hash of the settings that decide what an image becomes."""
    passing = ("image_processor_type", "processor_class", "_name_or_path", "name_or_path")
    settings = {name: value for name, value in processor.to_dict().items() if name not in passing}
    plain = json.loads(json.dumps(settings, default=str))
    return {"class": type(processor).__name__, "settings": content_hash(plain)}
