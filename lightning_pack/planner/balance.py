"""How unequal the work of data-parallel ranks is, and what a window of packs makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_pack.media_budget import MediaCost
from lightning_pack.policy import PackingPolicy
from lightning_pack.simulation import simulate

WINDOWS = (64, 128)


@dataclass(frozen=True, kw_only=True)
class WindowBalance:
    """Ranks with ``balance="quadratic"``.

    Args:
        window: packs that each loader worker holds.
        imbalance: mean over steps of the largest work of a rank over the mean of all ranks; 1 is equal work.
        tokens: bound of the tokens in the window of a loader worker.
    """

    window: int
    imbalance: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class RankBalance:
    """The work of ranks that train on one pack a step each; a pack's work is the sum of its squared lengths, as in attention.

    Args:
        ranks: data-parallel ranks, each simulated as one loader worker with a share of the sources of its own.
        steps: that were compared.
        unbalanced: mean over steps of the largest work of a rank over the mean, without balance.
        windows: with balance, by size of the window.
    """

    ranks: int
    steps: int
    unbalanced: float
    windows: tuple[WindowBalance, ...]


def rank_balance(
    policy: PackingPolicy,
    lengths: Sequence[int],
    *,
    ranks: int,
    windows: Sequence[int] = WINDOWS,
    keys: Sequence[str | None] | None = None,
    media: Sequence[MediaCost] | None = None,
) -> RankBalance:
    """Deal sources out to ranks in turn, pack each share, and compare the ranks step by step.

    Args:
        policy: the packing rules; its own balance and window are not used.
        lengths: real tokens of the sources.
        ranks: data-parallel ranks, at least 2.
        windows: sizes to compare. Steps in windows that are not full on all ranks do not count, unless all are so.
        keys: sources with different keys do not share a pack.
        media: of each source; None means none.

    Raises:
        ValueError: for fewer than 2 ranks, or fewer sources than ranks.
    """
    from lightning_pack.energon.window import order_of  # Energon takes seconds to import

    if ranks < 2:
        raise ValueError(f"ranks={ranks}: only two ranks or more can differ in their work")
    if len(lengths) < ranks:
        raise ValueError(f"{len(lengths)} sources cannot be dealt out to {ranks} ranks: give at least one for each")
    shares = [
        simulate(
            policy,
            lengths[rank::ranks],
            keys=None if keys is None else keys[rank::ranks],
            media=None if media is None else media[rank::ranks],
        ).squares
        for rank in range(ranks)
    ]
    steps = min(map(len, shares))
    # As the packs of a buffer leave in an order drawn by each worker for itself.
    drawn = [np.random.default_rng([policy.seed, rank]).permutation(share)[:steps] for rank, share in enumerate(shares)]
    found = []
    for size in windows:
        used = steps // size * size or steps
        ordered = []
        for share in shares:
            emitted: list[int] = []
            for number, start in enumerate(range(0, used, size)):
                works = share[start : min(start + size, used)]
                emitted += [works[i] for i in order_of(works, size=size, seed=policy.seed, number=number)]
            ordered.append(emitted)
        found.append(WindowBalance(window=size, imbalance=_imbalance(ordered), tokens=(size + 1) * policy.capacity))
    return RankBalance(ranks=ranks, steps=steps, unbalanced=_imbalance(drawn), windows=tuple(found))


def drawn_imbalance(works: Sequence[int], *, ranks: int, seed: int) -> float:
    """The imbalance of ranks whose packs are drawn from those of one stream: quick, and near to that of :func:`rank_balance`.

    Args:
        works: sum of squared lengths of each pack.
        ranks: data-parallel ranks; on one, or with fewer packs than ranks, it is 1.
        seed: of the drawing.
    """
    steps = len(works) // ranks
    if ranks == 1 or not steps:
        return 1.0
    drawn = np.random.default_rng(seed).permutation(works)[: steps * ranks]
    return _imbalance(drawn.reshape(ranks, steps))


def _imbalance(works: Sequence[Sequence[int] | np.ndarray] | np.ndarray) -> float:
    """Mean over steps of max / mean over ranks, of ``[ranks, steps]``."""
    by_step = np.array(works, dtype=np.float64)
    return float((by_step.max(0) / by_step.mean(0)).mean())
