"""A plan for data with images keeps to the limits of media that training would have."""

from __future__ import annotations

import io
import json
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_pack import EnergonPackDataModule, PackingPolicy, plan
from lightning_pack.cli import main
from lightning_pack.encoders import VisionChatEncoder
from lightning_pack.media_budget import MediaCost
from lightning_pack.planner.memory import MeasuredMemory
from lightning_pack.planner.report import size
from lightning_pack.policy import OverlengthError
from lightning_pack.simulation import simulate
from tests.tiny_vision import image_processor, sample, vision_encoder, vision_tokenizer, write_shards

PER_PACK = {"max_media_tokens": 40}
PER_BUFFER = {"buffer_media_tokens": 60}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = [sample(i, (1, 3, 0, 2)[i % 4]) for i in range(60)]
    return write_shards(tmp_path_factory.mktemp("plan") / "chats", {"train": samples})


def planned(chats: Path, **options: Any) -> Any:
    shape = {"capacity": 256, "encoder": vision_encoder(), "buffer_sizes": [16], "sources": 61, "measure_seconds": 0}
    return plan(chats, **shape | options)


@pytest.mark.parametrize("limits", [{}, PER_PACK | PER_BUFFER])
def test_the_loader_makes_the_packs_that_were_planned(chats: Path, limits: dict[str, int]) -> None:
    found = planned(chats, sources=60, **limits)
    free = planned(chats, sources=60)
    assert found.policy == free.policy if not limits else found != free
    for name in ("exact_fill", "concatenative") if limits else ("exact_fill",):
        (each,) = [one for one in found.combinations if one.policy.algorithm == name and one.policy.carry_over]
        data = EnergonPackDataModule(chats, encoder=vision_encoder(), packing=each.policy, num_workers=0, epochs=1)
        data.setup("fit")
        rows = list(data.train_dataloader())
        data.teardown("fit")
        assert not any(row.left_out for row in rows)
        assert len(rows) == each.packs


def measured(photos: Path) -> tuple[Any, Any]:
    """The plan of these, and the memory of a worker that buffers no samples: of a process with nothing else in it, as it is for
    people, since what a worker changes of its parent's memory counts as its own."""
    small = {"shortest_edge": 1024, "longest_edge": 50_000}
    encoder = VisionChatEncoder(vision_tokenizer(), image_processor("qwen3_vl", size=small), family="qwen3_vl")
    found = planned(photos, encoder=encoder, capacity=512, sources=64, measure_seconds=200)
    assert found.sources.options.shuffle_buffer_size == 256
    options = replace(found.sources.options, shuffle_buffer_size=0)
    return found, MeasuredMemory.of_worker(options, found.policy, rows_per_buffer=1, seconds=200)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="a process tells what it has for itself on Linux")
def test_memory_is_that_of_a_worker_that_runs(tmp_path: Path) -> None:
    """What it takes is mostly photographs, as files in its buffers and as pixels in its rows."""
    noise = np.random.default_rng(0).integers(0, 256, (4, 400, 500, 3), dtype=np.uint8)
    photos = [io.BytesIO() for _ in noise]
    for pixels, file in zip(noise, photos, strict=True):
        Image.fromarray(pixels).save(file, format="JPEG", quality=95)
    content = [file.getvalue() for file in photos]
    size_of_one = sum(map(len, content)) / 4
    assert size_of_one > 200_000
    samples = [{"json": sample(i, 1)["json"], "0.jpg": content[i % 4]} for i in range(64)]
    path = write_shards(tmp_path / "photos", {"train": samples})
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        found, less = fresh.submit(measured, path).result()
    memory, chosen = found.memory, found.recommendation.combination
    assert memory.problem == ""
    assert memory.whole
    assert memory.rows > chosen.rows_per_buffer * 2
    assert 0.5 < memory.nbytes / chosen.memory < 2
    assert f"Measured: a loader worker took {size(memory.nbytes)} for itself" in found.report()
    assert json.loads(found.to_json())["measured_memory"]["nbytes"] == memory.nbytes
    # And less where less is held.
    assert less.rows == 3
    assert memory.nbytes - less.nbytes > 0.8 * 256 * size_of_one


