"""What belongs to a source besides its tokens: images and the like, as the tensors that a model takes.

Tensors of several sources are joined along their first dimension, in row order, so a model finds the features of each
placeholder by their order alone. Until a source is in a row its media may be :class:`Deferred`: still encoded, and small.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

    from lightning_pack.source import EncodedSource

_KIND = re.compile(r"[a-z0-9]+")
#: Name of the model's argument -> tensor.
Media = dict[str, Tensor]
#: For a message between processes: values, and the dtype that numpy does not have.
PlainMedia = dict[str, tuple["np.ndarray", str | None]]


class Deferred(Protocol):
    """Media of one source that are made when its pack is chosen."""

    @property
    def held(self) -> int:
        """Bytes in memory until then."""

    def complete(self, source: EncodedSource) -> EncodedSource:
        """The source with its media, and without this object. The number of its tokens stays.

        Raises:
            LeaveOut: if they cannot be made; that source alone is left out then.
        """


@dataclass(frozen=True)
class MediaFile:
    """One of a source's media as the data had it, such as the content of an image file.

    Args:
        content: of the file.
        kind: its format, such as ``"png"``: lower-case letters and digits.
        tokens: placeholders that stand for it.
        nbytes: of the tensors that it becomes.

    Raises:
        ValueError: for a kind that cannot be the ending of a file's name.
    """

    content: bytes = field(repr=False)
    kind: str
    tokens: int
    nbytes: int

    def __post_init__(self) -> None:
        if not _KIND.fullmatch(self.kind):
            raise ValueError(
                f"kind={self.kind!r}: the format of a file becomes the ending of its name, lower-case letters and digits such "
                "as 'png'"
            )

    @cached_property
    def check(self) -> str:
        """Hash of the content."""
        return hashlib.sha256(self.content).hexdigest()[:16]


@runtime_checkable
class MediaStore(Protocol):
    """Takes the media of sources apart into files, and puts them together again; rows that are written ahead hold the files."""

    def files_of(self, source: EncodedSource) -> list[MediaFile]:
        """The media of a source that was just encoded, in the order of their placeholders.

        Raises:
            LeaveOut: if they cannot be read.
        """

    def with_files(self, source: EncodedSource, files: Sequence[MediaFile]) -> EncodedSource:
        """The source as it was encoded, from one that has its tokens and labels alone, and its files (none for text)."""


def joined(parts: Sequence[tuple[str, Media]]) -> tuple[Media, dict[str, list[int]]]:
    """The media of sources in row order, and how many rows of each tensor belong to each of them.

    Args:
        parts: key and media of every source in the row, those without media too.

    Raises:
        ValueError: if two sources disagree on the shape or dtype of a tensor beyond its first dimension.
    """
    names = dict.fromkeys(name for _, media in parts for name in media)
    tensors, rows = {}, {}
    for name in names:
        having = [(key, media[name]) for key, media in parts if name in media]
        first_key, first = having[0]
        for key, tensor in having:
            if tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype:
                raise ValueError(
                    f"{name} of sample {key!r} is {tensor.dtype} of shape {list(tensor.shape)}, that of {first_key!r} in the "
                    f"same row {first.dtype} of shape {list(first.shape)}: all but the first dimension must agree, so encode "
                    "all samples with one image processor, or keep them apart with EncodedSource.group"
                )
        tensors[name] = torch.cat([tensor for _, tensor in having])
        rows[name] = [len(media[name]) if name in media else 0 for _, media in parts]
    return tensors, rows


def nbytes(media: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors."""
    return sum(tensor.nbytes for tensor in media.values())


def to_plain(media: Media) -> PlainMedia:
    """For :func:`from_plain`; float types that numpy lacks travel as whole numbers of their width."""
    plain: PlainMedia = {}
    for name, tensor in media.items():
        if tensor.dtype == torch.bfloat16:
            plain[name] = tensor.contiguous().view(torch.int16).numpy(), "bfloat16"
        else:
            plain[name] = tensor.numpy(), None
    return plain


def from_plain(plain: PlainMedia) -> Media:
    """The media that :func:`to_plain` was given."""
    found: dict[str, Any] = {name: torch.from_numpy(values) for name, (values, _) in plain.items()}
    return {name: tensor if plain[name][1] is None else tensor.view(torch.bfloat16) for name, tensor in found.items()}
