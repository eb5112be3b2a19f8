"""PackedAttention packs the padded batches of ordinary projects: real Trainers against sources that run alone."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

from lightning_pack import (
    CollatedBatchError,
    PackedAttention,
    PackingMonitor,
    PackingPolicy,
    ParallelLayout,
    TokenNormalizedGradients,
    packed_row,
    unpack,
)
from lightning_pack.source import IGNORE, EncodedSource
from tests.padded_batches import Batches, HuggingFaceModule, Side, pad, stay_double
from tests.ranks import on_ranks
from tests.tiny_models import alone_gradients, alone_logits, alone_loss, make_sources, quiet_trainer, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.*is left out of training")


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_double(monkeypatch)


#: Sources of each micro-batch, with different numbers of targets.
PARTS = [(7, 3, 12), (5, 9), (4, 4, 3), (15, 2)]
POLICY = PackingPolicy(16, multiple=2)


def parts(which: list[int] | None = None) -> list[list[EncodedSource]]:
    chosen = range(len(PARTS)) if which is None else which
    return [make_sources(PARTS[i], seed=i, prompt=1 + i) for i in chosen]


def batches(which: list[int] | None = None, *, side: Side = "right") -> Batches:
    return Batches(*(lambda sources=sources: pad(sources, side) for sources in parts(which)))


def alone_steps(accumulate: int, *, ranks: int = 1, clip: float | None = None) -> tuple[torch.nn.Module, list[float]]:
    """The same training with every source in a forward pass of its own: the model, and the mean loss of each micro-batch."""
    model = tiny_model("llama", dtype=torch.float64)
    optimizer = SGD(model.parameters(), lr=0.5)
    per_step = accumulate * ranks
    losses = []
    for start in range(0, len(PARTS), per_step):
        optimizer.zero_grad()
        micro = [[alone_loss(model, source) for source in sources] for sources in parts()[start : start + per_step]]
        count = sum(n for each in micro for _, n in each)
        torch.stack([loss for each in micro for loss, _ in each]).sum().div(count).backward()
        losses += [float(sum(loss.detach() for loss, _ in each) / sum(n for _, n in each)) for each in micro]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model, losses


def farthest(a: torch.nn.Module, b: torch.nn.Module) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_weights_are_those_of_the_unpacked_run(side: Side, accumulate: int) -> None:
    expected, losses = alone_steps(accumulate, clip=0.1)
    module = HuggingFaceModule()
    assert farthest(module.model, tiny_model("llama", dtype=torch.float64)) == 0
    trainer = quiet_trainer(
        callbacks=[PackedAttention(policy=POLICY)], max_epochs=1, accumulate_grad_batches=accumulate, gradient_clip_val=0.1
    )
    trainer.fit(module, batches(side=side))
    assert module.shapes == [[1, 24], [1, 16], [1, 8], [1, 16]]
    assert farthest(expected, tiny_model("llama", dtype=torch.float64)) > 1e-3, "the run must have moved the weights"
    assert max(abs(a - b) for a, b in zip(module.losses, losses, strict=True)) < 1e-10
    assert farthest(module.model, expected) < 1e-10


def test_the_padded_run_itself_gives_the_same_where_its_loss_is_the_same() -> None:
    """One micro-batch to a step, so that the mean of a batch is the mean over the targets of the step."""
    padded, packed = HuggingFaceModule(), HuggingFaceModule()
    quiet_trainer(max_epochs=1).fit(padded, batches())
    quiet_trainer(callbacks=[PackedAttention(policy=POLICY)], max_epochs=1).fit(packed, batches())
    assert padded.shapes[0] == [3, 14]
    assert max(abs(a - b) for a, b in zip(padded.losses, packed.losses, strict=True)) < 1e-10
    assert farthest(padded.model, packed.model) < 1e-10


def a_rank(argument: dict[str, Any]) -> dict[str, Any]:
    """Two of the four micro-batches, in one optimizer step."""
    stay_double(pytest.MonkeyPatch())
    rank = int(os.environ["RANK"])
    module = HuggingFaceModule()
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "devices": 2, "strategy": "ddp"}
    trainer = quiet_trainer(callbacks=[PackedAttention(policy=POLICY, monitor=False)], **options)
    trainer.fit(module, batches([rank, 2 + rank], side="left"))
    expected, _ = alone_steps(2, ranks=2)
    result = {"difference": farthest(module.model, expected), "losses": module.losses}

    class Shared(LightningDataModule):
        """Both ranks are to share a row, and the loader gives padded batches."""

        parallel = ParallelLayout(context=2)

        def train_dataloader(self) -> Batches:
            return batches([0])

    try:
        quiet_trainer(callbacks=[PackedAttention(policy=POLICY, monitor=False)], **options).fit(
            HuggingFaceModule(), datamodule=Shared()
        )
    except ValueError as e:
        result["shared"] = str(e)
    return result


def test_two_ranks_with_accumulation_give_the_unpacked_step(tmp_path: Path) -> None:
    results = on_ranks("tests.test_padded_training:a_rank", {}, folder=tmp_path)
    assert len({*results[0]["losses"], *results[1]["losses"]}) == 4
    for result in results:
        assert result["difference"] < 1e-10
        assert "2 context-parallel ranks share a row" in result["shared"]
        assert "pack_loader(loader, policy, sharded=True)" in result["shared"]


def test_evaluation_is_packed_too_and_gives_the_same_loss() -> None:
    sources = parts([0])[0]
    total = [alone_loss(tiny_model("llama", dtype=torch.float64), source) for source in sources]
    expected = float(sum(loss.detach() for loss, _ in total) / sum(n for _, n in total))
    for stage in ("validate", "test"):
        module = HuggingFaceModule()
        getattr(quiet_trainer(callbacks=[PackedAttention(policy=POLICY)]), stage)(module, batches([0]), verbose=False)
        assert abs(module.losses[0] - expected) < 1e-10


def test_what_a_step_logs_weighs_as_before() -> None:
    sources = make_sources((7, 12, 5, 9))
    loader = [lambda: pad(sources[:1]), lambda: pad(sources[1:])]
    module = HuggingFaceModule()
    (logged,) = quiet_trainer(callbacks=[PackedAttention(policy=POLICY)]).validate(module, Batches(*loader), verbose=False)
    first, second = module.losses
    assert abs(first - second) > 1e-3
    assert abs(logged["val_loss"] - (first + 3 * second) / 4) < 1e-6


class Predictor(HuggingFaceModule):
    def predict_step(self, batch: Any, batch_idx: int) -> list[Any]:
        assert batch["input_ids"].shape[0] == 1
        return unpack(self.model(**batch), batch)


@pytest.mark.parametrize("labels", [True, False])
def test_predict_gives_results_by_source_in_order(labels: bool) -> None:
    # One token, no target, and no prompt: none of these matters here.
    sources = make_sources((7, 1, 12, 5), prompt=9)
    model = tiny_model("llama", dtype=torch.float64)

    def make() -> dict[str, Any]:
        batch = pad(sources, "left") | {"id": list("abcd")}
        if not labels:
            del batch["labels"]
        return batch

    trainer = quiet_trainer(callbacks=[PackedAttention(policy=POLICY)])
    (results,) = trainer.predict(Predictor(), Batches(make))  # type: ignore[misc]
    assert [result.key for result in results] == list("abcd")
    for source, result in zip(sources, results, strict=True):
        assert result.values.shape == (len(source), 64)
        assert (result.values - alone_logits(model, source)).abs().max() < 1e-10
    trainer = quiet_trainer(callbacks=[PackedAttention(policy=PackingPolicy(8))])
    with pytest.warns(UserWarning, match=r"1 sources of batch 0 on rank 0 are left out.*such as 'c' \(overlength, 12"):
        (results,) = trainer.predict(Predictor(), Batches(make))  # type: ignore[misc]
    assert [result.key for result in results] == list("abd")


def test_flattened_batches_are_trained_as_packed_rows() -> None:
    expected, losses = alone_steps(1)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def make(sources: list[EncodedSource]) -> Any:
        features = [{"input_ids": s.input_ids.tolist(), "labels": s.labels.tolist()} for s in sources]
        return lambda: collate(features, return_tensors="pt")

    module = HuggingFaceModule()
    quiet_trainer(callbacks=[PackedAttention()], max_epochs=1).fit(module, Batches(*map(make, parts())))
    assert module.shapes == [[1, sum(lengths)] for lengths in PARTS]
    assert max(abs(a - b) for a, b in zip(module.losses, losses, strict=True)) < 1e-10
    assert farthest(module.model, expected) < 1e-10


def flattened(*sources: EncodedSource) -> Any:
    features = [{"input_ids": s.input_ids.tolist(), "labels": s.labels.tolist()} for s in sources]
    return DataCollatorWithFlattening()(features, return_tensors="pt")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (PackingPolicy(16), r"it has 22 tokens, more than capacity=16\. Rows that come packed are not packed again: leave"),
        (PackingPolicy(24, multiple=4), r"a source of 7 tokens, no multiple of multiple=4"),
        (PackingPolicy(24, max_sources=2), r"3 sources, more than max_sources=2"),
        (PackingPolicy(24, width="fixed"), r"22 tokens, not width='fixed' \(24\)"),
    ],
)
def test_flattened_batches_keep_to_the_policy_or_are_refused(policy: PackingPolicy, message: str) -> None:
    loader = Batches(lambda: flattened(*parts([0])[0]))
    module = HuggingFaceModule()
    quiet_trainer(callbacks=[PackedAttention(policy=PackingPolicy(22))], max_epochs=1).fit(module, loader)
    assert module.shapes == [[1, 22]]
    with pytest.raises(CollatedBatchError, match=message):
        quiet_trainer(callbacks=[PackedAttention(policy=policy)], max_epochs=1).fit(HuggingFaceModule(), loader)


class Looks(HuggingFaceModule):
    """Its evaluation needs no targets."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.shapes.append([len(result.values) for result in unpack(self.model(**batch), batch)])

    test_step = validation_step


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("form", ["padded", "flattened"])
def test_evaluation_without_labels_is_refused_unless_it_needs_none(stage: str, form: str) -> None:
    sources = parts([0])[0]

    def make() -> Any:
        batch = pad(sources) if form == "padded" else flattened(*sources)
        del batch["labels"]
        return batch

    def evaluate(module: HuggingFaceModule, **options: Any) -> None:
        callback = PackedAttention(policy=PackingPolicy(22), **options)
        getattr(quiet_trainer(callbacks=[callback]), stage)(module, Batches(make), verbose=False)

    name = {"validate": "validation", "test": "test"}[stage]
    with pytest.raises(
        CollatedBatchError,
        match=rf"batch 0 has neither labels nor shift_labels.*{name}_step needs no targets, say .*evaluate_unlabelled=True",
    ):
        evaluate(HuggingFaceModule())
    module = Looks()
    evaluate(module, evaluate_unlabelled=True)
    assert module.shapes == [[7, 3, 12]]


