"""PackedAttention in a real Trainer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.data import warning_cache
from torch import Tensor, nn
from torch.optim import SGD
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_pack import PackingPolicy, pack_loader, packed_row
from lightning_pack.attention import STRICT_ATTENTION, ModelRefusedError
from lightning_pack.callbacks import PackedAttention, TokenNormalizedGradients
from lightning_pack.callbacks.monitor import PackingMonitor
from lightning_pack.module import PackedCausalLM
from lightning_pack.parallel import ParallelLayout
from lightning_pack.row import PackedBatch
from lightning_pack.source import Pack
from tests.padded_batches import Batches, pad
from tests.tiny_models import (
    Rows,
    alone_gradients,
    alone_loss,
    forward_inputs,
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


class Plain(LightningModule):
    """A module as users have it. ``seen`` keeps what the model was set to in each step."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = tiny_model("llama") if model is None else model
        self.seen: list[tuple[str, str, bool]] = []
        self.losses: list[float] = []

    def _step(self, name: str, batch: Any) -> Tensor:
        self.seen.append((name, self.model.config._attn_implementation, self.model.config.use_cache))
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        return self._step("train", batch)

    def validation_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self._step("sanity" if self.trainer.sanity_checking else "validate", batch)

    def test_step(self, batch: PackedBatch, batch_idx: int) -> None:
        self._step("test", batch)

    def predict_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        return self._step("predict", batch)

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.01)


def rows() -> Rows:
    return Rows(pack_row(make_sources(), multiple=4))


def alone() -> PackedAttention:
    return PackedAttention(monitor=False, token_normalization=False)


def test_every_stage_runs_packed_and_leaves_the_model_as_it_was() -> None:
    module = Plain()
    expected, _ = alone_gradients(tiny_model("llama"), make_sources())
    trainer = quiet_trainer(callbacks=[alone()], max_epochs=1)
    trainer.fit(module, rows(), rows())
    on = (STRICT_ATTENTION, False)
    assert module.seen == [("sanity", *on), ("train", *on), ("validate", *on)]
    assert abs(module.losses[0] - expected) < 1e-5
    assert abs(module.losses[1] - expected) < 1e-5
    for stage, run in (("validate", trainer.validate), ("test", trainer.test), ("predict", trainer.predict)):
        assert (module.model.config._attn_implementation, module.model.config.use_cache) == ("sdpa", True)
        run(module, rows(), **({} if stage == "predict" else {"verbose": False}))
        assert module.seen[-1] == (stage, *on)
    assert (module.model.config._attn_implementation, module.model.config.use_cache) == ("sdpa", True)


class Broken(Plain):
    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        assert self.model.config._attn_implementation == STRICT_ATTENTION
        raise ArithmeticError("broken on purpose")


def test_the_model_is_put_back_after_an_error() -> None:
    module = Broken()
    callback = alone()
    with pytest.raises(ArithmeticError, match="on purpose"):
        quiet_trainer(callbacks=[callback], max_epochs=1).fit(module, rows())
    assert (module.model.config._attn_implementation, module.model.config.use_cache) == ("sdpa", True)
    again = Plain(module.model)
    quiet_trainer(callbacks=[callback], max_epochs=1).fit(again, rows())
    assert again.seen == [("train", STRICT_ATTENTION, False)]


def test_what_belongs_to_packing_is_added_once_and_before_checkpoints(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    calls: list[str] = []
    for kind in (PackedAttention, PackingMonitor, TokenNormalizedGradients):
        real = kind.setup

        def setup(self: Any, *args: Any, real: Any = real, **kwargs: Any) -> None:
            calls.append(type(self).__name__)
            real(self, *args, **kwargs)

        monkeypatch.setattr(kind, "setup", setup)
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    trainer = quiet_trainer(callbacks=[checkpoint, PackedAttention()], max_epochs=1, enable_checkpointing=True)
    module = PackedCausalLM(tiny_config("llama"))
    trainer.fit(module, rows())
    kinds = [type(callback).__name__ for callback in trainer.callbacks]
    assert kinds[kinds.index("PackedAttention") :] == [
        "PackedAttention",
        "TokenNormalizedGradients",
        "PackingMonitor",
        "ModelCheckpoint",
    ]
    assert calls == ["PackedAttention", "TokenNormalizedGradients", "PackingMonitor"]
    assert (tmp_path / "last.ckpt").is_file()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, rows())
    assert [type(callback).__name__ for callback in trainer.callbacks] == kinds


