"""What a sample of a dataset becomes under one policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_pack.media_budget import MediaCost


@dataclass(frozen=True, kw_only=True)
class LeftOutCount:
    """How many of the sources that were read cannot be trained on at any capacity, for one reason."""

    reason: str
    sources: int


@dataclass(frozen=True, kw_only=True)
class OverLength:
    """What is longer than a capacity.

    Args:
        over: share of the sources that are longer.
        lost: share of the tokens read that are not trained on because of it, 0 to 1.
    """

    over: float
    lost: float


@dataclass(frozen=True, kw_only=True)
class SourceMedia:
    """What images and the like make of a source of the mean.

    Args:
        held: bytes that it holds in the buffer beyond ids and labels: M-RoPE positions and encoded images.
        tokens: placeholders.
        nbytes: of the tensors that its media become.
        encoded: bytes of ``held`` that are encoded images.
        beyond: share of all sources, 0 to 1, whose media are more than a pack may have, so that they are left out.
        shuffled: samples that wait in the shuffle buffer, with their images.
    """

    held: float
    tokens: float
    nbytes: float
    encoded: float = 0.0
    beyond: float = 0.0
    shuffled: int = 0


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Sources as they enter the buffer of a loader worker under one policy.

    Args:
        lengths: real tokens of each, none above the capacity.
        keys: sources with different keys do not share a pack.
        overlength: what was longer than the capacity.
        media: of the sources that fit.
        costs: of the media of each; None where there are none.
    """

    lengths: list[int] = field(repr=False)
    keys: list[str | None] = field(repr=False)
    overlength: OverLength
    media: SourceMedia | None = None
    costs: list[MediaCost] | None = field(default=None, repr=False)
