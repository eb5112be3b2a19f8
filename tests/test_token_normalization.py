"""Gradients per target token: one big batch, however it was cut over micro-batches and ranks."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from lightning_pack.callbacks import PackedAttention, TokenNormalizedGradients
from lightning_pack.module import PackedCausalLM
from lightning_pack.row import PackedBatch
from lightning_pack.source import IGNORE, EncodedSource
from tests.ranks import on_ranks
from tests.tiny_models import (
    Rows,
    alone_gradients,
    largest_difference,
    make_sources,
    pack_row,
    quiet_trainer,
    tiny_config,
    tiny_model,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]

CLIP = 0.05
#: Targets differ much between rows, and sources are never the same.
ROWS = [make_sources(lengths, seed=number) for number, lengths in enumerate([(9, 4, 14), (3, 5), (12,), (4, 4, 4), (20, 3)])]


class Recorded(PackedCausalLM):
    """Plain gradient descent that keeps the gradients of every step, before and after clipping."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tiny_config("llama"), **options)
        self.raw: list[dict[str, Tensor]] = []
        self.clipped: list[dict[str, Tensor]] = []

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model.load_state_dict(tiny_model("llama").state_dict())

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.raw.append(self._gradients())
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.clipped.append(self._gradients())

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters()}


def without_targets(sources: list[EncodedSource]) -> list[EncodedSource]:
    """The same sources as prompts only (the policy would not let them in; here they test a rank that has none)."""
    return [EncodedSource(key=s.key, input_ids=s.input_ids, labels=torch.full_like(s.labels, IGNORE)) for s in sources]


