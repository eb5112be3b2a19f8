"""A position from a stranger: decoded to what it was, or refused in words and at once, whatever it is made of."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_pack import EnergonPackDataModule
from lightning_pack.energon import ExactLoader
from lightning_pack.energon.loader import Standing
from lightning_pack.energon.position import DamagedDataError
from lightning_pack.energon.state import MOST_DEPTH, StateError, from_plain, to_plain
from lightning_pack.energon.validity import MOST_BUFFERS_PASSED_OVER, refuse_scattered
from lightning_pack.resume import ResumeError
from lightning_pack.rewind import ResumePoint
from tests.conftest import faulty_records
from tests.numbers_data import lengths, records_of, same_batch, write_webdataset
from tests.test_exact_position import PlainNumbers, Run, comparable, through_a_file
from tests.training import Options, run

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")

#: Name of the case -> options of the run, number of workers, and rows that were trained on.
FLUSHED = {"carry_over": False}
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "no workers": (FLUSHED, 0, 11),
    "two workers": (FLUSHED, 2, 17),
    "blend": (FLUSHED, 2, 17),
    "split": (FLUSHED | {"overlength": "split", "capacity": 20}, 0, 12),
    "last pass": (FLUSHED | {"epochs": 2}, 0, 110),
    "two workers in passes": (FLUSHED | {"epochs": 2}, 2, 20),
    "carried over": ({"buffer_size": 64}, 0, 11),
    "carried over by two workers in passes": ({"buffer_size": 48, "epochs": 2}, 2, 19),
    "in balance": ({"balance": "quadratic", "window": 5}, 0, 13),
}
#: Those that differ most in what a position holds.
SWEPT = ("two workers", "split", "carried over", "in balance")
#: What a position may be a part of.
POINT = {"next": "batch", "epoch": 0, "batch": 7, "total_batches": 7, "stepped": 7, "last": False}


class Saved:
    """A datamodule that has trained a little, and the state it saved."""

    def __init__(self, path: Path, options: dict[str, Any], workers: int, rows: int) -> None:
        self.path, self.options, self.workers, self.rows = path, options, workers, rows
        trained = Run(path, num_workers=workers, **options)
        self.last = trained_rows(trained, rows)[-1]
        self.data: EnergonPackDataModule = trained.data
        self.state: Any = through_a_file(trained.end())
        assert self.state["ranks"][0]["point"] is None, "no Trainer has made one"
        self.state["ranks"][0]["point"] = POINT

    def problem(self, state: Any) -> ValueError | None:
        return self.data._stream.problem(state, ranks=[0])

    @property
    def loader(self) -> Any:
        """The loader's part of the state."""
        return self.state["ranks"][0]["loader"]

    def read(self, state: Any, rows: int) -> int:
        """Read so many rows from a state on; how many of them there are not."""
        loader = ExactLoader(
            self.data._stream.progress.loader.options, workers=self.data._spread.workers(), epochs=self.data.epochs
        )
        loader.restore(through_a_file(state)["ranks"][0]["loader"])
        try:
            while loader.state()["epoch"] != self.data.epochs and rows > 0:
                for _ in zip(range(rows), loader, strict=False):
                    loader.trained()
                    loader.commit()
                    rows -= 1
        finally:
            loader.stop()
        return rows


def trained_rows(one: Run, rows: int) -> list[Any]:
    """Rows of one pass after the other."""
    given: list[Any] = []
    while len(given) < rows:
        try:
            given += one.train(1)
        except StopIteration:
            one.batches = iter(one.data.train_dataloader())
    return given


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Saved]]:
    folder = tmp_path_factory.mktemp("saved")
    plain = write_webdataset(folder / "plain", {"train": faulty_records()})
    other = write_webdataset(folder / "other", {"train": records_of(lengths(50, most=40))})
    blend = folder / "blend.yaml"
    blend.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        f"      - weight: 2\n        path: {plain}\n      - weight: 1\n        path: {other}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.test_exact_position.NumberEncoder", PlainNumbers)
        yield {name: Saved(blend if name == "blend" else plain, *case) for name, case in CASES.items()}


# Paths into a state, and changes there.

Path_ = tuple[Any, ...]


def paths(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    yield at
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*at, key))
    elif isinstance(value, list | tuple):
        for i in range(len(value)):
            yield from paths(value[i], (*at, i))


def there(value: Any, at: Path_) -> Any:
    for key in at:
        value = value[key]
    return value


