"""Operations of vision encoders against torch's own counter on tiny real models, and in what the monitor logs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.flop_counter import FlopCounterMode

from lightning_pack import ModelFlops, PackedAttention, PackedCausalLM, PackingMonitor, PackingPolicy
from lightning_pack.vision_flops import VISION_MODELS, VisionFlops
from tests.test_vision_rows import vision_row_of_one_pack, vision_sources
from tests.tiny_models import Rows, quiet_trainer
from tests.tiny_vision import vision_config, vision_model

#: Images and videos; in windows of 4 by 4 patches, some are cut at both sides.
GRIDS = [[1, 4, 4], [1, 6, 10], [3, 8, 2], [1, 2, 2]]


def counted(function: Any) -> dict[str, int]:
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        function()
    return {str(name).partition(".")[2]: number for name, number in counter.get_flop_counts()["Global"].items()}


def eager(family: str) -> Any:
    model = vision_model(family)
    # Plain matrix products, over each image or window alone.
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("family", VISION_MODELS)
def test_images_cost_what_torch_counts(family: str) -> None:
    model = eager(family)
    vision, grids = model.config.vision_config, torch.tensor(GRIDS)
    patches = int(grids.prod(-1).sum())
    pixels = torch.randn(patches, 3 * vision.temporal_patch_size * vision.patch_size**2)
    flops = ModelFlops.of(model.config).vision
    assert flops == VisionFlops.of(model.config)
    p, pairs, windows, tokens = flops.counts(grids).tolist()
    assert (p, tokens) == (patches, patches // 4)
    assert pairs == sum(t * (h * w) ** 2 for t, h, w in GRIDS)
    assert (0 < windows < pairs) == (family == "qwen2_5_vl")
    found = counted(lambda: model.model.visual(pixels, grid_thw=grids))
    assert found.keys() <= {"mm", "addmm", "bmm", "convolution"}
    linear = sum(number for name, number in found.items() if name != "bmm")
    assert flops.forward([p, 0, 0, tokens]) == linear
    assert flops.forward([0, pairs, windows, 0]) == found["bmm"]


@pytest.mark.parametrize("family", VISION_MODELS)
def test_text_costs_what_torch_counts(family: str) -> None:
    model, length = eager(family), 9
    flops = ModelFlops.of(model.config)
    positions = torch.arange(length).expand(4, 1, -1)
    found = counted(lambda: model(input_ids=torch.arange(10, 19)[None], position_ids=positions, use_cache=False))
    assert flops.forward(width=length, squared_lengths=[0]) == sum(found.get(name, 0) for name in ("mm", "addmm"))
    assert 2 * flops.forward(width=0, squared_lengths=[length**2]) == found["bmm"]


def test_two_images_and_a_video_of_two_frames() -> None:
    flops = VisionFlops(per_patch=1, per_pair=1, per_token=1, merge_size=2)
    assert flops.counts(torch.tensor([[1, 10, 10]] * 2)).tolist() == [200, 20000, 0, 50]
    assert flops.counts(torch.tensor([[2, 10, 10]])).tolist() == [200, 20000, 0, 50]
    assert flops.counts(torch.zeros(0, 3, dtype=torch.int64)).tolist() == [0, 0, 0, 0]


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match=r"per_window_pair=0, window=4.*give both"):
        VisionFlops(per_patch=1, per_pair=1, per_token=1, merge_size=2, window=4)
    with pytest.raises(ValueError, match="merge_size is at least 1"):
        VisionFlops(per_patch=1, per_pair=1, per_token=1, merge_size=0)
    with pytest.raises(ValueError, match=r"vision=\[1, 1, 0, 1\]: the operations of a vision encoder are not known"):
        ModelFlops(per_position=1, attention=()).forward(width=1, squared_lengths=[], vision=[1, 1, 0, 1])


def test_the_monitor_logs_them(tmp_path: Path) -> None:
    sources = vision_sources("qwen3_vl")
    rows = [vision_row_of_one_pack(part) for part in (sources[:1], sources[1:2], sources[2:4], sources[4:])]
    assert [len(row.media.get("image_grid_thw", ())) for row in rows] == [2, 0, 5, 3]
    module = PackedCausalLM(vision_config("qwen3_vl"))
    policy = PackingPolicy(capacity=1024)
    trainer = quiet_trainer(
        logger=CSVLogger(tmp_path),
        max_steps=4,
        log_every_n_steps=1,
        callbacks=[PackedAttention(), PackingMonitor(policy=policy, summary=False)],
    )
    trainer.fit(module, Rows(*rows))
    flops = ModelFlops.of(module.model.config)
    with open(Path(trainer.logger.log_dir) / "metrics.csv") as file:
        lines = [line for line in csv.DictReader(file) if line.get("packing/model_tflops_per_second")]
    assert len(lines) == 3
    for line, row in zip(lines, rows[1:], strict=True):
        squares = flops.squared_lengths(row.cu_seqlens.diff()).tolist()
        text = flops.training(width=row.width, squared_lengths=squares)
        grids = row.media.get("image_grid_thw")
        images = [] if grids is None else flops.vision.counts(grids).tolist()
        whole = flops.training(width=row.width, squared_lengths=squares, vision=images)
        assert (whole > 1.05 * text) == (grids is not None)
        # Operations for each real token, which do not depend on the time that a step took.
        rate = float(line["packing/model_tflops_per_second"]) * 1e12 / float(line["packing/real_tokens_per_second"])
        assert rate == pytest.approx(whole / int(row.cu_seqlens[-1]))
