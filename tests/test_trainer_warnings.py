"""A run is told before it starts if nothing keeps its sources apart, or nothing ends it; legal runs are told nothing."""

from __future__ import annotations

import subprocess
import sys
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateFinder, Timer
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lightning_pack import EnergonPackDataModule, PackedAttention, PackedBatch, PackingPolicy
from lightning_pack.trainer_warnings import BoundariesWarning, EndlessFitWarning
from tests.numbers_data import NumberEncoder, lengths, records_of, write_webdataset
from tests.packed_rows import pack_rows
from tests.tiny_models import quiet_trainer, tiny_model
from tests.training import Recorder

#: Ids of the data go up to this.
VOCABULARY = 600


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = {"train": records_of(lengths(60, most=40)), "val": records_of([9] * 8), "test": records_of([7] * 8)}
    return write_webdataset(tmp_path_factory.mktemp("told") / "numbers", parts)


class Data(EnergonPackDataModule):
    """Predicts on its test data."""

    def predict_dataloader(self) -> Any:
        return self.test_dataloader()


def online(path: Path, **options: Any) -> EnergonPackDataModule:
    policy = PackingPolicy(capacity=64, buffer_size=8)
    return Data(path, encoder=NumberEncoder(), packing=policy, num_workers=0, shuffle_buffer_size=0, **options)


class Plain(pl.LightningModule):
    """Hands a row to its model; the model is made by configure_model where a kind of it is given."""

    def __init__(self, model: PreTrainedModel | None = None, *, late: str | None = None) -> None:
        super().__init__()
        self.model, self.late, self.rows, self.lr = model, late, 0, 0.1

    def configure_model(self) -> None:
        if self.model is None and self.late is not None:
            self.model = tiny_model(self.late, vocab_size=VOCABULARY)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        self.rows += 1
        assert self.model is not None
        return self.model(**batch).loss

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=1)

    def test_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def predict_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def llama() -> PreTrainedModel:
    return tiny_model("llama", vocab_size=VOCABULARY)


def short(*callbacks: Callback, **options: Any) -> pl.Trainer:
    limits = {
        "max_steps": 2,
        "limit_val_batches": 1,
        "limit_test_batches": 1,
        "limit_predict_batches": 1,
        "val_check_interval": 1,
    }
    return quiet_trainer(callbacks=list(callbacks), **limits | options)


def told(found: Any, kind: type[Warning]) -> list[str]:
    return [str(each.message) for each in found if isinstance(each.message, kind)]


# --- sources that nothing keeps apart ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "ahead"), [("fit", False), ("validate", False), ("test", False), ("predict", False), ("fit", True)]
)
def test_a_model_without_the_callback_is_told_of_once(data: Path, tmp_path: Path, stage: str, ahead: bool) -> None:
    given = Data(pack_rows(data, tmp_path / "rows").path, num_workers=0) if ahead else online(data)
    module = Plain(late="llama")
    # With the sanity check and two validations a fit asks for several loaders.
    trainer = short(num_sanity_val_steps=1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        getattr(trainer, stage)(module, datamodule=given)
        assert module.rows == {"fit": 1 + 2 + 2}.get(stage, 1)
    (text,) = told(found, BoundariesWarning)
    assert text.startswith(
        "no PackedAttention among the Trainer's callbacks: Plain has a transformers model (LlamaForCausalLM)"
    )
    assert "sources of a packed row do not see each other" in text
    assert "Trainer(callbacks=[PackedAttention()])" in text
    assert "warnings.filterwarnings('ignore', 'no PackedAttention')" in text
    assert not told(found, EndlessFitWarning)


def test_each_call_of_the_trainer_tells_anew(data: Path) -> None:
    trainer, module, given = short(), Plain(llama()), online(data)
    for stage in ("fit", "validate"):
        with pytest.warns(BoundariesWarning):
            getattr(trainer, stage)(module, datamodule=given)


def test_the_filter_that_the_warning_names_silences_it(data: Path) -> None:
    module = Plain(llama())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "no PackedAttention")
        short().fit(module, online(data))
    assert module.rows > 0
    assert not told(found, BoundariesWarning)


def handed(*args: Any, **options: Any) -> Any:
    """Attention of a project's own."""
    return sdpa_attention_forward(*args, **options)


