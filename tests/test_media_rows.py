"""Rows with images, written ahead: every chat as it is online, resumed exactly, damage found, other settings refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory
from torch import Tensor

from lightning_pack import EnergonPackDataModule, PackedAttention, PackedBatch, PackedCausalLM, PackingPolicy
from lightning_pack.cli import main
from lightning_pack.encoders import VisionChatEncoder
from lightning_pack.encoders.image_reader import ImageReader
from lightning_pack.energon.task_encoder import PackTaskEncoder
from lightning_pack.media import MediaFile
from lightning_pack.offline import Manifest, ManifestError, VerificationError, convert, prepack, verify
from lightning_pack.offline.row_file import Row
from lightning_pack.offline.shard_file import samples_of
from lightning_pack.source import IGNORE, EncodedSource, Pack
from tests.numbers_data import NumberEncoder, records_of, write_webdataset
from tests.packed_rows import flip, kill_when, pack_rows, rewrite, stand_still
from tests.test_exact_position import through_a_file
from tests.test_prepack import files
from tests.test_replay import module, one_pass, stored, train
from tests.test_vision_rows import alone, same_row, summed_loss
from tests.test_vision_stream import REASONS, TRUNCATED, faulty_samples
from tests.test_vision_training import Curve
from tests.tiny_models import quiet_trainer
from tests.tiny_vision import (
    chat,
    image_processor,
    picture,
    sample,
    vision_config,
    vision_encoder,
    vision_model,
    vision_tokenizer,
    write_shards,
)

CAPACITY = 192
COUNT = 48


def packed(data: Path, out: Path, **options: Any) -> Path:
    settings: dict[str, Any] = {"capacity": CAPACITY, "multiple": 4, "workers": 0, "shards": 3}
    if "vision" not in options:
        settings["encoder"] = vision_encoder()
    return prepack(data, out, **settings | options).path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media") / "chats"
    return write_shards(folder, {"train": faulty_samples(COUNT), "val": [sample(i, i % 3) for i in range(6)]})


@pytest.fixture(scope="module")
def rows(data: Path) -> Path:
    return packed(data, data.parent / "rows", workers=2)


@pytest.fixture
def copied(rows: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rows, tmp_path / "rows"))


@pytest.fixture(scope="module")
def online(data: Path) -> tuple[dict[str, EncodedSource], list[PackedBatch]]:
    """A pass that is packed while training: its sources by key, with their tensors, and its rows."""
    given: list[Pack] = []
    complete = PackTaskEncoder.complete
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackTaskEncoder, "complete", lambda self, pack: given.append(complete(self, pack)) or given[-1])
        policy = PackingPolicy(CAPACITY, multiple=4, buffer_size=16)
        batches = one_pass(data, encoder=vision_encoder(), packing=policy)
    return {source.key: source for pack in given for source in pack.sources}, batches


@pytest.fixture(scope="module")
def sources(online: tuple[dict[str, EncodedSource], list[PackedBatch]]) -> dict[str, EncodedSource]:
    return online[0]


Alone = dict[str, Tensor]


def apart(batches: Iterable[PackedBatch]) -> list[tuple[str, Alone]]:
    """Everything that rows hold of each source."""
    found = []
    for batch in batches:
        physical, lengths = batch.cu_seqlens_padded.tolist(), batch.cu_seqlens.diff().tolist()
        taken = dict.fromkeys(batch.media, 0)
        for i, (key, start, n) in enumerate(zip(batch.source_keys, physical, lengths, strict=False)):
            part = slice(start, start + n)
            held = {name: getattr(batch, name)[..., part] for name in ("input_ids", "labels", "shift_labels", "position_ids")}
            for name, tensor in batch.media.items():
                count = batch.media_rows[name][i]
                held[name] = tensor[taken[name] : taken[name] + count]
                taken[name] += count
            found.append((key, held))
        assert taken == {name: len(tensor) for name, tensor in batch.media.items()}
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_those_of_the_same_sources_packed_while_training(
    rows: Path, sources: dict[str, EncodedSource], workers: int
) -> None:
    given = one_pass(rows, num_workers=workers)
    assert any(len(batch.media_rows.get("image_grid_thw", [])) > 2 for batch in given)
    assert all(batch.position_ids.shape == (4, 1, batch.width) for batch in given)
    assert sorted(key for batch in given for key in batch.source_keys) == sorted(sources)
    policy = PackingPolicy(CAPACITY, multiple=4)
    for batch in given:
        pack = policy.build([sources[key] for key in batch.source_keys])
        expected = PackedBatch.from_packs([pack], pad_id=vision_encoder().pad_id)
        expected.ages, expected.__restore_key__ = batch.ages, batch.__restore_key__
        assert same_row(batch, expected)
    images = [len(held["image_grid_thw"]) for _, held in apart(b for b in given if b.media)]
    assert set(images) >= {1, 2, 3}


def test_the_manifest_counts_images_and_tells_what_was_left_out(
    rows: Path, online: tuple[dict[str, EncodedSource], list[PackedBatch]]
) -> None:
    batches = online[1]
    gone = Counter(each.reason for batch in batches for each in batch.left_out)
    # Also those whose header is whole, and which break when they are decoded.
    assert gone == Counter(REASONS.values())
    assert gone["image"] == 3
    found = Manifest.read(rows)
    assert found is not None
    train_split = found.splits["train"]
    assert {reason: each.sources for reason, each in train_split.left_out.items()} == gone
    assert not any(batch.left_out for batch in one_pass(rows))
    assert train_split.files == sum(len(batch.media["image_grid_thw"]) for batch in batches if batch.media)
    placeholder = vision_encoder().image_token_id
    assert train_split.media_tokens == sum(int((batch.input_ids == placeholder).sum()) for batch in batches)
    kept = [file for row in stored(rows).values() for each in row.files or () for file in each]
    assert train_split.file_bytes == sum(len(file.content) for file in kept)
    # As the data has them.
    known = {part for one in faulty_samples(COUNT) for name, part in one.items() if name != "json"}
    assert {file.content for file in kept} <= known
    assert f"{train_split.files} images of" in found.summary()
    assert json.loads((rows / "manifest.json").read_text())["format"] == 2
    assert verify(rows).files == train_split.files + found.splits["val"].files
    assert len(list(module(rows).val_dataloader())) == found.splits["val"].rows


@pytest.mark.parametrize(("workers", "stops"), [(0, range(10)), (2, range(2, 10, 4))])
def test_resume_is_exact_at_every_step(rows: Path, workers: int, stops: range) -> None:
    whole = module(rows, num_workers=workers)
    batches = iter(whole.train_dataloader())
    states, given = [whole.state_dict()], list[PackedBatch]()
    for _ in range(12):
        given += train(whole, batches, 1)
        states.append(whole.state_dict())
    whole.teardown("fit")
    assert sum(bool(batch.media) for batch in given) > 8
    for stop in stops:
        again = module(rows, num_workers=workers)
        again.load_state_dict(through_a_file(states[stop]))
        following = train(again, iter(again.train_dataloader()), 2)
        again.teardown("fit")
        assert all(same_row(a, b) for a, b in zip(following, given[stop : stop + 2], strict=True))


def test_training_on_rows_is_training_on_their_chats(rows: Path, sources: dict[str, EncodedSource]) -> None:
    start = vision_model("qwen3_vl").state_dict()

    def made() -> PackedCausalLM:
        module = PackedCausalLM(vision_config("qwen3_vl"), learning_rate=1e-3)
        module.configure_model()
        module.model.load_state_dict(start)
        return module

    curve = Curve()
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False), curve], max_steps=3, limit_val_batches=0)
    trainer.fit(made(), EnergonPackDataModule(rows, num_workers=0))
    assert sum(bool(sources[key].media) for keys in curve.rows for key in keys) > 5
    twin = made()
    optimizer = twin.configure_optimizers()["optimizer"]
    unpacked = []
    for keys in curve.rows:
        chosen = [sources[key] for key in keys]
        total = torch.stack([summed_loss(alone(twin.model, source), source) for source in chosen]).sum()
        loss = total / sum(int((source.labels != IGNORE).sum()) for source in chosen)
        unpacked.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    packed_losses = curve.steps()
    assert abs(packed_losses[-1] - packed_losses[0]) > 0.05
    assert max(abs(a - b) for a, b in zip(packed_losses, unpacked, strict=True)) <= 1e-4
    # What is said of the encoder is compared with the model for rows too.
    other = PackedCausalLM(vision_config("qwen3_vl") | {"image_token_id": 6})
    with pytest.raises(ValueError, match=r"writes images as token 5, and image_token_id of Qwen3VL.* is 6"):
        quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_steps=1, limit_val_batches=0).fit(
            other, EnergonPackDataModule(rows, num_workers=0)
        )


def test_a_run_that_is_killed_goes_on_and_writes_the_same(data: Path, rows: Path, tmp_path: Path) -> None:
    out, at = tmp_path / "rows", tmp_path / ".rows.prepack"

    def begun() -> bool:
        return any(path.stat().st_size for path in at.glob("train-part*.bin"))

    def work() -> None:
        # The part of train is under way, after some images.
        stand_still(ImageReader, "processed", when=begun)
        packed(data, out)

    kill_when(work, begun)
    assert not out.exists()
    assert list(at.glob("train-part*.bin"))
    packed(data, out)
    assert files(out) == files(rows)
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
    # As often as it is asked for.
    assert not prepack(data, out, capacity=CAPACITY, multiple=4, workers=0, encoder=vision_encoder()).fresh


def with_images(samples: list[Any], *, least: int) -> int:
    """Place of a row with so many chats, of which one has images and another has none."""
    for i, (_, parts) in enumerate(samples):
        row = Row.of(parts)
        assert row.files is not None
        if len(row.keys) >= least and 0 < sum(map(bool, row.files)) < len(row.keys):
            return i
    raise AssertionError("no such row")


def test_a_changed_byte_of_an_image_is_found_and_leaves_out_its_chat(copied: Path) -> None:
    before = dict(apart(one_pass(copied)))
    key = flip(copied / "train-0001.tar", ".png")
    row = Row.of(dict(samples_of(copied / "train-0001.tar"))[key])
    ((place, problem),) = row.broken.items()
    assert problem.endswith("is not what was written: the hash differs")
    with pytest.raises(
        VerificationError, match=rf"train-0001\.tar: row {key}: source '{row.keys[place]}': its file \d+\.png is not"
    ):
        verify(copied)
    batches = one_pass(copied)
    assert [each for batch in batches for each in batch.left_out] == [(row.keys[place], "damaged", row.lengths[place])]
    after = dict(apart(batches))
    assert set(before) - set(after) == {row.keys[place]}
    assert all(torch.equal(held[name], before[name_of][name]) for name_of, held in after.items() for name in held)


@pytest.mark.parametrize("damage", ["missing", "swapped", "truncated"])
def test_images_that_are_not_theirs_or_cannot_be_decoded_leave_out_their_chats(copied: Path, damage: str) -> None:
    changed: list[Row] = []

    def change(samples: list[Any]) -> list[Any]:
        at = with_images(samples, least=2)
        key, parts = samples[at]
        row = Row.of(parts)
        changed.append(row)
        assert row.files is not None
        place = next(i for i, each in enumerate(row.files) if each)
        if damage == "missing":
            parts = {name: part for name, part in parts.items() if not name.startswith("0.")}
        elif damage == "swapped":
            parts = parts | {"0.png": next(part for name, part in samples[at - 1][1].items() if name.startswith("0."))}
        else:
            # By its hash it is what was written: a machine whose Pillow cannot decode it.
            broken = [[type(file)(TRUNCATED, file.kind, file.tokens, file.nbytes) for file in each] for each in row.files]
            other = [broken[i] if i == place else each for i, each in enumerate(row.files)]
            parts = Row(**vars(row) | {"files": other}).parts()
        return [*samples[:at], (key, parts), *samples[at + 1 :]]

    rewrite(copied / "train-0000.tar", change)
    (row,) = changed
    assert row.files is not None
    place = next(i for i, each in enumerate(row.files) if each)
    batches = one_pass(copied)
    reason = "image" if damage == "truncated" else "damaged"
    assert [each for batch in batches for each in batch.left_out] == [(row.keys[place], reason, row.lengths[place])]
    # The others of its row are trained on.
    rest = [key for key in row.keys if key != row.keys[place]]
    assert rest
    assert rest in [batch.source_keys for batch in batches]
    with pytest.raises(VerificationError, match="is missing" if damage == "missing" else "is not"):
        verify(copied)


@pytest.mark.parametrize("algorithm", ["minimum_bin_slack", "concatenative"])
def test_limits_of_media_hold_for_rows(data: Path, rows: Path, tmp_path: Path, algorithm: str) -> None:
    def most(path: Path) -> tuple[int, int]:
        held = [[file for each in row.files or () for file in each] for row in stored(path).values()]
        return max(sum(f.tokens for f in row) for row in held), max(sum(f.nbytes for f in row) for row in held)

    tokens, nbytes = most(rows)
    assert tokens > 42
    limited = packed(data, tmp_path / "tokens", algorithm=algorithm, max_media_tokens=42, splits=["train"])
    assert 30 < most(limited)[0] <= 42
    manifest = verify(limited).manifest
    before = Manifest.read(rows)
    assert before is not None
    # None is lost, and it takes more rows.
    split, free = manifest.splits["train"], before.splits["train"]
    assert split.sources == free.sources
    assert free.lower_bound <= split.lower_bound <= free.rows < split.rows
    if algorithm == "concatenative":
        return
    strict = packed(data, tmp_path / "bytes", max_media_bytes=nbytes // 3, splits=["train"])
    assert most(strict)[1] <= nbytes // 3
    found = verify(strict).manifest.splits["train"]
    assert found.left_out["media_budget"].sources > 3
    assert found.sources + sum(each.sources for each in found.left_out.values()) == COUNT
    # In wide rows images are what counts: the bound is theirs, and since most of them exceed half of the limit 17 is the least.
    wide = verify(packed(data, tmp_path / "wide", capacity=512, max_media_tokens=42, splits=["train"])).manifest.splits["train"]
    assert -(-wide.tokens // 512) < wide.lower_bound == -(-wide.media_tokens // 42) < wide.rows <= 19
    # They are settings of the rows.
    one_pass(limited, packing=PackingPolicy(CAPACITY, max_media_tokens=42))
    with pytest.raises(ManifestError, match=r"packing\.max_media_tokens: 42 in the rows, 41 now"):
        module(limited, packing=PackingPolicy(CAPACITY, max_media_tokens=41))
    with pytest.raises(ManifestError, match=r"packing\.buffer_media_tokens: not used with rows that are decided, 9 now"):
        module(limited, packing=PackingPolicy(CAPACITY, buffer_media_tokens=9))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of tokenizer and image processor."""
    made = tmp_path_factory.mktemp("model")
    vision_tokenizer().save_pretrained(made)
    image_processor("qwen3_vl").save_pretrained(made)
    return made


