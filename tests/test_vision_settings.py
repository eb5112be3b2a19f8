"""What does not fit together in a run on images is refused before its first step, by the name of the setting."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_pack import EnergonPackDataModule, PackedAttention, PackedCausalLM, PackingPolicy, ParallelLayout
from lightning_pack.encoders import VisionChatEncoder
from lightning_pack.encoders.vision_checks import check_model
from lightning_pack.trainer_checks import refuse_pipeline, require_packed
from tests.test_vision_rows import vision_row, vision_sources
from tests.tiny_models import Rows, make_sources, pack_row, quiet_trainer, tiny_config
from tests.tiny_vision import (
    image_processor,
    sample,
    vision_config,
    vision_encoder,
    vision_model,
    vision_tokenizer,
    write_shards,
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("settings") / "chats", {"train": [sample(i, 1) for i in range(8)]})


def changed(family: str, *, part: str | None = None, **changes: Any) -> dict[str, Any]:
    config = vision_config(family)
    (config if part is None else config[part]).update(changes)
    return config


@pytest.mark.parametrize(
    ("config", "processor", "message"),
    [
        (
            vision_config("qwen2_5_vl"),
            {},
            r"family 'qwen3_vl' is for models of model_type 'qwen3_vl' or 'qwen3_vl_moe', and that of Qwen2_5_VLFor\w+ is "
            r"'qwen2_5_vl': set vision",
        ),
        (tiny_config("llama", vocab_size=320), {}, r"gives images, and LlamaForCausalLM \(model_type='llama'\) has no vision"),
        (changed("qwen3_vl", image_token_id=6), {}, "writes images as token 5, and image_token_id of Qwen3VL.* is 6"),
        (
            vision_config("qwen3_vl"),
            {"patch_size": 14},
            "patch_size=14 of the image processor, and patch_size=16 of",
        ),
        (
            changed("qwen3_vl", part="vision_config", spatial_merge_size=4),
            {},
            "merge_size=2 of the image processor, and spatial_merge_size=4 of the vision_config",
        ),
        (
            changed("qwen3_vl", part="vision_config", temporal_patch_size=1),
            {},
            "temporal_patch_size=2 of the image processor, and temporal_patch_size=1",
        ),
        (
            changed("qwen3_vl", part="vision_config", out_hidden_size=32),
            {},
            "out_hidden_size=32 of the vision_config of .*, and hidden_size=64 of its text_config",
        ),
    ],
)
def test_model_and_encoder_that_do_not_match(
    chats: Path, config: dict[str, Any], processor: dict[str, Any], message: str
) -> None:
    encoder = VisionChatEncoder(vision_tokenizer(), image_processor("qwen3_vl", **processor), family="qwen3_vl")
    data = EnergonPackDataModule(chats, encoder=encoder, packing=PackingPolicy(320, buffer_size=4), num_workers=0)
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_steps=1, limit_val_batches=0)
    with pytest.raises(ValueError, match=message):
        trainer.fit(PackedCausalLM(config), data)
    assert trainer.global_step == 0


def test_a_width_by_another_name_is_compared_too() -> None:
    encoder = vision_encoder("qwen2_vl")
    config = vision_model("qwen2_vl").config
    check_model(encoder.images, config, model="mine")
    config.vision_config.hidden_size = 32
    with pytest.raises(ValueError, match="hidden_size=32 of the vision_config of mine, and hidden_size=64 of its text_config"):
        check_model(encoder.images, config, model="mine")


def test_context_parallel_ranks_do_not_share_images(chats: Path) -> None:
    data = EnergonPackDataModule(
        chats,
        encoder=vision_encoder(),
        packing=PackingPolicy(320, buffer_size=4),
        num_workers=0,
        parallel=ParallelLayout(eval_context=2),
    )
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_steps=1, limit_val_batches=0)
    with pytest.raises(ValueError, match=r"context=1, eval_context=2 of the datamodule's parallel layout cuts rows"):
        trainer.fit(PackedCausalLM(vision_config("qwen3_vl")), data)


def test_a_micro_batch_is_one_row() -> None:
    row = vision_row(vision_sources("qwen3_vl"))
    assert require_packed(row) is row
    row.input_ids = row.input_ids.expand(2, -1)
    with pytest.raises(ValueError, match=r"have the shape \[2, \d+\], and a micro-batch is one physical row, \[1, T\]"):
        require_packed(row)


class Stages(SingleDeviceStrategy):
    pipeline_model_parallel_size = 4


def test_pipelines_are_refused() -> None:
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_steps=1, strategy=Stages("cpu"))
    with pytest.raises(ValueError, match=r"pipeline_model_parallel_size=4 of Stages: a pipeline cuts.*set it to 1"):
        trainer.fit(PackedCausalLM(tiny_config("llama")), Rows(pack_row(make_sources())))

    class Mesh:
        mesh_dim_names = ("dp", "pp")

        def __getitem__(self, name: str) -> Any:
            return SimpleNamespace(size=lambda: {"dp": 1, "pp": 2}[name])

    trainer.strategy._device_mesh = Mesh()
    Stages.pipeline_model_parallel_size = 1
    with pytest.raises(ValueError, match="pp of the device mesh=2 of Stages"):
        refuse_pipeline(trainer)


@pytest.mark.parametrize("name", ["max_media_tokens", "max_media_bytes", "buffer_media_tokens", "buffer_media_bytes"])
def test_limits_of_images_without_images(chats: Path, tmp_path: Path, name: str) -> None:
    vision_tokenizer().save_pretrained(tmp_path)
    data = EnergonPackDataModule(chats, tokenizer=tmp_path, packing=PackingPolicy(320, **{name: 9}), num_workers=0)
    with pytest.raises(ValueError, match=f"{name}=9 limits images and the like, which RecordEncoder does not give"):
        data.setup("fit")


def test_rules_that_do_not_fit_images(chats: Path) -> None:
    with pytest.raises(ValueError, match="capacity=322 is not a multiple of multiple=4: take 320"):
        PackingPolicy(322, multiple=4)
    data = EnergonPackDataModule(
        chats, encoder=vision_encoder(), packing=PackingPolicy(320, overlength="truncate"), num_workers=0
    )
    with pytest.raises(ValueError, match="overlength='truncate' would cut sources, and one with images is never cut"):
        data.setup("fit")
