"""Rows written ahead: every source exactly once, as online; runs that are ended go on; damage is found and named."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_pack import EnergonPackDataModule, PackingPolicy, lower_bound
from lightning_pack.cli import main
from lightning_pack.metrics import PackingMetrics
from lightning_pack.offline import Manifest, VerificationError, prepack, row_writer, verify, workplace
from lightning_pack.offline.row_file import Row
from lightning_pack.offline.shard_file import ShardFile, samples_of
from tests.numbers_data import NumberEncoder, lengths, records_of, write_webdataset
from tests.packed_rows import CAPACITY, flip, kill_when, pack_rows, records, rewrite, sources_of, stand_still
from tests.prepared_files import read_back

COUNT = 2000
#: Of the data that is written many times: three parts of the encoding.
FEW = 600


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = {"train": records(COUNT), "val": records_of(lengths(60, most=40, seed=1))}
    return write_webdataset(tmp_path_factory.mktemp("data") / "numbers", parts)


@pytest.fixture(scope="module")
def rows(data: Path) -> Path:
    return pack_rows(data, data.parent / "rows", workers=2).path


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = {"train": records(FEW), "val": records_of(lengths(30, most=40, seed=1))}
    return write_webdataset(tmp_path_factory.mktemp("few") / "numbers", parts)


@pytest.fixture(scope="module")
def few_rows(few: Path) -> Path:
    return pack_rows(few, few.parent / "rows").path


@pytest.fixture
def copied(few_rows: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(few_rows, tmp_path / "rows"))


def files(folder: Path) -> dict[str, bytes]:
    """What is the same whenever the same rows are written; Energon's index holds the time."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_every_source_is_there_once_as_it_is_online(data: Path, rows: Path) -> None:
    online = EnergonPackDataModule(
        data, encoder=NumberEncoder(), packing=PackingPolicy(CAPACITY, multiple=4), epochs=1, num_workers=0
    )
    replayed = EnergonPackDataModule(rows, epochs=1, num_workers=0)
    batches = {}
    for name, each in (("online", online), ("replayed", replayed)):
        each.setup("fit")
        batches[name] = list(each.train_dataloader())
    there = sources_of(batches["online"])
    assert len({key for key, _ in there}) == len(there) > COUNT - 120
    assert sorted(sources_of(batches["replayed"])) == sorted(there)
    # What was left out is told by the manifest, once, and not again in every pass.
    gone = Counter(each.reason for batch in batches["online"] for each in batch.left_out)
    assert set(gone) == {"overlength", "corrupt", "no_targets"}
    found = Manifest.read(rows)
    assert found is not None
    train = found.splits["train"]
    assert {reason: each.sources for reason, each in train.left_out.items()} == gone
    assert len(there) + gone.total() == COUNT
    assert not any(batch.left_out for batch in batches["replayed"])
    # Sources of the group share rows with each other only.
    grouped = {f"train{i:06d}" for i in range(100, 160)}
    mixed = [len(grouped & set(batch.source_keys)) for batch in batches["replayed"]]
    assert any(mixed)
    assert all(n in (0, len(batch.source_keys)) for n, batch in zip(mixed, batches["replayed"], strict=True))


