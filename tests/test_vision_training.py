"""Training on images: a packed run follows the unpacked one; the example learns; what does not fit together is refused."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from lightning_pack import EnergonPackDataModule, PackedAttention, PackedBatch, PackedCausalLM, PackingPolicy
from lightning_pack.encoders import MediaRecord
from lightning_pack.prepare import prepare_jsonl, prepare_skimage
from lightning_pack.prepare.skimage import LOADERS, captioned
from lightning_pack.source import IGNORE
from tests.test_packed_equals_unpacked import LossCurve
from tests.test_vision_rows import alone, summed_loss
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

needs_images = pytest.mark.skipif(importlib.util.find_spec("skimage") is None, reason="needs scikit-image")


class Curve(LossCurve):
    """Remembers the keys of each row too."""

    def __init__(self) -> None:
        super().__init__(1)
        self.rows: list[list[str]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: object, batch: PackedBatch, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.rows.append(batch.source_keys)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_packed_run_on_images_follows_the_unpacked_run(tmp_path: Path, family: str) -> None:
    samples = [sample(i, 1 + i % 3) for i in range(24)]
    path = write_shards(tmp_path / "chats", {"train": samples})
    data = EnergonPackDataModule(path, encoder=vision_encoder(family), packing=PackingPolicy(320, buffer_size=8), num_workers=0)
    start = vision_model(family).state_dict()

    def module() -> PackedCausalLM:
        made = PackedCausalLM(vision_config(family), learning_rate=1e-3)
        made.configure_model()
        made.model.load_state_dict(start)
        return made

    curve = Curve()
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False), curve], max_steps=6, limit_val_batches=0)
    trainer.fit(module(), data)
    assert min(map(len, curve.rows)) >= 2

    twin, encoder = module(), vision_encoder(family)
    optimizer = twin.configure_optimizers()["optimizer"]
    unpacked = []
    for keys in curve.rows:
        total, targets, images = torch.zeros(()), 0, 0
        for key in keys:
            members = dict(samples[int(key.rpartition("train")[2])])
            record = MediaRecord(json.loads(members.pop("json")), files=members, folder=None)
            source = encoder(key, record).completed()
            total = total + summed_loss(alone(twin.model, source), source)
            targets += int((source.labels != IGNORE).sum())
            images += len(source.media["image_grid_thw"])
        assert images > len(keys)
        loss = total / targets
        unpacked.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    packed = curve.steps()
    assert abs(packed[-1] - packed[0]) > 0.1
    assert max(abs(a - b) for a, b in zip(packed, unpacked, strict=True)) <= 1e-4


def test_a_placeholder_that_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "chats", {"train": [sample(i, 1) for i in range(8)]})
    data = EnergonPackDataModule(path, encoder=vision_encoder(), packing=PackingPolicy(320, buffer_size=4), num_workers=0)
    module = PackedCausalLM(vision_config("qwen3_vl") | {"image_token_id": 6})
    with pytest.raises(ValueError, match=r"writes images as token 5, and image_token_id of Qwen3VL.* is 6: set image_token_id"):
        quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_steps=1, limit_val_batches=0).fit(module, data)


def test_a_memory_probe_without_pixels_is_refused(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "chats", {"train": [sample(i, 1) for i in range(8)]})
    data = EnergonPackDataModule(path, encoder=vision_encoder(), packing=PackingPolicy(320, buffer_size=4), num_workers=0)
    attention = PackedAttention(monitor=False, probe_memory=True)
    with pytest.raises(ValueError, match="heaviest rows are made of text, and this encoder gives images"):
        quiet_trainer(callbacks=[attention], max_steps=1, limit_val_batches=0).fit(
            PackedCausalLM(vision_config("qwen3_vl")), data
        )


@needs_images
# Lightning calls jsonargparse in a way that it calls deprecated; the other command-line tests run in processes of their own.
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_the_example_learns_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_pack.cli import main

    config = yaml.safe_load((Path(__file__).parents[1] / "configs" / "vision_quickstart.yaml").read_text())
    # Its own settings, for fewer steps.
    config["trainer"] |= {"max_steps": 30, "val_check_interval": 15, "enable_progress_bar": False, "log_every_n_steps": 1}
    config["trainer"]["callbacks"][0]["init_args"]["every_n_train_steps"] = 15
    config["data"]["num_workers"] = 0
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", "config.yaml"])
    table = (tmp_path / "runs/vision_quickstart/logs/version_0/metrics.csv").read_text().splitlines()
    at = table[0].split(",").index("train_loss")
    losses = [float(line.split(",")[at]) for line in table[1:] if line.split(",")[at]]
    assert len(losses) == 30
    assert losses[0] > 5
    assert sum(losses[-5:]) / 5 < losses[0] / 2
    main(["fit", "--config", "config.yaml", "--ckpt_path", "runs/vision_quickstart/step=15.ckpt"])
    again = (tmp_path / "runs/vision_quickstart/logs/version_1/metrics.csv").read_text().splitlines()
    at = again[0].split(",").index("train_loss")
    # The same losses, to the last digit.
    assert [float(line.split(",")[at]) for line in again[1:] if line.split(",")[at]] == losses[15:]


@needs_images
def test_images_with_their_captions(tmp_path: Path) -> None:
    (root,) = importlib.util.find_spec("skimage").submodule_search_locations
    images, skipped = captioned(Path(root) / "data")
    assert [image.name for image in images] == list(LOADERS)
    assert not skipped
    cat = next(image for image in images if image.name == "chelsea")
    assert cat.title == "Chelsea the cat"
    assert cat.caption.startswith("Chelsea the cat. An example with texture")
    for image in images:
        assert max(Image.open(io.BytesIO(image.content)).size) <= 256
        assert not any(word in image.caption for word in ("downloaded", "CC0", "copyright", "Returns", "ndarray"))
    made = prepare_skimage(tmp_path / "out", progress=False)
    assert made.train + made.val == 6 * len(LOADERS)
    assert made.val > 3
    assert made.lengths.left_out == {}
    assert made.lengths.longest < 512
    assert not prepare_skimage(tmp_path / "out").fresh


def test_a_file_of_ones_own_becomes_shards_with_its_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_pack.cli import main

    model = tmp_path / "model"
    vision_tokenizer().save_pretrained(model)
    image_processor("qwen3_vl").save_pretrained(model)
    (tmp_path / "pictures").mkdir()
    lines = []
    for i in range(12):
        (tmp_path / "pictures" / f"{i}").write_bytes(picture(i, kind=("PNG", "JPEG", "WEBP")[i % 3]))
        lines.append(json.dumps({"images": [f"pictures/{i}"], **chat(i, 1)}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    options = ["--tokenizer", str(model), "--vision", "qwen3_vl", "--no-progress"]
    main(["prepare", str(tmp_path / "chats.jsonl"), str(tmp_path / "out"), *options])
    assert "12 records taken evenly" in capsys.readouterr().out
    # All that is needed is in the dataset.
    for old in ("pictures", "model"):
        shutil.rmtree(tmp_path / old)
    data = EnergonPackDataModule(tmp_path / "out", vision="qwen3_vl", packing=PackingPolicy(320), num_workers=0, epochs=1)
    data.setup("fit")
    rows = [*data.train_dataloader(), *data.val_dataloader()]
    data.teardown("fit")
    assert sum(len(row.source_keys) for row in rows) == sum(len(row.media["image_grid_thw"]) for row in rows) == 12
    assert not any(row.left_out for row in rows)

    (tmp_path / "chats.jsonl").write_text(json.dumps({"images": ["none.png"], **chat(0, 1)}))
    (tmp_path / "again").mkdir()
    vision_tokenizer().save_pretrained(model)
    image_processor("qwen3_vl").save_pretrained(model)
    with pytest.raises(ValueError, match=r"has 1 bad line of 1:\n  line 1: image 'none.png' is not there"):
        prepare_jsonl(tmp_path / "chats.jsonl", tmp_path / "again" / "out", tokenizer=model, vision="qwen3_vl")


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'lightning-pack\[vision\]'"):
        prepare_skimage(tmp_path / "out")
