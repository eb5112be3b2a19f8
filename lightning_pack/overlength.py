"""Admission to the buffer: sources that fit in no row are left out, cut, split or refused; so are those without a target."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lightning_pack.media_budget import MediaBudget
from lightning_pack.source import IGNORE, EncodedSource, LeftOut

Overlength = Literal["drop", "truncate", "split", "error"]


#: On media.
_NO_LIMIT = MediaBudget()


class OverlengthError(ValueError):
    """A source is longer than a row may be, and the policy says ``overlength="error"``."""


def too_long(what: str, length: int, *, capacity: int, whole: bool = False) -> OverlengthError:
    """The error for a source of so many tokens; a whole one cannot be cut."""
    return OverlengthError(
        f"{what} has {length} tokens, more than capacity={capacity}: raise the capacity, shorten the data, "
        + ("or choose overlength='drop'" if whole else "or choose overlength='drop' or 'truncate' ('split' for plain text)")
    )


def admitted(
    source: EncodedSource,
    *,
    capacity: int,
    rule: Overlength,
    budget: MediaBudget = _NO_LIMIT,
    needs_targets: bool = True,
) -> list[EncodedSource]:
    """What may enter the buffer in place of ``source``: itself, pieces of it, or the marker of its absence.

    Args:
        source: in question.
        capacity: most tokens of a row.
        rule: for longer ones.
        budget: of media in a row.
        needs_targets: whether a source without a target is left out; predictions need none.

    Raises:
        OverlengthError: under the rule ``"error"``, for a source that fits in no row; under ``"truncate"`` and ``"split"``, for
            one with media.
    """
    if source.left_out is not None and not len(source):
        return [source]
    length = len(source)
    if not length:
        return [EncodedSource.dropped(source.key, "empty")]
    if length > capacity and source.has_media and rule in ("truncate", "split"):
        raise OverlengthError(
            f"sample {source.key!r} has {length} tokens, more than capacity={capacity}, and images, so overlength={rule!r} "
            "cannot cut it: raise the capacity, make its images smaller, or choose overlength='drop'"
        )
    if not budget.allows(source.media_tokens, source.media_bytes):
        if rule == "error":
            raise OverlengthError(
                f"the images of sample {source.key!r} have {source.media_tokens} tokens and become {source.media_bytes} bytes, "
                f"more than max_media_tokens={budget.tokens} or max_media_bytes={budget.nbytes}: raise the limit, make its "
                "images smaller, or choose overlength='drop'"
            )
        return [EncodedSource.dropped(source.key, "media_budget", length)]
    if length > capacity:
        if rule == "error":
            raise too_long(f"sample {source.key!r}", length, capacity=capacity, whole=source.has_media)
        if rule == "split" and source.splittable:
            return _pieces(source, capacity)
        if rule != "truncate":
            return [EncodedSource.dropped(source.key, "overlength", length)]
        source = replace(
            source,
            input_ids=source.input_ids[:capacity].clone(),
            labels=source.labels[:capacity].clone(),
            left_out=LeftOut(source.key, "truncated", length - capacity),
        )
    if needs_targets and bool((source.labels[1:] == IGNORE).all()):
        return [EncodedSource.dropped(source.key, "no_targets", length)]
    return [source]


def _pieces(source: EncodedSource, capacity: int) -> list[EncodedSource]:
    pieces: list[EncodedSource] = []
    for start in range(0, len(source) - 1, capacity - 1):
        part = slice(start, start + capacity)
        piece = EncodedSource.of(f"{source.key}#{len(pieces)}", source.input_ids[part].clone(), source.labels[part])
        piece.group = source.group
        pieces.append(piece)
    return pieces