# Any warning is an error here.
@pytest.mark.parametrize("case", ["the callback", "no model of transformers", "attention of its own"])
def test_nothing_is_told_where_sources_are_kept_apart(data: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = Recorder() if case == "no model of transformers" else Plain(llama())
    callbacks = [PackedAttention(monitor=False)] if case == "the callback" else []
    if case == "attention of its own":
        monkeypatch.setitem(AttentionInterface._global_mapping, "handed", handed)
        module.model.set_attn_implementation("handed")
    short(*callbacks).fit(module, online(data))
    assert module.trained if isinstance(module, Recorder) else module.rows


def test_looking_at_rows_without_a_trainer_tells_nothing(data: Path) -> None:
    given = online(data)
    given.setup("fit")
    assert next(iter(given.train_dataloader())).width
    assert next(iter(given.val_dataloader())).width
    # One that has no module yet.
    given.trainer = quiet_trainer()
    assert next(iter(given.val_dataloader())).width
    given.teardown("fit")


def test_a_datamodule_brings_no_code_of_models_along() -> None:
    code = "import sys, lightning_pack.datamodule; print('transformers.modeling_utils' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=200)
    assert found.stdout.split() == ["False"]


# --- a fit that nothing ends -------------------------------------------------------------------------------------------------


class Stop(Callback):
    """Ends what nothing else would."""

    def __init__(self, rows: int) -> None:
        self.rows, self.stopped = rows, False

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step >= self.rows:
            self.stopped = trainer.should_stop = True


def early(**options: Any) -> EarlyStopping:
    return EarlyStopping("val_loss", patience=99, strict=False, **options)


ENDLESS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "epochs of the Trainer": {"max_epochs": 2},
    "a timer that only measures": {"callbacks": [Timer()]},
    "a timer that looks when an epoch ends": {"callbacks": [Timer("00:01:00:00", interval="epoch")]},
    "early stopping after an epoch's validation": {"callbacks": [early()], "limit_val_batches": 1},
    "early stopping without a validation": {"callbacks": [early()], "val_check_interval": 2},
    "early stopping in later epochs": {
        "callbacks": [early(check_on_train_epoch_end=False)],
        "val_check_interval": 2,
        "limit_val_batches": 1,
        "check_val_every_n_epoch": 2,
    },
    "early stopping when an epoch ends": {
        "callbacks": [early(check_on_train_epoch_end=True)],
        "val_check_interval": 2,
        "limit_val_batches": 1,
    },
}
ENDING: dict[str, dict[str, Any]] = {
    "max_steps": {"max_steps": 3},
    "limit_train_batches": {"limit_train_batches": 3, "max_epochs": 2},
    "max_time": {"max_time": {"hours": 1}},
    "a timer": {"callbacks": [Timer("00:01:00:00")]},
    "early stopping within the epoch": {"callbacks": [early()], "val_check_interval": 2, "limit_val_batches": 1},
    "asked for": {"max_epochs": -1},
    "fast_dev_run": {"fast_dev_run": True},
}


def endless(options: dict[str, Any]) -> tuple[pl.Trainer, Stop]:
    stop = Stop(4)
    callbacks = [*deepcopy(options.get("callbacks", [])), stop]
    return quiet_trainer(**{"limit_val_batches": 0, "num_sanity_val_steps": 0} | options | {"callbacks": callbacks}), stop


# Lightning says that max_epochs was not set.
@pytest.mark.filterwarnings("ignore:`max_epochs` was not set")
@pytest.mark.parametrize("options", ENDLESS.values(), ids=ENDLESS)
def test_a_fit_that_nothing_ends_is_told_of(data: Path, options: dict[str, Any]) -> None:
    trainer, stop = endless(options)
    with pytest.warns(EndlessFitWarning) as found:
        trainer.fit(Recorder(), online(data))
    assert stop.stopped, "nothing else has ended it"
    (text,) = told(found, EndlessFitWarning)
    limit = options.get("max_epochs", -1 if any(isinstance(c, Timer) for c in options.get("callbacks", [])) else 1000)
    assert f"the training stream is endless, and so is its first epoch, whatever max_epochs={limit} says" in text
    for way in ("max_steps", "limit_train_batches", "max_time", "the datamodule epochs", "max_epochs=-1"):
        assert way in text


@pytest.mark.filterwarnings("ignore:`max_epochs` was not set")
@pytest.mark.parametrize("options", ENDING.values(), ids=ENDING)
def test_nothing_is_told_of_a_fit_that_ends(data: Path, options: dict[str, Any]) -> None:
    module = Recorder()
    endless(options)[0].fit(module, online(data))
    assert module.trained


def test_nothing_is_told_of_passes_over_the_data(data: Path) -> None:
    module = Recorder()
    quiet_trainer(max_epochs=-1, limit_val_batches=0).fit(module, online(data, epochs=1))
    assert module.trained
    quiet_trainer(max_epochs=3, limit_val_batches=0).fit(module, online(data, epochs=1))


# A search asks for the loader under limits and callbacks of its own, and again afterwards.
@pytest.mark.filterwarnings("ignore:`max_epochs` was not set")
def test_a_search_for_the_learning_rate_ends_and_a_fit_behind_it_is_told_of_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = Plain(llama())
    Tuner(quiet_trainer(limit_val_batches=0, callbacks=[PackedAttention(monitor=False)])).lr_find(
        module, datamodule=online(data), num_training=3
    )
    assert module.rows == 3
    search, stop = LearningRateFinder(num_training_steps=3), Stop(4)
    trainer = quiet_trainer(limit_val_batches=0, callbacks=[PackedAttention(monitor=False), search, stop])
    with pytest.warns(EndlessFitWarning) as found:
        trainer.fit(Plain(llama()), online(data))
    assert search.optimal_lr is not None
    assert stop.stopped
    assert len(told(found, EndlessFitWarning)) == 1
    assert not told(found, BoundariesWarning)


def test_rows_written_ahead_are_an_endless_stream_too(data: Path, tmp_path: Path) -> None:
    rows = pack_rows(data, tmp_path / "rows").path
    trainer, stop = endless({"max_epochs": 1})
    with pytest.warns(EndlessFitWarning):
        trainer.fit(Recorder(), EnergonPackDataModule(rows, num_workers=0))
    assert stop.stopped


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_evaluation_ends(data: Path, stage: str) -> None:
    module = Plain(late="llama")
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)])
    getattr(trainer, stage)(module, datamodule=online(data))
    assert module.rows