def changed(value: Any, at: Path_, new: Any) -> Any:
    """A copy of the containers on the way, with ``new`` at the end of it."""
    if not at:
        return new
    if isinstance(value, dict):
        return {key: changed(item, at[1:], new) if key == at[0] else item for key, item in value.items()}
    return type(value)(changed(item, at[1:], new) if i == at[0] else item for i, item in enumerate(value))


def find(value: Any, *names: str) -> Path_:
    """The first place below the names, one after the other; FlexState's entries are pairs in lists."""
    at: Path_ = ()
    for name in names:
        at += next(p for p in paths(there(value, at)) if p and named(there(value, at), p) == name)
    return at


def named(value: Any, at: Path_) -> Any:
    pair = there(value, at[:-1])
    return pair[0] if isinstance(pair, tuple) and len(pair) == 2 and at[-1] == 1 else at[-1]


@pytest.mark.parametrize("case", CASES)
def test_a_real_state_comes_back_as_it_was(saved: dict[str, Saved], case: str) -> None:
    one = saved[case]
    assert one.problem(one.state) is None
    assert comparable(Standing.of(one.loader).plain()) == comparable(one.loader)
    starts = [worker["at"]["start"] for worker in one.loader["workers"]]
    assert len(starts) == max(one.workers, 1)
    for plain in starts:
        state = from_plain(plain)
        keys = there(plain, find(plain, "_restore_keys"))
        assert any(type(part) is tuple for part in keys)
        assert comparable(to_plain(state)) == comparable(plain)
        # Decoded afresh each time: Energon changes what it is given.
        assert from_plain(plain)["datasets"][0] is not state["datasets"][0]
    within = "window_emitted" if "balance" in one.options else "emitted"
    assert any(worker["at"][within] for worker in one.loader["workers"]), "within a buffer"
    if "carry_over" not in one.options:
        assert all(worker["at"]["carried"] for worker in one.loader["workers"])


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.sampled_from([10**12, 2**63, 10**2000, -(10**30)]),
    st.floats(),
    st.sampled_from(["", "x", "MapDataset", "Webdataset", "__kind__", "os.system", "epoch"]),
    st.binary(max_size=20),
    st.sampled_from([bytes(8), bytes(80), bytes(5056), b"\xff" * 5056]),
    st.sampled_from([torch.zeros(3), torch.zeros(5056, dtype=torch.uint8), torch.zeros(1).expand(1 << 40)]),
)
KINDS = ("ndarray", "FlexState", "dict", "SliceState", "StagePosition", "eval")
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.sampled_from(["items", "fields", "worker", "workers", "at", "start", "rng"]), inner, max_size=3),
        st.builds(
            lambda kind, more: {"__kind__": kind, **more}, st.sampled_from(KINDS), st.fixed_dictionaries({"items": inner})
        ),
    ),
    max_leaves=8,
)


@st.composite
def tampered(draw: Callable[..., Any], state: Any) -> Any:
    """The state with one to three places changed."""
    for _ in range(draw(st.integers(1, 3))):
        # Small states deep inside are where most of the places are; all levels get their turn.
        places = list(paths(state))
        at = draw(st.sampled_from(places))
        old = there(state, at)
        # Another part of the state fits better than anything made up.
        ways: list[Any] = [VALUES, st.sampled_from(places).map(lambda other, state=state: there(state, other))]
        if type(old) is int:
            ways.append(st.integers(-1, 1).map(lambda by, old=old: old + by))
        if type(old) in (list, tuple) and old:
            ways += [st.just(old[:-1]), st.just(old[::-1]), st.just(old + old[-1:])]
        if type(old) is dict and old:
            lost = draw(st.sampled_from(sorted(old, key=str)))
            ways += [st.just({key: item for key, item in old.items() if key != lost}), st.just({**old, "more": 1})]
        if type(old) is bytes and old:
            ways.append(st.integers(0, len(old) - 1).map(lambda i, old=old: old[:i] + bytes([old[i] ^ 0x80]) + old[i + 1 :]))
            ways += [st.just(old[:-8]), st.just(old + old[-8:]), st.just(old * 200)]
        state = changed(state, at, draw(st.one_of(ways)))
    return state


