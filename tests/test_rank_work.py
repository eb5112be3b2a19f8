"""The imbalance of ranks against ratios written down by hand; ranks are real ones in test_monitor."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from lightning_pack.callbacks.work import STEPS, Imbalance, RankWork
from lightning_pack.layout import RowLayout
from lightning_pack.row import PackedBatch
from lightning_pack.source import EncodedSource, Pack


def row(*lengths: int) -> PackedBatch:
    sources = [EncodedSource.of(str(length), torch.arange(length)) for length in lengths]
    return PackedBatch.from_packs([Pack(sources, RowLayout.of(lengths, multiple=8))], pad_id=0)


def ranks_of(*steps: list[tuple[int, ...]]) -> list[RankWork]:
    """For each step the lengths that each rank trains on."""
    ranks = [RankWork() for _ in steps[0]]
    for step in steps:
        for rank, lengths in zip(ranks, step, strict=True):
            if lengths:
                rank.add(row(*lengths))
            rank.end_step()
    return ranks


def compared(ranks: list[RankWork]) -> Imbalance:
    """What the first rank gets, when all send what they send."""
    sent: list[Tensor] = []
    for rank in ranks:
        rank.compared(lambda own: sent.append(own) or own)  # type: ignore[func-returns-value]
    assert len(sent) == len(ranks)
    return ranks[0].compared(lambda own: torch.stack(sent))


def test_the_mean_over_steps_of_the_largest_over_the_mean() -> None:
    found = compared(ranks_of([(3, 4), (5,), (1, 7)], [(2,), (), (2,)], [(), (), ()]))
    # 25, 25, 50, and 4, 0, 4; the lengths are the real ones, and a step without any work has no ratio.
    assert found.steps == 2
    assert found.mean == pytest.approx((50 / (100 / 3) + 4 / (8 / 3)) / 2, abs=1e-9)


def test_one_rank_is_balanced_and_the_open_step_waits() -> None:
    (work,) = ranks_of([(3, 4)], [(5,)])
    work.add(row(2))
    alone = work.compared(lambda own: own)
    assert (alone.steps, alone.mean) == (2, 1.0)
    work.clear()
    assert work.compared(lambda own: own) == Imbalance()
    work.add(row(1))
    other = RankWork()
    other.add(row(4))
    for rank in (work, other):
        rank.end_step()
    found = compared([work, other])
    assert found.steps == 1
    assert found.mean == pytest.approx(16 / ((4 + 1 + 16) / 2), abs=1e-9), "the open step kept the row from before"


def test_sums_do_not_depend_on_where_they_were_interrupted() -> None:
    steps = [[(i % 7 + 1,), (i % 5 + 2, 3)] for i in range(20)]
    whole = compared(ranks_of(*steps))
    assert whole.mean > 1.1
    parts = [compared(ranks_of(*steps[a:b])) for a, b in ((0, 3), (3, 11), (11, 20))]
    assert list(accumulate(parts, Imbalance.plus))[-1] == whole
    assert whole.minus(parts[0]) == parts[1].plus(parts[2])


def test_ranks_that_were_interrupted_at_different_steps_compare_the_common_ones() -> None:
    behind, ahead = ranks_of([(3,), (4,)], [(1,), (2,)])
    ahead.add(row(6))
    ahead.end_step()
    assert compared([behind, ahead]).steps == 2


def test_the_sums_have_a_bound() -> None:
    work = RankWork()
    for step in range(STEPS):
        assert not work.full, step
        work.end_step()
    assert work.full


def test_a_copy_leaves_the_original_alone() -> None:
    (work,) = ranks_of([(3,)])
    other = work.copy()
    other.add(row(4))
    other.end_step()
    assert (work.compared(lambda own: own).steps, other.compared(lambda own: own).steps) == (1, 2)