def test_monitor_and_normalization_see_the_row_wherever_they_were_put() -> None:
    seen: list[bool] = []

    class Looking(HuggingFaceModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            row = packed_row(batch)
            seen.append(row is not None and row.input_ids is batch["input_ids"])
            return super().training_step(batch, batch_idx)

    monitor = PackingMonitor(summary=False)
    callbacks = [monitor, TokenNormalizedGradients(), PackedAttention(policy=PackingPolicy(9))]
    trainer = quiet_trainer(callbacks=callbacks, max_epochs=1)
    trainer.fit(Looking(), batches())
    kinds = [type(callback).__name__ for callback in trainer.callbacks]
    assert kinds == ["PackedAttention", "PackingMonitor", "TokenNormalizedGradients"]
    assert seen == [True] * 4
    stats = monitor._results["train"]
    kept = [source for part in parts() for source in part if len(source) <= 9 and (source.labels != IGNORE).any()]
    assert len(kept) == 6
    # Prompts of three and four tokens leave no target in sources that short.
    assert stats.left_out == {"overlength": 2, "no_targets": 2}
    assert (stats.sources, stats.real_tokens) == (len(kept), sum(map(len, kept)))
    assert stats.fill == 1.0
    assert packed_row({}) is None


def test_a_batch_without_any_source_keeps_the_run_going_and_is_counted() -> None:
    monitor = PackingMonitor(summary=False)
    expected = tiny_model("llama", dtype=torch.float64)
    _, gradients = alone_gradients(expected, parts([2])[0])
    module = HuggingFaceModule()
    long = make_sources((30, 20), seed=9)
    loader = Batches(lambda: pad(long), lambda: pad(parts([2])[0]))
    callbacks = [monitor, PackedAttention(policy=POLICY)]
    quiet_trainer(callbacks=callbacks, max_epochs=1, accumulate_grad_batches=2).fit(module, loader)
    assert math.isnan(module.losses[0]), "a mean over no target"
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter -= 0.5 * gradients[name]
    assert farthest(module.model, expected) < 1e-10
    # The third source of the other batch is all prompt.
    assert monitor._results["train"].left_out == {"overlength": 2, "no_targets": 1}
    assert monitor._results["train"].left_out_tokens == {"overlength": 50, "no_targets": 3}


def test_an_epoch_without_any_source_is_no_success() -> None:
    long = make_sources((30, 20), seed=9)
    trainer = quiet_trainer(callbacks=[PackedAttention(policy=POLICY, monitor=False)], max_epochs=1)
    message = r"no source of this epoch .*; 'batch 0, row 0', for .* overlength \(20 tokens\): raise the policy's capacity"
    with pytest.raises(ValueError, match=message):
        trainer.fit(HuggingFaceModule(), Batches(lambda: pad(long[1:] + long[1:])))


def test_a_resumed_epoch_may_be_left_with_no_source(tmp_path: Path) -> None:
    long = make_sources((30, 20), seed=9)
    first = quiet_trainer(callbacks=[PackedAttention(policy=POLICY, monitor=False)], max_epochs=1)
    first.fit(HuggingFaceModule(), Batches(lambda: pad(parts([2])[0])))
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed = quiet_trainer(callbacks=[PackedAttention(policy=POLICY, monitor=False)], max_epochs=2)
    module = HuggingFaceModule()
    resumed.fit(module, Batches(lambda: pad(long)), ckpt_path=tmp_path / "first.ckpt")
    assert math.isnan(module.losses[-1]), "a mean over no target"


class Data(LightningDataModule):
    """An ordinary datamodule, with torch's own DataLoader and its collate_fn."""

    def train_dataloader(self) -> DataLoader[Any]:
        sources: Any = make_sources([length for lengths in PARTS for length in lengths], prompt=1)
        return DataLoader(sources, batch_size=3, collate_fn=pad, num_workers=0)


def test_an_ordinary_datamodule_works() -> None:
    module = HuggingFaceModule()
    quiet_trainer(callbacks=[PackedAttention(policy=POLICY)], max_epochs=1).fit(module, datamodule=Data())
    assert [shape[0] for shape in module.shapes] == [1, 1, 1, 1]
    assert all(map(math.isfinite, module.losses))


def test_a_policy_beside_a_datamodule_that_packs_is_refused() -> None:
    class Packs(Data):
        packing = POLICY

    with pytest.raises(ValueError, match=r"Packs packs by its own rules .packing., so this policy is not used: leave it out"):
        quiet_trainer(callbacks=[PackedAttention(policy=POLICY)], max_epochs=1).fit(HuggingFaceModule(), datamodule=Packs())


def test_tuples_and_mixtures_are_refused_in_a_run() -> None:
    callbacks = [PackedAttention(policy=POLICY)]
    with pytest.raises(CollatedBatchError, match="a tuple does not name its entries"):
        quiet_trainer(callbacks=callbacks, max_epochs=1).fit(HuggingFaceModule(), Batches(lambda: (torch.ones(1, 4), 1)))
    unlabelled = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "attention_mask": torch.ones(2, 4)}
    with pytest.raises(CollatedBatchError, match="batch 0 has neither labels nor shift_labels"):
        quiet_trainer(callbacks=callbacks, max_epochs=1).fit(HuggingFaceModule(), Batches(lambda: dict(unlabelled)))


@pytest.mark.filterwarnings("ignore")
def test_another_namespace_is_refused_by_name() -> None:
    other = pytest.importorskip("pytorch_lightning")

    class Module(other.LightningModule):  # type: ignore[name-defined, misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            raise AssertionError("refused before")

        def configure_optimizers(self) -> None:
            return None

    trainer = other.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[PackedAttention(policy=POLICY)],
    )
    message = (
        "comes from 'pytorch_lightning'.*write 'import lightning.pytorch as pl' instead of 'import pytorch_lightning as pl'"
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit(Module(), Batches(lambda: pad(parts()[0])))


def test_no_label_is_a_target_twice() -> None:
    """The targets of a row are those of its sources: none is shifted again, none crosses a boundary."""
    sources = make_sources((6, 4), prompt=0)
    row_targets: list[int] = []

    class Counting(HuggingFaceModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            row_targets.append(int((batch["shift_labels"] != IGNORE).sum()))
            return super().training_step(batch, batch_idx)

    quiet_trainer(callbacks=[PackedAttention(policy=POLICY)], max_epochs=1).fit(Counting(), Batches(lambda: pad(sources)))
    assert row_targets == [5 + 3]
