"""A row that another system decided, as its file says it, and what is checked before it becomes one of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from lightning_pack.offline.row_file import Row
from lightning_pack.source import IGNORE, LeftOut

_MOST_ID = 2**31 - 1


class GivenRowError(ValueError):
    """A row of another system that does not say what a row must."""

    #: File and number of the row.
    place = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenSource:
    """A source of such a row.

    Args:
        ids: int64 ``[n]``.
        targets: bool ``[n]``, whether a token is predicted from those before it. The first never is.
        room: places that it takes up; None takes as many as its tokens need.
        number: of the source in its row, for its key; None counts those that are given.
    """

    ids: np.ndarray
    targets: np.ndarray
    room: int | None = None
    number: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenRow:
    """A row as another system decided it.

    Args:
        place: file and number, for keys and errors.
        sources: in order; those without tokens are left out of the row.
        left_out: further sources that the row cannot hold.
    """

    place: str
    sources: Sequence[GivenSource] = field(repr=False)
    left_out: Sequence[LeftOut] = ()

    def row(
        self, *, split: str, number: int, first_source: int, multiple: int, capacity: int | None
    ) -> tuple[Row | None, list[LeftOut]]:
        """The row as it is stored, and what is left out of it; None where nothing is left.

        Args:
            split: that it goes to.
            number: of the row.
            first_source: number of its first source.
            multiple: of the places that each source takes up.
            capacity: most places; None for any number.

        Raises:
            GivenRowError: for ids that are none, rooms that do not fit, or too many places.
        """
        keys, kept, rooms, spare = list[str](), list[GivenSource](), list[int](), 0
        gone = list(self.left_out)
        for i, source in enumerate(self.sources):
            key, tokens = f"{self.place}#{i if source.number is None else source.number}", len(source.ids)
            if not tokens:
                gone.append(LeftOut(key, "empty", 0))
                spare += source.room or 0
                continue
            if source.ids.min() < 0 or source.ids.max() > _MOST_ID:
                raise GivenRowError(
                    f"{key} has the token ids {source.ids.min()} to {source.ids.max()}: 0 to {_MOST_ID} are ids"
                )
            room = -(-tokens // multiple) * multiple if source.room is None else source.room
            if room < tokens or room % multiple:
                raise GivenRowError(
                    f"{key} has {tokens} tokens in {room} places, which must be enough and a multiple of {multiple} (multiple)"
                )
            keys.append(key)
            kept.append(source)
            rooms.append(room)
        if not kept:
            return None, gone
        rooms[-1] += spare
        if capacity is not None and sum(rooms) > capacity:
            raise GivenRowError(f"{self.place} takes up {sum(rooms)} places, more than capacity={capacity}: raise the capacity")
        ids = np.concatenate([source.ids for source in kept])
        targets = np.concatenate([source.targets for source in kept])
        lengths = [len(source.ids) for source in kept]
        targets[np.cumsum([0, *lengths[:-1]])] = False
        row = Row(
            split=split,
            number=number,
            keys=keys,
            numbers=list(range(first_source, first_source + len(kept))),
            lengths=lengths,
            offsets=np.cumsum([0, *rooms]).tolist(),
            tokens=np.stack([ids, np.where(targets, ids, IGNORE)]).astype(np.int32),
        )
        return row, gone


_Made = TypeVar("_Made")


def attempted(make: Callable[[], _Made], place: str) -> _Made | GivenRowError:
    """The row, or why there is none: whoever reads on decides whether that ends the conversion."""
    try:
        return make()
    except GivenRowError as e:
        e.place = place
        return e


def whole_numbers(values: object, name: str, place: str) -> np.ndarray:
    """Values of a file as int64 ``[n]``.

    Raises:
        GivenRowError: where they are no list of whole numbers.
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as e:
        raise GivenRowError(f"{place}: {name} is no list of numbers ({e})") from e
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        if array.ndim == 1 and array.dtype.kind == "f" and (array == np.floor(array)).all():
            return array.astype(np.int64)
        raise GivenRowError(
            f"{place}: {name} must be a list of whole numbers, it is {array.dtype} of shape {list(array.shape)}"
        )
    return array.astype(np.int64)


def mask_of(values: object, name: str, place: str, *, length: int) -> np.ndarray:
    """A mask of 0 and 1 as bool ``[length]``.

    Raises:
        GivenRowError: for other values, or another number of them.
    """
    mask = whole_numbers(values, name, place)
    if len(mask) != length:
        raise GivenRowError(f"{place}: {name} has {len(mask)} values for {length} tokens")
    if len(mask) and (mask.min() < 0 or mask.max() > 1):
        raise GivenRowError(f"{place}: {name} holds {mask.min()} to {mask.max()}: 0 and 1 are known (weights are not)")
    return mask.astype(bool)
