"""PackingMonitor in real Trainer runs; expected numbers are counted from the sources, not from the monitor's own metrics."""

import csv
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn

from lightning_pack.callbacks import throughput
from lightning_pack.callbacks.monitor import LeftOutWarning, PackingMonitor
from lightning_pack.callbacks.work import STEPS
from lightning_pack.flops import AttentionFlops, ModelFlops
from lightning_pack.metrics import COUNTS
from lightning_pack.parallel import ParallelLayout
from lightning_pack.policy import PackingPolicy
from lightning_pack.row import PackedBatch
from lightning_pack.source import EncodedSource
from tests.logger_files import tensorboard_images
from tests.ranks import on_ranks

pytestmark = [
    # Lightning's own use of a name that torch has deprecated.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    # True of the lists these tests train on.
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]

POLICY = PackingPolicy(capacity=16, multiple=4)


class TokenModel(LightningModule):
    """Reads packed rows; anything else is a vector of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 4)
        self.head = nn.Linear(4, 32)

    def loss(self, batch: PackedBatch | Tensor) -> Tensor:
        if isinstance(batch, Tensor):
            return self.head(batch).square().mean()
        logits = self.head(self.embedding(batch.input_ids)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch.shift_labels.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class EvaluatedModel(TokenModel):
    """With evaluation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    test_step = validation_step


class Loader:
    """A list that Lightning does not take for several loaders."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def row(*lengths: int, left_out: tuple[tuple[str, str, int], ...] = ()) -> PackedBatch:
    sources = [EncodedSource.of(f"s{length}", torch.arange(length)) for length in lengths]
    markers = [EncodedSource.dropped(*gone) for gone in left_out]
    return PackedBatch.from_packs([POLICY.build([*sources, *markers])], pad_id=0)


def trainer(path: Path, *callbacks: Any, **options: Any) -> Trainer:
    options = {"logger": CSVLogger(path), "enable_checkpointing": False, "log_every_n_steps": 2, "max_steps": 6, **options}
    return Trainer(
        accelerator="cpu",
        devices=options.pop("devices", 1),
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def logged(run: Trainer, *, of: str = "packing/fill") -> list[dict[str, float]]:
    """Rows of the logger that hold this metric; by default those of training's intervals."""
    assert isinstance(run.logger, CSVLogger)
    with open(Path(run.logger.log_dir) / "metrics.csv") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if of in row]


def without_rates(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not name.endswith("_per_second")} for row in rows]


ROWS = [(5, 3), (16,), (7,), (1, 1, 1), (13,), (8, 8)]


