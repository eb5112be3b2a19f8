"""How few bins there can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_pack.binning.limits import fitting


def lower_bound(lengths: Sequence[int], capacity: int) -> int:
    """The bound L2 of Martello and Toth: no packing has fewer bins.

    For a length K up to half of the capacity, sources above capacity - K have a bin of their own as far as sources of at
    least K go, sources above half of the capacity have one each, and what the rest needs beyond the room that these leave
    takes further bins. The best K counts. O(n log n).

    >>> lower_bound([6, 5, 5, 4, 4], 10)
    3

    Raises:
        ValueError: for a source without tokens or one that fits in no bin.
    """
    values = np.sort(np.asarray(fitting(lengths, capacity), dtype=np.int64))
    if not len(values):
        return 0
    total = np.concatenate([[0], np.cumsum(values)])
    half = int(np.searchsorted(values, capacity // 2, side="right"))
    least = np.concatenate([[0], np.unique(values[:half])])
    start = np.searchsorted(values, least, side="left")
    alone = np.searchsorted(values, capacity - least, side="right")
    room = (alone - half) * capacity - (total[alone] - total[half])
    further = -((room - (total[half] - total[start])) // capacity)
    return int((len(values) - half + np.maximum(further, 0)).max())
