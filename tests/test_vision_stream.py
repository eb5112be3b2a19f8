"""Images in the stream: nothing lost, resumed exactly, small while they wait, within their budgets."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from lightning_pack import EnergonPackDataModule, PackedBatch, PackingPolicy, plan
from lightning_pack.encoders import VisionChatEncoder
from lightning_pack.energon.position import Buffer, StagePosition
from lightning_pack.energon.task_encoder import PackTaskEncoder
from lightning_pack.source import EncodedSource, Pack
from tests.test_exact_position import through_a_file
from tests.test_vision_rows import same_row
from tests.tiny_vision import chat, image_processor, picture, sample, vision_encoder, vision_tokenizer, write_shards

TRUNCATED = picture(3, kind="JPEG", size=(90, 90))[:900]


def faulty_samples(count: int) -> list[dict[str, bytes]]:
    """Chats with 0 to 3 images, some of which can never be trained on."""
    samples = [sample(i, (1, 3, 0, 2)[i % 4]) for i in range(count)]
    samples[5]["1.png"] = b"no image"
    # Its header is whole, so it fails when it is decoded.
    samples[9].pop("0.png")
    samples[9] = {"json": samples[9]["json"], "0.jpg": TRUNCATED, **{k: v for k, v in samples[9].items() if k != "json"}}
    samples[13].pop("2.png")
    samples[17] = sample(17, 3, answer="It shows a cat. " * 60)
    samples[19]["0.png"] = picture(0, size=(4, 900))
    samples[21]["json"] = b"{broken"
    samples[23]["json"] = json.dumps({"messages": [{"role": "user", "content": "Hm?"}]}).encode()
    return samples


REASONS = {5: "image", 9: "image", 13: "corrupt", 17: "overlength", 19: "image", 21: "corrupt", 23: "no_targets"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision") / "chats"
    return write_shards(folder, {"train": faulty_samples(48), "val": [sample(i, i % 3) for i in range(6)]})


class Run:
    """A datamodule and what it has given, without a Trainer."""

    def __init__(self, path: Path, *, workers: int = 0, state: Any = None, encoder: Any = None, **options: Any) -> None:
        settings = {name: options.pop(name) for name in ("epochs", "packs_per_batch", "vision", "tokenizer") if name in options}
        policy = PackingPolicy(**{"capacity": 192, "buffer_size": 16, "multiple": 4} | options)
        self.data = EnergonPackDataModule(
            path,
            encoder=encoder or (None if "vision" in settings else vision_encoder()),
            packing=policy,
            num_workers=workers,
            shuffle_buffer_size=4,
            max_samples_per_sequence=5,
            **settings,
        )
        self.data.setup("fit")
        if state is not None:
            self.data.load_state_dict(through_a_file(state))
        self.batches: Iterator[PackedBatch] = iter(self.data.train_dataloader())

    def train(self, steps: int) -> list[PackedBatch]:
        given = []
        for _ in range(steps):
            batch = next(self.batches, None)
            if batch is None:
                break
            given.append(batch)
            self.data._stream.progress.count_batch()
            self.data._stream.progress.loader.commit()
        return given

    def state(self) -> Any:
        return through_a_file(self.data.state_dict())

    def end(self) -> None:
        self.data.teardown("fit")


def number(key: str) -> int:
    """Of a sample in its split, from its key."""
    return int(key.rpartition("train")[2])


@pytest.mark.parametrize("packs_per_batch", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_trains_or_reports_every_chat_once(shards: Path, workers: int, packs_per_batch: int) -> None:
    run = Run(shards, workers=workers, epochs=1, packs_per_batch=packs_per_batch)
    rows = run.train(1000)
    run.end()
    trained = [number(key) for row in rows for key in row.source_keys]
    left_out = {number(gone.key): gone.reason for row in rows for gone in row.left_out}
    assert sum(len(row.left_out) for row in rows) == len(left_out)
    assert left_out == REASONS
    assert sorted([*trained, *left_out]) == list(range(48))
    tokens = {number(gone.key): gone.tokens for row in rows for gone in row.left_out}
    # What was known of those that were measured.
    assert tokens[17] > 192
    assert tokens[9] > 0
    assert tokens[5] == 0
    encoder = vision_encoder()
    for row in rows:
        images = [(1, 3, 0, 2)[number(key) % 4] for key in row.source_keys]
        assert row.media_rows.get("image_grid_thw", [0] * len(images)) == images
        placeholders = int((row.input_ids == encoder.image_token_id).sum())
        assert placeholders == int((row.media["image_grid_thw"].prod(1) // 4).sum()) if row.media else placeholders == 0
        assert len(row.ages) == len(row.source_keys)
    assert any(age for row in rows if row.media for age in row.ages)


@pytest.mark.parametrize("options", [{}, {"carry_over": False}, {"balance": "quadratic", "window": 2}])
def test_packs_whose_images_all_fail_are_no_rows(tmp_path: Path, options: dict[str, Any]) -> None:
    """One source to a pack, and most of them break when they are decoded, the last ones too."""
    bad = {"json": json.dumps(chat(0, 1)).encode(), "0.jpg": TRUNCATED}
    whole = (4, 11)
    path = write_shards(tmp_path / "bad", {"train": [sample(i, 1) if i in whole else bad for i in range(24)]}, shards=1)
    run = Run(path, epochs=1, max_sources=1, **options)
    rows = run.train(100)
    run.end()
    assert sorted(number(key) for row in rows for key in row.source_keys) == list(whole)
    left_out = [number(gone.key) for row in rows for gone in row.left_out]
    assert sorted(left_out) == [i for i in range(24) if i not in whole]
    assert {gone.reason for row in rows for gone in row.left_out} == {"image"}


def test_images_of_any_ending_are_read_where_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(i: int, **fields: Any) -> dict[str, bytes]:
        return {"json": json.dumps(chat(i, 1) | fields).encode(), "0.pixels": picture(i)}

    path = write_shards(tmp_path / "named", {"train": [one(i, images=["0.pixels"]) for i in range(8)]}, shards=1)
    run = Run(path, epochs=1)
    rows = run.train(100)
    run.end()
    assert sum(len(row.media_rows["image_grid_thw"]) for row in rows) == 8
    assert not any(row.left_out for row in rows)
    # Where nobody names them, the run ends with what is wrong.
    monkeypatch.setattr("lightning_pack.energon.packs.MOST_LEFT_OUT_IN_A_ROW", 30)
    run = Run(write_shards(tmp_path / "unnamed", {"train": [one(i) for i in range(8)]}, shards=1))
    message = r"30 corrupt; the last is '.*'0.pixels'\], which would be images if they were named.*: check data, tokenizer"
    with pytest.raises(ValueError, match=message):
        run.train(1)
    run.end()


@pytest.fixture(scope="module")
def uninterrupted(shards: Path) -> dict[int, list[PackedBatch]]:
    given = {}
    for workers in (0, 2):
        run = Run(shards, workers=workers)
        given[workers] = run.train(20)
        run.end()
    return given


@pytest.mark.parametrize("workers", [0, 2])
def test_restored_at_every_step_the_next_rows_are_the_same(
    shards: Path, uninterrupted: dict[int, list[PackedBatch]], workers: int
) -> None:
    expected = uninterrupted[workers]
    assert sum(gone.reason == "image" for row in expected for gone in row.left_out) >= 2
    assert sum(bool(row.media) for row in expected) > 15
    run = Run(shards, workers=workers)
    states = []
    positions: list[StagePosition] = []
    for _ in range(9):
        run.train(1)
        states.append(run.state())
        positions += [at for _, at in run.data._stream.progress.loader._reader.position() if at is not None]
    run.end()
    # In mid-buffer, with packs of it still to come, and with sources that were carried over.
    assert sum(bool(at.emitted) for at in positions) >= 2
    assert sum(bool(at.carried) for at in positions) >= 3
    for step, state in enumerate(states, 1):
        resumed = Run(shards, workers=workers, state=state)
        assert all(map(same_row, resumed.train(3), expected[step : step + 3])), f"restored after {step} rows"
        resumed.end()


@pytest.mark.parametrize(
    "limits",
    [
        {"balance": "quadratic", "window": 2},
        {"buffer_media_bytes": 60000},
        {"buffer_media_tokens": 120},
        {"max_media_tokens": 40},
    ],
)
def test_a_limited_stream_is_restored_exactly(shards: Path, limits: dict[str, Any]) -> None:
    run = Run(shards, **limits)
    expected = run.train(12)
    run.end()
    free = Run(shards).train(12)
    assert [row.source_keys for row in free] != [row.source_keys for row in expected]
    state = None
    got: list[PackedBatch] = []
    for steps in (1, 2, 1, 3):
        run = Run(shards, state=state, **limits)
        got += run.train(steps)
        state = run.state()
        run.end()
    assert all(map(same_row, got, expected))
    run = Run(shards, epochs=1, **limits)
    rows = run.train(1000)
    run.end()
    keys = [number(key) for row in rows for key in row.source_keys] + [number(g.key) for row in rows for g in row.left_out]
    assert sorted(keys) == list(range(48))


def test_a_buffer_that_is_full_of_what_was_carried_over_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shards(tmp_path / "few", {"train": [sample(i, 3 if i % 5 == 0 else 0) for i in range(40)]})
    full = 0
    carry_over = Buffer.carry_over

    def carried(buffer: Buffer, before: Buffer, *, gone: Any) -> None:
        nonlocal full
        carry_over(buffer, before, gone=gone)
        full += any(source.held_media for source in buffer.sources[: len(buffer.carried)])

    monkeypatch.setattr(Buffer, "carry_over", carried)
    limits = {"buffer_media_bytes": 1, "algorithm": "concatenative"}
    run = Run(path, **limits)
    expected = run.train(14)
    run.end()
    assert full > 2
    state = None
    got: list[PackedBatch] = []
    for _ in range(12):
        run = Run(path, state=state, **limits)
        got += run.train(1)
        state = run.state()
        run.end()
    assert all(map(same_row, got, expected))


class Watched:
    """What buffers hold at each pack."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: list[int] = []
        self.tokens: list[int] = []
        self.all_held: list[int] = []
        self.sources: list[EncodedSource] = []
        self.packs: list[Pack] = []
        add, complete = Buffer.add, PackTaskEncoder.complete

        def added(buffer: Buffer, source: EncodedSource) -> None:
            add(buffer, source)
            self.held.append(sum(one.held_media for one in buffer.sources))
            self.all_held.append(sum(one.held for one in buffer.sources))
            self.tokens.append(sum(one.media_tokens for one in buffer.sources))
            self.sources += buffer.sources

        def completed(encoder: PackTaskEncoder, pack: Pack) -> Pack:
            self.packs.append(complete(encoder, pack))
            return self.packs[-1]

        monkeypatch.setattr(Buffer, "add", added)
        monkeypatch.setattr(PackTaskEncoder, "complete", completed)