def test_a_measurement_that_ends_early_says_so(chats: Path) -> None:
    stopped = planned(chats, measure_seconds=1e-6)
    assert stopped.memory == replace(stopped.memory, nbytes=None, rows=0, whole=False)
    # To end the worker takes a moment too.
    assert re.search(r"It was not measured: it made no row in \d+ seconds\.", stopped.report())
    assert "by this estimate" in stopped.report()
    assert planned(chats).memory is None
    assert "easured" not in planned(chats).report()
    part = replace(stopped, memory=MeasuredMemory(nbytes=3_000_000, rows=2, seconds=0.5))
    assert "took 3.0 MB for itself" in part.report()
    assert "its buffers were not full by then, so it may take more (measure_seconds)" in part.report()
    with pytest.raises(ValueError, match="measure_seconds=-1: seconds are needed"):
        planned(chats, measure_seconds=-1)
    with pytest.raises(ValueError, match="measure_seconds=3 is not used with lengths"):
        plan([5, 6], capacity=64, measure_seconds=3)


def test_limits_are_in_all_that_a_plan_says(chats: Path) -> None:
    free, limited = planned(chats, sources=240), planned(chats, sources=240, max_media_tokens=25)
    assert limited.policy.max_media_tokens == 25
    assert "max_media_tokens: 25" in limited.yaml()
    best, worst = free.recommendation.combination, limited.recommendation.combination
    assert worst.bound > best.bound
    assert worst.packs > best.packs
    assert worst.fill < best.fill - 0.05
    assert best.media is not None
    assert best.media.beyond == 0
    assert worst.packs >= worst.bound
    assert worst.media is not None
    assert worst.media.beyond > 0
    assert f"{worst.media.beyond:.2%} of the sources have more images than a pack may: they are left out" in limited.report()
    assert "(media_budget)" not in free.report()


def test_limits_of_a_buffer_bound_its_memory(chats: Path) -> None:
    free, limited = planned(chats, buffer_sizes=[64]), planned(chats, buffer_sizes=[64], **PER_BUFFER)
    for one, other in zip(free.combinations, limited.combinations, strict=True):
        assert other.memory < one.memory
    few = simulate(PackingPolicy(64, algorithm="concatenative", buffer_media_tokens=4), [8] * 30, media=[MediaCost(2)] * 30)
    # Two sources reach the limit, where all would fit.
    assert few.choices == 15
    assert simulate(PackingPolicy(64, algorithm="concatenative"), [8] * 30, media=[MediaCost(2)] * 30).choices == 1


def test_the_algorithm_is_chosen_within_the_limits() -> None:
    lengths, media = [10, 6, 5, 5, 4] * 40, [MediaCost(1), MediaCost(9), MediaCost(9), MediaCost(1), MediaCost(9)] * 40
    policy = PackingPolicy(16, max_media_tokens=10, buffer_size=16)
    chosen = policy.settled(lengths, media=media)
    packs = {
        name: simulate(PackingPolicy(16, algorithm=name, max_media_tokens=10, buffer_size=16), lengths, media=media).packs
        for name in ("exact_fill", "minimum_bin_slack")
    }
    assert len(set(packs.values())) == 2
    assert packs[chosen.algorithm] == min(packs.values())
    for group in simulate(policy, lengths, media=media).groups:
        assert sum(media[i].tokens for i in group) <= 10


def test_what_cannot_be_planned_names_the_limit(chats: Path) -> None:
    with pytest.raises(
        ValueError, match=r"the images of 45 are more than max_media_tokens=1\): raise what is too low"
    ) as caught:
        planned(chats, max_media_tokens=1, capacity=20)
    assert "truncate" not in str(caught.value)
    with pytest.raises(
        OverlengthError, match=r"the images of \d+ of 60 sources .* are more than max_media_tokens=20 of a pack"
    ):
        planned(chats, max_media_tokens=20, overlength="error", capacity=512)
    with pytest.raises(ValueError, match="max_media_tokens=9 is not used with lengths"):
        plan([5, 6], capacity=64, max_media_tokens=9)


def test_the_command_takes_limits(chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vision_tokenizer().save_pretrained(tmp_path)
    image_processor("qwen3_vl").save_pretrained(tmp_path)
    limits = ["--max-media-tokens", "40", "--max-media-bytes", "9000000"]
    limits += ["--buffer-media-tokens", "500", "--buffer-media-bytes", "9000000"]
    options = ["--capacity", "256", "--vision", "qwen3_vl", "--tokenizer", str(tmp_path), "--buffer-sizes", "16"]
    main(["plan", str(chats), *options, "--sources", "60", "--measure-seconds", "0", *limits])
    printed = capsys.readouterr().out
    for name in ("max_media_tokens: 40", "max_media_bytes: 9000000", "buffer_media_tokens: 500", "buffer_media_bytes: 9000000"):
        assert f"    {name}\n" in printed
