"""A position from a stranger: decoded to what it was, or refused in words and at once, whatever it is made of."""

from __future__ import annotations

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
from lightning_pack.energon.state import MOST_DEPTH, MOST_REPLAYED, StateError, from_plain, to_plain
from lightning_pack.restore import problem_of
from lightning_pack.resume import ResumeError
from tests.conftest import faulty_records
from tests.numbers_data import lengths, records_of, same_batch, write_webdataset
from tests.test_exact_position import PlainNumbers, Run, comparable, through_a_file
from tests.training import Options, run

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")

#: Name of the case -> options of the run, and number of workers.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "no workers": ({}, 0),
    "two workers": ({}, 2),
    "blend": ({}, 2),
    "split": ({"overlength": "split", "capacity": 20}, 0),
}


class Saved:
    """A datamodule that has trained a little, and the state it saved."""

    def __init__(self, path: Path, options: dict[str, Any], workers: int) -> None:
        self.path, self.options, self.workers = path, options, workers
        trained = Run(path, num_workers=workers, **options)
        trained.train(7)
        self.data: EnergonPackDataModule = trained.data
        self.state: Any = through_a_file(trained.end())

    def problem(self, state: Any) -> ValueError | None:
        progress = self.data._progress
        assert progress is not None
        return problem_of(
            state, settings=self.data._fingerprint, rank=0, counts=progress.counts, open_loader=self.data._open_stream
        )

    def loader_state(self) -> Any:
        """The part that is Energon's."""
        loader = self.state["ranks"][0]["loader"]
        return loader if self.workers else loader["snapshot"]


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
        # A snapshot with every batch: the states are full ones, not the beginning and a number of batches.
        patch.setattr("lightning_pack.energon.reader.SNAPSHOT_SECONDS", 0.0)
        patch.setattr("tests.test_exact_position.NumberEncoder", PlainNumbers)
        yield {name: Saved(blend if name == "blend" else plain, options, workers) for name, (options, workers) in CASES.items()}


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
    plain = saved[case].loader_state()
    state = from_plain(plain)
    assert len([p for p in paths(plain) if p and named(plain, p) == "_restore_keys"]) >= 3 * max(saved[case].workers, 1)
    assert comparable(to_plain(state)) == comparable(plain)
    assert saved[case].problem(saved[case].state) is None
    # Decoded afresh each time: Energon changes what it is given.
    assert from_plain(plain).worker_states is not state.worker_states


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.sampled_from([10**12, 2**63, 10**2000, -(10**30)]),
    st.floats(),
    st.sampled_from(["", "x", "MapDataset", "Webdataset", "__kind__", "os.system", "ndarray"]),
    st.binary(max_size=20),
    st.sampled_from([bytes(5056), b"\xff" * 5056]),
    st.sampled_from([torch.zeros(3), torch.zeros(5056, dtype=torch.uint8), torch.zeros(1).expand(1 << 40)]),
)
KINDS = ("ndarray", "FlexState", "dict", "SliceState", "SystemRngState", "SavableDatasetState", "eval")
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.sampled_from(["items", "fields", "data", "index", "offset", "rng"]), inner, max_size=3),
        st.builds(
            lambda kind, more: {"__kind__": kind, **more}, st.sampled_from(KINDS), st.fixed_dictionaries({"items": inner})
        ),
        st.builds(
            lambda dtype, shape, data: {"__kind__": "ndarray", "dtype": dtype, "shape": shape, "data": data},
            st.sampled_from(["O", "<u4", "<f8", "V8", "|S5", 7]),
            st.lists(st.integers(-2, 10**12), max_size=3),
            st.binary(max_size=32),
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
        ways: list[Any] = [VALUES]
        if type(old) is int:
            ways.append(st.integers(-1, 1).map(lambda by, old=old: old + by))
        if type(old) in (list, tuple) and old:
            ways += [st.just(old[:-1]), st.just(old[::-1]), st.just(old + old[-1:])]
        if type(old) is dict and old:
            lost = draw(st.sampled_from(sorted(old, key=str)))
            ways += [st.just({key: item for key, item in old.items() if key != lost}), st.just({**old, "more": 1})]
        if type(old) is bytes and old:
            ways.append(st.integers(0, len(old) - 1).map(lambda i, old=old: old[:i] + bytes([old[i] ^ 0x80]) + old[i + 1 :]))
        state = changed(state, at, draw(st.one_of(ways)))
    return state


@pytest.mark.parametrize("case", CASES)
def test_a_tampered_state_is_refused_or_is_a_valid_one(saved: dict[str, Saved], case: str) -> None:
    one, verdicts = saved[case], Counter[str]()

    @settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(state=tampered(one.state))
    def check(state: Any) -> None:
        began = time.perf_counter()
        problem = one.problem(state)
        assert time.perf_counter() - began < 5
        verdicts["accepted" if problem is None else type(problem).__name__] += 1
        if problem is not None:
            assert type(problem) in (StateError, ResumeError)
            assert len(str(problem)) < 20_000
            assert str(pickle.loads(pickle.dumps(problem))) == str(problem), "it must cross from rank to rank"
            return
        loader = state["ranks"][0]["loader"]
        plain = loader if one.workers or loader is None else loader["snapshot"]
        assert comparable(to_plain(from_plain(plain))) == comparable(plain)

    check()
    assert verdicts["StateError"] > 20
    assert verdicts["accepted"] > 0


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


@pytest.mark.slow
@pytest.mark.parametrize("case", ["no workers", "two workers"])
def test_what_is_accepted_reads_on_or_says_why_not(saved: dict[str, Saved], case: str) -> None:
    """Values of the right type and range may still be wrong, but neither hang nor crash the reader."""
    one = saved[case]
    generator = np.random.default_rng(0)
    places = [p for p in paths(one.state) if p[:1] == ("ranks",) and "counts" not in p and type(there(one.state, p)) is int]
    ran = refused = 0
    for i in generator.permutation(len(places))[: 12 if one.workers else 60]:
        new = there(one.state, places[i]) + int(generator.integers(1, 4))
        state = changed(one.state, places[i], new)
        if one.problem(state) is not None:
            refused += 1
            continue
        resumed = Run(one.path, num_workers=one.workers, state=state)
        began = time.perf_counter()
        try:
            resumed.train(4)
        except ValueError as e:
            # The packs of a buffer with another sample in it may not fit any more.
            assert "damaged" in str(e) or "more than capacity" in str(e)  # noqa: PT017
        resumed.data.teardown("fit")
        assert time.perf_counter() - began < 30
        ran += 1
    assert ran > 3
    assert refused > 0 or one.workers


READER = ("fields", "worker_states", "WebdatasetSampleLoaderDataset")
IMPOSSIBLE: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "replays for ever": (("offset",), 10**12, r"offset: 1000000000000 is not a whole number from 0 to 100000"),
    "next worker": (("next_worker_id",), 2, r"it has 2 workers, of which number 2 comes next; this run has 2"),
    "negative": (("sample_index",), -1, r"workers\[0\]\.state\.sample_index: -1 is not a whole number"),
    "a pending slice": (
        ("_pending_slice_indexes",),
        [7, 10**6],
        r"workers\[0\]\.WebdatasetSampleLoaderDataset\._pending_slice_indexes\[1\]: slice 1000000 is beyond the data",
    ),
    "slices read": (
        ("_pending_slices_offset",),
        400,
        r"_pending_slices_offset: 400 slices read and \d+ to be read are not \d+",
    ),
    "an open slice": (
        ("_active_slice_state", "index"),
        4000,
        r"_active_slice_state\[0\]: slice 4000 is beyond the data, which has \d+",
    ),
    "a sample": (("_active_slice_state", "current"), 199, r"_active_slice_state\[0\]: sample 199 is not in its slice, \d+ to"),
    "open slices": (("_active_slice_state",), [], r"_active_slice_state: 0 slices are open; 16 must be"),
    "lengths of packs": (("_pre_packing_lengths",), [1], r"_pre_packing_lengths: packs of 1 sources, and \d+ sources to make"),
    "an empty pack": (("_pre_packing_lengths",), [0], r"_pre_packing_lengths\[0\]: 0 is not a whole number from 1 to"),
    "no key": (("_active_buffer", "_restore_keys"), [()], r"_restore_keys\[0\]: a tuple is not the key of a sample"),
    "a key beyond the data": (
        ("_active_buffer", "_restore_keys"),
        [("MapDataset", 0, "MapDataset", 0, "Webdataset", 500)],
        r"ShuffleBufferDataset\._active_buffer\._restore_keys\[0\]: there is no sample MapDataset/0/.*/500 in the data of this",
    ),
    "a key of other data": (("_active_buffer", "_restore_keys"), [("BlendDataset", 1)], r"BlendDataset/1 is not the key of a"),
    "a buffer too full": (
        ("_active_buffer", "_restore_keys"),
        [("MapDataset", i, "MapDataset", i, "Webdataset", 0) for i in range(9)],
        r"ShuffleBufferDataset: 9 samples are in a buffer of 8",
    ),
    "half a sample": (("_generator_offset",), 3, r"_generator_sample_key: no sample can be half done here"),
    "random numbers": (("_worker_rng",), {"__kind__": "FlexState", "items": [("rng", bytes(5056))]}, r"no state of torch's"),
    "fewer random numbers": (("_worker_rng",), {"__kind__": "FlexState", "items": [("rng", b"1")]}, r"no state of torch's"),
    "batch size": (("micro_batch_size",), 4, r"its batches are of 4, those of this run of 1"),
    "no dataset": (("dataset_state",), {"__kind__": "FlexState", "items": []}, r"the state of a None stands where .*GcDataset"),
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


SYSTEM = {"numpy": 1, "random": 2}


@pytest.mark.parametrize(
    ("part", "new"),
    [
        # numpy would read beyond its array.
        ("numpy", lambda old: (*old[:2], 10**6, *old[3:])),
        ("numpy", lambda old: (old[0], old[1] | {"data": old[1]["data"][:-4], "shape": [623]}, *old[2:])),
        ("numpy", lambda old: ("PCG64", *old[1:])),
        ("random", lambda old: (old[0], (*old[1][:-1], 10**6), old[2])),
        ("random", lambda old: (old[0], old[1][:-2], old[2])),
        ("random", lambda old: (torch.zeros(3, dtype=torch.uint8), *old[1:])),
        ("torch", lambda old: old[:-1].clone()),
        ("torch", lambda old: None),
    ],
)
def test_states_of_random_numbers_are_checked(saved: dict[str, Saved], part: str, new: Callable[[Any], Any]) -> None:
    one = saved["two workers"]
    at = (*find(one.state, "loader", "state", "fields", "rng"), "fields", part)
    problem = one.problem(changed(one.state, at, new(there(one.state, at))))
    assert f"ranks[0].loader.workers[0].state.rng.{part}: " in str(problem)
    assert "random numbers" in str(problem)


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


def array(dtype: Any, shape: Any, data: Any) -> dict[str, Any]:
    return {"__kind__": "ndarray", "dtype": dtype, "shape": shape, "data": data}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (array("|O", [1], bytes(8)), r"arrays of type '\|O' have no place in it"),
        (array("<u4", [-1], bytes(8)), "the shape of an array is no list of whole numbers"),
        (array("<u4", [10**12], b""), "the shape of an array is no list"),
        (array("<f8", [1 << 20, 1 << 20], b""), "does not consist of"),
        (array("<f8", [3], bytes(23)), "does not consist of"),
        (array("<f8", [3], "x" * 24), "does not consist of"),
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
    assert time.perf_counter() - began < 1


def test_depth_of_today_is_far_below_the_bound(saved: dict[str, Saved]) -> None:
    def depth(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    assert 40 < depth(saved["blend"].state) < MOST_DEPTH / 2
    from_plain(wrapped(MOST_DEPTH))
    assert MOST_REPLAYED < 10**6


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_encoded_again_as_it_was_is_named_by_the_reader(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_pack.energon.reader.SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr("tests.test_exact_position.NumberEncoder", PlainNumbers)
    path = write_webdataset(tmp_path / "d", {"train": records_of([50] * 30)})
    one = Saved(path, {"overlength": "split", "capacity": 20}, workers)
    at = find(one.state, "loader", "_pre_packing_buffer", "_restore_keys")
    key = there(one.state, (*at, 0))
    assert key[0] == "MapDataset"
    assert key[2] < 3, "the piece of the sample"
    state = changed(one.state, (*at, 0, 2), 9)
    assert one.problem(state) is None, "only encoding it shows that there is no tenth piece"
    resumed = Run(path, num_workers=workers, state=state, **one.options)
    with pytest.raises(StateError, match=r"damaged: loader: the samples that it names cannot be read again \(.*did not yield"):
        resumed.train(3)
    resumed.data.teardown("fit")


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
        (("ranks", 0, "loader", "offset"), 10**12, r"ranks\[0\]\.loader\.offset: 1000000000000 is no number of batches"),
        (("ranks", 0, "loader"), [], r"ranks\[0\]\.loader: a list is no position of a loader without workers"),
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
        (("ranks", 0), None, r"ranks\[0\]: it should hold counts, loader, random"),
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
    whole = Run(one.path, num_workers=one.workers)
    expected = whole.train(12)
    whole.end()
    resumed = Run(one.path, num_workers=one.workers, state=one.state)
    assert all(map(same_batch, resumed.train(5), expected[7:]))
    resumed.end()
