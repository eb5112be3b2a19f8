"""What Lightning's own loggers keep of a real run: names, values, steps, figures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_pack import PackedAttention, PackedBatch, PackedCausalLM, PackingMonitor, PackingPolicy
from lightning_pack.callbacks import throughput
from lightning_pack.callbacks.figures import FIGURE, drawn
from lightning_pack.callbacks.logged_metrics import METRICS, When
from lightning_pack.callbacks.monitor import LeftOutWarning
from lightning_pack.metrics import REASONS, PackingMetrics
from lightning_pack.source import EncodedSource
from tests import logger_files, metrics_table
from tests.tiny_models import Rows, quiet_trainer, tiny_config

POLICY = PackingPolicy(capacity=16, multiple=4)
LENGTHS = [(5, 3), (16,), (7,), (4, 2, 1), (13,), (8, 8)]
EPOCHS = 2
#: Libraries that would tell their makers of a run, or of its failure.
SILENCE = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_X_DISABLE_STATS": "true",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_SILENT": "true",
    # A busy machine takes a while to start its service.
    "WANDB__SERVICE_WAIT": "240",
    "WANDB_INIT_TIMEOUT": "240",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "DO_NOT_TRACK": "true",
}


def row(*lengths: int, reasons: tuple[str, ...] = ()) -> PackedBatch:
    sources = [EncodedSource.of(f"s{length}", torch.arange(length)) for length in lengths]
    markers = [EncodedSource.dropped(f"gone/{reason}", reason, 20) for reason in reasons]
    return PackedBatch.from_packs([POLICY.build([*sources, *markers])], pad_id=0)


@dataclass(frozen=True)
class Logged:
    """What each logger has, by its name, and the figures of those that take them."""

    numbers: dict[str, logger_files.Values]
    #: Step -> PNG.
    figures: dict[str, dict[int, bytes]]


def train_and_test(loggers: list[Logger]) -> None:
    """Two epochs with validation, then a test; every reason to leave a source out occurs."""
    seed_everything(0)
    run = quiet_trainer(
        logger=loggers,
        callbacks=[PackedAttention(), PackingMonitor(policy=POLICY, summary=False, figures=len(loggers) > 1)],
        max_epochs=EPOCHS,
        log_every_n_steps=2,
        num_sanity_val_steps=0,
    )
    module = PackedCausalLM(tiny_config("llama"))
    rows = Rows(*(row(*lengths, reasons=REASONS if lengths == (13,) else ()) for lengths in LENGTHS))
    with pytest.MonkeyPatch.context() as patch:
        # A CPU has no known peak; that of a device is all that is made up here.
        patch.setattr(throughput, "peak_flops", lambda device: 10**12)
        with pytest.warns(LeftOutWarning):
            run.fit(module, rows, Rows(row(9), row(10, 2)))
        run.test(module, Rows(row(6, 1)), verbose=False)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    """Four loggers of one run."""
    path = tmp_path_factory.mktemp("loggers")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SILENCE.items():
            patch.setenv(name, value)
        yield _four(path)


def _four(path: Path) -> Logged:
    import wandb

    (path / "wandb").mkdir()
    board, table = TensorBoardLogger(path / "board", default_hp_metric=False), CSVLogger(path / "csv")
    weights = WandbLogger(save_dir=path / "wandb", offline=True, project="packing")
    flow = MLFlowLogger(tracking_uri=f"file:{path / 'mlflow'}")
    try:
        train_and_test([board, table, weights, flow])
        offline = Path(weights.experiment.dir).parent
    finally:
        wandb.teardown()
    numbers, images = logger_files.wandb_values(offline)
    flow_run = path / "mlflow" / str(flow.experiment_id) / str(flow.run_id)
    files = (flow_run / "artifacts" / FIGURE).glob("*.png")
    return Logged(
        numbers={
            "csv": logger_files.csv_values(Path(table.log_dir)),
            "tensorboard": logger_files.tensorboard_values(Path(board.log_dir)),
            "wandb": numbers,
            "mlflow": logger_files.mlflow_values(flow_run),
        },
        figures={
            "tensorboard": logger_files.tensorboard_images(Path(board.log_dir))[FIGURE],
            "wandb": {step: (offline / "files" / one).read_bytes() for step, (one,) in images[FIGURE].items()},
            "mlflow": {int(file.stem.removeprefix("step_")): file.read_bytes() for file in files},
        },
    )


def test_a_run_logs_the_metrics_of_the_table_and_no_others(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    train_and_test([logger])
    listed = [name for metric in METRICS for name in metric.full_names]
    assert len(listed) == len(set(listed))
    # Lightning adds the epoch to all that it logs.
    assert set(logger_files.csv_values(Path(logger.log_dir))) - {"epoch"} == set(listed)


@pytest.mark.slow
def test_every_logger_has_the_same_values_at_the_same_steps(logged: Logged) -> None:
    expected = logged.numbers["csv"]
    assert list(expected["packing/fill"]) == [1, 3, 5, 7, 9, 11]
    assert list(expected["packing/fill_epoch"]) == list(expected["packing/val_fill"]) == [5, 11]
    assert expected["packing/real_tokens_seen"][11] == EPOCHS * sum(map(sum, LENGTHS))
    for logger in ("wandb", "mlflow"):
        assert logged.numbers[logger] == expected, logger
    board = logged.numbers["tensorboard"]
    assert {name: list(values) for name, values in board.items()} == {name: list(values) for name, values in expected.items()}
    for name, values in expected.items():
        assert board[name] == pytest.approx(values, rel=1e-6), name


@pytest.mark.slow
def test_loggers_that_take_figures_have_one_for_each_epoch(logged: Logged) -> None:
    assert set(logged.figures) == {"tensorboard", "wandb", "mlflow"}
    for logger, figures in logged.figures.items():
        assert sorted(figures) == list(logged.numbers["csv"]["packing/fill_epoch"]), logger
        for png in figures.values():
            assert logger_files.colors(png) > 20, logger


def test_the_table_in_the_readme_is_current() -> None:
    assert metrics_table.in_readme() == metrics_table.markdown()
    assert metrics_table.in_readme().count("\n") == 1 + len(METRICS)
    assert all(f"`{reason}`" in metrics_table.README.read_text() for reason in REASONS)


def test_names_say_when_they_are_logged() -> None:
    (fill,) = (metric for metric in METRICS if metric.name == "fill")
    assert fill.full_names == ("packing/fill", "packing/fill_epoch", "packing/val_fill", "packing/test_fill")
    assert fill.full_name(When.TEST) == "packing/test_fill"
    for metric in METRICS:
        assert metric.unit
        assert metric.meaning
        # What MLflow takes as it is.
        assert all(name.replace("_", "").replace("/", "").isalnum() for name in metric.full_names)


def test_the_figure_shows_what_was_counted() -> None:
    metrics = PackingMetrics(POLICY)
    metrics.update(row(5, 3, reasons=("overlength", "corrupt")))
    metrics.update(row(13))
    stats = metrics.compute()
    assert (stats.slots, stats.alignment_padding, stats.tail_padding) == (32, 4 + 3, 4)
    figure = drawn(stats, title="Packing of epoch 3")
    lengths, slots = figure.axes
    (outline,) = lengths.patches
    assert outline.get_data().values.sum() == 3
    assert outline.get_data().edges[-1] == POLICY.capacity
    names = [label.get_text() for label in slots.get_yticklabels()]
    drawn_bars = dict(zip(names, (bar.get_width() for bar in slots.patches), strict=True))
    assert drawn_bars == {
        "target tokens": 18,
        "other real tokens": 3,
        "alignment padding": 7,
        "tail padding": 4,
        "left out: overlength": 20,
        "left out: corrupt": 20,
    }
    assert [text.get_text() for text in slots.texts] == ["56.2%", "9.4%", "21.9%", "12.5%", "1 sources", "1 sources"]
    without_policy = PackingMetrics()
    without_policy.update(row(5))
    assert len(drawn(without_policy.compute(), title="").axes) == 1


def fit(path: Path, logger: Any, **options: Any) -> PackingMonitor:
    monitor = PackingMonitor(policy=POLICY, summary=False, figures=True)
    run = quiet_trainer(
        logger=logger, callbacks=[PackedAttention(), monitor], max_epochs=2, log_every_n_steps=2, **{"max_steps": 4, **options}
    )
    run.fit(PackedCausalLM(tiny_config("llama")), Rows(row(5, 3), row(16)))
    return monitor


def told(caught: Any) -> list[str]:
    return [str(warning.message) for warning in caught if "figures" in str(warning.message)]


def test_figures_without_a_logger_for_them_are_told_of_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="logs no figures") as caught:
        fit(tmp_path, CSVLogger(tmp_path))
    (text,) = told(caught)
    assert "logs no figures: the trainer has CSVLogger, and figures go to TensorBoardLogger, WandbLogger, MLFlowLogger" in text
    with pytest.warns(UserWarning, match="logs no figures") as caught:
        fit(tmp_path, False)
    (text,) = told(caught)
    assert "the trainer has no logger" in text


def test_figures_without_matplotlib_are_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    with pytest.warns(UserWarning, match="logs no figures") as caught:
        fit(tmp_path, logger)
    (text,) = told(caught)
    assert "drawn with matplotlib: pip install 'lightning-pack[plot]'" in text
    assert "packing/fill_epoch" in logger_files.tensorboard_values(Path(logger.log_dir))
    assert not logger_files._events(Path(logger.log_dir)).Tags()["images"]