def test_logs_the_interval_and_the_totals(tmp_path: Path) -> None:
    run = trainer(tmp_path, PackingMonitor(policy=POLICY, summary=False))
    run.fit(TokenModel(), Loader(row(*lengths) for lengths in ROWS))
    rows = logged(run)
    assert [r["step"] for r in rows] == [1, 3, 5]
    for index, r in enumerate(rows):
        recent, seen = ROWS[2 * index : 2 * index + 2], ROWS[: 2 * index + 2]
        real = sum(map(sum, recent))
        padded = sum(-(-n // 4) * 4 for lengths in recent for n in lengths)
        assert r["packing/fill"] == pytest.approx(real / 32)
        assert r["packing/alignment_padding"] == pytest.approx((padded - real) / 32)
        assert r["packing/tail_padding"] == pytest.approx((32 - padded) / 32)
        assert r["packing/sources_per_pack"] == sum(map(len, recent)) / 2
        assert r["packing/real_tokens_seen"] == sum(map(sum, seen))
        assert r["packing/sources_seen"] == sum(map(len, seen))
        assert r["packing/packs_seen"] == len(seen)
        assert r["packing/real_tokens_per_second"] > r["packing/target_tokens_per_second"] > 0
        assert not [name for name in r if "left_out" in name]
    assert rows[1]["packing/alignment_padding"] > 0 < rows[1]["packing/tail_padding"]
    assert "packing/fill" in run.progress_bar_metrics


def test_logs_ages_the_gap_and_the_imbalance_of_intervals_and_of_the_epoch(tmp_path: Path) -> None:
    policy = PackingPolicy(capacity=16, multiple=4, buffer_size=8)
    batches = [row(*lengths, left_out=(("x", "overlength", 30),) if index < 2 else ()) for index, lengths in enumerate(ROWS)]
    waited = [[0, 7], [8], [24], [0, 0, 0], [800], [5, 16]]
    for batch, ages in zip(batches, waited, strict=True):
        batch.ages[:] = ages
    run = trainer(tmp_path, PackingMonitor(policy=policy), max_epochs=1)
    with pytest.warns(LeftOutWarning):
        run.fit(TokenModel(), Loader(batches))
    rows = logged(run)
    assert [r["packing/age_p50"] for r in rows] == [0.875, 0.0, 2.0]
    # Above 8 turnovers: the power of two above 100.
    assert [r["packing/age_max"] for r in rows] == [1.0, 3.0, 128.0]
    assert [r["packing/age_p95"] for r in rows] == [1.0, 3.0, 128.0]
    # Aligned 8 + 4 + 16, 8 + 4 + 4 + 4, 16 + 8 + 8: two packs each, as there are.
    assert [r["packing/gap_to_bound"] for r in rows] == [0.0, 0.0, 0.0]
    assert [r["packing/overlength"] for r in rows] == [pytest.approx(60 / (60 + 24)), 0.0, 0.0]
    assert [r["packing/rank_imbalance"] for r in rows] == [1.0, 1.0, 1.0]
    (last,) = logged(run, of="packing/fill_epoch")
    epoch = {name.removeprefix("packing/"): value for name, value in last.items() if name.startswith("packing/")}
    # The row of 7 takes 8 of 16, and what the row of three leaves free is enough for the rest of it: one pack less would do.
    assert epoch == pytest.approx(
        {
            "fill_epoch": 63 / 96,
            "alignment_padding_epoch": (80 - 63) / 96,
            "tail_padding_epoch": 16 / 96,
            "overlength_epoch": 60 / (60 + 63),
            "sources_per_pack_epoch": 10 / 6,
            "age_p50_epoch": 0.625,
            "age_p95_epoch": 128.0,
            "age_max_epoch": 128.0,
            "gap_to_bound_epoch": 6 / 5 - 1,
            "rank_imbalance_epoch": 1.0,
        }
    )


def test_an_epoch_is_counted_on_its_own(tmp_path: Path) -> None:
    monitor, batches = PackingMonitor(policy=POLICY, summary=False), [row(16), row(4)]
    run = trainer(tmp_path, monitor, max_steps=-1, max_epochs=2, log_every_n_steps=0)
    run.fit(TokenModel(), Loader(batches))
    assert run.callback_metrics["packing/fill_epoch"] == pytest.approx(20 / 32)
    state = monitor.state_dict()
    assert (state["total"]["packs"], state["epoch"]["packs"], state["logged"]["packs"]) == (4, 2, 0)
    assert (state["total"]["imbalance"][0], state["epoch"]["imbalance"][0]) == (4, 2)
    assert (sum(state["total"]["ages"]), sum(state["epoch"]["ages"])) == (4, 2)


def test_sums_of_steps_are_compared_before_they_are_too_many(tmp_path: Path) -> None:
    monitor = PackingMonitor(policy=POLICY, summary=False)
    gathered: list[tuple[int, int]] = []
    run = trainer(tmp_path, monitor, max_steps=STEPS + 2, log_every_n_steps=0, logger=False)
    inner = run.strategy.all_gather

    def all_gather(tensor: Tensor, **how: Any) -> Tensor:
        gathered.append((run.fit_loop.epoch_loop.batch_idx, int(tensor[-1])))
        return inner(tensor, **how)

    run.strategy.all_gather = all_gather  # type: ignore[method-assign]
    run.fit(TokenModel(), Loader([row(5)] * (STEPS + 2)))
    assert gathered[0] == (STEPS - 1, STEPS)
    assert monitor.state_dict()["total"]["imbalance"] == [STEPS + 2, (STEPS + 2) << 32]


def test_another_policy_begins_ages_and_lengths_anew(tmp_path: Path) -> None:
    first = trainer(tmp_path, PackingMonitor(policy=POLICY, summary=False), max_steps=2)
    first.fit(TokenModel(), Loader([row(5, 3), row(16)]))
    first.save_checkpoint(tmp_path / "a.ckpt")
    monitor = PackingMonitor(policy=PackingPolicy(capacity=32, multiple=4), summary=False)
    second = trainer(tmp_path, monitor, max_steps=4)
    with pytest.warns(UserWarning, match="another capacity or buffer_size, or had none; ages and gap to the bound are counted"):
        second.fit(TokenModel(), Loader([row(7), row(8)]), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    total = monitor.state_dict()["total"]
    assert (total["packs"], total["sources"], sum(total["ages"]), total["lengths"][0]) == (4, 5, 2, 2)
    # The packs before it are in no gap; two packs of 8 tokens could be one.
    assert logged(second)[-1]["packing/gap_to_bound"] == 1.0
    monitor.policy = POLICY
    with pytest.warns(UserWarning, match="ages and gap to the bound are counted anew"):
        second.fit(TokenModel(), Loader([row(7), row(8)]))
    total = monitor.state_dict()["total"]
    assert (total["packs"], sum(total["ages"]), total["lengths"][0]) == (4, 0, 0)


def test_policy_comes_from_the_datamodule(tmp_path: Path) -> None:
    class Data(LightningDataModule):
        packing = POLICY
        packs_per_batch = 2

        def train_dataloader(self) -> Loader:
            packs = [[POLICY.build([EncodedSource.of("a", torch.arange(n))]) for n in (5, 9)] for _ in range(2)]
            return Loader(PackedBatch.from_packs(pair, pad_id=0) for pair in packs)

    run = trainer(tmp_path, PackingMonitor(summary=False), max_steps=2)
    run.fit(TokenModel(), datamodule=Data())
    assert logged(run)[0]["packing/fill"] == pytest.approx(14 / 32)
    assert logged(run)[0]["packing/packs_seen"] == 4


def test_one_logging_for_an_accumulated_step(tmp_path: Path) -> None:
    monitor = PackingMonitor(policy=POLICY, summary=False)
    reads: list[int] = []
    run = trainer(tmp_path, monitor, accumulate_grad_batches=3, log_every_n_steps=1, max_steps=2)
    inner = run.strategy.reduce

    def reduce(tensor: Tensor, **how: Any) -> Any:
        reads.append(tensor.numel())
        return inner(tensor, **how)

    run.strategy.reduce = reduce  # type: ignore[method-assign]
    run.fit(TokenModel(), Loader(row(*lengths) for lengths in ROWS))
    assert [r["packing/packs_seen"] for r in logged(run)] == [3, 6]
    # Two loggings, the epoch and the end: nothing else waits for the device.
    assert len([numbers for numbers in reads if numbers >= COUNTS]) == 4


def test_a_resumed_run_logs_what_the_whole_run_logs(tmp_path: Path) -> None:
    batches = [row(*lengths, left_out=(("x", "overlength", 40),) if len(lengths) > 1 else ()) for lengths in ROWS]
    for index, batch in enumerate(batches):
        batch.ages[:] = [index * 200] * len(batch.ages)
    # Logging every 2 steps and stopping after 3 leaves half an interval in the checkpoint.
    whole = trainer(tmp_path / "whole", PackingMonitor(policy=POLICY, summary=False))
    with pytest.warns(LeftOutWarning):
        whole.fit(TokenModel(), Loader(batches))
    path = tmp_path / "3.ckpt"
    save = LambdaCallback(on_train_batch_end=lambda run, *_: run.save_checkpoint(path))
    first = trainer(tmp_path / "first", PackingMonitor(policy=POLICY, summary=False), save, max_steps=3)
    with pytest.warns(LeftOutWarning):
        first.fit(TokenModel(), Loader(batches))
    monitor = PackingMonitor(policy=POLICY, summary=False)
    second = trainer(tmp_path / "second", monitor)
    rest = Loader(batches[3:] + batches[:3])
    with pytest.warns(LeftOutWarning):
        second.fit(TokenModel(), rest, ckpt_path=path, weights_only=True)
    assert second.global_step == 6
    assert without_rates(logged(second)) == without_rates(logged(whole))[1:]
    assert logged(whole)[0]["packing/age_max"] == 0.875
    (epoch,) = logged(whole, of="packing/fill_epoch")
    assert logged(second, of="packing/fill_epoch") == [epoch]
    assert epoch["packing/age_p50_epoch"] < epoch["packing/age_max_epoch"] == 4.0
    assert epoch["packing/age_max_epoch"] > logged(first, of="packing/fill_epoch")[0]["packing/age_max_epoch"]
    assert logged(second)[-1]["packing/left_out/overlength"] == 3
    state = monitor.state_dict()
    assert state["total"]["left_out_tokens/overlength"] == 120
    plain = [value for name in ("total", "epoch", "logged") for value in state[name].values()]
    assert all(type(value) is int for values in plain for value in (values if type(values) is list else [values]))


def test_fit_twice_goes_on_and_a_new_trainer_starts_anew(tmp_path: Path) -> None:
    monitor, module, batches = PackingMonitor(policy=POLICY, summary=False), TokenModel(), Loader([row(5, 3), row(16)])
    run = trainer(tmp_path, monitor, max_steps=-1, max_epochs=1)
    run.fit(module, batches)
    run.fit_loop.max_epochs = 2
    run.fit(module, batches)
    assert run.global_step == 4
    assert monitor.state_dict()["total"]["packs"] == 4
    other = trainer(tmp_path, monitor, max_steps=2)
    other.fit(module, batches)
    assert monitor.state_dict()["total"]["packs"] == 2


def test_evaluating_a_checkpoint_does_not_move_the_training_counts(tmp_path: Path) -> None:
    run = trainer(tmp_path, PackingMonitor(policy=POLICY, summary=False), max_steps=2)
    run.fit(TokenModel(), Loader([row(5, 3), row(16)]))
    run.save_checkpoint(tmp_path / "a.ckpt")
    monitor = PackingMonitor(policy=POLICY, summary=False)
    other = trainer(tmp_path, monitor, max_steps=2)
    other.validate(EvaluatedModel(), Loader([row(7)]), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    other.fit(TokenModel(), Loader([row(5, 3), row(16)]))
    assert monitor.state_dict()["total"]["packs"] == 2


def test_validation_is_counted_apart_and_the_sanity_check_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = PackingMonitor(policy=POLICY)
    run = trainer(tmp_path, monitor, max_steps=6, val_check_interval=3, num_sanity_val_steps=2)
    gone = (("v1", "no_targets", 4),)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LeftOutWarning)  # validation's left-outs are no warning about training
        run.fit(EvaluatedModel(), Loader(row(*lengths) for lengths in ROWS), Loader([row(9, left_out=gone), row(10, 2)]))
    assert monitor.state_dict()["total"]["packs"] == 6
    assert monitor._results["validation"].packs == 2
    assert run.callback_metrics["packing/val_fill"] == pytest.approx(21 / 32)
    assert run.callback_metrics["packing/val_sources_per_pack"] == 1.5
    out = capsys.readouterr().out
    assert "validation: left out for no_targets: 1 source, 4 tokens, for example v1" in out
    assert "train: no source was left out" in out


def test_validate_and_test_print_their_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(tmp_path, PackingMonitor(policy=POLICY))
    run.validate(EvaluatedModel(), Loader([row(9), row(10, 2)]), verbose=False)
    assert "65.62%" in capsys.readouterr().out
    run.test(EvaluatedModel(), Loader([row(16)]), verbose=False)
    out = capsys.readouterr().out
    assert "100.00%" in out
    assert "validation" not in out
    assert run.callback_metrics["packing/test_fill"] == 1.0


def test_left_out_sources_warn_once_and_are_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batches = [row(5, left_out=((f"long[{i}]", "overlength", 20 + i), (f"odd{i}", f"reason {i}", 1))) for i in range(6)]
    monitor = PackingMonitor(policy=POLICY)
    run = trainer(tmp_path, monitor)
    with pytest.warns(LeftOutWarning) as caught:
        run.fit(TokenModel(), Loader(batches))
    texts = [str(w.message) for w in caught if issubclass(w.category, LeftOutWarning)]
    assert len(texts) == 1
    assert "source 'long[0]' is left out of training (overlength): 20 tokens are not trained on" in texts[0]
    assert [r["packing/left_out/overlength"] for r in logged(run)] == [2, 4, 6]
    assert [r["packing/left_out/other"] for r in logged(run)] == [2, 4, 6]
    out = capsys.readouterr().out
    assert "train: left out for overlength: 6 sources, 135 tokens, for example long[0], long[1], long[2]\n" in out
    assert all(len(keys) == 3 for keys in monitor._examples["train"].values())
    assert len(monitor._examples["train"]) == 2  # six reasons nobody knows are one: memory is bounded


def test_batches_that_are_not_packed_are_ignored_with_one_warning(tmp_path: Path) -> None:
    monitor = PackingMonitor(policy=POLICY, summary=False)
    run = trainer(tmp_path, monitor, max_steps=4, log_every_n_steps=1)
    with pytest.warns(UserWarning, match="ignores this Tensor of the train data") as caught:
        run.fit(TokenModel(), Loader([torch.ones(2, 4), row(5, 3), torch.ones(2, 4), row(16)]))
    assert len([w for w in caught if "PackingMonitor" in str(w.message)]) == 1
    assert monitor.state_dict()["total"]["packs"] == 2


def test_rates_leave_out_validation_and_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that only steps and validation move, so that the numbers are the same on every machine.
    now = [0.0]

    class SlowStart(EvaluatedModel):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            now[0] += 1.0 if batch_idx == 0 else 0.05
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            now[0] += 0.4

    monkeypatch.setattr("lightning_pack.callbacks.interval.time", SimpleNamespace(perf_counter=lambda: now[0]))
    run = trainer(tmp_path, PackingMonitor(policy=POLICY, summary=False), val_check_interval=1, num_sanity_val_steps=0)
    run.fit(SlowStart(), Loader([row(16) for _ in ROWS]), Loader([row(5)]))
    assert now[0] == pytest.approx(1.0 + 5 * 0.05 + 6 * 0.4)
    # 16 tokens a step of 0.05 s; with the 0.4 s of validation they would be 36 a second.
    assert [r["packing/real_tokens_per_second"] for r in logged(run)] == pytest.approx([320.0] * 3)


def test_a_rate_needs_a_step_after_the_first(tmp_path: Path) -> None:
    run = trainer(tmp_path, PackingMonitor(policy=POLICY, summary=False), log_every_n_steps=1, max_steps=2)
    run.fit(TokenModel(), Loader([row(16), row(16)]))
    assert ["packing/real_tokens_per_second" in r for r in logged(run)] == [False, True]


def test_counts_stay_exact_beyond_float32(tmp_path: Path) -> None:
    run = trainer(tmp_path, PackingMonitor(policy=POLICY, summary=False), max_steps=2)
    run.fit(TokenModel(), Loader([row(16), row(16)]))
    run.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    state = checkpoint["callbacks"]["PackingMonitor"]
    assert state["total"]["real_tokens"] == 32
    state["total"]["real_tokens"] = state["logged"]["real_tokens"] = 2**40
    torch.save(checkpoint, tmp_path / "b.ckpt")
    second = trainer(tmp_path, PackingMonitor(policy=POLICY, summary=False), max_steps=4)
    second.fit(TokenModel(), Loader([row(7), row(5, 3)] * 2), ckpt_path=tmp_path / "b.ckpt", weights_only=True)
    assert logged(second)[-1]["packing/real_tokens_seen"] == 2**40 + 15


def test_state_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"state of version 99, this package reads version 2: resume with the release"):
        PackingMonitor().load_state_dict({"version": 99})


def test_damaged_histograms_are_refused() -> None:
    state = PackingMonitor().state_dict()
    PackingMonitor().load_state_dict(state)
    del state["epoch"]["ages"][3:]
    with pytest.raises(ValueError, match=r"is damaged: its ages, lengths and imbalance hold 3, \d+ and 2"):
        PackingMonitor().load_state_dict(state)


class RankData(LightningDataModule):
    """Rank 0 gets the rows with even index, rank 1 the others; only rank 1 leaves something out."""

    packing = POLICY

    def __init__(self, parallel: ParallelLayout) -> None:
        super().__init__()
        self.parallel = parallel

    def train_dataloader(self) -> Loader:
        assert self.trainer is not None
        rank, _ = self.parallel.data_parallel(self.trainer.global_rank, world_size=self.trainer.world_size)
        data_parallel = self.trainer.world_size // self.parallel.model_parallel_size
        gone = (("r1", "corrupt", 0),) if rank == 1 else ()
        return Loader(row(*lengths, left_out=gone) for lengths in ROWS[rank::data_parallel])


FLOPS = ModelFlops(per_position=1000, attention=(AttentionFlops(None, 64), AttentionFlops(4, 16)))
RATES = ("model_tflops_per_second", "mfu", "real_tokens_per_second")


def run_rank(argument: dict[str, Any]) -> dict[str, Any]:
    path = Path(argument["path"])
    report: dict[str, Any] = {}
    peaks = {0: 10**12, 1: 2 * 10**12}
    throughput.peak_flops = lambda device: peaks[int(os.environ["RANK"])]  # type: ignore[assignment]
    monitor = PackingMonitor(flops=FLOPS, summary=True, figures=True)
    data = RankData(ParallelLayout(tensor=argument["tensor"]))
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "log_every_n_steps": 1}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        board = TensorBoardLogger(path / f"board{os.environ['RANK']}", version="", name="", default_hp_metric=False)
        run = trainer(path, monitor, max_steps=2, logger=[CSVLogger(path), board], **options)
        run.fit(TokenModel(), datamodule=data)
        report["warnings"] = [str(w.message) for w in caught if issubclass(w.category, LeftOutWarning)]
    report["logged"] = sorted(name for name in run.logged_metrics if name.startswith("packing/"))
    for name in ("rank_imbalance", "rank_imbalance_epoch", "gap_to_bound_epoch"):
        report[name] = float(run.logged_metrics[f"packing/{name}"])
    rates = {name: float(run.logged_metrics[f"packing/{name}"]) for name in RATES}
    report["flops_per_token"] = rates["model_tflops_per_second"] * 1e12 / rates["real_tokens_per_second"]
    report["peak"] = rates["model_tflops_per_second"] / rates["mfu"]
    report["seen"] = float(run.logged_metrics["packing/real_tokens_seen"])
    report["state"] = monitor.state_dict()["total"]
    run.save_checkpoint(path / "a.ckpt")
    resumed = PackingMonitor(summary=False)
    second = trainer(path, resumed, max_steps=3, **options)
    second.fit(TokenModel(), datamodule=data, ckpt_path=path / "a.ckpt", weights_only=True)
    report["saved"] = torch.load(path / "a.ckpt", weights_only=True)["callbacks"]["PackingMonitor"]
    state = resumed.state_dict()
    report |= {"resumed": state["total"], "history": state["history"], "examples": state["examples"]}
    report["resumed_imbalance"] = float(second.logged_metrics["packing/rank_imbalance"])
    return report


def run_two_ranks(path: Path, tensor: int) -> list[dict[str, Any]]:
    return on_ranks("tests.test_monitor:run_rank", {"path": str(path), "tensor": tensor}, folder=path / "ranks")


def test_two_ranks_log_and_save_global_numbers(tmp_path: Path) -> None:
    zero, one = run_two_ranks(tmp_path, tensor=1)
    real = sum(map(sum, ROWS[:4]))
    for report in (zero, one):
        assert report["seen"] == report["state"]["real_tokens"] == real
        assert report["state"]["packs"] == 4
        assert report["state"]["left_out/corrupt"] == 2
        # Resumed from rank 0's file on both ranks: the old total counts once, and the new batches of both ranks.
        assert report["resumed"]["packs"] == 6
        assert report["resumed"]["real_tokens"] == real + sum(ROWS[0]) + sum(ROWS[1])
        # Steps of rank 0 and rank 1: 5² + 3² and 16², then 7² and 3 x 1²; the epoch's mean is of both.
        imbalances = [256 / ((34 + 256) / 2), 49 / ((49 + 3) / 2)]
        assert report["rank_imbalance"] == pytest.approx(imbalances[1])
        assert report["rank_imbalance_epoch"] == pytest.approx(sum(imbalances) / 2)
        assert report["gap_to_bound_epoch"] == pytest.approx(4 / 3 - 1)
        # The step after the resume, and the two before it.
        assert report["resumed_imbalance"] == pytest.approx(imbalances[0])
        assert report["resumed"]["imbalance"][0] == 3
        # The second step: 7 tokens in 8 slots on rank 0, 3 x 1 in 3 x 4 on rank 1; of 49 a window of 4 leaves out 3².
        assert report["flops_per_token"] == pytest.approx(3 * (1000 * (8 + 12) + 64 * 52 + 16 * (52 - 9)) / 10)
        assert report["peak"] == pytest.approx(3.0)
        # A point for each logging, of both ranks; the first step of a process is not timed. Rank 0 left nothing out itself.
        tokens = [sum(map(sum, rows)) for rows in (ROWS[:2], ROWS[2:4], ROWS[:2])]
        assert report["saved"]["history"]["counts"]["real_tokens"] == tokens[:2]
        assert report["history"]["counts"]["real_tokens"] == tokens
        assert report["history"]["times"]["timed_tokens"] == [0, tokens[1], 0]
        # Of 49 + 3 squared lengths a window of 4 leaves out 3².
        operations = 3 * (1000 * (8 + 12) + 64 * 52 + 16 * (52 - 9))
        assert report["history"]["times"]["operations"] == [0, operations, 0]
        assert report["saved"]["examples"] == report["examples"] == {"corrupt": ["r1"]}
    assert zero["logged"] == one["logged"]
    assert list(tensorboard_images(tmp_path / "board0")["packing/figure"]) == [1]
    assert not (tmp_path / "board1").exists()
    assert "packing/left_out/corrupt" in zero["logged"]
    # Rank 0 saw none itself, and is the one that tells.
    assert len(zero["warnings"]) == 1
    assert "1 sources are left out of training so far" in zero["warnings"][0]
    assert one["warnings"] == []
    out = "".join((tmp_path / "ranks" / f"rank{rank}.log").read_text() for rank in range(2))
    assert out.count("train: left out for corrupt: 2 sources, 0 tokens, for example r1\n") == 1


def test_ranks_that_share_a_model_count_their_batches_once(tmp_path: Path) -> None:
    zero, one = run_two_ranks(tmp_path, tensor=2)
    assert zero["state"] == one["state"]
    assert zero["state"]["packs"] == 2
    assert zero["state"]["real_tokens"] == zero["seen"] == sum(map(sum, ROWS[:2]))
    assert zero["rank_imbalance"] == 1.0
    # The work of one model, and the peak of both devices that hold it.
    assert zero["flops_per_token"] == pytest.approx(3 * (1000 * 16 + 64 * 256 + 16 * (256 - 144)) / 16)
    assert zero["peak"] == pytest.approx(3.0)
