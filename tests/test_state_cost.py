"""What the state of a run costs: its size, what a resume reads, and the command that measures both."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.energon.flavors.webdataset.itar import CachedItarOffsetReader

from lightning_pack import EnergonPackDataModule, PackingPolicy
from lightning_pack.bench.resume import BYTES_PER_SOURCE, BYTES_PER_WORKER
from lightning_pack.cli import main
from lightning_pack.energon import StreamOptions, index
from lightning_pack.energon.dataset import open_share
from lightning_pack.energon.index import ShardIndex
from lightning_pack.energon.worker import Whereabouts, rows_of_share
from tests.numbers_data import NumberEncoder, lengths, records_of, write_webdataset


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = records_of(lengths(1500, most=60))
    return write_webdataset(tmp_path_factory.mktemp("cost") / "data", {"train": records})


def entries(value: Any, name: str) -> list[Any]:
    """Every entry of that name in plain containers."""
    if isinstance(value, dict):
        value = [*value.items()]
    if not isinstance(value, list | tuple):
        return []
    found = [item[1] for item in value if isinstance(item, tuple) and len(item) == 2 and item[0] == name]
    return found + [inner for item in value for inner in entries(item, name)]


def saved_with_full_buffers(path: Path, *, buffer: int, workers: int) -> tuple[int, list[int]]:
    """Bytes of the state where every worker is in a buffer after its first, and the samples in their shuffle buffers."""
    module = EnergonPackDataModule(
        path,
        encoder=NumberEncoder(),
        packing=PackingPolicy(capacity=64, buffer_size=buffer),
        num_workers=workers,
        shuffle_buffer_size=buffer,
    )
    module.setup("fit")
    loader = module.train_dataloader()
    try:
        for _ in loader:
            loader.trained()
            loader.commit()
            if all(worker["at"] and worker["at"]["buffer"] for worker in loader.state()["workers"]):
                break
        file = io.BytesIO()
        state = module.state_dict()
        torch.save(state, file)
    finally:
        module.teardown("fit")
    return len(file.getvalue()), [len(keys) for keys in entries(state, "_restore_keys")]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_grows_by_few_bytes_for_each_buffered_source(data: Path, workers: int) -> None:
    sizes = {}
    readers = max(workers, 1)
    for buffer in (16, 64, 512):
        sizes[buffer], shuffled = saved_with_full_buffers(data, buffer=buffer, workers=workers)
        assert len(shuffled) == readers
        assert all(buffer - 1 <= count <= buffer for count in shuffled), "the buffers were not full"
        assert sizes[buffer] <= (BYTES_PER_SOURCE * 2 * buffer + BYTES_PER_WORKER) * readers
    # Of the two buffers only the keys of the shuffle buffer are there, which is what grows.
    assert 0 < sizes[512] - sizes[64] <= BYTES_PER_SOURCE * (512 - 64) * readers


def test_a_state_of_blended_data_is_as_small(data: Path, tmp_path: Path) -> None:
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        + "".join(f"      - weight: {weight}\n        path: {data}\n" for weight in (3, 1))
    )
    size, shuffled = saved_with_full_buffers(blend, buffer=256, workers=0)
    assert 255 <= sum(shuffled) <= 256
    assert size <= BYTES_PER_SOURCE * 2 * 256 + BYTES_PER_WORKER


class Places(Whereabouts):
    """Remembers everything that was read."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []

    def reads(self, place: str) -> None:
        super().reads(place)
        self.all.append(place)


def options(data: Path, *, buffer: int) -> StreamOptions:
    policy = PackingPolicy(capacity=64, buffer_size=buffer)
    return StreamOptions(path=str(data), encoder=NumberEncoder(), policy=policy, shuffle_buffer_size=buffer)


def rows(settings: StreamOptions, origin: Any = None) -> tuple[Any, Places]:
    places = Places()
    return rows_of_share(lambda told: open_share(settings, 0, told, split="train", of=1, epoch=None), places, origin), places