def judged(one: Saved, state: Any, *, most_seconds: float) -> str:
    """What becomes of a tampered state: its refusal, the error of the reader, or that it is read on from."""
    began = time.perf_counter()
    problem = one.problem(state)
    assert time.perf_counter() - began < most_seconds
    if problem is not None:
        assert type(problem) in (StateError, ResumeError)
        assert len(str(problem)) < 20_000
        assert str(pickle.loads(pickle.dumps(problem))) == str(problem), "it must cross from rank to rank"
        return type(problem).__name__
    loader = state["ranks"][0]["loader"]
    assert comparable(Standing.of(loader).plain()) == comparable(loader)
    if one.workers:
        return "accepted"
    try:
        one.read(state, 3)
    except (StateError, DamagedDataError) as e:
        assert "checkpoint" in str(e)  # noqa: PT017
        return "refused by the reader"
    finally:
        assert time.perf_counter() - began < 2 * most_seconds
    return "accepted"


@pytest.mark.parametrize("case", CASES)
def test_a_tampered_state_is_refused_or_is_a_valid_one(saved: dict[str, Saved], case: str) -> None:
    one, verdicts = saved[case], Counter[str]()

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(state=tampered(one.state))
    def check(state: Any) -> None:
        verdicts[judged(one, state, most_seconds=20)] += 1

    check()
    # That some are let through is asserted below, of more examples.
    assert verdicts["StateError"] > 20


@pytest.mark.parametrize("case", [name for name, (options, *_) in CASES.items() if "carry_over" not in options])
def test_a_source_carried_twice_is_refused_at_once(saved: dict[str, Saved], case: str) -> None:
    """The same object at two places; it was found only when the loader started."""
    one = saved[case]
    at = ("ranks", 0, "loader", "workers", 0, "at", "carried")
    keys = there(one.state, at)
    assert len(keys) > 1
    problem = one.problem(changed(one.state, (*at, 1), keys[0]))
    assert isinstance(problem, StateError)
    assert ".carried[1]: the same part occurs in it twice" in str(problem)


@pytest.mark.slow
@pytest.mark.parametrize("case", SWEPT)
def test_a_tampered_position_is_refused_or_is_a_valid_one(saved: dict[str, Saved], case: str) -> None:
    """The same, of the loader alone, and many times."""
    one, verdicts = saved[case], Counter[str]()

    @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(loader=tampered(one.loader))
    def check(loader: Any) -> None:
        state = changed(one.state, ("ranks", 0, "loader"), loader)
        verdicts[judged(one, state, most_seconds=20)] += 1

    check()
    assert verdicts["StateError"] > 130
    assert verdicts["accepted"] > 5


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=VALUES)
def test_anything_is_decoded_or_refused(value: Any) -> None:
    try:
        from_plain(value)
    except StateError as e:
        message = str(e)
    else:
        return
    assert message.startswith("the checkpoint's data position is damaged: loader")
    assert message.endswith("resume from another checkpoint")


def numbers_in(state: Any) -> list[Path_]:
    return [p for p in paths(state) if p[:3] == ("ranks", 0, "loader") and type(there(state, p)) is int]


@pytest.mark.slow
@pytest.mark.parametrize("case", SWEPT)
def test_any_number_may_be_another_one(saved: dict[str, Saved], case: str) -> None:
    """Values of the right type and range may still be wrong, but neither hang nor crash the reader."""
    one, verdicts = saved[case], Counter[str]()
    generator = np.random.default_rng(0)
    places = numbers_in(one.state)
    assert len(places) > 30
    for i in generator.permutation(len(places))[: 12 if one.workers else 80]:
        state = changed(one.state, places[i], there(one.state, places[i]) + int(generator.integers(1, 4)))
        verdict = judged(one, state, most_seconds=20)
        if verdict == "accepted" and one.workers:
            began = time.perf_counter()
            try:
                one.read(state, 4)
            except (StateError, DamagedDataError) as e:
                assert "checkpoint" in str(e)  # noqa: PT017
            assert time.perf_counter() - began < 60
        verdicts[verdict] += 1
    assert verdicts["accepted"] > 3
    assert verdicts["StateError"] > 0


