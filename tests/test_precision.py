"""A packed run against the unpacked one in every precision of the Trainer."""

import logging
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import SGD
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_pack.callbacks import PackedAttention
from lightning_pack.module import PackedCausalLM
from lightning_pack.policy import PackingPolicy
from lightning_pack.pretrained import checkpoint_activations
from lightning_pack.row import PackedBatch
from lightning_pack.source import IGNORE, EncodedSource
from lightning_pack.target_window import TargetWindow, multiply_gradients
from tests.tiny_models import alone_loss, forward_inputs, make_sources, pack_row, quiet_trainer, tiny_config, tiny_model

CLIP = 0.05
#: Of two micro-batches each. Targets differ much between the micro-batches of a window.
WINDOWS = [[(20, 24, 16, 20), (5,)], [(4, 4), (30, 28, 12)]]
#: Unit roundoff of what the model computes in.
ROUNDOFF = {
    "64-true": 2.0**-53,
    "32-true": 2.0**-24,
    "16-mixed": 2.0**-11,
    "16-true": 2.0**-11,
    "bf16-mixed": 2.0**-8,
    "bf16-true": 2.0**-8,
}
INTEGERS = {
    "input_ids": torch.int64,
    "labels": torch.int64,
    "shift_labels": torch.int64,
    "loss_mask": torch.bool,
    "position_ids": torch.int64,
    "cu_seqlens": torch.int32,
    "cu_seqlens_padded": torch.int32,
    "segment_ids": torch.int32,
}


def micro_batches() -> list[list[list[EncodedSource]]]:
    return [[make_sources(lengths, seed=10 * w + m) for m, lengths in enumerate(window)] for w, window in enumerate(WINDOWS)]


def model_for(precision: str) -> nn.Module:
    if precision != "64-true":
        return tiny_model("llama")
    # The norms of Llama compute in float32, whatever they are given; those of GPT-2 do not.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes, **off), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4 if parameter.ndim == 2 else 1)
    return model.train()


class Descent(LightningModule):
    """Plain gradient descent that keeps the gradients of every step, before and after clipping."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.raw: list[dict[str, Tensor]] = []
        self.clipped: list[dict[str, Tensor]] = []

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


class Packed(Descent):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.batches: list[PackedBatch] = []

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        self.batches.append(batch)
        logits = self.model(**forward_inputs(batch)).logits[0]
        # The model's own loss would be float32 in double precision too.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, batch.shift_labels[0], ignore_index=IGNORE)


class Unpacked(Descent):
    """Every source of a window alone, without boundaries, positions or a callback."""

    def training_step(self, sources: list[EncodedSource], batch_idx: int) -> Tensor:
        parts = [alone_loss(self.model, source) for source in sources]
        return torch.stack([part.double() for part, _ in parts]).sum() / sum(count for _, count in parts)


class Data(LightningDataModule):
    """Batches, and packing rules that tell how many tokens a row has."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.packing = PackingPolicy(capacity=64, multiple=4)
        self.batches = batches

    def train_dataloader(self) -> Any:
        return Loader(self.batches)


class Loader:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Scales(Callback):
    """Scale of the gradient scaler, and whether the weights moved, at every step."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.moved: list[bool] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.before = [p.detach().clone() for p in pl_module.parameters()]

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._note(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(trainer, pl_module)

    def _note(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if hasattr(self, "before"):
            self.moved.append(not all(torch.equal(a, b) for a, b in zip(self.before, pl_module.parameters(), strict=True)))
            self.scales.append(trainer.precision_plugin.scaler.get_scale())


def options_of(precision: str, **scaler: Any) -> dict[str, Any]:
    if precision == "16-mixed":
        # By its name Lightning would take bfloat16 on the CPU.
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, **scaler}))
        return {"plugins": [plugin]}
    return {"precision": precision}


def fit_packed(precision: str, windows: list[list[list[EncodedSource]]], *more: Callback, **scaler: Any) -> Packed:
    module = Packed(model_for(precision))
    rows = [pack_row(sources, multiple=4) for window in windows for sources in window]
    trainer = quiet_trainer(
        callbacks=[*more, PackedAttention(monitor=False)],
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=CLIP,
        **options_of(precision, **scaler),
    )
    trainer.fit(module, datamodule=Data(rows))
    return module


def fit_unpacked(precision: str, windows: list[list[list[EncodedSource]]]) -> Unpacked:
    module = Unpacked(model_for(precision))
    trainer = quiet_trainer(max_epochs=1, gradient_clip_val=CLIP, **options_of(precision))
    trainer.fit(module, datamodule=Data([[source for sources in window for source in sources] for window in windows]))
    return module


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference of all gradients by the norm of the expected ones."""
    assert found.keys() == expected.keys()
    norms = [sum(float(t.square().sum()) for t in tensors) for tensors in _differences(found, expected)]
    return (norms[0] / norms[1]) ** 0.5


