"""Ranks whose shares are not equal: the end of a training pass, and evaluation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_pack import EnergonPackDataModule, PackedBatch, PackingPolicy
from tests.numbers_data import NumberEncoder, records_of, write_webdataset
from tests.ranks import on_ranks

pytestmark = pytest.mark.slow


class Sums(pl.LightningModule):
    """Sums losses over tokens, so that a row without a target counts nothing; its buffer is broadcast by DDP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Embedding(600, 8), torch.nn.Linear(8, 600))
        self.register_buffer("scale", torch.ones(1))
        self.trained: list[PackedBatch] = []
        self.passes: list[list[str]] = []

    def loss(self, batch: PackedBatch) -> torch.Tensor:
        logits = self.model(batch.input_ids) * self.scale
        return torch.nn.functional.cross_entropy(logits[0], batch.shift_labels[0], reduction="sum")

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        self.trained.append(batch)
        return self.loss(batch) / 100

    def on_validation_epoch_start(self) -> None:
        self.passes.append([])

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self.passes[-1] += batch.source_keys
        loss, count = self.loss(batch), batch.loss_mask.sum()
        self.log("loss_sum", loss, reduce_fx="sum", sync_dist=True, on_epoch=True, batch_size=1)
        self.log("tokens", count.float(), reduce_fx="sum", sync_dist=True, on_epoch=True, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def runs(argument: dict[str, Any]) -> list[dict[str, Any]]:
    """One run for every number of workers, in one group of processes."""
    return [fit_or_validate(argument | {"workers": workers}) for workers in argument["workers"]]


def fit_or_validate(argument: dict[str, Any]) -> dict[str, Any]:
    data = EnergonPackDataModule(
        argument["data"],
        encoder=NumberEncoder(),
        packing=PackingPolicy(capacity=64, buffer_size=16),
        num_workers=argument["workers"],
        epochs=argument.get("epochs"),
    )
    ranks = argument["ranks"]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0 if "epochs" in argument else 1.0,
    )
    module = Sums()
    if "epochs" in argument:
        trainer.fit(module, data)
    else:
        trainer.validate(module, data, verbose=False)
        trainer.validate(module, data, verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "keys": [key for batch in module.trained for key in batch.source_keys],
        "left_out": [[gone.key, gone.reason, gone.tokens] for batch in module.trained for gone in batch.left_out],
        "rows": len(module.trained),
        "steps": trainer.global_step,
        "passes": module.passes,
        "metrics": metrics,
    }


#: The first samples are short and the others long, so the shares of two ranks differ much in rows.
UNEVEN = records_of([4] * 30 + [40] * 90)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = {"train": UNEVEN, "val": UNEVEN[:60]}
    return write_webdataset(tmp_path_factory.mktemp("uneven") / "data", parts, shards=1)


def test_ranks_end_a_pass_together_and_report_what_is_left(uneven: Path, tmp_path: Path) -> None:
    argument = {"data": str(uneven), "workers": [0, 2], "ranks": 2, "epochs": 2}
    for results in zip(*on_ranks("tests.test_uneven_ranks:runs", argument, folder=tmp_path), strict=True):
        assert results[0]["rows"] == results[1]["rows"] == results[0]["steps"] > 10
        left = Counter(key for result in results for key, *_ in result["left_out"])
        trained = Counter(key for result in results for key in result["keys"])
        assert left, "the shares must be uneven"
        assert {reason for result in results for _, reason, _ in result["left_out"]} == {"uneven_ranks"}
        assert {tokens for result in results for *_, tokens in result["left_out"]} <= {4, 40}
        assert trained + left == Counter({f"train{i:06d}": 2 for i in range(120)})


def test_a_rank_without_a_row_is_an_error_on_every_rank(tmp_path: Path) -> None:
    data = write_webdataset(tmp_path / "one", {"train": records_of([5])}, shards=1)
    argument = {"data": str(data), "workers": 0, "ranks": 2, "epochs": 1}
    with pytest.raises(AssertionError, match=r"exit codes \[1, 1\]") as e:
        on_ranks("tests.test_uneven_ranks:fit_or_validate", argument, folder=tmp_path)
    assert str(e.value).count("ValueError: a data-parallel rank has no row to train on in this pass") >= 2


def test_validation_is_the_same_however_it_is_spread(uneven: Path, tmp_path: Path) -> None:
    losses, counts = [], set()
    for ranks in (1, 2):
        argument = {"data": str(uneven), "workers": [0, 1, 2, 3], "ranks": ranks}
        everyone = on_ranks("tests.test_uneven_ranks:runs", argument, folder=tmp_path / str(ranks), ranks=ranks)
        for results in zip(*everyone, strict=True):
            for number in (0, 1):
                seen = sorted(key for result in results for key in result["passes"][number])
                assert seen == [f"val{i:06d}" for i in range(60)]
            assert all(result["passes"][0] == result["passes"][1] for result in results)
            losses.append(results[0]["metrics"]["loss_sum"] / results[0]["metrics"]["tokens"])
            counts.add(results[0]["metrics"]["tokens"])
    assert len(counts) == 1
    # Sums of float32 in other orders; a source more or less would be 1 % and more.
    assert losses == pytest.approx([losses[0]] * 8, rel=1e-5)


def test_a_rank_without_a_row_takes_part_in_validation(tmp_path: Path) -> None:
    data = write_webdataset(tmp_path / "one", {"train": records_of([5]), "val": records_of([5])}, shards=1)
    argument = {"data": str(data), "workers": [0, 3], "ranks": 2}
    for results in zip(*on_ranks("tests.test_uneven_ranks:runs", argument, folder=tmp_path), strict=True):
        assert sorted(result["passes"] for result in results) == [[[], []], [["val000000"], ["val000000"]]]
        assert [result["metrics"]["tokens"] for result in results] == [4.0, 4.0]
