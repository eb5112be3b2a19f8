"""A window of packs, emitted so that all loader workers emit packs of about the same work in the same step.

Each worker, on every rank, holds a window of equally many packs, sorts them by their work and emits them in a pseudo-random
order of places that is the same for all workers: where one emits its heaviest pack, all do. Nothing is communicated, and every
pack leaves with its window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from lightning_pack.energon.packs import Emitted
from lightning_pack.energon.position import StagePosition
from lightning_pack.source import Pack


class StartAgain(Exception):  # noqa: N818 - it is an order, not an error
    """The data is to be opened anew at a position: what was read since cannot be taken back."""

    def __init__(self, position: StagePosition) -> None:
        super().__init__(position)
        self.position = position


def work_of(pack: Pack) -> int:
    """Sum of the squared real lengths of the sources: what attention costs."""
    return sum(len(source) ** 2 for source in pack.sources)


def order_of(works: Sequence[int], *, size: int, seed: int, number: int) -> list[int]:
    """In which order the packs of a window leave it.

    Args:
        works: of its packs; fewer than ``size`` in the last window of a finite stream, which then emits the same quantiles as a
            full window would, but for those in between.
        size: of a full window.
        seed: the same for all workers.
        number: of the window.

    >>> order_of([5, 1, 9, 3], size=4, seed=0, number=0)
    [3, 0, 1, 2]
    >>> order_of([50, 10, 90, 30], size=4, seed=0, number=0)
    [3, 0, 1, 2]
    """
    turn = np.random.default_rng([seed, number]).permutation(size)
    ranked = sorted(range(len(works)), key=lambda i: (works[i], i))
    return [i for _, i in sorted((turn[place * size // len(works)], i) for place, i in enumerate(ranked))]


def in_balance(
    packs: Callable[[StagePosition], Iterator[Emitted]],
    origin: StagePosition,
    *,
    size: int,
    seed: int,
    may_repair: Callable[[str], None],
) -> Iterator[Emitted]:
    """The packs of a stream, window by window; while one is emitted the next one is filled: ``size`` packs and one are held.

    Args:
        packs: opens the stream at the position where the data stands.
        origin: where to start.
        size: packs in a window.
        seed: of the order in which places are emitted.
        may_repair: called where the packs of the window that were emitted before are not those that are there now; raises if
            that is not to be mended.

    Raises:
        StartAgain: from the position before that window, passing over what was emitted.
    """
    number, emitted, given = origin.window, origin.window_emitted, origin.window_given
    before = replace(origin, window_emitted=0, window_given=b"")
    stream = packs(before)
    window = list(islice(stream, size))
    order = order_of([work_of(each.pack) for each in window], size=size, seed=seed, number=number)
    if emitted > len(window) or given != b"".join(window[i].hashed for i in order[:emitted]):
        may_repair(f"window {number}")
        raise StartAgain(replace(before, skip=before.skip + given))
    while window:
        order = order_of([work_of(each.pack) for each in window], size=size, seed=seed, number=number)
        after_all, waiting = replace(window[-1].after, window=number + 1), dict(enumerate(window))
        window.clear()
        for gone in order[:emitted]:
            del waiting[gone]
        ahead: list[Emitted] = []
        for turn in range(emitted, len(order)):
            due = size * (turn + 1 - emitted) // (len(order) - emitted)
            ahead += islice(stream, due - len(ahead))
            each = waiting.pop(order[turn])
            given += each.hashed
            if turn == len(order) - 1 and ahead:
                after = after_all
            else:
                after = replace(before, window=number, window_emitted=turn + 1, window_given=given)
            yield Emitted(each.pack, each.hashed, after)
        before, window = after_all, ahead
        number, emitted, given = number + 1, 0, b""