def test_what_is_there_already_is_kept() -> None:
    own = TokenNormalizedGradients(loss="sum")
    trainer = quiet_trainer(callbacks=[own, PackedAttention(monitor=False)], max_epochs=1)
    trainer.fit(PackedCausalLM(tiny_config("llama")), rows())
    assert [c for c in trainer.callbacks if isinstance(c, TokenNormalizedGradients)] == [own]
    assert not any(isinstance(callback, PackingMonitor) for callback in trainer.callbacks)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": torch.ones(1, 4), "labels": torch.ones(1, 4)}, r"got a dict with keys \['input_ids', 'labels'\]"),
        (torch.ones(2, 3), r"got a Tensor of shape \[2, 3\]"),
        ((torch.ones(1), "x"), r"got a tuple of 2 \(Tensor, str\)"),
        (SimpleNamespace(ids=1), r"got a SimpleNamespace with \['ids'\]"),
    ],
)
@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_other_batches_are_refused(stage: str, batch: Any, message: str) -> None:
    trainer = quiet_trainer(callbacks=[alone()], max_epochs=1)
    with pytest.raises(ValueError, match=message + r" and needs a PackedBatch.*EnergonPackDataModule.*from_packs"):
        getattr(trainer, stage)(Plain(), Rows(batch))


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_batches_of_several_loaders_in_one_step_are_refused(kind: str) -> None:
    padded = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "labels": torch.ones(2, 4, dtype=torch.int64)}
    batch = padded if kind == "padded" else next(iter(rows()))
    combined = {"a": Rows(batch), "b": Rows(batch)}
    with pytest.raises(
        ValueError, match=r"got a dict with keys \['a', 'b'\], the batches of several loaders in one step.*Concat"
    ):
        quiet_trainer(callbacks=[alone()], max_epochs=1).fit(Plain(), combined)


class LogsLoss(Plain):
    """Logs its loss over the pass, as Lightning weighs it and by target tokens."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self._step("validate", batch)
        self.log("by_row", loss)
        row = packed_row(batch)
        assert row is not None
        self.log("by_token", loss, batch_size=int(row.target_tokens()))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_loss_that_is_logged_can_be_the_mean_over_target_tokens(in_place: bool) -> None:
    # A warning of Lightning comes once in a process, and is an error here.
    warning_cache.clear()
    policy = PackingPolicy(64)
    sources = make_sources((9, 3, 30, 4, 3, 21, 5), seed=2)
    batches = Batches(lambda: pad(sources[:2]), lambda: pad(sources[2:]))
    loader = batches if in_place else pack_loader(batches, policy, window=2)
    module = LogsLoss(tiny_model("llama", dtype=torch.float64))
    parts = [alone_loss(module.model, source) for source in sources]
    expected = float(sum(total.item() for total, _ in parts) / sum(count for _, count in parts))
    callback = PackedAttention(policy=policy if in_place else None, monitor=False)
    (found,) = quiet_trainer(callbacks=[callback]).validate(module, loader, verbose=False)
    assert len(module.losses) == 2
    assert max(module.losses) - min(module.losses) > 1e-3
    assert abs(found["by_token"] - expected) < 1e-6
    weights = [2, 5] if in_place else [1, 1]
    by_row = sum(n * loss for n, loss in zip(weights, module.losses, strict=True)) / sum(weights)
    assert abs(found["by_row"] - by_row) < 1e-6
    assert abs(by_row - expected) > 1e-5


def test_an_empty_row_is_refused() -> None:
    empty = PackedBatch.from_packs([Pack([], None)], pad_id=0)
    assert empty.input_ids.shape == (1, 0)
    with pytest.raises(ValueError, match="an empty row reached the model"):
        quiet_trainer(callbacks=[alone()], max_epochs=1).fit(Plain(), Rows(empty))


def test_unsafe_models_are_refused_before_the_sanity_check() -> None:
    values = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    module = Plain(AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **values)))
    with pytest.raises(ModelRefusedError, match=r"MambaForCausalLM: .*Conv1d"):
        quiet_trainer(callbacks=[alone()], max_epochs=1).fit(module, rows(), rows())
    assert module.seen == []


class Student(Plain):
    """Two models, one of them made in configure_model."""

    def configure_model(self) -> None:
        self.teacher = tiny_model("qwen2")

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        self.seen.append(("teacher", self.teacher.config._attn_implementation, self.teacher.config.use_cache))
        return super().training_step(batch, batch_idx) + self.teacher(**batch.model_inputs()).loss


def test_every_model_of_the_module_is_switched() -> None:
    module = Student()
    quiet_trainer(callbacks=[alone()], max_epochs=1).fit(module, rows())
    assert module.seen == [("teacher", STRICT_ATTENTION, False), ("train", STRICT_ATTENTION, False)]
    assert module.teacher.config._attn_implementation == "sdpa"


class Distilled(Plain):
    """Keeps its teacher out of its own weights; ``shared`` lets both have one configuration."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        teacher = AutoModelForCausalLM.from_config(self.model.config) if shared else tiny_model("qwen2")
        self._teachers = {"large": teacher}

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        teacher = self._teachers["large"]
        self.seen.append(("teacher", teacher.config._attn_implementation, teacher.config.use_cache))
        return super().training_step(batch, batch_idx) + teacher(**batch).loss