READER = "WebdatasetSampleLoaderDataset"
IMPOSSIBLE: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "a pass of an endless stream": (("epoch",), 1, r"epoch: 1 is not a whole number from 0 to 0"),
    "a worker beyond": (("worker",), 2, r"workers\[0\]\.worker: 2 is not a whole number from 0 to 1"),
    "a worker twice": (("worker",), 0, r"workers\[1\]\.worker: worker 0 is there twice"),
    "no workers": (("workers",), [], r"workers: it should hold a list of 2"),
    "no position": (
        ("at",),
        {},
        r"workers\[0\]\.at: a dict does not hold buffer, carried, digest, emitted, entered, given, read, skip, start, window",
    ),
    "negative": (("buffer",), -1, r"workers\[0\]\.at\.buffer: -1 is not a whole number"),
    "more packs than sources": (("emitted",), 17, r"at\.emitted: 17 is not a whole number from 0 to 16"),
    "no packs": (("emitted",), 0, r"at\.given: b.* is no row of 0 to 0 hashes of 8 bytes, after 0 packs"),
    "packs without sources": (("emitted",), 9, r"at\.given: b.* is no row of 9 to 16 hashes of 8 bytes, after 9 packs"),
    "more sources than the buffer": (("given",), bytes(17 * 8), r"at\.given: b.*\(136 long\) is no row of 2 to 16 hashes"),
    "half a hash": (("given",), bytes(20), r"at\.given: b.* is no row of 2 to 16 hashes"),
    "hashes that are numbers": (("given",), [1, 2], r"at\.given: a list is no row of 2 to 16 hashes"),
    "no digest": (("digest",), None, r"at\.digest: None is no row of 1 to 1 hashes"),
    "carried over without carry-over": (("carried",), [("MapDataset", 0)], r"at\.carried: 1 sources cannot have stayed in a"),
    "an age": (("entered",), [10**6], r"at\.entered\[0\]: 1000000 is not a whole number from 0 to"),
    "packs of a window": (("window_emitted",), 3, r"at\.window_emitted: 3 is not a whole number from 0 to 0"),
    "sources of a window": (("window_given",), bytes(8), r"at\.window_given: b.* is no row of 0 to 0 hashes"),
    "two digests": (("digest",), bytes(16), r"at\.digest: b.* is no row of 1 to 1 hashes"),
    "passed over": (("skip",), bytes((64 * 16 + 1) * 8), r"at\.skip: b.*\(8200 long\) is no row of 0 to 1024 hashes"),
    "a count": (("_sample_count",), -1, rf"at\.start.*\.{READER}\._sample_count: -1 is not a whole number"),
    "a pending slice": (
        ("_pending_slice_indexes",),
        [7, 10**6],
        rf"workers\[0\]\.at\.start\.{READER}\._pending_slice_indexes\[1\]: slice 1000000 is beyond the data",
    ),
    "slices read": (
        ("_pending_slices_offset",),
        400,
        r"_pending_slices_offset: 400 slices read and \d+ to be read are not \d+",
    ),
    "nothing pending": (
        ("_pending_slice_indexes",),
        None,
        r"the slices still to be read and the number read must come together",
    ),
    "an open slice": (
        ("_active_slice_state", "index"),
        4000,
        r"_active_slice_state\[\d\]: slice 4000 is beyond the data, which has \d+",
    ),
    "a sample": (
        ("_active_slice_state", "current"),
        1999,
        r"_active_slice_state\[\d\]: sample 1999 is not in its slice, \d+ to",
    ),
    "open slices": (("_active_slice_state",), [], r"_active_slice_state: 0 slices are open; 16 must be"),
    "no key": (("_active_buffer", "_restore_keys"), [()], r"_restore_keys\[0\]: a tuple is not the key of a sample"),
    "a key beyond the data": (
        ("_active_buffer", "_restore_keys"),
        [("Reading", 1, "MapDataset", 0, "MapDataset", 0, "Webdataset", 500)],
        r"ShuffleBufferDataset\._active_buffer\._restore_keys\[0\]: there is no sample Reading/1/.*/500 in the data of this",
    ),
    "a key of other data": (("_active_buffer", "_restore_keys"), [("BlendDataset", 1)], r"BlendDataset/1 is not the key of a"),
    "a buffer too full": (
        ("_active_buffer", "_restore_keys"),
        [("Reading", i, "MapDataset", i, "MapDataset", i, "Webdataset", 152) for i in range(9)],
        r"ShuffleBufferDataset: 9 samples are in a buffer of 8",
    ),
    "half a sample": (("_generator_offset",), 3, r"_generator_sample_key: no sample can be half done here"),
    "random numbers": (("_worker_rng",), {"__kind__": "FlexState", "items": [("rng", bytes(5056))]}, r"no state of torch's"),
    "fewer random numbers": (("_worker_rng",), {"__kind__": "FlexState", "items": [("rng", b"1")]}, r"no state of torch's"),
    "no random numbers": (
        ("_worker_rng",),
        {"__kind__": "FlexState", "items": []},
        r"a FlexState is no state of random numbers",
    ),
    "no dataset": (
        ("start",),
        {"__kind__": "FlexState", "items": []},
        r"at\.start: the state of a None stands where .*MapDataset",
    ),
    "no state": (("start",), 5, r"at\.start: 5 is no state of a MapDataset"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_value_of_the_right_type_is_named(saved: dict[str, Saved], name: str) -> None:
    names, new, message = IMPOSSIBLE[name]
    one = saved["two workers"]
    at = find(one.state, "loader", *names)
    assert comparable(there(one.state, at)) != comparable(new)
    problem = one.problem(changed(one.state, at, new))
    assert type(problem) is StateError
    with pytest.raises(StateError, match=rf"the checkpoint's data position is damaged: ranks\[0\]\.loader.*{message}"):
        raise problem


def test_a_dataset_of_a_blend_cannot_be_said_to_have_ended(saved: dict[str, Saved]) -> None:
    one = saved["blend"]
    at = find(one.state, "loader", "exhausted")
    assert there(one.state, at) == [False, False]
    assert "repeated for ever is said to have ended" in str(one.problem(changed(one.state, at, [True, False])))
    assert "all datasets are said to have ended" in str(one.problem(changed(one.state, at, [True, True])))


def test_no_worker_is_within_a_pass_after_the_last(saved: dict[str, Saved]) -> None:
    one = saved["two workers in passes"]
    assert one.loader["epoch"] == 0
    state = changed(one.state, find(one.state, "loader", "epoch"), 2)
    assert "workers[0].at: all 2 passes over the data are said to be done" in str(one.problem(state))


# What only reading shows.


@pytest.mark.parametrize("case", [case for case in CASES if case != "in balance"])
@pytest.mark.parametrize("way", ["one more pack", "other sources", "another digest"])
def test_packs_that_were_not_emitted_are_not_left_out(saved: dict[str, Saved], case: str, way: str) -> None:
    one = saved[case]
    i, at = next((i, worker["at"]) for i, worker in enumerate(one.loader["workers"]) if worker["at"]["emitted"])
    worker = one.loader["workers"][i]["worker"]
    new, error, message = {
        "one more pack": (
            {"emitted": at["emitted"] + 1, "given": at["given"] + bytes(8)},
            StateError,
            f"damaged: loader worker {worker}: {at['emitted'] + 1} packs of buffer {at['buffer']} are said to be gone",
        ),
        "other sources": ({"given": at["given"][8:] + bytes(8)}, StateError, f"{at['emitted']} packs of buffer"),
        "another digest": ({"digest": bytes(8)}, DamagedDataError, "has changed, or the checkpoint is damaged"),
    }[way]
    state = changed(one.state, ("ranks", 0, "loader", "workers", i, "at"), at | new)
    assert one.problem(state) is None, "only the sources show it"
    with pytest.raises(error, match=message):
        one.read(state, 6)
    assert one.read(one.state, 6) < 6


@pytest.mark.parametrize("way", ["one more pack", "fewer packs", "other sources"])
def test_packs_of_a_window_that_were_not_emitted_are_not_left_out(saved: dict[str, Saved], way: str) -> None:
    one = saved["in balance"]
    at = one.loader["workers"][0]["at"]
    assert at["window_emitted"] > 1
    new = {
        "one more pack": {"window_emitted": at["window_emitted"] + 1},
        "fewer packs": {"window_emitted": at["window_emitted"] - 1},
        "other sources": {"window_given": at["window_given"][8:] + bytes(8)},
    }[way]
    state = changed(one.state, ("ranks", 0, "loader", "workers", 0, "at"), at | new)
    assert one.problem(state) is None, "only the sources show it"
    with pytest.raises(DamagedDataError, match=f"window {at['window']} of loader worker 0.*the checkpoint is damaged"):
        one.read(state, 6)
    assert one.read(one.state, 6) < 6


def test_what_was_carried_over_is_what_the_keys_say(saved: dict[str, Saved]) -> None:
    one = saved["carried over"]
    at = one.loader["workers"][0]["at"]
    first, second, *others = at["carried"]
    state = changed(one.state, ("ranks", 0, "loader", "workers", 0, "at", "carried"), [second, first, *others])
    assert one.problem(state) is None, "only the sources show it"
    with pytest.raises(DamagedDataError, match="has changed, or the checkpoint is damaged"):
        one.read(state, 6)
    worker = ("ranks", 0, "loader", "workers", 0, "at", "carried")
    for key, message in (
        (
            ("MapDataset", 1, "Reading", 1, "MapDataset", 0, "MapDataset", 0, "Webdataset", 10**6),
            r"carried\[0\]: there is no sample MapDataset/",
        ),
        (("MapDataset", 1, "Webdataset", 1), r"carried\[0\]: MapDataset/1/Webdataset/1 is not the key of a sample"),
    ):
        problem = one.problem(changed(one.state, worker, [key, second, *others]))
        with pytest.raises(StateError, match=message):
            raise problem  # type: ignore[misc]


def test_more_packs_than_a_last_buffer_has_are_refused(saved: dict[str, Saved]) -> None:
    path = saved["two workers in passes"].path
    whole = Run(path, num_workers=2, epochs=1, **FLUSHED)
    states = []
    for _ in whole.data.train_dataloader():
        whole.data._stream.progress.count_batch()  # type: ignore[union-attr]
        states.append(through_a_file(whole.data.state_dict()))
    whole.end()
    # Before the last row of the pass the other worker has come to its end, where it stays.
    state = states[-2]
    (i,) = (i for i, worker in enumerate(state["ranks"][0]["loader"]["workers"]) if worker["at"]["emitted"])
    ended = state["ranks"][0]["loader"]["workers"][i]["at"]
    assert state["ranks"][0]["loader"]["epoch"] == 0
    resumed = Run(path, num_workers=2, epochs=1, **FLUSHED, state=state)
    assert len(list(resumed.data.train_dataloader())) == 1
    resumed.end()
    more = changed(state, ("ranks", 0, "loader", "workers", i, "at", "emitted"), ended["emitted"] + 1)
    resumed = Run(path, num_workers=2, epochs=1, **FLUSHED, state=more)
    packs = ended["emitted"]
    with pytest.raises(
        StateError, match=rf"{packs + 1} packs of buffer {ended['buffer']} are said to be gone; it has {packs},"
    ):
        list(resumed.data.train_dataloader())
    resumed.end()


def hash_of(key: str, tokens: int) -> bytes:
    return hashlib.blake2b(f"{tokens} {key}".encode(), digest_size=8).digest()


def test_passing_over_comes_to_an_end(saved: dict[str, Saved]) -> None:
    """As many hashes as a position may hold, of sources that all come again and again."""
    one = saved["no workers"]
    whole = Run(one.path, num_workers=0)
    sources: dict[str, int] = {}
    for batch in whole.train(200):
        sources |= dict(zip(batch.source_keys, batch.cu_seqlens.diff().tolist(), strict=True))
    whole.end()
    hashes = [hash_of(*source) for source in sources.items()]
    position = one.loader["workers"][0]["at"]
    assert position["given"][:8] in hashes
    skip = b"".join((hashes * MOST_BUFFERS_PASSED_OVER)[: 16 * MOST_BUFFERS_PASSED_OVER])
    beginning = position | {"buffer": 3, "emitted": 0, "given": None, "digest": None, "skip": skip}
    state = changed(one.state, ("ranks", 0, "loader", "workers", 0, "at"), beginning)
    assert one.problem(state) is None
    loader = ExactLoader(one.data._stream.progress.loader.options, workers=one.data._spread.workers())
    loader.restore(state["ranks"][0]["loader"])
    began = time.perf_counter()
    for _ in zip(range(12), loader, strict=False):
        loader.trained()
        loader.commit()
    loader.stop()
    assert time.perf_counter() - began < 60
    after = loader.state()["workers"][0]["at"]
    assert after["buffer"] > 3
    assert len(after["skip"] or b"") < len(skip) / 2, "they were passed over"


# Several ranks.


def on_two_ranks(one: Saved) -> Any:
    """The state of two ranks with a worker each, of which one rank with two workers may go on."""
    settings = one.state["settings"] | {"data-parallel ranks": 2, "num_workers": 1}
    entry = one.state["ranks"][0]
    parts = [{"epoch": 0, "workers": [worker]} for worker in one.loader["workers"]]
    return one.state | {"settings": settings, "ranks": [entry | {"loader": part} for part in parts]}


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (("loader", "epoch"), 1, r"ranks\[1\]\.loader\.epoch: 1 is not a whole number"),
        (("loader", "workers", 0, "worker"), 1, r"ranks\[1\]\.loader\.workers\[0\]\.worker: worker 1 is there twice"),
        (("loader", "workers"), torch.zeros(1).expand(1 << 40), r"ranks\[1\]\.loader\.workers: it should hold a list of 1"),
        (("loader", "workers"), [1] * 1000, r"ranks\[1\]\.loader\.workers: it should hold a list of 1"),
        (("loader",), "epoch", r"ranks\[1\]\.loader: 'epoch' does not hold epoch, workers"),
        (("point",), [], r"ranks\[1\]\.point: a list does not hold batch, epoch, last, next, stepped, total_batches"),
        (("point", "batch"), -1, r"ranks\[1\]\.point: next='batch', epoch=0, batch=-1, .* is no place to go on from"),
        (("counts", "rows"), 0.5, r"ranks\[1\]\.counts\.rows: 0\.5 is not a whole number"),
    ],
)
def test_what_another_rank_saved_is_checked_too(saved: dict[str, Saved], at: Path_, new: Any, message: str) -> None:
    one = saved["two workers"]
    state = on_two_ranks(one)
    assert [part["loader"]["workers"][0]["worker"] for part in state["ranks"]] == [1, 0]
    assert one.problem(state) is None
    began = time.perf_counter()
    problem = one.problem(changed(state, ("ranks", 1, *at), new))
    assert time.perf_counter() - began < 20
    assert type(problem) is StateError
    with pytest.raises(StateError, match=message):
        raise problem


