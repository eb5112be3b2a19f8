"""Samples as they were read, and the records that an encoder understands."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from megatron.energon import CrudeSample, Sample, basic_sample_keys, edataclass, stateless
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from lightning_pack.encoders import LeaveOut, MediaRecord
from lightning_pack.energon.reading import DamagedSample


@edataclass
class RawSample(Sample):
    """A crude sample as it was read: file extension -> content (bytes, or a JSON value that Energon parsed already)."""

    parts: dict[str, Any]
    #: Where paths in it start from; None for samples that bring their files along.
    folder: str | None = None


#: Parts that hold the record itself.
_RECORDS = ("json", "txt")
#: Of the folder among the fields of a crude sample.
_FOLDER = "__folder__"


@stateless
def cook(sample: CrudeSample) -> RawSample:
    """Keep the parts as they are; what cannot be parsed must become a marker, so parsing comes later."""
    parts = {name: value for name, value in sample.items() if not name.startswith("__")}
    return RawSample(**basic_sample_keys(sample), parts=parts, folder=sample.get(_FOLDER))


def media_record_of(sample: Sample) -> MediaRecord:
    """The record and the files beside it, for an encoder with media.

    Raises:
        LeaveOut: as :func:`record_of`; as ``corrupt`` for a sample type with fields of its own.
    """
    if not isinstance(sample, RawSample | DamagedSample):
        raise LeaveOut(
            "corrupt",
            f"it is a {type(sample).__name__}: images are read from crude samples, whose record lies in a .json part (class "
            "CrudeWebdataset in .nv-meta/dataset.yaml), and from .jsonl files",
        )
    record = record_of(sample)
    assert isinstance(sample, RawSample)
    files = {name: part for name, part in sample.parts.items() if isinstance(part, bytes) and name not in _RECORDS}
    return MediaRecord(record, files=files, folder=sample.folder)


def parts_of(sample: Sample) -> Mapping[str, Any]:
    """The parts of a crude sample as they were read, for an encoder that says ``reads_parts``.

    Raises:
        LeaveOut: as ``damaged``, where the sample cannot be read; as ``corrupt`` for one of another type.
    """
    if isinstance(sample, DamagedSample):
        raise LeaveOut("damaged", "it cannot be read any more")
    if not isinstance(sample, RawSample):
        raise LeaveOut("corrupt", f"it is a {type(sample).__name__}, whose parts are not as they were read")
    return sample.parts


def record_of(sample: Sample) -> Mapping[str, Any]:
    """The record that an encoder understands.

    A crude sample's ``json`` part, its ``txt`` part as ``{"text": ...}``, or the fields of any other Energon sample type.

    Raises:
        LeaveOut: as ``corrupt``, where the parts cannot be understood, ``damaged`` where the sample cannot be read.
    """
    if isinstance(sample, DamagedSample):
        raise LeaveOut("damaged", "it cannot be read any more")
    if not isinstance(sample, RawSample):
        names = (f.name for f in dataclasses.fields(sample) if not f.name.startswith("__"))
        record = {name: getattr(sample, name) for name in names}
        return {name: value.decode() if isinstance(value, bytes) else value for name, value in record.items()}
    if "json" in sample.parts:
        value = sample.parts["json"]
        if isinstance(value, bytes | str):
            value = json.loads(value)
        if not isinstance(value, dict):
            raise LeaveOut("corrupt", f"the JSON of a sample must be an object, this is a {type(value).__name__}")
        return value
    if "txt" in sample.parts:
        return {"text": sample.parts["txt"].decode()}
    raise LeaveOut("corrupt", f"a sample needs a .json or a .txt part, this has {sorted(sample.parts) or 'none'}")


def keep_bad_lines(dataset: Any) -> None:
    """Make Energon's reader of ``.jsonl`` files hand on a line that is no JSON as bytes; it would stop the run.

    And tell each sample the folder of its file.
    """
    load, folder = dataset._load_sample, str(dataset.path.parent)

    def load_or_keep(sample: Any) -> Any:
        line = sample["json"]
        sample[_FOLDER] = folder
        try:
            return load(sample)
        except ValueError:
            sample["json"] = line
            return CrudeJsonlDatasetFactory._load_sample(dataset, sample)

    dataset._load_sample = load_or_keep