@pytest.mark.parametrize("shared", [False, True])
def test_models_in_containers_and_with_one_configuration_are_switched_and_put_back(shared: bool) -> None:
    module = Distilled(shared=shared)
    teacher = module._teachers["large"]
    assert (teacher.config is module.model.config) is shared
    assert teacher not in list(module.modules())
    quiet_trainer(callbacks=[alone()], max_epochs=1).fit(module, rows())
    assert module.seen == [("teacher", STRICT_ATTENTION, False), ("train", STRICT_ATTENTION, False)]
    for model in (module.model, teacher):
        assert (model.config._attn_implementation, model.config.use_cache) == ("sdpa", True)


class Generating(Plain):
    """Generates between batches, under another attention; ``careful`` puts the packed one back."""

    def __init__(self, *, careful: bool) -> None:
        super().__init__()
        self.careful = careful

    def on_train_batch_end(self, outputs: Any, batch: PackedBatch, batch_idx: int) -> None:
        packed = self.model.config._attn_implementation
        self.model.set_attn_implementation("sdpa")
        self.model.generate(batch.input_ids[:, :3], max_new_tokens=2, use_cache=True)
        if self.careful:
            self.model.set_attn_implementation(packed)


def test_attention_that_was_changed_is_noticed_at_the_next_batch() -> None:
    row = pack_row(make_sources())
    careful, careless = Generating(careful=True), Generating(careful=False)
    quiet_trainer(callbacks=[alone()], max_epochs=1).fit(careful, Rows(row, row))
    assert [name for name, *_ in careful.seen] == ["train", "train"]
    with pytest.raises(
        ModelRefusedError, match=r"LlamaForCausalLM was set to 'sdpa' during the run.*'packed_thd_strict' again"
    ):
        quiet_trainer(callbacks=[alone()], max_epochs=1).fit(careless, Rows(row, row))
    assert [name for name, *_ in careless.seen] == ["train"]


def test_one_bad_model_leaves_the_others_untouched() -> None:
    class Mixed(Plain):
        def configure_model(self) -> None:
            values = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
            self.other = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **values))

    module = Mixed()
    with pytest.raises(ModelRefusedError, match="MambaForCausalLM"):
        quiet_trainer(callbacks=[alone()], max_epochs=1).fit(module, rows())
    assert module.model.config._attn_implementation == "sdpa"


def test_two_of_its_kind_are_refused() -> None:
    module = Plain()
    with pytest.raises(ValueError, match=r"has several PackedAttention callbacks.*leave one"):
        quiet_trainer(callbacks=[alone(), PackedAttention(backend="segments")], max_epochs=1).fit(module, rows())
    assert module.seen == []