def _differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [found[k].double() - expected[k].double() for k in expected], [expected[k].double() for k in expected]


@pytest.mark.parametrize("precision", ROUNDOFF)
def test_a_packed_run_is_the_unpacked_run(precision: str) -> None:
    packed = fit_packed(precision, micro_batches())
    unpacked = fit_unpacked(precision, micro_batches())
    computed = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    assert {g.dtype for g in packed.raw[0].values()} == {computed}
    assert len(packed.raw) == len(unpacked.raw) == 2
    # A dozen operations follow one another, forward and backward, each of which may round by the unit.
    tolerance = 16 * ROUNDOFF[precision]
    for step in range(2):
        norm = sum(float(g.double().square().sum()) for g in packed.raw[step].values()) ** 0.5
        assert norm > 2 * CLIP, "clipping has to be on"
        assert relative(packed.raw[step], unpacked.raw[step]) <= tolerance
        assert relative(packed.clipped[step], unpacked.clipped[step]) <= tolerance
    # The precision is what differs, and not what is computed: means of micro-batches would be far away.
    means = [fit_unpacked(precision, [[sources]]) for sources in micro_batches()[0]]
    mean = {k: (means[0].raw[0][k].double() + means[1].raw[0][k].double()) / 2 for k in means[0].raw[0]}
    assert relative(mean, unpacked.raw[0]) > 4 * tolerance


@pytest.mark.parametrize("precision", ["16-true", "64-true", "bf16-mixed"])
def test_rows_are_not_cast(precision: str) -> None:
    given = [pack_row(sources, multiple=4) for window in micro_batches() for sources in window]
    module = fit_packed(precision, micro_batches())
    assert len(module.batches) == 4
    for batch, row in zip(module.batches, given, strict=True):
        tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)}
        assert {name: tensor.dtype for name, tensor in tensors.items()} == INTEGERS
        assert all(torch.equal(tensor, getattr(row, name)) for name, tensor in tensors.items())
    # Kernels tell that nothing is padded by one object in both places.
    assert {b.cu_seqlens is b.cu_seqlens_padded for b in module.batches} == {True, False}


def test_a_step_that_the_scaler_skips_leaves_nothing_behind() -> None:
    windows = micro_batches()
    scales = Scales()
    skipped = [[make_sources((9, 7), seed=90)], [make_sources((14,), seed=91)]]
    module = fit_packed(
        "16-mixed", [[skipped[0][0], skipped[1][0]], *windows], scales, init_scale=2.0**40, backoff_factor=2.0**-30
    )
    assert scales.scales == [2.0**10] * 3
    assert scales.moved == [False, True, True]
    assert not all(gradient.isfinite().all() for gradient in module.raw[0].values())
    expected = fit_unpacked("16-mixed", windows)
    for step in range(2):
        assert relative(module.raw[step + 1], expected.raw[step]) <= 16 * ROUNDOFF["16-mixed"]
        assert relative(module.clipped[step + 1], expected.clipped[step]) <= 16 * ROUNDOFF["16-mixed"]


class Fused(Packed):
    """Its optimizer takes the factor of the gradient scaler out by itself, after every hook."""

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1, fused=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.raw.append(self._gradients())

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None: ...


def test_an_optimizer_that_unscales_by_itself() -> None:
    module = Fused(model_for("16-mixed"))
    rows = [pack_row(sources, multiple=4) for sources in micro_batches()[0]]
    options = options_of("16-mixed", init_scale=2.0**6)
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_epochs=1, accumulate_grad_batches=2, **options)
    trainer.fit(module, datamodule=Data(rows))
    expected = fit_unpacked("16-mixed", micro_batches()[:1]).raw[0]
    scaled = {name: gradient / 2.0**6 for name, gradient in module.raw[0].items()}
    assert relative(scaled, expected) <= 16 * ROUNDOFF["16-mixed"]
    start = model_for("16-mixed").state_dict()
    moved = {name: (start[name] - p.detach()) / 0.1 for name, p in module.model.named_parameters()}
    assert relative(moved, expected) <= 16 * ROUNDOFF["16-mixed"]


