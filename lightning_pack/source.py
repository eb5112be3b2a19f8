"""What travels from the encoder to the row: a source, and a pack of sources."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pack.layout import RowLayout
from lightning_pack.media import Deferred, Media
from lightning_pack.media import nbytes as media_nbytes
from lightning_pack.notebook import pack_html, source_html

#: Label of a position that is no target (the convention of transformers and of torch's cross entropy).
IGNORE = -100


class LeftOut(NamedTuple):
    """A source that was dropped, or cut, and why."""

    key: str
    #: ``overlength``, ``truncated``, ``no_targets``, ``empty``, ``corrupt``, ``encoder_error``, ``image``, ``media_budget``.
    reason: str
    #: Real tokens that are not trained on; 0 where the source never became tokens.
    tokens: int


@dataclass(kw_only=True)
class EncodedSource:
    """One training sample as tokens. A source with :attr:`left_out` and no tokens only carries the news that it was dropped.

    Such a marker goes through the buffer like any other source, so it is in every checkpoint and cannot be lost.
    """

    #: Energon's sample key.
    key: str
    #: int64 ``[L]``.
    input_ids: Tensor
    #: int64 ``[L]``, equal to ``input_ids`` where a token is a target, else :data:`IGNORE`. The first is never a target.
    labels: Tensor
    #: A plain text, which ``overlength="split"`` may cut in pieces.
    splittable: bool = False
    left_out: LeftOut | None = None
    #: Why in words, for a message.
    why: str = field(default="", repr=False)
    #: Sources of different groups do not share a pack.
    group: str | None = None
    #: int64 ``[3, L]``: M-RoPE positions (time, height, width); None where text positions are all.
    mrope: Tensor | None = None
    #: Tensors that the model takes for images and the like, by the name of its argument.
    media: Media = field(default_factory=dict)
    #: Media that are made when a pack is chosen; None where :attr:`media` is complete.
    deferred: Deferred | None = None
    #: Tokens that stand for media.
    media_tokens: int = 0
    #: Bytes of :attr:`media`, also before they are made.
    media_bytes: int = 0
    #: Set by Energon: how to read and encode this source again.
    __restore_key__: tuple[Any, ...] = ()

    @classmethod
    def of(cls, key: str, input_ids: Tensor, labels: Tensor | None = None) -> EncodedSource:
        """A source whose targets are ``labels``, or all tokens; the first token is made no target."""
        labels = input_ids.clone() if labels is None else labels.clone()
        labels[:1] = IGNORE
        return cls(key=key, input_ids=input_ids, labels=labels)

    @classmethod
    def dropped(cls, key: str, reason: str, tokens: int = 0, *, why: str = "") -> EncodedSource:
        """The marker of a source that is left out whole."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(key=key, input_ids=none, labels=none, left_out=LeftOut(key, reason, tokens), why=why)

    @property
    def news(self) -> list[LeftOut]:
        """What was left out of it, or instead of it."""
        return [] if self.left_out is None else [self.left_out]

    @property
    def has_media(self) -> bool:
        """Whether images or the like belong to it; it is never cut then."""
        return bool(self.media) or self.deferred is not None or self.media_tokens > 0

    @property
    def held_media(self) -> int:
        """Bytes of media, encoded or not, that it holds now."""
        return media_nbytes(self.media) + (0 if self.deferred is None else self.deferred.held)

    @property
    def held(self) -> int:
        """Bytes that it holds now: tokens, labels, positions and media."""
        tensors = [self.input_ids, self.labels, *([] if self.mrope is None else [self.mrope])]
        # Not nbytes: positions of texts are one row that is seen three times.
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors) + self.held_media

    def completed(self) -> EncodedSource:
        """The source with its media made.

        Raises:
            LeaveOut: if they cannot be made.
        """
        return self if self.deferred is None else self.deferred.complete(self)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __repr__(self) -> str:
        return f"EncodedSource({self.key!r}, {len(self)} tokens, left_out={self.left_out})"

    def _repr_html_(self) -> str:
        return source_html(self)


@dataclass
class Pack:
    """Sources that share a row, in row order, and where they lie (None if the pack only carries what was left out)."""

    sources: list[EncodedSource]
    layout: RowLayout | None
    left_out: list[LeftOut] = field(default_factory=list)
    #: For each source, how many sources were read after it before its pack was chosen; none given means 0.
    ages: list[int] = field(default_factory=list)
    #: Set by Energon.
    __restore_key__: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        row = "no row" if self.layout is None else f"{sum(self.layout.lengths)} real tokens in a row of {self.layout.width}"
        return f"Pack({len(self.sources)} sources, {row}, {len(self.left_out)} left out)"

    def _repr_html_(self) -> str:
        return pack_html(self)