def test_the_command_writes_them_and_the_folder_brings_all_that_is_needed(
    data: Path, rows: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows"
    main(
        [
            *("prepack", str(data), str(out), "--capacity", str(CAPACITY), "--multiple", "4", "--workers", "0"),
            *("--shards", "3", "--vision", "qwen3_vl", "--tokenizer", str(folder), "--no-progress"),
        ]
    )
    assert " images of " in capsys.readouterr().out
    assert {name: part for name, part in files(out).items() if name.endswith(".tar")} == {
        name: part for name, part in files(rows).items() if name.endswith(".tar")
    }
    for options in ({"vision": "qwen3_vl"}, {"tokenizer": folder, "vision": "qwen3_vl"}):
        (batch, *_) = module(out, **options).val_dataloader()
        assert batch.media
    main(["prepack", "--verify", str(out)])
    assert "boundaries, images and labels are those" in capsys.readouterr().out


def test_images_beside_a_file_go_into_the_rows(folder: Path, tmp_path: Path) -> None:
    at = tmp_path / "data"
    at.mkdir()
    lines = []
    for i in range(6):
        (at / f"{i}.png").write_bytes(picture(i))
        lines.append(json.dumps({"images": [f"{i}.png" if i != 3 else "none.png"], **chat(i, 1)}))
    (at / "chats.jsonl").write_text("\n".join(lines) + "\n")
    CrudeJsonlDatasetFactory.prepare_dataset(at / "chats.jsonl")
    made = prepack(at / "chats.jsonl", tmp_path / "rows", capacity=CAPACITY, vision="qwen3_vl", tokenizer=folder, workers=0)
    assert {reason: each.sources for reason, each in made.manifest.splits["train"].left_out.items()} == {"image": 1}
    shutil.rmtree(at)
    given = apart(one_pass(made.path))
    assert len(given) == 5
    for key, held in given:
        i = int(key.rpartition("/")[2])
        expected = vision_encoder()("a", {"images": [picture(i)], **chat(i, 1)}).completed()
        assert torch.equal(held["pixel_values"], expected.media["pixel_values"])


def test_another_image_processor_or_family_is_refused(rows: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"encoder\.family: 'qwen3_vl' in the rows, 'qwen2_vl' now"):
        module(rows, vision="qwen2_vl")
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    image_processor("qwen3_vl", image_mean=[0.1, 0.2, 0.3]).save_pretrained(other)
    settings = r"encoder\.image_processor\.settings: '\w+' in the rows, '\w+' now"
    with pytest.raises(ManifestError, match=settings):
        module(rows, tokenizer=other)
    with pytest.raises(ManifestError, match=settings):
        module(rows, encoder=VisionChatEncoder(other, family="qwen3_vl"))
    (other / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match="no image processor can be loaded from"):
        module(rows, tokenizer=other)
    assert one_pass(rows, encoder=vision_encoder())
    # Rows of text have no family.
    text = pack_rows(write_webdataset(tmp_path / "text", {"train": records_of([5, 6, 7])}), tmp_path / "text_rows").path
    with pytest.raises(ManifestError, match=r"encoder\.family: 'not set' in the rows, 'qwen3_vl' now"):
        module(text, vision="qwen3_vl")
    with pytest.raises(ManifestError, match=r"packing\.max_media_tokens: not used with rows of tokens alone, 9 now"):
        module(text, packing=PackingPolicy(64, max_media_tokens=9))


def test_another_tokenizer_beside_the_rows_is_refused(copied: Path) -> None:
    file = copied / "tokenizer" / "tokenizer.json"
    said = json.loads(file.read_text())
    vocabulary = said["model"]["vocab"]
    one, two = sorted(vocabulary)[-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(said))
    with pytest.raises(ManifestError, match=r"beside the rows .*\n  encoder\.tokenizer\.backend: '\w+' in the rows, '\w+' now"):
        module(copied)
    assert module(copied, tokenizer=None, encoder=vision_encoder()).encoder.has_media
    tokenizer = r"the tokenizer beside the rows is not the one .*: encoder\.tokenizer\.backend: '\w+' in the rows, '\w+' now"
    with pytest.raises(VerificationError, match=rf"is damaged:\n  {tokenizer}\nRestore it"):
        verify(copied)
    image_processor("qwen3_vl", image_mean=[0.1, 0.2, 0.3]).save_pretrained(copied / "tokenizer")
    settings = (
        r"the image processor beside the rows is not .*: encoder\.image_processor\.settings: '\w+' in the rows, '\w+' now"
    )
    with pytest.raises(VerificationError, match=rf"is damaged:\n  {tokenizer}\n  {settings}\nRestore it"):
        verify(copied)
    file.write_text("{")
    with pytest.raises(VerificationError, match=rf"no tokenizer can be loaded from .*\n  {settings}"):
        verify(copied)
    # With another that is given, they can be read.
    shutil.rmtree(copied / "tokenizer")
    assert verify(copied).files


class Opaque(NumberEncoder):
    """Says that it has media."""

    has_media = True


class Silent(NumberEncoder):
    """Has M-RoPE positions, and does not say so."""

    def __call__(self, key: str, record: Any) -> EncodedSource:
        source = super().__call__(key, record)
        source.mrope = torch.zeros(3, len(source), dtype=torch.int64)
        return source


def test_what_rows_cannot_hold_is_refused(data: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_webdataset(tmp_path / "text", {"train": records_of([5, 6, 7])})
    for encoder, said in (
        (Opaque(), "Opaque gives images or the like, .* the methods files_of and with_files"),
        (Silent(), r"sample 'train\d+' has M-RoPE positions, and Silent does not say so"),
    ):
        with pytest.raises(ValueError, match=said):
            pack_rows(text, tmp_path / "rows", encoder=encoder)
    for options, said in (
        ({"vision": "qwen3_vl", "encoder": vision_encoder()}, "vision='qwen3_vl' makes an encoder from the folder"),
        ({"overlength": "truncate"}, "overlength='truncate' would cut sources"),
        ({"max_media_tokens": 9, "min_bins": 2}, "max_media_tokens=9 makes more packs"),
    ):
        with pytest.raises(ValueError, match=said):
            packed(data, tmp_path / "rows", **options)
    with pytest.raises(ValueError, match="max_media_tokens=9 limits images and the like, which NumberEncoder does not give"):
        pack_rows(text, tmp_path / "rows", max_media_tokens=9)
    assert not (tmp_path / "rows").exists()
    with pytest.raises(SystemExit):
        main(
            ["prepack", str(data), str(tmp_path / "rows"), "--capacity", "192", "--vision", "x", "--format", "megatron-bridge"]
        )
    assert "has no place for images" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["image/png", "PNG", "tar.gz", ""])
def test_a_kind_that_cannot_end_a_name_is_refused(kind: str) -> None:
    assert MediaFile(b"", kind="png", tokens=1, nbytes=1).kind == "png"
    with pytest.raises(ValueError, match=rf"kind='{kind}': the format of a file becomes the ending of its name"):
        MediaFile(b"", kind=kind, tokens=1, nbytes=1)


def test_formats_of_others_hold_no_images(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [[{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Yes."}]]}')
    with pytest.raises(ValueError, match="converted hold tokens and no images, and VisionChatEncoder gives images"):
        convert(chats, tmp_path / "rows", capacity=CAPACITY, encoder=vision_encoder())
    pytest.importorskip("pyarrow")
    with pytest.raises(SystemExit):
        main(["convert", str(rows), str(tmp_path / "parquet"), "--to", "megatron-bridge"])
    assert "hold images, for which this format has no place" in capsys.readouterr().err
    assert not (tmp_path / "parquet").exists()


def test_rows_of_an_encoder_of_ones_own_need_it(data: Path, tmp_path: Path) -> None:
    class Own(VisionChatEncoder):
        def fingerprint(self) -> dict[str, Any]:
            return super().fingerprint() | {"encoder": "own"}

    encoder = Own(vision_tokenizer(), image_processor("qwen3_vl"), family="qwen3_vl")
    rows = packed(data, tmp_path / "rows", encoder=encoder, splits=["val"])
    with pytest.raises(ManifestError, match=r"of an encoder of your own .*: give it \(encoder="):
        module(rows)
    data_module = EnergonPackDataModule(rows, encoder=encoder, num_workers=0)
    data_module.setup("validate")
    assert {
        number_of_images for batch in data_module.val_dataloader() for number_of_images in batch.media_rows["image_grid_thw"]
    }