def test_ranks_are_in_the_same_pass() -> None:
    positions = [{"epoch": epoch, "workers": [{"worker": worker, "at": None}]} for worker, epoch in enumerate((1, 1, 2))]
    refuse_scattered(positions[:2], streams=2, epochs=3)
    with pytest.raises(StateError, match=r"ranks\[2\]\.loader\.epoch: 2 passes are done, and 1 on another rank"):
        refuse_scattered(positions, streams=3, epochs=3)


def test_a_place_in_the_training_loop_is_refused_at_once() -> None:
    assert ResumePoint.from_plain(POINT).to_plain() == POINT
    for name in POINT:
        for value in (shared(30), wrapped(100_000), 10**5000, -1, "x" * 10**6, itself(), None, torch.zeros(2), {"next": 1}):
            began = time.perf_counter()
            with pytest.raises(ValueError, match="is no place to go on from") as refusal:
                ResumePoint.from_plain(POINT | {name: value})
            assert time.perf_counter() - began < 20
            assert len(str(refusal.value)) < 500
    for other in (shared(30), itself(), None, {}, POINT | {"more": 1}, {**POINT, 5: 6}):
        with pytest.raises(ValueError, match=r"does not hold batch, epoch, last, next, stepped, total_batches"):
            ResumePoint.from_plain(other)