def test_a_resume_reads_two_buffers_in_the_order_of_the_shards_and_goes_on_at_an_even_pace(data: Path) -> None:
    size = 128
    settings = options(data, buffer=size)
    whole, _ = rows(settings)
    positions, keys = [], []
    known = None
    for row in whole:
        # What did not change since the row before is not told again.
        known = row.at if row.at.start is not None else known
        assert known is not None
        positions.append(replace(row.at, start=known.start, carried=known.carried, entered=known.entered))
        keys.append(row.batch.source_keys)
        if row.at.buffer == 3:
            break
    inside = [i for i, position in enumerate(positions) if position.buffer == 2]
    assert len(inside) > 8
    middle = inside[len(inside) // 4]
    resumed, places = rows(settings, positions[middle])
    assert next(resumed).batch.source_keys == keys[middle + 1]
    # What was carried over, the shuffle buffer, the rest of the packing buffer, and the first source of the next one.
    assert 2 * size - 1 <= len(places.all) <= 2 * size + 2
    carried = len(positions[middle].carried)
    assert carried > 8
    read = [(place.split("[")[0], int(place.split("[")[1][:-1])) for place in places.all]
    for again in (read[:carried], read[carried : carried + size - 1]):
        assert len({shard for shard, _ in again}) > 1
        assert again == sorted(again)
    left = len(inside) - len(inside) // 4 - 1
    steps = []
    for expected in keys[middle + 2 : middle + 2 + left // 2]:
        before = len(places.all)
        assert next(resumed).batch.source_keys == expected
        steps.append(len(places.all) - before)
    assert len(steps) > 2
    assert max(steps) <= size // left + 2


def test_an_index_in_memory_says_what_energon_reads(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = sorted(str(shard) for shard in data.glob("*.tar"))
    assert len(shards) == 3
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0)).tolist()
    expected = {(shard, i): CachedItarOffsetReader(2).get_itar_byte_offset(shard, i) for shard in shards for i in order[:60]}
    for most in (index.MOST_BYTES, 0):
        monkeypatch.setattr(index, "MOST_BYTES", most)
        # Fewer are held than there are shards.
        reader = ShardIndex(2)
        for i in order[:60]:
            for shard in shards:
                assert reader.get_itar_byte_offset(shard, i) == expected[shard, i]
        assert len(reader._indices) == 2
        assert all(held is None for held in reader._indices.values()) == (most == 0)
        last = reader.get_itar_byte_offset(shards[0], 499)
        assert last == CachedItarOffsetReader(2).get_itar_byte_offset(shards[0], 499)
        assert last[1] > 0
        for wrong in (501, 10**9):
            with pytest.raises(IndexError):
                reader.get_itar_byte_offset(shards[0], wrong)


def test_bench_resume_prints_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "resume", "--buffers", "16", "32", "--workers", "0", "1", "--every", "2", "--turns", "1"])
    lines = capsys.readouterr().out.splitlines()
    states = [line for line in lines if line.startswith("state ")]
    assert [tuple(map(int, re.findall(r"(\d+) sources, (\d+) workers", line)[0])) for line in states] == [
        (16, 0),
        (32, 0),
        (16, 1),
        (32, 1),
    ]
    for line in states:
        size, each, share, save, cold, *ratios = (
            float(figure.replace(",", ""))
            for figure in re.findall(
                r"([\d,.]+)(?= bytes| a buffered|% of| ms;| s cold|x in the middle|x at the last|x in a new)", line
            )
        )
        assert len(ratios) == 3
        assert all(figure > 0 for figure in (size, each, share, save, cold, *ratios))
        assert size > 16 * 1024 > each
    (trained,) = [line for line in lines if line.startswith("resume/checkpoints ")]
    assert float(trained.split()[1].removesuffix("x")) > 0
    assert "one checkpoint in 2 steps against none" in trained
    assert [line.split()[0] for line in lines[-3:]] == ["resume/state", "resume/first-row", "resume/checkpoints"]
    assert "32 sources in each of 2 buffers, 1 workers" in lines[-2]


@pytest.mark.parametrize("option", [["--buffers", "0"], ["--workers", "-1"], ["--every", "0"], ["--turns", "0"]])
def test_bench_resume_refuses_what_it_cannot_measure(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "resume", *option])
    assert stop.value.code == 2
    assert f"{option[0]} {option[1]}: at least" in capsys.readouterr().err