def test_the_manifest_says_how_full_rows_are(rows: Path) -> None:
    found = Manifest.read(rows)
    assert found is not None
    train = found.splits["train"]
    metrics = PackingMetrics(policy=found.policy())
    data = EnergonPackDataModule(rows, epochs=1, num_workers=0)
    data.setup("fit")
    batches = list(data.train_dataloader())
    for batch in batches:
        metrics.update(batch)
    stats = metrics.compute()
    assert (stats.packs, stats.sources, stats.real_tokens) == (train.rows, train.sources, train.tokens)
    assert (stats.target_tokens, stats.slots, stats.alignment_padding) == (train.targets, train.slots, train.alignment)
    assert (stats.fill, stats.tail_padding) == (train.fill, train.tail)
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for key, (ids, *_) in sources_of(batches):
        sizes["train000100" <= key < "train000160"].append(-(-len(ids) // 4) * 4)
    assert all(sizes.values())
    assert train.lower_bound == sum(lower_bound(each, CAPACITY) for each in sizes.values())
    assert 0 <= train.gap < 0.02
    assert f"{train.fill:.2%} full" in found.summary()
    assert list(found.splits) == ["train", "val"]


def test_any_number_of_processes_writes_the_same_files(few: Path, few_rows: Path, tmp_path: Path) -> None:
    assert len(list(few_rows.glob("train-*.tar"))) == 4
    assert files(pack_rows(few, tmp_path / "again", workers=2).path) == files(few_rows)


STAGES: dict[str, tuple[Any, str, Callable[[Path], bool]]] = {
    "encoding": (NumberEncoder, "__call__", lambda at: 1 <= len(list(at.glob("train*.npz"))) < 3),
    "packing": (row_writer.PackedSources, "of", lambda at: len(list(at.glob("train*.npz"))) == 3),
    "writing": (ShardFile, "add", lambda at: 1 <= len(list(at.glob("train*.tar.json"))) < 4),
    "indexing": (Manifest, "write", lambda at: (at / "dataset" / ".nv-meta" / "index.uuid").exists()),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_is_killed_goes_on(few: Path, few_rows: Path, tmp_path: Path, stage: str) -> None:
    owner, name, ready = STAGES[stage]
    out = tmp_path / "rows"
    at = tmp_path / ".rows.prepack"

    def work() -> None:
        stand_still(owner, name, when=lambda: ready(at))
        pack_rows(few, out, workers=2 if stage in ("encoding", "writing") else 0)

    kill_when(work, lambda: ready(at))
    assert not out.exists()
    before = {path.name: path.stat().st_mtime_ns for path in [*at.glob("*.npz"), *at.glob("dataset/*.tar")]}
    kept: dict[str, int] = {}

    def note(*_: Any) -> None:
        kept.update({path.name: path.stat().st_mtime_ns for path in [*at.glob("*.npz"), *at.glob("dataset/*.tar")]})

    publish = workplace.Workplace.publish
    with pytest.MonkeyPatch.context() as patch:
        # On a busy machine processes of the killed run take a while to see that it is gone.
        patch.setattr(workplace, "_LAST_BREATH", 60.0)
        patch.setattr(workplace.Workplace, "publish", lambda self, *args, **options: (note(), publish(self, *args, **options)))
        assert pack_rows(few, out).fresh
    assert before
    # What was complete is not done again.
    complete = {name for name in before if name.endswith(".npz") or (stage != "writing" and name.endswith(".tar"))}
    assert {name: kept[name] for name in complete} == {name: before[name] for name in complete}
    assert verify(out).sources == verify(few_rows).sources
    assert files(out) == files(few_rows)
    assert not at.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_rows_that_are_complete_are_verified(few: Path, copied: Path) -> None:
    again = pack_rows(few, copied)
    assert not again.fresh
    assert "already written with these settings, and verified" in again.summary()
    flip(copied / "train-0001.tar", ".npy")
    with pytest.raises(VerificationError, match=r"train-0001\.tar: row train-row\d+: its tokens are not what was written"):
        pack_rows(few, copied)
    assert pack_rows(few, copied, overwrite=True).fresh
    assert verify(copied).rows


def test_rows_that_are_replaced_are_there_until_the_new_ones_are(
    few: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(copied)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "dataset":
            raise OSError("the disk is gone")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        pack_rows(few, copied, seed=5, overwrite=True)
    assert files(copied) == before
    monkeypatch.undo()
    # What was written is not written again.
    monkeypatch.setattr(ShardFile, "add", None)
    assert pack_rows(few, copied, seed=5, overwrite=True).fresh
    assert verify(copied).manifest.packing["seed"] == 5


def test_other_settings_are_refused_one_by_one(few: Path, copied: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows of other settings") as error:
        pack_rows(few, copied, capacity=128, algorithm="best_fit_decreasing", encoder=NumberEncoder(salt=1))
    lines = str(error.value).splitlines()[1:-1]
    assert lines == [
        "  packing.capacity: 64 there, 128 asked for",
        "  packing.algorithm: 'minimum_bin_slack' there, 'best_fit_decreasing' asked for",
        "  encoder.salt: 0 there, 1 asked for",
    ]
    other = write_webdataset(tmp_path / "other", {"train": records_of([5, 6, 7]), "val": records_of([5, 6, 7])})
    with pytest.raises(ValueError, match=r"data\.train\.files: .* there, .* asked for"):
        pack_rows(other, copied)
    # Before they are complete too.
    at = tmp_path / ".begun.prepack"

    def encoded() -> bool:
        return len(list(at.glob("*.npz"))) > 0

    def begin() -> None:
        stand_still(NumberEncoder, "__call__", when=encoded)
        pack_rows(few, tmp_path / "begun")

    kill_when(begin, encoded)
    with pytest.raises(ValueError, match=r"begun with other settings:\n  packing\.seed: 0 there, 3 asked for\nSet them back"):
        pack_rows(few, tmp_path / "begun", seed=3)
    assert pack_rows(few, tmp_path / "begun", seed=3, overwrite=True).manifest.packing["seed"] == 3
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="is not empty and holds no packed rows"):
        pack_rows(few, foreign, overwrite=True)
    assert (foreign / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"capacity": 62}, "capacity=62 is not a multiple of multiple=4: take 60"),
        ({"delta": 2}, "delta=2 is not used by algorithm='minimum_bin_slack'"),
        ({"min_bins": 900}, "move sources between rows, which sources of 2 groups do not allow"),
        ({"overlength": "error"}, r"sample 'train\d+' has \d+ tokens, more than capacity=64"),
        ({"workers": -1}, "workers=-1: a whole number of at least 0"),
        ({"splits": ["test"]}, "has no samples in its split 'test'; it has train, val"),
        ({"tokenizer": "x"}, "give one of encoder and tokenizer"),
    ],
)
def test_settings_that_do_not_fit_are_refused(few: Path, tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pack_rows(few, tmp_path / "rows", **options)
    assert not (tmp_path / "rows").exists()


def test_data_of_which_nothing_can_be_trained_on_leaves_nothing_behind(few: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows"
    options: dict[str, Any] = {"encoder": NumberEncoder(), "workers": 0}
    with pytest.raises(ValueError, match=r"no source of the split 'train' of .* can be trained on; left out are .*overlength"):
        prepack(few, out, capacity=1, **options)
    assert list(tmp_path.iterdir()) == []
    assert prepack(few, out, capacity=64, **options).fresh


def test_rows_of_fixed_shape(tmp_path: Path) -> None:
    data = write_webdataset(tmp_path / "data", {"train": records_of(lengths(90, most=30))})
    made = prepack(
        data,
        tmp_path / "rows",
        capacity=64,
        width=80,
        multiple=8,
        max_sources=5,
        fixed_boundaries=True,
        bins_multiple_of=4,
        encoder=NumberEncoder(),
        workers=0,
    )
    module = EnergonPackDataModule(made.path, epochs=1, num_workers=0)
    module.setup("fit")
    batches = list(module.train_dataloader())
    assert len(batches) % 4 == 0
    assert {batch.input_ids.shape for batch in batches} == {(1, 80)}
    assert {len(batch.cu_seqlens) for batch in batches} == {6}
    assert {len(batch.source_keys) for batch in batches} > {5}
    assert verify(made.path).sources == 90


class PlainNumbers(NumberEncoder):
    """Sources that may be split."""

    def __call__(self, key: str, record: Any) -> Any:
        source = super().__call__(key, record)
        source.splittable = True
        return source


@pytest.mark.parametrize("rule", ["truncate", "split"])
def test_long_sources_are_cut_as_they_are_online(tmp_path: Path, rule: Any) -> None:
    data = write_webdataset(tmp_path / "data", {"train": records_of([*lengths(60, most=30), 70, 100, 200])})
    rows = pack_rows(data, tmp_path / "rows", overlength=rule, encoder=PlainNumbers())
    policy = PackingPolicy(CAPACITY, multiple=4, overlength=rule)
    online = EnergonPackDataModule(data, encoder=PlainNumbers(), packing=policy, epochs=1, num_workers=0)
    # The rule for long sources is a setting that the rows know.
    replayed = EnergonPackDataModule(rows.path, packing=policy, epochs=1, num_workers=0)
    found = []
    for each in (online, replayed):
        each.setup("fit")
        found.append(sorted(sources_of(each.train_dataloader())))
    assert found[0] == found[1]
    assert len(found[0]) == (63 if rule == "truncate" else 60 + 2 + 2 + 4)
    gone = rows.manifest.splits["train"].left_out
    assert {reason: each.tokens for reason, each in gone.items()} == ({"truncated": 6 + 36 + 136} if rule == "truncate" else {})
    assert verify(rows.path).sources == len(found[0])
    state = replayed.state_dict()
    again = EnergonPackDataModule(rows.path, epochs=1, num_workers=0)
    again.setup("fit")
    again.load_state_dict(state)
    assert len(sources_of(again.train_dataloader())) == len(found[0])


def test_energon_itself_reads_the_rows(few_rows: Path) -> None:
    read = read_back(few_rows, "train")
    found = Manifest.read(few_rows)
    assert found is not None
    assert sorted(sample.record["row"] for sample in read) == list(range(found.splits["train"].rows))


def test_a_process_that_dies_or_fails_ends_the_run(few: Path, tmp_path: Path) -> None:
    class Deadly(NumberEncoder):
        def __call__(self, key: str, record: Any) -> Any:
            if key == "train000300":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(key, record)

    with pytest.raises(ValueError, match=r"encoding train: a process died.*The same command goes on where this one stopped"):
        pack_rows(few, tmp_path / "rows", workers=2, encoder=Deadly())
    assert pack_rows(few, tmp_path / "rows", workers=2).fresh
    with pytest.raises(ValueError, match=r"sample 'train\d+' has \d+ tokens, more than capacity=64"):
        pack_rows(few, tmp_path / "others", workers=2, overlength="error")


def test_a_full_disk_is_named_and_the_run_goes_on(few: Path, few_rows: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(ValueError, match=r"the rows for .*rows cannot be written \(.*too large.*make room"):
            pack_rows(few, tmp_path / "rows")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "rows").exists()
    assert files(pack_rows(few, tmp_path / "rows").path) == files(few_rows)


def test_only_one_run_writes_at_a_time(few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workplace, "_LAST_BREATH", 0.2)
    with (
        workplace.Workplace(tmp_path / "rows").held(),
        pytest.raises(ValueError, match=r"another run writes rows for .*: wait for it, or choose another folder"),
    ):
        pack_rows(few, tmp_path / "rows")
    assert pack_rows(few, tmp_path / "rows").fresh


def doubled(samples: list[Any]) -> list[Any]:
    return [*samples[:-1], (samples[-1][0], samples[0][1])]


def moved_boundary(samples: list[Any]) -> list[Any]:
    row = Row.of(samples[0][1])
    offsets = [row.offsets[0], row.offsets[1] + 4, *row.offsets[2:]]
    moved = Row(**{**vars(row), "offsets": offsets})
    return [(samples[0][0], moved.parts()), *samples[1:]]


def without_a_shard(rows: Path) -> None:
    path = rows / ".nv-meta" / "split.yaml"
    text = path.read_text()
    assert "train-{0000..0003}.tar" in text
    path.write_text(text.replace("train-{0000..0003}.tar", "train-{0000..0002}.tar"))


@pytest.mark.parametrize(
    ("damage", "texts"),
    [
        (lambda rows: flip(rows / "train-0002.tar", ".npy"), [r"train-0002\.tar: row train-row\d+: its tokens are not"]),
        (lambda rows: flip(rows / "val-0000.tar", ".json"), [r"val-0000\.tar: row val-row\d+: its JSON"]),
        (
            lambda rows: (rows / "train-0001.tar").unlink(),
            [r"train-0001\.tar is missing, with \d+ rows", "sources are missing"],
        ),
        (
            lambda rows: rewrite(rows / "train-0003.tar", doubled),
            [r"it lies under the key 'train-row\d+' and is 'train-row\d+'", "sources are missing, such as"],
        ),
        (
            lambda rows: rewrite(rows / "train-0003.tar", lambda s: [*s, *s[:1]]),
            [r"row train-row\d+ is there twice", r"source 'train\d+' \(number \d+\) is there twice", "rows, the manifest says"],
        ),
        (
            lambda rows: rewrite(rows / "train-0000.tar", lambda s: s[1:]),
            [r"1 of \d+ rows are missing, such as train-row00000000"],
        ),
        (lambda rows: rewrite(rows / "train-0000.tar", moved_boundary), [r"row train-row00000000"]),
        (lambda rows: shutil.rmtree(rows / ".nv-meta"), ["Energon's index is missing"]),
        (
            lambda rows: (rows / "train-0001.tar.idx").write_bytes((rows / "train-0001.tar.idx").read_bytes()[:40]),
            [r"index of train-0001\.tar is not that of its rows"],
        ),
        (
            lambda rows: (rows / ".nv-meta" / ".info.json").write_text('{"energon_version": "7", "shard_counts": {}}'),
            [r"split 'train': "],
        ),
        (without_a_shard, [r"split 'train': Energon's index has \d+ rows, the manifest says \d+"]),
        (lambda rows: (rows / "train-0000.tar").write_bytes(b"\x07" * 4096), [r"train-0000\.tar: cannot be read after row 0"]),
    ],
)
def test_verification_names_what_is_damaged(
    copied: Path, damage: Any, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["prepack", "--verify", str(copied)])
    assert "each exactly once" in capsys.readouterr().out
    damage(copied)
    with pytest.raises(VerificationError) as error:
        verify(copied)
    for text in texts:
        assert error.match(text)
    with pytest.raises(SystemExit) as code:
        main(["prepack", "--verify", str(copied)])
    assert code.value.code == 1
    assert "is damaged" in capsys.readouterr().err


def test_a_source_of_other_tokens_is_found_though_all_hashes_of_rows_are_right(copied: Path) -> None:
    def changed(samples: list[Any]) -> list[Any]:
        row = Row.of(samples[0][1])
        row.tokens[:, 1] += 1
        return [(samples[0][0], row.parts()), *samples[1:]]

    rewrite(copied / "train-0000.tar", changed)
    assert all(Row.of(parts) for _, parts in samples_of(copied / "train-0000.tar"))
    with pytest.raises(VerificationError, match=r"train-0000\.tar is not the file that was written"):
        verify(copied)


def test_the_manifest_is_json_that_others_can_read(rows: Path) -> None:
    said = json.loads((rows / "manifest.json").read_text())
    assert (said["kind"], said["format"], said["pad_id"]) == ("lightning-pack packed rows", 1, 0)
    assert said["splits"]["train"]["gap_to_lower_bound"] >= 0
    assert said["encoder"] == {"type": "NumberEncoder", "salt": 0}


def test_the_command_says_what_it_needs(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    for args, text in (
        (["prepack"], "DATA and OUT are needed"),
        (["prepack", "a", "b"], "--capacity N is needed"),
        (["prepack", "--verify", "a", "--capacity", "5"], "not used here: capacity"),
    ):
        with pytest.raises(SystemExit) as code:
            main(args)
        assert code.value.code == 2
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit) as code:
        main(["prepack", "--verify", str(data)])
    assert code.value.code == 1
    assert "there are no packed rows" in capsys.readouterr().err