def wrapped(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def shared(levels: int) -> Any:
    value: Any = [0]
    for _ in range(levels):
        value = [value] * 10
    return value


def itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"__kind__": "ndarray", "dtype": "|O", "shape": [1], "data": bytes(8)}, "its kind 'ndarray' is not known"),
        ({"__kind__": "SliceState", "fields": {"index": 1}}, r"should hold \['current', 'index'\] and holds"),
        ({"__kind__": "SliceState", "fields": {"index": 1, "current": 1, "x": 1}}, r"should hold \['current', 'index'\]"),
        ({"__kind__": "SliceState", "fields": {"index": True, "current": 1}}, r"loader.index: True is not a whole number"),
        ({"__kind__": "SliceState"}, "should hold"),
        ({"__kind__": "Popen", "fields": {"args": "true"}}, "its kind 'Popen' is not known"),
        ({"__kind__": ["x"]}, "its kind a list is not known"),
        ({"__kind__": "dict", "items": [([], 1)]}, "a list cannot be a name in it"),
        ({"__kind__": "dict", "items": [("a", 1), ("a", 2)]}, "'a' cannot be a name in it, or is there twice"),
        ({"__kind__": "FlexState", "items": {"a": 1}}, "its items are no pairs"),
        ({"__kind__": "FlexState", "items": [("a", 1, 2)]}, "its items are no pairs"),
        ({1.5: 2}, "1.5 cannot be a name in it"),
        ({1, 2}, "a set has no place in it"),
        (np.zeros(3), "a ndarray has no place in it"),
        (10**5000, r"a number of \d+ bits is too large"),
        (float("nan"), "nan is not a number to go on with"),
        (torch.zeros(1, dtype=torch.uint8).expand(1 << 40), "has no place in it"),
        (torch.zeros(4), "has no place in it"),
        (torch.zeros(4, dtype=torch.uint8).to_sparse(), "has no place in it"),
        (wrapped(MOST_DEPTH + 1), f"nested more than {MOST_DEPTH} levels deep"),
        (wrapped(100_000), f"nested more than {MOST_DEPTH} levels deep"),
        (itself(), "the same part occurs in it twice"),
        (shared(30), "the same part occurs in it twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_a_state_is_refused_at_once(value: Any, message: str) -> None:
    began = time.perf_counter()
    with pytest.raises(StateError, match=message):
        from_plain(value)
    assert time.perf_counter() - began < 20


def test_depth_of_today_is_far_below_the_bound(saved: dict[str, Saved]) -> None:
    def depth(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    assert 40 < depth(saved["blend"].state) < MOST_DEPTH / 2
    from_plain(wrapped(MOST_DEPTH))


class Runs:
    """Unpickled, it makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


def test_a_checkpoint_that_would_run_code_is_refused_by_fit(tmp_path: Path, numbers: Path) -> None:
    run(Options(data=str(numbers), checkpoints=str(tmp_path), trainer={"max_steps": 2}))
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    checkpoint["EnergonPackDataModule"]["ranks"][0]["loader"] = Runs(str(tmp_path / "ran"))
    torch.save(checkpoint, tmp_path / "malicious.ckpt")
    torch.load(tmp_path / "malicious.ckpt", weights_only=False)
    assert (tmp_path / "ran").exists(), "the code must run where it is let"
    (tmp_path / "ran").rmdir()
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        run(Options(data=str(numbers), resume=str(tmp_path / "malicious.ckpt"), trainer={"max_steps": 4}))
    assert not (tmp_path / "ran").exists()


def test_a_damaged_position_is_refused_by_fit_and_a_good_one_is_not(numbers: Path, tmp_path: Path) -> None:
    options = {"data": str(numbers), "trainer": {"max_steps": 4}}
    run(Options(data=str(numbers), checkpoints=str(tmp_path), trainer={"max_steps": 2}))
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert len(run(Options(**options, resume=str(tmp_path / "last.ckpt"))).trained) == 2
    for at, new, message in (
        (
            ("ranks", 0, "loader", "epoch"),
            10**12,
            r"ranks\[0\]\.loader\.epoch: 1000000000000 is not a whole number from 0 to 0",
        ),
        (("ranks", 0, "loader"), [], r"ranks\[0\]\.loader: a list does not hold epoch, workers"),
        (("ranks", 0, "point", "next"), "eval", r"ranks\[0\]\.point: next='eval', epoch=0, .* is no place to go on from"),
        (("ranks", 0, "counts", "rows"), -1, r"ranks\[0\]\.counts\.rows: -1 is not a whole number"),
        (("ranks", 0, "counts"), {}, r"ranks\[0\]\.counts: it should hold left_out, real_tokens, rows, sources"),
        (("ranks", 0, "random", "cpu"), torch.zeros(9), r"ranks\[0\]\.random\.cpu: a tensor of torch\.float32"),
        (
            ("ranks", 0, "random", "cpu"),
            torch.zeros(9, dtype=torch.uint8),
            r"ranks\[0\]\.random\.cpu: a Tensor is no state of torch's",
        ),
        (
            ("ranks", 0, "random", "device"),
            torch.zeros(9, dtype=torch.uint8),
            r"ranks\[0\]\.random\.device: this is no state of a device",
        ),
        (("ranks", 0, "random"), 5, r"ranks\[0\]\.random: it should hold cpu and device"),
        (("ranks", 0), None, r"ranks\[0\]: it should hold counts, loader, point, random"),
        (("ranks",), [], r"ranks: it should hold a list of 1"),
        (("settings",), [], r"its outermost part: it should hold version, settings and ranks"),
        (("settings", "num_workers"), "2", r"settings\.num_workers: '2' is not a whole number from 0 to 1000"),
        (("settings", "seed"), torch.zeros(3, dtype=torch.uint8), r"settings: the setting seed is a Tensor"),
        (("settings", "data.files"), itself(), r"settings\.data\.files.*: the same part occurs in it twice"),
    ):
        bad = tmp_path / "bad.ckpt"
        torch.save(changed(checkpoint, ("EnergonPackDataModule", *at), new), bad)
        with pytest.raises(StateError, match=f"the checkpoint's data position is damaged: {message}"):
            run(Options(**options, resume=str(bad)))


def test_refusals_need_no_lightning() -> None:
    code = "import sys, lightning_pack.energon.validity; assert not any(m.startswith('lightning.') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_restored_state_gives_the_same_batches(saved: dict[str, Saved], monkeypatch: pytest.MonkeyPatch) -> None:
    one = saved["blend"]
    whole = Run(one.path, num_workers=one.workers, **one.options)
    expected = whole.train(one.rows + 5)
    whole.end()
    assert same_batch(one.last, expected[one.rows - 1])
    resumed = Run(one.path, num_workers=one.workers, **one.options, state=one.state)
    assert all(map(same_batch, resumed.train(5), expected[one.rows :]))
    resumed.end()
