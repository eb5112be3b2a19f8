"""The monitor's history: bounded, exact, and one run however often it was stopped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightning_pack.callbacks.history import MOST, TIMES, History, Stretch
from lightning_pack.callbacks.monitor import LeftOutWarning, PackingMonitor
from tests.test_monitor import POLICY, ROWS, Loader, TokenModel, row, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]
TOKENS = [sum(lengths) for lengths in ROWS]


def drawn(count: int) -> list[Stretch]:
    numbers = random.Random(count)
    return [Stretch(*(numbers.randrange(1 << 40) for _ in Stretch._fields))._replace(loggings=1) for _ in range(count)]


def summed(points: list[Stretch]) -> Stretch:
    return Stretch(*map(sum, zip(*points, strict=True)))


@pytest.mark.parametrize("count", [1, MOST, MOST + 1, 2 * MOST + 1, 5 * MOST + 3])
def test_neighbours_are_merged_and_no_sum_changes(count: int) -> None:
    stretches, history = drawn(count), History()
    for number, stretch in enumerate(stretches):
        history = history.added(stretch)
        if number % 500 == 0:
            # A resume at any place changes nothing.
            history = History.from_plain(history.to_plain())
    assert len(history.points) <= MOST
    assert len(history.points) > MOST / 2 or history.stride == 1
    assert history.stride == 1 << max(0, (count - 1) // MOST).bit_length()
    assert history.total == summed(stretches)
    # Each point is of the next ``stride`` stretches, the last one of what is left.
    for number, point in enumerate(history.points):
        assert point == summed(stretches[number * history.stride : (number + 1) * history.stride])


def monitored(path: Path, batches: list[Any], *callbacks: Any, **options: Any) -> PackingMonitor:
    monitor = PackingMonitor(policy=POLICY, summary=False)
    resume = {"ckpt_path": path / "3.ckpt", "weights_only": True} if options.pop("resume", False) else {}
    trainer(path, monitor, *callbacks, **options).fit(TokenModel(), Loader(batches), **resume)
    return monitor


@pytest.mark.parametrize("every", [2, 3])
def test_a_resumed_run_has_the_history_of_the_whole_run(tmp_path: Path, every: int) -> None:
    batches = [row(*lengths, left_out=((f"x{i}", "overlength", 40),)) for i, lengths in enumerate(ROWS)]
    save = LambdaCallback(on_train_batch_end=lambda run, *_: run.save_checkpoint(tmp_path / f"{run.global_step}.ckpt"))
    with pytest.warns(LeftOutWarning):
        whole = monitored(tmp_path / "whole", batches, log_every_n_steps=every).state_dict()
    with pytest.warns(LeftOutWarning):
        monitored(tmp_path, batches, save, log_every_n_steps=every, max_steps=3)
    saved = torch.load(tmp_path / "3.ckpt", weights_only=True)["callbacks"]["PackingMonitor"]
    # Logging every 2 steps, half an interval is in the checkpoint: in its total, and in no point yet.
    logged = sum(TOKENS[:every])
    assert saved["history"]["counts"]["real_tokens"] == [logged]
    assert (saved["logged"]["real_tokens"], saved["total"]["real_tokens"]) == (logged, sum(TOKENS[:3]))
    with pytest.warns(LeftOutWarning):
        resumed = monitored(tmp_path, batches[3:] + batches[:3], log_every_n_steps=every, resume=True, max_steps=6).state_dict()
    for state in (resumed, whole):
        assert sorted(state["history"].pop("times")) == sorted(TIMES)
    assert resumed == whole
    assert len(whole["history"]["counts"]["packs"]) == 6 // every
    assert whole["examples"] == {"overlength": ["x0", "x1", "x2"]}


def test_times_are_those_of_the_interval_after_the_first_step(tmp_path: Path) -> None:
    monitor = monitored(tmp_path, [row(*lengths) for lengths in ROWS])
    times = monitor.state_dict()["history"]["times"]
    # The clock starts after the first step.
    assert times["timed_tokens"] == [TOKENS[1], sum(TOKENS[2:4]), sum(TOKENS[4:6])]
    assert min(times["nanoseconds"]) > 0
    assert times["operations"] == times["modelled_nanoseconds"] == [0, 0, 0], "this model's operations are not known"


def test_a_checkpoint_without_a_history_is_one_stretch(tmp_path: Path) -> None:
    batches = [row(*lengths) for lengths in ROWS]
    save = LambdaCallback(on_train_end=lambda run, _: run.save_checkpoint(tmp_path / "3.ckpt"))
    monitored(tmp_path, batches, save, max_steps=3)
    checkpoint = torch.load(tmp_path / "3.ckpt", weights_only=True)
    del checkpoint["callbacks"]["PackingMonitor"]["history"], checkpoint["callbacks"]["PackingMonitor"]["examples"]
    torch.save(checkpoint, tmp_path / "3.ckpt")
    state = monitored(tmp_path, batches[3:] + batches[:3], resume=True, max_steps=6).state_dict()
    assert state["history"]["undetailed_steps"] == 2
    assert state["history"]["counts"]["real_tokens"] == [sum(TOKENS[:2]), sum(TOKENS[2:4]), sum(TOKENS[4:6])]
    assert state["total"]["real_tokens"] == sum(TOKENS)


def test_damaged_histories_are_refused() -> None:
    plain = History().added(Stretch(steps=1, packs=2)).to_plain()
    assert History.from_plain(plain).points == (Stretch(loggings=1, steps=1, packs=2),)
    for change, text in (
        ({"version": 2}, "its version is 2"),
        ({"counts": None}, "no counts or no times"),
        ({"counts": plain["counts"] | {"packs": [-1]}}, "its packs are no list of whole numbers"),
        ({"counts": plain["counts"] | {"packs": ["many"]}}, "its packs are no list of whole numbers"),
        ({"counts": plain["counts"] | {"packs": [1 << 4000]}}, "its packs are no list of whole numbers"),
        ({"counts": plain["counts"] | {"packs": [1, 2]}}, r"its lists hold \[1, 2\] numbers"),
        ({"times": {}}, "its nanoseconds are no list"),
        ({"stride": 0}, "stride 0"),
    ):
        with pytest.raises(ValueError, match=rf"history in the checkpoint is damaged: .*{text}.*resume without the monitor"):
            History.from_plain(plain | change)
    with pytest.raises(ValueError, match="its version is 'list'"):
        PackingMonitor().load_state_dict(PackingMonitor().state_dict() | {"history": [1]})