@pytest.mark.parametrize("precision", ["16-true", "bf16-true", "bf16-mixed"])
def test_losses_are_summed_in_double_precision(precision: str) -> None:
    module = PackedCausalLM(tiny_config("llama"))
    module.configure_model()
    module.model.load_state_dict(tiny_model("llama").state_dict())
    assert module.val_loss.dtype == torch.float64
    rows = [sources for window in micro_batches() for sources in window]
    trainer = quiet_trainer(callbacks=[PackedAttention(monitor=False)], precision=precision)
    (logged,) = trainer.validate(module, Loader([pack_row(row, multiple=4) for row in rows]), verbose=False)
    assert module.val_loss.mean_value.dtype == torch.float64
    weights = {"16-true": torch.float16, "bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}[precision]
    assert {parameter.dtype for parameter in module.model.parameters()} == {weights}
    model = tiny_model("llama", dtype=torch.float64)
    parts = [alone_loss(model, source) for row in rows for source in row]
    expected = float(sum(part.detach() for part, _ in parts)) / sum(count for _, count in parts)
    assert abs(logged["val_loss"] - expected) <= 16 * ROUNDOFF[precision] * expected


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 100.3), (torch.float16, 1e6)])
def test_the_factor_is_not_rounded_to_the_type_of_gradients(dtype: torch.dtype, factor: float) -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=dtype))
    parameter.grad = torch.full((4,), 1.4 * 2.0**-10, dtype=dtype)
    expected = (parameter.grad.double() * factor).to(dtype)
    assert not torch.equal(expected, (parameter.grad.double() * torch.tensor(factor).to(dtype)).to(dtype))
    multiply_gradients(SGD([parameter], lr=0.1), torch.tensor(factor, dtype=torch.float64))
    assert torch.equal(parameter.grad, expected)


def test_the_scale_of_losses_follows_the_packing_rules() -> None:
    window = TargetWindow()
    window.fit_scale(SimpleNamespace(datamodule=None))  # type: ignore[arg-type]
    assert window.scale == 4096
    rules = SimpleNamespace(packing=PackingPolicy(capacity=100), packs_per_batch=2)
    window.fit_scale(SimpleNamespace(datamodule=rules))  # type: ignore[arg-type]
    assert window.scale == 256
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert float(window.factor(torch.tensor(2051))) == 2051 / 256
    finally:
        torch.set_default_dtype(torch.float32)


# --- activations recomputed in the backward pass -----------------------------------------------------------------------


class Recomputed(PackedCausalLM):
    """Counts the calls of attention and notes the boundaries that each was given."""

    def __init__(self, use_reentrant: bool | None, dropout: float = 0.0) -> None:
        super().__init__(tiny_config("llama", attention_dropout=dropout))
        self.use_reentrant = use_reentrant
        self.given: list[Tensor] = []
        self.raw: list[dict[str, Tensor]] = []

    def configure_model(self) -> None:
        if self.model is not None:
            return
        super().configure_model()
        self.model.load_state_dict(tiny_model("llama").state_dict())
        for layer in self.model.model.layers:
            layer.self_attn.register_forward_pre_hook(self._note, with_kwargs=True)
        if self.use_reentrant is not None:
            self.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": self.use_reentrant})

    def _note(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        assert keywords["cu_seq_lens_q"] is keywords["cu_seq_lens_k"]
        self.given.append(keywords["cu_seq_lens_q"])

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.raw.append({name: p.grad.clone() for name, p in self.model.named_parameters()})


class Warned(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def warned() -> Iterator[Warned]:
    """What transformers warns of, also what it has warned of before."""
    handler, logger = Warned(), logging.getLogger("transformers")
    logger.addHandler(handler)
    type(logger).warning_once.cache_clear()  # type: ignore[attr-defined]
    yield handler
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("precision", "dropout"), [("32-true", 0.0), ("32-true", 0.3), ("64-true", 0.0), ("bf16-mixed", 0.3), ("16-mixed", 0.0)]
)
def test_recomputed_activations_give_bitwise_the_same_gradients(precision: str, dropout: float, warned: Warned) -> None:
    rows = [pack_row(sources, multiple=4) for window in micro_batches() for sources in window]
    found: dict[bool | None, Recomputed] = {}
    for mode in (None, False, True):
        module = found[mode] = Recomputed(mode, dropout)
        trainer = quiet_trainer(
            callbacks=[PackedAttention(monitor=False)], max_epochs=1, accumulate_grad_batches=2, **options_of(precision)
        )
        torch.manual_seed(7)
        trainer.fit(module, datamodule=Data(rows))
        # Each of two layers attends once more in the backward pass.
        passes = 2 if mode is None else 4
        assert [len(boundaries) for boundaries in module.given] == [len(r.cu_seqlens) for r in rows for _ in range(passes)]
        for number, boundaries in enumerate(module.given):
            assert torch.equal(boundaries, rows[number // passes].cu_seqlens_padded)
    for mode in (False, True):
        for step in range(2):
            for name, gradient in found[None].raw[step].items():
                assert torch.equal(found[mode].raw[step][name], gradient), (mode, name)
    if dropout:
        assert relative(found[None].raw[0], fit_unpacked(precision, micro_batches()).raw[0]) > 0.05, "nothing was dropped"
    assert [message for message in warned.messages if "use_cache" in message or "past_key_value" in message] == []


def test_the_warning_about_caches_would_be_seen(warned: Warned) -> None:
    model = tiny_model("llama")
    checkpoint_activations(model)
    model(**{**forward_inputs(pack_row(make_sources((6,)))), "use_cache": True})
    assert any("use_cache=False" in message for message in warned.messages)
