"""Model FLOPs per second in real Trainer runs; two ranks are in test_monitor."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_pack import ModelFlops, PackedBatch, PackingMonitor, PackingPolicy
from lightning_pack.callbacks import throughput
from lightning_pack.callbacks.throughput import flops_of_module
from lightning_pack.source import EncodedSource
from tests.tiny_models import Rows, forward_inputs, quiet_trainer, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")

POLICY = PackingPolicy(capacity=16, multiple=4)
LENGTHS = [(5, 3), (16,), (7,), (1, 1, 1), (13,), (8, 8)]
WIDTHS = [12, 16, 8, 12, 16, 16]


def row(*lengths: int) -> PackedBatch:
    return PackedBatch.from_packs([POLICY.build([EncodedSource.of(str(n), torch.arange(n)) for n in lengths])], pad_id=0)


class Language(LightningModule):
    def __init__(self, kind: str = "mistral") -> None:
        super().__init__()
        self.model = tiny_model(kind)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        logits = self.model(**forward_inputs(batch)).logits[0]
        return nn.functional.cross_entropy(logits, batch.shift_labels[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(path: Path, *, module: LightningModule, steps: int = 6, rows: Any = LENGTHS, **how: Any) -> list[dict[str, float]]:
    """What the logger holds after logging every second step, and the checkpoint ``last.ckpt``."""
    flops = how.pop("flops", None)
    run = quiet_trainer(
        logger=CSVLogger(path), max_steps=steps, log_every_n_steps=2, callbacks=[PackingMonitor(flops=flops, policy=POLICY)]
    )
    run.fit(module, Rows(*(row(*lengths) for lengths in rows)), weights_only=True, **how)
    run.save_checkpoint(path / "last.ckpt")
    assert isinstance(run.logger, CSVLogger)
    with open(Path(run.logger.log_dir) / "metrics.csv") as file:
        rows = [{name: float(value) for name, value in line.items() if value} for line in csv.DictReader(file)]
    return [line for line in rows if "packing/fill" in line]


def per_token(line: dict[str, float]) -> float:
    """Operations for each real token, which does not depend on the time that a step took."""
    return line["packing/model_tflops_per_second"] * 1e12 / line["packing/real_tokens_per_second"]


def expected(flops: ModelFlops, steps: slice) -> float:
    """The same of these steps, counted from the lengths."""
    ((window, per_square),) = flops.attention
    assert window == 4
    lengths = [n for step in LENGTHS[steps] for n in step]
    squares = sum(n * n if n <= window else 2 * window * n - window**2 for n in lengths)
    return 3 * (sum(WIDTHS[steps]) * flops.per_position + per_square * squares) / sum(lengths)


def test_operations_of_each_interval_also_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Language()
    flops = ModelFlops.of(module.model.config)
    lines = fit(tmp_path / "whole", module=module)
    # The clock starts after the first step.
    assert [per_token(line) for line in lines] == [
        pytest.approx(expected(flops, steps)) for steps in (slice(1, 2), slice(2, 4), slice(4, 6))
    ]
    assert not [name for line in lines for name in line if name.endswith("mfu")]
    fit(tmp_path / "first", module=Language(), steps=3)
    monkeypatch.setattr(throughput, "peak_flops", lambda device: 5 * 10**11)
    rest = LENGTHS[3:] + LENGTHS[:3]
    lines = fit(tmp_path / "second", module=Language(), rows=rest, ckpt_path=tmp_path / "first" / "last.ckpt")
    # Step 4 is the first of this process; the interval that the stop cut in two has no rate.
    assert ["packing/mfu" in line for line in lines] == [False, True]
    assert per_token(lines[1]) == pytest.approx(expected(flops, slice(4, 6)))
    assert lines[1]["packing/mfu"] == pytest.approx(lines[1]["packing/model_tflops_per_second"] / 0.5)


def test_nothing_is_logged_where_the_work_is_not_known(tmp_path: Path) -> None:
    frozen, unknown = Language(), Language()
    frozen.model.get_input_embeddings().requires_grad_(False)
    unknown.model.config.model_type = "my_model"
    assert flops_of_module(Language()) == ModelFlops.of(Language().model.config)
    assert [flops_of_module(module) for module in (frozen, unknown, LightningModule())] == [None] * 3
    lines = fit(tmp_path / "a", module=frozen, steps=4)
    assert "packing/real_tokens_per_second" in lines[1]
    assert not [name for line in lines for name in line if "tflops" in name]
    # What the user says is taken as it is.
    flops = ModelFlops(per_position=7, attention=())
    (_, line) = fit(tmp_path / "b", module=frozen, steps=4, flops=flops)
    assert per_token(line) == pytest.approx(3 * 7 * sum(WIDTHS[2:4]) / 10)
