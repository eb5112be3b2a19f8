"""TokenNormalizer: gradients per target token where a module optimizes manually."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import SGD

from lightning_pack import EnergonPackDataModule, PackingPolicy, TokenNormalizer
from lightning_pack.callbacks import PackedAttention
from lightning_pack.row import PackedBatch
from lightning_pack.source import EncodedSource
from tests.numbers_data import NumberEncoder
from tests.test_precision import CLIP, ROUNDOFF, Data, Packed, fit_unpacked, options_of, relative
from tests.tiny_models import alone_loss, make_sources, pack_row, quiet_trainer, tiny_model

#: One source list a row; targets differ much.
ROWS = [make_sources(lengths, seed=40 + number) for number, lengths in enumerate([(20, 24, 16), (5,), (4, 4), (30, 12)])]


class Manual(Packed):
    """A loop of its own that makes a step of every two rows."""

    def __init__(self, *, loss: Any = "mean") -> None:
        super().__init__(tiny_model("llama"))
        self.automatic_optimization = False
        self.normalizer = TokenNormalizer(self, loss=loss)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self.backward_on(batch, batch_idx)
        if batch_idx % 2 == 1:
            self.step()

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None: ...

    def loss(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)

    def backward_on(self, batch: PackedBatch, batch_idx: int) -> None:
        loss = self.loss(batch, batch_idx)
        before = loss.item()
        self.manual_backward(self.normalizer.scale(loss, batch))
        assert loss.item() == before

    def step(self) -> None:
        optimizer = self.optimizers()
        self.normalizer.normalize(optimizer)
        self.raw.append(self._gradients())
        nn.utils.clip_grad_norm_(self.parameters(), CLIP)
        self.clipped.append(self._gradients())
        optimizer.step()
        optimizer.zero_grad()


def fit(module: Packed, rows: list[list[EncodedSource]] = ROWS, **options: Any) -> None:
    callbacks = [PackedAttention(monitor=False, token_normalization=False)]
    trainer = quiet_trainer(callbacks=callbacks, **{"max_epochs": 1, **options})
    trainer.fit(module, datamodule=Data([pack_row(row, multiple=4) for row in rows]))


class Summed(Manual):
    def loss(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        return super().loss(batch, batch_idx) * batch.loss_mask.sum()


class Skipping(Manual):
    """Does not send every loss backward: its tokens do not count then."""

    def training_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self.normalizer.scale(self.loss(batch, batch_idx), batch)
        super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Manual, lambda: Summed(loss="sum"), Skipping])
def test_manual_steps_are_steps_of_all_target_tokens(kind: Any) -> None:
    module = kind()
    fit(module)
    expected = fit_unpacked("32-true", [ROWS[:2], ROWS[2:]])
    assert len(module.raw) == 2
    for step in range(2):
        assert relative(module.raw[step], expected.raw[step]) <= 16 * ROUNDOFF["32-true"]
        assert relative(module.clipped[step], expected.clipped[step]) <= 16 * ROUNDOFF["32-true"]


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "bf16-mixed"])
def test_half_precision(precision: str) -> None:
    # There manual_backward runs with a half type as the default one.
    module = Manual()
    fit(module, **options_of(precision))
    expected = fit_unpacked(precision, [ROWS[:2], ROWS[2:]])
    for step in range(2):
        assert relative(module.raw[step], expected.raw[step]) <= 16 * ROUNDOFF[precision]


class Scaled(Manual):
    """Normalizes and clips where a gradient scaler has just taken its factor out."""

    def training_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self.backward_on(batch, batch_idx)
        if batch_idx % 2 == 1:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.normalizer.normalize(optimizer)
        self.raw.append(self._gradients())
        nn.utils.clip_grad_norm_(self.parameters(), CLIP)
        self.clipped.append(self._gradients())


def test_a_gradient_scaler_and_a_step_that_it_skips() -> None:
    module = Scaled()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-30)
    fit(module, [*ROWS[:2], *ROWS], plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert not all(gradient.isfinite().all() for gradient in module.raw[0].values())
    assert scaler.get_scale() == 2.0**10
    expected = fit_unpacked("16-mixed", [ROWS[:2], ROWS[2:]])
    for step in range(2):
        assert relative(module.raw[step + 1], expected.raw[step]) <= 16 * ROUNDOFF["16-mixed"]
        assert relative(module.clipped[step + 1], expected.clipped[step]) <= 16 * ROUNDOFF["16-mixed"]


class Windows(Manual):
    """Two optimizers with windows of their own: one makes a step of every row, the other of every two."""

    def training_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self.backward_on(batch, batch_idx)
        often, seldom = self.optimizers()
        for optimizer in (often, seldom) if batch_idx % 2 == 1 else (often,):
            self.normalizer.normalize(optimizer)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        parameters = list(self.model.parameters())
        return [SGD(parameters[::2], lr=0.1), SGD(parameters[1::2], lr=0.1)]


def test_each_optimizer_is_normalized_by_its_own_tokens() -> None:
    module = Windows()
    fit(module)
    model = tiny_model("llama")
    parameters = list(model.parameters())
    groups = [parameters[::2], parameters[1::2]]
    counts = [0, 0]
    for number, row in enumerate(ROWS):
        parts = [alone_loss(model, source) for source in row]
        torch.stack([part for part, _ in parts]).sum().backward()
        for group in range(2):
            counts[group] += sum(count for _, count in parts)
            if group == 0 or number % 2 == 1:
                with torch.no_grad():
                    for parameter in groups[group]:
                        parameter -= 0.1 * parameter.grad / counts[group]
                        parameter.grad = None
                counts[group] = 0
    moved = {name: p.detach() for name, p in model.named_parameters()}
    start = dict(tiny_model("llama").named_parameters())
    assert all(not torch.equal(moved[name], start[name]) for name in moved)
    assert relative({name: p.detach() for name, p in module.model.named_parameters()}, moved) <= 1e-6


class Adversaries(Windows):
    """Two losses, each for one optimizer."""

    def training_step(self, batch: PackedBatch, batch_idx: int) -> None:
        first, second = self.optimizers()
        mine = first if batch_idx % 2 == 0 else second
        self.manual_backward(self.normalizer.scale(self.loss(batch, batch_idx), batch, optimizers=[mine]))
        self.normalizer.normalize(mine)
        self.raw.append(self._gradients())
        mine.step()
        self.zero_grad()


def test_a_loss_for_one_optimizer_counts_for_that_one_only() -> None:
    module = Adversaries()
    fit(module, ROWS[:2])
    model = tiny_model("llama")
    for number in range(2):
        parts = [alone_loss(model, source) for source in ROWS[number]]
        (torch.stack([part for part, _ in parts]).sum() / sum(count for _, count in parts)).backward()
        own = {name: p for at, (name, p) in enumerate(model.named_parameters()) if at % 2 == number}
        found = {name: module.raw[number][name] for name in own}
        assert relative(found, {name: p.grad for name, p in own.items()}) <= 1e-6
        with torch.no_grad():
            for parameter in own.values():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()


def test_a_fit_that_ended_within_a_window_leaves_nothing_to_the_next() -> None:
    module = Manual()
    fit(module, ROWS[3:])
    assert module.raw == []
    module.zero_grad()
    fit(module)
    assert relative(module.raw[0], fit_unpacked("32-true", [ROWS[:2]]).raw[0]) <= 16 * ROUNDOFF["32-true"]


def test_a_copied_module_has_no_optimizers_of_the_fit() -> None:
    module = Manual()
    fit(module, ROWS[3:])
    assert len(module.normalizer._windows) == 1
    copied = copy.deepcopy(module.normalizer)
    assert copied._windows == {}
    assert len(module.normalizer._windows) == 1
    assert pickle.loads(pickle.dumps(Manual().normalizer))._loss == "mean"


@pytest.mark.filterwarnings("ignore::lightning_pack.callbacks.monitor.LeftOutWarning")
def test_a_manual_run_on_a_packed_stream_is_continued(numbers: Path, tmp_path: Path) -> None:
    def run(steps: int, **options: Any) -> tuple[Any, Manual]:
        policy = PackingPolicy(capacity=64, buffer_size=16, multiple=4, algorithm="exact_fill")
        data = EnergonPackDataModule(str(numbers), encoder=NumberEncoder(), packing=policy, num_workers=0, packs_per_batch=2)
        trainer = quiet_trainer(
            callbacks=[PackedAttention(token_normalization=False)], max_steps=steps, limit_val_batches=0, log_every_n_steps=1
        )
        module = Manual()
        module.model = tiny_model("llama", vocab_size=600)
        trainer.fit(module, datamodule=data, **options)
        return trainer, module

    _, whole = run(3)
    half, first = run(1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    trainer, resumed = run(3, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert trainer.global_step == 3
    assert len(whole.batches) == 6
    rows = [batch.source_keys for batch in whole.batches]
    assert [b.source_keys for b in first.batches] + [b.source_keys for b in resumed.batches] == rows
    # Losses are scaled by the tokens that a row may have.
    assert {window.scale for window in resumed.normalizer._windows.values()} == {128}
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


# --- misuse ------------------------------------------------------------------------------------------------------------


class Twice(Manual):
    def step(self) -> None:
        self.normalizer.normalize(self.optimizers())
        super().step()


class WithoutBackward(Manual):
    def backward_on(self, batch: PackedBatch, batch_idx: int) -> None:
        self.normalizer.scale(self.loss(batch, batch_idx), batch)


class Forgotten(Manual):
    def step(self) -> None:
        self.optimizers().step()


class TooEarly(Manual):
    """Sends one more loss backward after gradients were normalized."""

    def training_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self.backward_on(batch, batch_idx)
        self.normalizer.normalize(self.optimizers())
        self.backward_on(batch, batch_idx)
        self.optimizers().step()


class Detached(Manual):
    def loss(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        return super().loss(batch, batch_idx).detach()


class OtherBatch(Manual):
    def backward_on(self, batch: PackedBatch, batch_idx: int) -> None:
        self.normalizer.scale(self.loss(batch, batch_idx), batch.input_ids)  # type: ignore[arg-type]


class OtherOptimizer(Manual):
    def step(self) -> None:
        self.normalizer.normalize(SGD(self.parameters(), lr=0.1))


class NoOptimizer(Manual):
    def backward_on(self, batch: PackedBatch, batch_idx: int) -> None:
        self.normalizer.scale(self.loss(batch, batch_idx), batch, optimizers=[])


class Automatic(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Twice, "gradients of SGD are normalized already.*call normalize once before each optimizer.step"),
        (
            WithoutBackward,
            r"no scaled loss was sent backward for SGD.*manual_backward\(normalizer.scale\(loss, batch\)\) first",
        ),
        (
            Forgotten,
            r"SGD made a step with gradients that were not normalized.*normalizer.normalize\(optimizer\) after the last",
        ),
        (
            TooEarly,
            r"SGD made a step with gradients that were not normalized.*normalizer.normalize\(optimizer\) after the last",
        ),
        (Detached, "the loss given to TokenNormalizer.scale has no gradient"),
        (OtherBatch, "scale got a Tensor, which does not tell its target tokens: give the PackedBatch"),
        (OtherOptimizer, r"this SGD is not an optimizer of OtherOptimizer: give one that self.optimizers\(\) returns"),
        (NoOptimizer, r"scale\(optimizers=\[\]\): a loss for no optimizer"),
        (Automatic, r"Automatic optimizes automatically.*TokenNormalizedGradients.*self.automatic_optimization = False"),
    ],
)
def test_misuse_is_told(kind: type[Manual], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(kind())


def test_the_callback_names_the_helper() -> None:
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_epochs=1)
    with pytest.raises(
        ValueError, match=r"Manual optimizes manually.*lightning_pack.TokenNormalizer.*token_normalization=False"
    ):
        trainer.fit(Manual(), datamodule=Data([pack_row(ROWS[0])]))


def test_unknown_kind_of_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="loss='median' is not 'mean' or 'sum'"):
        Manual(loss="median")
