"""Equal work over ranks: all loader workers emit packs of about the same sum of squared lengths in the same step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.energon.state import FlexState

from lightning_pack import PackingPolicy
from lightning_pack.bench.bins import drawn
from lightning_pack.energon.packs import Emitted
from lightning_pack.energon.position import StagePosition
from lightning_pack.energon.window import in_balance, order_of
from lightning_pack.simulation import simulate
from lightning_pack.source import Pack
from tests.numbers_data import lengths, records_of, write_webdataset
from tests.ranks import on_ranks
from tests.test_exact_position import Run
from tests.test_policy import source
from tests.training import Options, run


class Tracked(Pack):
    """A pack whose end can be noticed."""

    __hash__ = object.__hash__


def in_order(works: list[int], *, size: int) -> list[int]:
    """Works in the order in which windows of so many packs emit them."""
    emitted: list[int] = []
    for number, start in enumerate(range(0, len(works), size)):
        window = works[start : start + size]
        emitted += [window[i] for i in order_of(window, size=size, seed=0, number=number)]
    return emitted


def imbalance(ranks: list[list[int]]) -> float:
    """Mean over steps of the greatest work over the mean work of the ranks."""
    steps = np.array([rank[: min(map(len, ranks))] for rank in ranks], dtype=float)
    return float((steps.max(0) / steps.mean(0)).mean())


@pytest.mark.parametrize(("window", "most"), [(64, 1.35), (128, 1.25)])
def test_ranks_work_alike(window: int, most: float) -> None:
    sizes, capacity = drawn("A", 80_000)
    policy = PackingPolicy(capacity=capacity, algorithm="exact_fill", buffer_size=256)
    ranks = [simulate(policy, sizes[rank::8]).squares for rank in range(8)]
    assert min(map(len, ranks)) > 7 * window
    assert imbalance(ranks) > 1.8, "without balance"
    assert imbalance([in_order(works, size=window) for works in ranks]) <= most


@settings(max_examples=200, deadline=None)
@given(works=st.lists(st.integers(0, 50), min_size=1, max_size=40), spare=st.integers(0, 10), number=st.integers(0, 5))
def test_every_pack_leaves_with_its_window(works: list[int], spare: int, number: int) -> None:
    size = len(works) + spare
    order = order_of(works, size=size, seed=3, number=number)
    assert sorted(order) == list(range(len(works)))
    assert order == order_of([work * 7 for work in works], size=size, seed=3, number=number), "only the rank of a work matters"


def test_every_window_has_an_order_of_its_own() -> None:
    works = list(range(16))
    orders = {tuple(order_of(works, size=16, seed=seed, number=number)) for seed in (0, 1) for number in range(3)}
    assert len(orders) == 6


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few long sources among many short ones."""
    sizes = [56 if i % 9 == 0 else n for i, n in enumerate(lengths(600, most=12))]
    return write_webdataset(tmp_path_factory.mktemp("uneven") / "data", {"train": records_of(sizes)}, shards=6)


def works_of(data: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[list[int]], list[str]]:
    """Work of each row of both workers of a rank, and all keys."""
    trained = Run(data, num_workers=2, buffer_size=32, multiple=1, **options)
    rows = trained.train(96)
    trained.end()
    works = [int((row.cu_seqlens.diff() ** 2).sum()) for row in rows]
    return [works[0::2], works[1::2]], [key for row in rows for key in row.source_keys]


def test_workers_emit_the_same_quantiles(uneven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without, _ = works_of(uneven, monkeypatch)
    balanced, _ = works_of(uneven, monkeypatch, balance="quadratic", window=16)
    assert imbalance(without) > 1.25
    assert imbalance(balanced) < 1 + (imbalance(without) - 1) * 0.6
    # In each window both workers emit from the least to the most in the same order.
    for start in range(0, 48, 16):
        places = [np.argsort(np.argsort(works[start : start + 16], kind="stable")) for works in balanced]
        assert np.corrcoef(*places)[0, 1] > 0.95


def test_a_window_holds_back_and_loses_nothing(uneven: Path) -> None:
    passes = {}
    for options in ({}, {"balance": "quadratic", "window": 16}):
        trained = Run(uneven, num_workers=2, epochs=1, buffer_size=32, multiple=1, **options)
        passes[len(options)] = list(trained.data.train_dataloader())
        trained.end()
    keys = [sorted(key for row in rows for key in row.source_keys) for rows in passes.values()]
    assert keys[0] == keys[1]
    assert len(keys[0]) == 600
    assert len(passes[2]) % 32, "the last windows are not full"
    orders = [[row.source_keys for row in rows] for rows in passes.values()]
    assert orders[0] != orders[1]
    policy = PackingPolicy(capacity=64, balance="quadratic", window=16)
    assert (policy.window_size, policy.window_tokens) == (16, 17 * 64)
    assert PackingPolicy(capacity=64, balance="quadratic").window_size == 64
    assert PackingPolicy(capacity=64).window_tokens == 0


def test_a_window_and_one_pack_are_held() -> None:
    held: weakref.WeakSet[Pack] = weakref.WeakSet()
    most = 0

    def packs(origin: StagePosition) -> Iterator[Emitted]:
        nonlocal most
        for number in range(100):
            pack = Tracked([source(str(number), 1 + number % 7)], None)
            held.add(pack)
            most = max(most, len(held))
            yield Emitted(pack, b"", replace(origin, buffer=number + 1))
            del pack

    start = StagePosition(0, 0, FlexState())
    given = [each.pack.sources[0].key for each in in_balance(packs, start, size=10, seed=0, may_repair=pytest.fail)]
    assert sorted(given, key=int) == [str(i) for i in range(100)]
    assert 10 <= most <= 12


def on_two_ranks(argument: dict[str, Any]) -> dict[str, Any]:
    """Digests of a whole run's batches and of one resumed within a window, and the work of each row."""
    policy = {"capacity": 64, "buffer_size": 32, "balance": "quadratic", "window": 8}
    shape = {"devices": 2, "strategy": "ddp", "max_steps": 16}
    options = {"data": argument["data"], "workers": 1, "policy": policy, "trainer": shape}
    whole = run(Options(**options, checkpoints=argument["folder"]))
    resumed = run(Options(**options, resume=f"{argument['folder']}/step=9.ckpt"))
    return {"whole": list(whole.trained.values()), "resumed": list(resumed.trained.values()), "works": whole.works}


@pytest.mark.slow
def test_two_ranks_work_alike_and_resume_within_a_window(uneven: Path, tmp_path: Path) -> None:
    argument = {"data": str(uneven), "folder": str(tmp_path / "checkpoints")}
    results = on_ranks("tests.test_balance:on_two_ranks", argument, folder=tmp_path)
    assert not set(results[0]["whole"]) & set(results[1]["whole"])
    for result in results:
        assert len(result["whole"]) == 16
        assert result["resumed"] == result["whole"][9:]
    works = [result["works"] for result in results]
    assert max(works[0]) > 2 * min(works[0])
    assert imbalance(works) < 1.35
