"""What Lightning's loggers have written, read back from their files: name -> step -> the last value logged."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Values = dict[str, dict[int, float]]

_BLOCK = 32768
_HEADER = 7


def csv_values(folder: Path) -> Values:
    """Of the CSVLogger whose ``log_dir`` this is."""
    found: Values = {}
    with open(folder / "metrics.csv") as file:
        for line in csv.DictReader(file):
            step = int(line.pop("step"))
            for name, value in line.items():
                if value:
                    found.setdefault(name, {})[step] = float(value)
    return found


def tensorboard_values(folder: Path) -> Values:
    """Of the TensorBoardLogger whose ``log_dir`` this is; it keeps numbers in float32."""
    events = _events(folder)
    return {name: {each.step: each.value for each in events.Scalars(name)} for name in events.Tags()["scalars"]}


def tensorboard_images(folder: Path) -> dict[str, dict[int, bytes]]:
    """Name -> step -> PNG."""
    events = _events(folder)
    return {name: {each.step: each.encoded_image_string for each in events.Images(name)} for name in events.Tags()["images"]}


def _events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    return events


def mlflow_values(run: Path) -> Values:
    """Of the folder of a run in a file store."""
    folder = run / "metrics"
    found: Values = {}
    for file in folder.rglob("*"):
        if file.is_file():
            lines = [line.split() for line in file.read_text().splitlines()]
            found[str(file.relative_to(folder))] = {int(step): float(value) for _, value, step in lines}
    return found


def wandb_values(run: Path) -> tuple[Values, dict[str, dict[int, list[str]]]]:
    """Of the folder of an offline run: numbers, and images as names of files in its ``files``."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = run.glob("*.wandb")
    numbers: Values = {}
    images: dict[str, dict[int, list[str]]] = {}
    for data in _log_records(file.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") != "history":
            continue
        values = {tuple(item.nested_key) or (item.key,): json.loads(item.value_json) for item in record.history.item}
        step = values.pop(("trainer/global_step",))
        for (name, *inner), value in values.items():
            if inner == ["filenames"]:
                images.setdefault(name, {})[step] = value
            elif not inner and not name.startswith("_"):
                numbers.setdefault(name, {})[step] = value
    return numbers, images


def _log_records(data: bytes) -> Iterator[bytes]:
    """Records of a log in blocks of 32 KiB, each in pieces: checksum, length, kind (1 whole, 2 first, 3 middle, 4 last)."""
    at, pieces = _HEADER, [b""]
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        at += _HEADER
        pieces = [*([] if kind in (1, 2) else pieces), data[at : at + length]]
        at += length
        if kind in (1, 4):
            yield b"".join(pieces)


def colors(png: bytes) -> int:
    """Number of different colours in a picture: 1 or 2 where nothing was drawn."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        return len(image.convert("RGB").getcolors(maxcolors=1 << 24) or ())