def test_what_waits_is_encoded(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    run = Run(shards)
    run.train(12)
    run.end()
    waiting = [source for source in watched.sources if source.media_tokens]
    assert waiting
    assert all(source.media == {} and source.mrope is None for source in waiting)
    assert max(watched.held) < sum(source.media_bytes for source in watched.sources[-16:]) / 3
    trained = [source for pack in watched.packs for source in pack.sources if source.media_tokens]
    assert all(source.deferred is None and source.media_bytes == source.held_media for source in trained)


@pytest.mark.parametrize("algorithm", ["exact_fill", "minimum_bin_slack", "concatenative", "first_fit_decreasing"])
def test_budgets_of_packs(shards: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    def most(**limits: int) -> tuple[int, int, Counter[str]]:
        watched = Watched(monkeypatch)
        run = Run(shards, epochs=1, algorithm=algorithm, **limits)
        rows = run.train(1000)
        run.end()
        assert len({key for row in rows for key in row.source_keys}) == sum(len(row.source_keys) for row in rows)
        reasons = Counter(gone.reason for row in rows for gone in row.left_out)
        assert sum(reasons.values()) + sum(len(row.source_keys) for row in rows) == 48
        packs = [pack for pack in watched.packs if pack.sources]
        tokens = [sum(source.media_tokens for source in pack.sources) for pack in packs]
        return max(tokens), max(sum(source.media_bytes for source in pack.sources) for pack in packs), reasons

    tokens, nbytes, reasons = most()
    assert tokens > 42
    assert reasons["media_budget"] == 0
    limited = most(max_media_tokens=40)
    assert 30 < limited[0] <= 40
    assert limited[2] == reasons
    limited = most(max_media_bytes=nbytes // 2)
    assert limited[1] <= nbytes // 2
    # Chats that alone have more are left out, and said to be.
    strict = most(max_media_tokens=25)
    assert strict[0] <= 25
    assert strict[2]["media_budget"] > 3


def test_budgets_of_buffers(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = max(sum(len(part) for name, part in one.items() if name != "json") for one in faulty_samples(48))
    free = Watched(monkeypatch)
    run = Run(shards, buffer_size=32)
    run.train(12)
    run.end()
    limit = 3 * largest
    assert max(free.held) > limit + largest
    limited = Watched(monkeypatch)
    run = Run(shards, buffer_size=32, buffer_media_bytes=limit)
    run.train(12)
    run.end()
    # Beyond by one source, the last that was taken.
    assert limit / 2 < max(limited.held) <= limit + largest
    limited = Watched(monkeypatch)
    run = Run(shards, buffer_size=32, buffer_media_tokens=120)
    run.train(12)
    run.end()
    assert 60 < max(limited.tokens) <= 120 + max(source.media_tokens for source in limited.sources)


def test_a_chat_beyond_a_budget_is_an_error_if_asked_for() -> None:
    source = vision_encoder()("big", {"messages": chat(0, 1)["messages"], "images": [picture(0)]})
    assert source.media_tokens > 2
    policy = PackingPolicy(capacity=512, max_media_tokens=2, overlength="error")
    with pytest.raises(ValueError, match=rf"images of sample 'big' have {source.media_tokens} tokens .* max_media_tokens=2"):
        policy.admit(source)


def test_settings_that_do_not_apply_are_refused(shards: Path, tmp_path: Path) -> None:
    for rule in ("truncate", "split"):
        with pytest.raises(ValueError, match=f"overlength='{rule}' would cut sources, and one with images is never cut"):
            Run(shards, overlength=rule)
    vision_tokenizer().save_pretrained(tmp_path)
    for name in ("max_media_tokens", "max_media_bytes", "buffer_media_tokens", "buffer_media_bytes"):
        with pytest.raises(ValueError, match=f"{name}=9 limits images and the like, which RecordEncoder does not give"):
            EnergonPackDataModule(shards, tokenizer=tmp_path, packing=PackingPolicy(64, **{name: 9})).setup("fit")
        with pytest.raises(ValueError, match=f"{name}=0: a whole number of at least 1"):
            PackingPolicy(64, **{name: 0})
    with pytest.raises(ValueError, match="max_media_tokens=9 makes more packs of some, which min_bins=2"):
        PackingPolicy(64, max_media_tokens=9, min_bins=2, carry_over=False)
    with pytest.raises(ValueError, match="vision='qwen3_vl' makes an encoder from the folder"):
        EnergonPackDataModule(shards, vision="qwen3_vl", encoder=vision_encoder())


def test_a_jsonl_file_with_paths_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "pictures").mkdir(parents=True)
    lines = []
    for i in range(12):
        (folder / "pictures" / f"{i}.png").write_bytes(picture(i))
        record = {"images": [f"pictures/{i}.png"], **chat(i, 1)}
        if i == 3:
            record["images"] = ["pictures/none.png"]
        lines.append(json.dumps(record))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    CrudeJsonlDatasetFactory.prepare_dataset(folder / "chats.jsonl")
    model = tmp_path / "model"
    vision_tokenizer().save_pretrained(model)
    image_processor("qwen3_vl").save_pretrained(model)
    run = Run(folder / "chats.jsonl", epochs=1, vision="qwen3_vl", tokenizer=model)
    assert isinstance(run.data.encoder, VisionChatEncoder)
    rows = run.train(100)
    run.end()
    assert sum(len(row.source_keys) for row in rows) == 11
    assert [gone.reason for row in rows for gone in row.left_out] == ["image"]
    assert sum(len(row.media["image_grid_thw"]) for row in rows) == 11
    # The same pixels as from the file itself.
    encoder = vision_encoder()
    made = [encoder("a", {"images": [picture(i)], **chat(i, 1)}).completed().media["pixel_values"] for i in range(12) if i != 3]
    given = torch.cat([row.media["pixel_values"] for row in rows])
    assert sorted(given.sum(1).tolist()) == sorted(torch.cat(made).sum(1).tolist())


def test_memory_in_the_plan_is_what_a_worker_holds(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(shards, capacity=192, multiple=4, encoder=vision_encoder(), buffer_sizes=[16], sources=48)
    (at,) = [each for each in found.combinations if each.policy == found.policy]
    assert at.media is not None
    watched = Watched(monkeypatch)
    run = Run(shards, algorithm=found.policy.algorithm)
    rows = run.train(20)
    run.end()
    # Two buffers, and the pixels of five rows.
    pixels = sum(tensor.nbytes for row in rows for tensor in row.media.values()) / len(rows)
    measured = 2 * sum(watched.all_held) / len(watched.all_held) + 5 * pixels
    # And the samples that wait to be encoded.
    assert at.media.shuffled == 256
    memory = at.memory - 256 * at.media.held
    assert 0.6 < memory / measured < 1.7
    assert memory > 3 * 16 * 2 * 16 * sum(found.sources.lengths) / len(found.sources.lengths)
    report = found.report()
    assert "of the tokens are placeholders of images; a source holds " in report
    assert json.loads(found.to_json())["media"]["tokens"] == pytest.approx(at.media.tokens)
    with pytest.raises(ValueError, match="overlength='truncate' would cut sources"):
        plan(shards, capacity=192, overlength="truncate", encoder=vision_encoder(), buffer_sizes=[16], sources=48)