def test_a_module_without_a_model_is_refused() -> None:
    class Empty(Plain):
        def __init__(self) -> None:
            super().__init__(nn.Linear(2, 2))

    with pytest.raises(ModelRefusedError, match="no transformers model was found in Empty"):
        quiet_trainer(callbacks=[alone()], max_epochs=1).fit(Empty(), rows())


class Module(LightningDataModule):
    def __init__(self, parallel: ParallelLayout) -> None:
        super().__init__()
        self.parallel = parallel

    def train_dataloader(self) -> Rows:
        return rows()


@pytest.mark.parametrize("layout", [ParallelLayout(context=2), ParallelLayout(eval_context=2)])
def test_processes_that_cannot_hold_a_model_are_refused(layout: ParallelLayout) -> None:
    with pytest.raises(
        ValueError, match=r"1 processes cannot hold models of 2 devices \(tensor=1, context=2\): start a multiple"
    ):
        quiet_trainer(callbacks=[alone()], max_epochs=1).fit(Plain(), datamodule=Module(layout))
    quiet_trainer(callbacks=[alone()], max_epochs=1).fit(Plain(), datamodule=Module(ParallelLayout()))


class Careless(Plain):
    """Passes the tokens and forgets the boundaries."""

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch.input_ids, labels=batch.labels).loss


def test_a_module_that_forgets_the_boundaries_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"no boundaries reached LlamaAttention \(layer 0\).*batch.model_inputs\(\)"):
        quiet_trainer(callbacks=[alone()], max_epochs=1).fit(Careless(), rows())


def test_a_checkpoint_is_continued_packed(tmp_path: Any) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    two = Rows(*(pack_row(make_sources(seed=seed), multiple=4) for seed in range(2)))

    def module() -> PackedCausalLM:
        torch.manual_seed(3)
        return PackedCausalLM(tiny_config("llama"), learning_rate=1e-2)

    def trainer(steps: int) -> Trainer:
        return quiet_trainer(callbacks=[PackedAttention(monitor=False)], max_epochs=steps, **options)

    whole = module()
    trainer(2).fit(whole, two)
    half = trainer(1)
    half.fit(module(), two)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = module()
    second = trainer(2)
    second.fit(resumed, two, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert second.global_step == 4
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


class Late(Plain):
    """Puts a model in place when the callbacks have looked."""

    def on_train_start(self) -> None:
        self.model = tiny_model("llama", seed=3)


def test_a_model_that_comes_late_is_refused() -> None:
    with pytest.raises(ModelRefusedError, match=r"LlamaForCausalLM was put into Late after the run had begun.*configure_model"):
        quiet_trainer(callbacks=[alone()], max_epochs=1).fit(Late(), rows())


def test_a_router_loss_would_count_pads() -> None:
    model = tiny_model("qwen3_moe", output_router_logits=True)
    losses = [model(**forward_inputs(pack_row(make_sources(), multiple=multiple))).aux_loss for multiple in (1, 16)]
    assert float((losses[0] - losses[1]).detach().abs()) > 1e-3
    with pytest.raises(ModelRefusedError, match=r"output_router_logits=True: .*counts the pads.*batch.padding_mask\(\)"):
        quiet_trainer(callbacks=[alone()], max_epochs=1).fit(Plain(model), rows())


@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
def test_a_source_longer_than_the_learned_positions_is_named(model_type: str) -> None:
    module = Plain(tiny_model(model_type, max_position_embeddings=16))
    quiet_trainer(callbacks=[alone()], max_epochs=1).fit(module, Rows(pack_row(make_sources((16,)), multiple=32)))
    assert len(module.losses) == 1, "a physical source may be longer"
    with pytest.raises(
        ValueError, match=r"source s0.1 has 17 tokens, and \w+ has learned 16 positions: set capacity=16 or less"
    ):
        quiet_trainer(callbacks=[alone()], max_epochs=1).fit(module, Rows(pack_row(make_sources((3, 17)))))
    with pytest.raises(ValueError, match=r"61 pads follow source s0.0, .*width='variable'"):
        quiet_trainer(callbacks=[alone()], max_epochs=1).fit(module, Rows(pack_row(make_sources((3,)), multiple=64)))