def expected_steps(windows: list[list[EncodedSource]]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Gradients of plain gradient descent on the sources of each window, every source alone in the model's own attention."""
    model = tiny_model("llama", dtype=torch.float64)
    steps = []
    for sources in windows:
        _, raw = alone_gradients(model, sources)
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        assert float(norm) > 2 * CLIP  # clipping is on
        clipped = {name: p.grad.clone() for name, p in model.named_parameters()}
        steps.append((raw, clipped))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return steps


def check_steps(module: Recorded, windows: list[list[EncodedSource]], tolerance: float = 1e-6) -> None:
    expected = expected_steps(windows)
    assert len(module.raw) == len(windows)
    for number, (raw, clipped) in enumerate(expected):
        assert largest_difference(module.raw[number], raw) <= tolerance
        assert largest_difference(module.clipped[number], clipped) <= tolerance


def flat(rows: list[list[EncodedSource]]) -> list[EncodedSource]:
    return [source for row in rows for source in row]


def fit(module: LightningModule, rows: list[list[EncodedSource]], *, callback: Any = None, **options: Any) -> None:
    callbacks = [PackedAttention(monitor=False) if callback is None else callback]
    options = {"precision": "64-true", **options}
    quiet_trainer(callbacks=callbacks, max_epochs=1, gradient_clip_val=CLIP, **options).fit(
        module, Rows(*(pack_row(row, multiple=4) for row in rows))
    )


@pytest.mark.parametrize("accumulate", [1, 4])
def test_accumulation_is_one_big_batch(accumulate: int) -> None:
    assert len(ROWS) % 4 == 1  # the last window is partial
    module = Recorded()
    fit(module, ROWS, accumulate_grad_batches=accumulate)
    check_steps(module, [flat(ROWS[i : i + accumulate]) for i in range(0, len(ROWS), accumulate)])


def test_without_it_short_rows_weigh_more() -> None:
    module = Recorded()
    fit(module, ROWS[:4], callback=PackedAttention(monitor=False, token_normalization=False), accumulate_grad_batches=4)
    ((raw, _),) = expected_steps([flat(ROWS[:4])])
    assert largest_difference(module.raw[0], raw) > 1e-3


class Clipping(Callback):
    """Clips by itself, and keeps what it got."""

    def __init__(self) -> None:
        self.given: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.given.append({name: p.grad.clone() for name, p in pl_module.model.named_parameters()})  # type: ignore[union-attr]
        clip_grad_norm_(pl_module.parameters(), CLIP)


def test_callbacks_that_see_gradients_get_them_per_target_token_wherever_they_stand() -> None:
    before, after, module = Clipping(), Clipping(), Recorded()
    trainer = quiet_trainer(
        callbacks=[before, PackedAttention(), after], max_epochs=1, accumulate_grad_batches=4, precision="64-true"
    )
    trainer.fit(module, Rows(*(pack_row(row, multiple=4) for row in ROWS[:4])))
    ((raw, clipped),) = expected_steps([flat(ROWS[:4])])
    assert largest_difference(raw, clipped) > 1e-2
    assert largest_difference(before.given[0], raw) < 1e-6
    assert largest_difference(after.given[0], clipped) < 1e-6
    kinds = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
    assert kinds == ["PackedAttention", "TokenNormalizedGradients", "PackingMonitor", "Clipping", "Clipping"]


class Summed(Recorded):
    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * batch.loss_mask.sum()


class PlainModule(LightningModule):
    """A module as users have it: the loss is the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model("llama")
        self.raw: list[dict[str, Tensor]] = []

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.raw.append({name: p.grad.clone() for name, p in self.model.named_parameters()})

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1)


def test_a_loss_that_is_a_sum() -> None:
    from lightning_pack.attention import ActivatedModel  # the other callback would bring its own

    module = Summed()
    module.configure_model()
    active = ActivatedModel.of(module.model)
    fit(module, ROWS, callback=TokenNormalizedGradients(loss="sum"), accumulate_grad_batches=4)
    active.restore()
    check_steps(module, [flat(ROWS[:4]), ROWS[4]])


def test_the_models_own_loss() -> None:
    module = PlainModule()
    fit(module, ROWS[:4], accumulate_grad_batches=4)
    ((raw, _),) = expected_steps([flat(ROWS[:4])])
    assert largest_difference(module.raw[0], raw) <= 1e-6


@pytest.mark.parametrize("kind", [Recorded, PlainModule])
def test_no_target_anywhere_gives_zeros(kind: type[Any]) -> None:
    module = kind()
    rows = [without_targets(ROWS[0]), without_targets(ROWS[1])]
    assert not pack_row(rows[0]).loss_mask.any()
    fit(module, rows, accumulate_grad_batches=2)
    assert len(module.raw) == 1
    assert all(not gradient.any() for gradient in module.raw[0].values())


def test_rows_without_targets_change_nothing() -> None:
    module = Recorded()
    fit(module, [ROWS[0], without_targets(ROWS[2]), ROWS[1]], accumulate_grad_batches=3)
    check_steps(module, [flat(ROWS[:2])])


def test_a_second_epoch_and_a_second_fit_start_anew() -> None:
    module = Recorded()
    trainer = quiet_trainer(
        callbacks=[PackedAttention(monitor=False)],
        max_epochs=2,
        gradient_clip_val=CLIP,
        accumulate_grad_batches=2,
        precision="64-true",
    )
    rows = Rows(*(pack_row(row) for row in ROWS[:3]))
    trainer.fit(module, rows)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, rows)
    check_steps(module, [flat(ROWS[:2]), ROWS[2]] * 3)


def test_logged_losses_are_not_scaled() -> None:
    module = Recorded()
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_steps=1)
    trainer.fit(module, Rows(pack_row(ROWS[0])))
    expected, _ = alone_gradients(tiny_model("llama"), ROWS[0])
    assert abs(float(trainer.callback_metrics["train_loss"]) - expected) < 1e-5


# --- two ranks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankCase:
    accumulate: int
    #: Rows of each rank, numbers into ROWS; None stands for a row without targets.
    rows: tuple[list[int | None], list[int | None]]
    #: What each optimizer step is made of.
    windows: list[list[int]]
    #: Weights sharded over both ranks (ModelParallelStrategy) and not copied (DDPStrategy).
    sharded: bool = False


RANK_CASES = {
    "one-by-one": RankCase(1, ([0, 1], [2, 3]), [[0, 2], [1, 3]]),
    "accumulated-with-partial-window": RankCase(2, ([0, 1, 4], [2, 3, 0]), [[0, 1, 2, 3], [4, 0]]),
    "a-rank-without-targets": RankCase(1, ([0, 3], [None, 2]), [[0], [3, 2]]),
    "sharded": RankCase(2, ([0, 1, 4], [2, None, 0]), [[0, 1, 2], [4, 0]], sharded=True),
}


#: Rows that each rank validates.
VALIDATED = ([0, 1], [4, 2])


class Sharded(Recorded):
    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            for part in (*self.model.model.layers, self.model):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def _gradients(self) -> dict[str, Tensor]:
        assert all(isinstance(p.grad, DTensor) for p in self.model.parameters())
        return {name: p.grad.full_tensor().clone() for name, p in self.model.named_parameters()}


def rank_rows(indices: list[int | None]) -> list[list[EncodedSource]]:
    return [without_targets(ROWS[1]) if index is None else ROWS[index] for index in indices]


def run_rank(argument: dict[str, Any]) -> None:
    """Body of one rank: every case in turn, gradients saved."""
    rank, folder = int(os.environ["RANK"]), argument["folder"]
    for name, case in RANK_CASES.items():
        module = Sharded() if case.sharded else Recorded()
        options: dict[str, Any] = {"strategy": "ddp"}
        if case.sharded:  # double precision is not to be had with it
            strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
            options = {"strategy": strategy, "precision": "32-true"}
        fit(module, rank_rows(case.rows[rank]), devices=2, accumulate_grad_batches=case.accumulate, **options)
        torch.save({"raw": module.raw, "clipped": module.clipped}, f"{folder}/{name}.{rank}.pt")
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], strategy="ddp", devices=2)
    (logged,) = trainer.validate(Recorded(), Rows(*(pack_row(ROWS[i]) for i in VALIDATED[rank])), verbose=False)
    torch.save(logged["val_loss"], f"{folder}/val_loss.{rank}.pt")


def test_two_ranks_are_one_big_batch(tmp_path: Path) -> None:
    on_ranks("tests.test_token_normalization:run_rank", {"folder": str(tmp_path)}, folder=tmp_path / "ranks")
    for name, case in RANK_CASES.items():
        for rank in range(2):
            module = Recorded()
            saved = torch.load(tmp_path / f"{name}.{rank}.pt")
            module.raw, module.clipped = saved["raw"], saved["clipped"]
            check_steps(module, [flat(rank_rows(list(window))) for window in case.windows], 1e-5 if case.sharded else 1e-6)

    model = tiny_model("llama")
    whole, _ = alone_gradients(model, flat([ROWS[i] for part in VALIDATED for i in part]))
    means = [alone_gradients(model, flat([ROWS[i] for i in part]))[0] for part in VALIDATED]
    assert abs(sum(means) / 2 - whole) > 1e-4  # a mean over ranks would be another number
    assert all(abs(torch.load(tmp_path / f"val_loss.{rank}.pt") - whole) < 1e-5 for rank in range(2))


# --- refusals ----------------------------------------------------------------------------------------------------------


class Manual(Recorded):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_manual_optimization_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Manual optimizes manually.*token_normalization=False"):
        quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_steps=1).fit(Manual(), Rows(pack_row(ROWS[0])))


def test_other_batches_are_refused() -> None:
    class Tensors(PlainModule):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.model(batch, labels=batch).loss

    trainer = quiet_trainer(callbacks=[TokenNormalizedGradients()], max_steps=1)
    with pytest.raises(ValueError, match=r"got a Tensor, which does not tell its target tokens: train on PackedBatch"):
        trainer.fit(Tensors(), Rows(torch.ones(1, 4, dtype=torch.long)))  # type: ignore[arg-type]


def test_deepspeed_is_refused() -> None:
    # It does not run without its accelerator, so only its place in the trainer is taken.
    trainer = quiet_trainer()
    trainer._accelerator_connector.strategy = object.__new__(DeepSpeedStrategy)
    with pytest.raises(ValueError, match=r"DeepSpeedStrategy.*inside its engine.*token_normalization=False"):
        TokenNormalizedGradients().on_fit_start(trainer, Recorded())


def test_unknown_kind_of_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="loss='median' is not 'mean' or 'sum'"):
        TokenNormalizedGradients(loss="median")  # type: ignore[arg-type]
