"""Data in an object store: the same batches as from a disk, through outages and kills; an error where one lasts too long."""

from __future__ import annotations

import functools
import io
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron.energon.epathlib import EPath

from lightning_pack import EnergonPackDataModule
from lightning_pack.energon import data_fingerprint, has_split, storage
from lightning_pack.energon.fingerprint import changed_files
from lightning_pack.energon.outage import StorageError, StorageRetry, is_outage
from lightning_pack.location import location
from lightning_pack.prepare import prepare_jsonl, prepared, train_tokenizer
from lightning_pack.row import PackedBatch
from tests import training
from tests.numbers_data import lengths, records_of, same_batch, write_webdataset
from tests.object_store import Proxy, Server, forget_clients, write_configuration
from tests.test_exact_position import Run as AnyRun
from tests.test_exact_position import through_a_file

pytestmark = [
    # Left open by the multi-storage client and botocore where the other end goes away.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
]
#: Patience for tests: a silent store is noticed soon, and a busy machine is borne.
#: Without a dry run, which would read from the store too.
Run = functools.partial(AnyRun, algorithm="exact_fill")
PATIENT = StorageRetry(outage_seconds=40, request_seconds=1.5)
HASTY = StorageRetry(outage_seconds=1)


class Store:
    """The server, the proxy before it, and the same data on a disk, in the store and behind the proxy."""

    def __init__(self, folder: Path) -> None:
        parts = {"train": records_of(lengths(400, most=60)), "val": records_of(lengths(40, most=40, seed=1))}
        # More shards than Energon keeps open, so that requests go on while training does.
        self.disk = write_webdataset(folder / "numbers", parts, shards=40)
        self.data = "msc://flaky/data/numbers"
        self.server = Server(folder)
        self.proxy = Proxy(self.server.port)
        ports = {"store": self.server.port, "flaky": self.proxy.port, "quick": self.proxy.port}
        self.configuration = write_configuration(folder / "msc.yaml", ports, timeouts={"quick": 1})

    def fill(self) -> None:
        for file in self.disk.rglob("*"):
            if file.is_file():
                EPath(file).copy(EPath(f"msc://store/data/numbers/{file.relative_to(self.disk)}"))

    def away(self, mode: str, seconds: float) -> threading.Thread:
        """Be away, and come back so long after somebody has missed it."""
        before = self.proxy.seen[mode]

        def come_back() -> None:
            while self.proxy.seen[mode] == before:
                time.sleep(0.01)
            time.sleep(seconds)
            self.proxy.set_mode("pass")

        self.proxy.set_mode(mode)
        back = threading.Thread(target=come_back, daemon=True)
        back.start()
        return back


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    pytest.importorskip("moto")
    store = Store(tmp_path_factory.mktemp("store"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MSC_CONFIG", str(store.configuration))
            store.fill()
            yield store
    finally:
        storage.set_retry(StorageRetry())
        store.proxy.close()
        store.server.close()
        forget_clients()


@pytest.fixture
def store(started: Store) -> Iterator[Store]:
    started.proxy.set_mode("pass")
    storage.set_retry(PATIENT)
    yield started
    started.proxy.set_mode("pass")


@pytest.fixture(scope="module")
def on_disk(started: Store) -> dict[int, list[PackedBatch]]:
    given = {}
    for workers in (0, 2):
        run = Run(started.disk, num_workers=workers)
        given[workers] = run.train(90)
        run.end()
    return given


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Callable[[StorageRetry], None]:
    """Runs have the patience that is asked for."""

    def have(retry: StorageRetry) -> None:
        made = EnergonPackDataModule

        def make(*args: Any, **options: Any) -> EnergonPackDataModule:
            return made(*args, **options, storage_retry=retry)

        monkeypatch.setattr("tests.test_exact_position.EnergonPackDataModule", make)

    have(PATIENT)
    return have


def train_for_ever(run: AnyRun, given: list[PackedBatch]) -> None:
    while True:
        given += run.train(1)


def assert_same_data(store: Store) -> None:
    there, here = data_fingerprint(store.data), data_fingerprint(str(store.disk))
    # Of a local file more is read.
    assert changed_files(there.pop("files"), here.pop("files")) == []
    assert there == here


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_state_and_fingerprint_are_those_of_the_same_data_on_a_disk(
    store: Store, on_disk: dict[int, list[PackedBatch]], workers: int, patient: Any
) -> None:
    before = store.proxy.seen["GET"]
    run = Run(store.data, num_workers=workers)
    given = run.train(30)
    assert store.proxy.seen["GET"] > before + 40, "shards are read while training goes on"
    state = through_a_file(run.end())
    # A position in the store is one on the disk, and back.
    moved = Run(store.disk, num_workers=workers, state=state)
    given += moved.train(10)
    back = Run(store.data, num_workers=workers, state=through_a_file(moved.end()))
    given += back.train(10)
    back.end()
    assert all(map(same_batch, given, on_disk[workers]))
    assert len(given) == 50
    assert_same_data(store)
    assert (has_split(store.data, "val"), has_split(store.data, "test")) == (True, False)


@pytest.mark.parametrize(
    ("workers", "mode"),
    [
        (0, "refused"),
        (0, "cut"),
        (2, "unavailable"),
        pytest.param(2, "silent", marks=pytest.mark.slow),
        pytest.param(2, "broken", marks=pytest.mark.slow),
    ],
)
def test_an_outage_while_reading_changes_no_batch(
    store: Store,
    on_disk: dict[int, list[PackedBatch]],
    workers: int,
    mode: str,
    patient: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(store.data, num_workers=workers)
    given = run.train(20)
    before = store.proxy.seen[mode]
    missed = threading.Event()

    def come_back() -> None:
        # Nobody counts connections that are refused, but whoever is refused says so.
        while store.proxy.seen[mode] == before and "trying again" not in caplog.text:
            time.sleep(0.01)
        missed.set()
        time.sleep(1.5)
        store.proxy.set_mode("pass")

    store.proxy.set_mode(mode)
    back = threading.Thread(target=come_back)
    back.start()
    while not missed.is_set() and len(given) < 80:
        given += run.train(1)
    assert missed.wait(10), "reading went on without the store"
    back.join()
    given += run.train(10)
    run.end()
    if workers == 0:
        assert "trying again for" in caplog.text
        assert "msc://flaky/data/numbers/train-" in caplog.text
    assert all(map(same_batch, given, on_disk[workers]))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_outage_that_lasts_ends_the_run_in_bounded_time_and_it_resumes(
    store: Store, on_disk: dict[int, list[PackedBatch]], workers: int, patient: Callable[[StorageRetry], None]
) -> None:
    patient(HASTY)
    run = Run(store.data, num_workers=workers)
    given = run.train(10)
    state = through_a_file(run.data.state_dict())
    store.proxy.set_mode("unavailable")
    began = time.monotonic()
    after: list[PackedBatch] = []
    with pytest.raises(
        StorageError,
        match=r"msc://flaky/data/numbers/train-\d+\.tar(\.idx)? failed \d+ times within \d+ s \(outage_seconds=1\): .*503"
        r"(.|\n)*Nothing was skipped: (.|\n)*resume from the last checkpoint(.|\n)*raise outage_seconds",
    ):
        train_for_ever(run, after)
    assert time.monotonic() - began < 60
    assert len(after) < 80
    if workers == 0:
        # Nothing was lost with a worker, so even now the position can be saved.
        later = through_a_file(run.data.state_dict())
    run.data.teardown("fit")
    store.proxy.set_mode("pass")
    patient(PATIENT)
    resumed = Run(store.data, num_workers=workers, state=state)
    given += resumed.train(15)
    resumed.end()
    assert all(map(same_batch, given, on_disk[workers]))
    if workers == 0:
        resumed = Run(store.data, num_workers=workers, state=later)
        expected = on_disk[0][10 + len(after) : 20 + len(after)]
        assert all(map(same_batch, resumed.train(10), expected))


def test_outages_at_opening_and_at_the_fingerprint_are_waited_for(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    back = store.away("unavailable", 1.0)
    assert_same_data(store)
    back.join()
    assert "trying again for" in caplog.text
    storage.set_retry(HASTY)
    store.proxy.set_mode("unavailable")
    for ask in (
        lambda: has_split(store.data, "val"),
        lambda: has_split(store.data, "test"),
        lambda: data_fingerprint(store.data),
    ):
        with pytest.raises(StorageError, match=r"is_file of msc://flaky/data/numbers.* failed \d times"):
            ask()


def test_what_will_not_get_better_is_told_at_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"'msc://store/data/nothing' cannot be opened.*lightning-pack prepare"):
        has_split("msc://store/data/nothing", "train")
    with pytest.raises(ValueError, match="absent"):
        has_split("msc://absent/data/numbers", "train")
    with pytest.raises(ValueError, match=r"'s3://data/numbers' cannot be opened: name an object store as msc://PROFILE"):
        EnergonPackDataModule("s3://data/numbers")
    store.proxy.set_mode("denied")
    with pytest.raises(ValueError, match="PermissionError: Permission denied"):
        has_split(store.data, "train")
    with pytest.raises(ValueError, match="there is nothing at msc://store/data/nothing"):
        storage.local_folder("msc://store/data/nothing")
    assert "trying again" not in caplog.text


def _client_of(path: EPath, answers: Any) -> None:
    answers.put((id(path.fs), id(path.fs.client), path.fs._process, path.read_bytes()[:20]))


def test_forked_processes_have_clients_of_their_own(store: Store) -> None:
    path = EPath(f"{store.data}/.nv-meta/split.yaml")
    content = path.read_bytes()[:20]
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    processes = [context.Process(target=_client_of, args=(path, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    assert {store_id for store_id, *_ in found} == {id(path.fs)}
    assert {pid for _, _, pid, _ in found} == {process.pid for process in processes}
    assert all(client != id(path.fs.client) for _, client, *_ in found)
    assert [read for *_, read in found] == [content] * 2


def test_large_objects_are_read_by_ranges(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "WHOLE", 4000)
    monkeypatch.setattr(storage, "FIRST_RANGE", 100)
    content = random.Random(0).randbytes(100_000)
    (tmp_path / "object").write_bytes(content)
    path = EPath("msc://flaky/data/object")
    EPath(tmp_path / "object").copy(path)
    before = store.proxy.seen["GET"]
    with path.open("rb") as file:
        assert file.read(10) + file.read(20_000) == content[:20_010]
        assert store.proxy.seen["GET"] == before + 2, "two requests, neither for the whole object"
        choose, expected = random.Random(1), io.BytesIO(content)
        file.seek(0)
        for _ in range(60):
            if choose.random() < 0.3:
                at = choose.randrange(110_000)
                assert file.seek(at) == expected.seek(at)
            size = choose.choice([0, 1, 50, 512, 3000])
            assert file.read(size) == expected.read(size)
            # A file that is sought behind its end reads nothing there.
            assert file.tell() == expected.tell()
        buffer = bytearray(64)
        file.seek(-32, io.SEEK_END)
        assert file.readinto(buffer) == 32
        assert bytes(buffer[:32]) == content[-32:]
        assert file.read() == b""
    assert path.read_bytes() == content


@pytest.fixture
def chats(tmp_path: Path) -> tuple[Path, Path]:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"text": f"some words, number {i} of many"}) + "\n" for i in range(200)))
    train_tokenizer(["some words, number of many"], vocab_size=280).save_pretrained(str(tmp_path / "tokenizer"))
    return file, tmp_path / "tokenizer"


def objects(url: str) -> set[str]:
    return {file.relative_to(EPath(url)) for file in EPath(url).walk()}


def test_prepared_in_a_store_it_is_what_is_prepared_on_a_disk(
    store: Store, chats: tuple[Path, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    file, tokenizer = chats
    url = f"msc://store/data/{request.node.name}"
    local = prepare_jsonl(file, tmp_path / "local", tokenizer=tokenizer, progress=False)
    made = prepare_jsonl(file, Path(url), tokenizer=tokenizer, progress=False)
    assert (made.fresh, made.path, made.train) == (True, url, local.train)
    names = {str(path.relative_to(tmp_path / "local")) for path in (tmp_path / "local").rglob("*") if path.is_file()}
    assert objects(url) == names
    for name in names - {".nv-meta/index.sqlite"}:
        assert (EPath(url) / name).read_bytes() == (tmp_path / "local" / name).read_bytes(), name
    assert prepared(url) == prepare_jsonl(file, url, tokenizer=tokenizer, progress=False)
    with pytest.raises(ValueError, match="prepared with other settings:\n  shards: 8 there, 2 asked for"):
        prepare_jsonl(file, url, tokenizer=tokenizer, shards=2, progress=False)
    assert objects(url) == names
    # The tokenizer is read from the store too.
    again = prepare_jsonl(file, url, tokenizer=f"{url}/tokenizer", shards=2, overwrite=True, progress=False)
    assert again.fresh
    assert "train-0007.tar" not in objects(url) | set(again.shards)
    data = EnergonPackDataModule(url)
    assert data.tokenizer("some words").input_ids == EnergonPackDataModule(tmp_path / "local").tokenizer("some words").input_ids
    (tmp_path / "thesis.tex").write_text("years of work")
    EPath(tmp_path / "thesis.tex").copy(EPath(f"{url}-other/thesis.tex"))
    with pytest.raises(ValueError, match=r"is not empty and was not prepared by lightning-pack.*even with --overwrite"):
        prepare_jsonl(file, f"{url}-other", tokenizer=tokenizer, overwrite=True, progress=False)


def test_killed_while_uploading_it_never_looks_finished(
    store: Store, chats: tuple[Path, Path], request: pytest.FixtureRequest
) -> None:
    file, tokenizer = chats
    url = f"msc://flaky/data/{request.node.name}"
    prepare_jsonl(file, url, tokenizer=tokenizer, shards=20, progress=False)
    store.proxy.uploads = 8
    command = [sys.executable, "-m", "lightning_pack", "prepare", str(file), url, "--tokenizer", str(tokenizer), "--overwrite"]
    process = subprocess.Popen(command)
    try:
        while store.proxy.uploads:
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    finally:
        store.proxy.uploads = None
    there = objects(url)
    assert "lightning_pack.unfinished.json" in there
    assert "lightning_pack.json" not in there
    assert prepared(url) is None
    with pytest.raises(ValueError, match="cannot be opened as an Energon dataset"):
        has_split(url, "train")
    # Another machine's would have to be overwritten; this one's process is known to be dead.
    made = prepare_jsonl(file, url, tokenizer=tokenizer, progress=False)
    assert made.fresh
    assert objects(url) >= {"lightning_pack.json", *made.shards}
    assert "lightning_pack.unfinished.json" not in objects(url)
    assert not any("train-0015" in name for name in objects(url))


def test_an_upload_of_another_machine_is_left_alone(
    store: Store, chats: tuple[Path, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    file, tokenizer = chats
    url = f"msc://store/data/{request.node.name}"
    (tmp_path / "mark").write_text(json.dumps({"format": 1, "host": "elsewhere", "pid": 17}))
    EPath(tmp_path / "mark").copy(EPath(f"{url}/lightning_pack.unfinished.json"))
    with pytest.raises(ValueError, match=r"process 17 on elsewhere is preparing .*or start again with --overwrite"):
        prepare_jsonl(file, url, tokenizer=tokenizer, progress=False)
    assert prepare_jsonl(file, url, tokenizer=tokenizer, overwrite=True, progress=False).fresh
    assert "lightning_pack.unfinished.json" not in objects(url)


def start(options: training.Options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.training", json.dumps(vars(options))]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)


def wait_for_steps(process: subprocess.Popen[str], record: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while not Path(f"{record}.0").exists() or len(training.read_record(record)) < steps:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"no {steps} steps: {process.communicate()[1]}")
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2])
def test_a_killed_run_resumes_while_the_server_is_coming_back(store: Store, tmp_path: Path, workers: int) -> None:
    steps = {"max_steps": 40}
    expected = training.run(training.Options(data=str(store.disk), workers=workers, trainer=steps)).trained
    record, checkpoints = tmp_path / "record", str(tmp_path / "checkpoints")
    options = training.Options(
        data="msc://quick/data/numbers",
        checkpoints=checkpoints,
        record=str(record),
        workers=workers,
        # Until what is done to it is done.
        stands_after=8,
        trainer=steps,
    )
    process = start(options)
    wait_for_steps(process, record, 8)
    process.kill()
    process.communicate()
    killed_at = len(training.read_record(record))
    assert killed_at == 8
    # The server itself stands still while the run starts again.
    os.kill(store.server.process.pid, signal.SIGSTOP)
    goes_on = threading.Event()
    try:
        process = start(training.Options(**vars(options) | {"resume": f"{checkpoints}/last.ckpt", "stands_after": 4}))
        assert process.stderr is not None
        said: list[str] = []

        def listen() -> None:
            for line in process.stderr or ():
                said.append(line)
                if "trying again" in line:
                    goes_on.set()

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        assert goes_on.wait(120), said
    finally:
        os.kill(store.server.process.pid, signal.SIGCONT)
    wait_for_steps(process, record, killed_at + 3)
    # And it goes away once more, until the run misses it.
    goes_on.clear()
    store.proxy.set_mode("refused")
    Path(f"{record}.go").touch()
    assert goes_on.wait(120), "the run has read all it needs before"
    store.proxy.set_mode("pass")
    assert process.wait(timeout=120) == 0, said
    listener.join()
    trained = training.read_record(record)
    assert {batch: set(digests) for batch, digests in trained.items()} == {batch: {d} for batch, d in expected.items()}
    assert len(trained) == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outage_seconds": -1}, "outage_seconds=-1"),
        ({"request_seconds": 0}, "request_seconds=0"),
        ({"outage_seconds": True}, "True"),
    ],
)
def test_impossible_patience_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StorageRetry(**options)


def test_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"base_path": "", "read_timeout": 77}
    config = {"profiles": {"p": {"storage_provider": {"type": "s3", "options": options}}}}
    storage.set_retry(StorageRetry(request_seconds=7))
    made = storage.bounded(config, "p")["profiles"]["p"]
    storage.set_retry(StorageRetry())
    assert made["storage_provider"]["options"] | {"retries": 0} == options | {"connect_timeout": 7, "retries": 0}
    assert made["retry"]["attempts"] == 1
    assert config == {"profiles": {"p": {"storage_provider": {"type": "s3", "options": {"base_path": "", "read_timeout": 77}}}}}
    mine = {"profiles": {"p": {"retry": {"attempts": 5}, "storage_provider": {"type": "gcs", "options": {"base_path": ""}}}}}
    assert storage.bounded(mine, "p") == mine


class _Answer(Exception):  # noqa: N818 - stands for the errors of other stores' libraries
    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


@pytest.mark.parametrize(
    ("cause", "outage"),
    [(_Answer(500), True), (_Answer(429), True), (_Answer(401), False), (KeyError("x"), False), (None, False)],
)
def test_outages_of_other_stores(cause: Exception | None, outage: bool) -> None:
    error = RuntimeError("Failed to GET")
    error.__cause__ = cause
    assert is_outage(error) is outage
    assert not is_outage(OSError(28, "no space left on device"))
    assert is_outage(ConnectionResetError())


def test_a_path_object_keeps_its_profile() -> None:
    assert location(Path("msc://store/data")) == "msc://store/data"
    assert EnergonPackDataModule(Path("msc://store/data")).path == "msc://store/data"
