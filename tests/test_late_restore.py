"""Strategies that restore a checkpoint after the optimizers exist, and may have asked for the loader by then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_pack.resume import ResumeError
from tests.ranks import on_ranks
from tests.training import Options, Recorder, datamodule, trainer


class Sharded(Recorder):
    """Asks for the number of steps while it makes its optimizer, so Lightning makes the loader before it restores."""

    def configure_model(self) -> None:
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches == 12
        return super().configure_optimizers()

    def weights(self) -> list[float]:
        return torch.cat([p.full_tensor().flatten() for p in self.parameters()]).tolist()  # type: ignore[attr-defined]


def fit(data: str, **options: Any) -> Sharded:
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    settings = {"limit_train_batches": 4, "max_epochs": 3, "strategy": strategy}
    options_of_run = Options(data=data, trainer=settings, **options)
    module = Sharded()
    trainer(options_of_run).fit(module, datamodule(options_of_run), ckpt_path=options_of_run.resume)
    return module


def resume(argument: dict[str, Any]) -> dict[str, Any]:
    data, folder = argument["data"], argument["folder"]
    whole = fit(data, checkpoints=folder)
    saved = f"{folder}/step=6.ckpt"
    resumed = fit(data, resume=saved)
    meta = torch.load(f"{saved}/meta.pt", weights_only=True)
    del meta["EnergonPackDataModule"]
    torch.save(meta, f"{saved}/meta.pt")
    refusal = ""
    try:
        fit(data, resume=saved)
    except ResumeError as e:
        refusal = str(e)
    return {
        "expected": list(whole.trained.values())[6:],
        "resumed": list(resumed.trained.values()),
        "weights": whole.weights() == resumed.weights(),
        "refusal": refusal,
    }


@pytest.mark.slow
def test_a_late_restore_is_exact_and_a_missing_position_is_noticed(numbers: Path, tmp_path: Path) -> None:
    argument = {"data": str(numbers), "folder": str(tmp_path / "c")}
    (result,) = on_ranks("tests.test_late_restore:resume", argument, folder=tmp_path, ranks=1)
    assert len(result["expected"]) == 6
    assert result["resumed"] == result["expected"]
    assert result["weights"]
    assert "holds no position in the data for EnergonPackDataModule" in result["refusal"]
