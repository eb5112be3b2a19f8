"""PackedCausalLM: building, losses, optimizer, checkpoints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from transformers import CONFIG_MAPPING

from lightning_pack.callbacks import PackedAttention
from lightning_pack.module import PackedCausalLM, learning_rate_factor
from lightning_pack.pretrained import _unknown_names
from lightning_pack.row import PackedBatch
from tests.tiny_models import (
    LENGTHS,
    Rows,
    alone_gradients,
    alone_logits,
    alone_loss,
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


def built(model: Any = None, **options: Any) -> PackedCausalLM:
    module = PackedCausalLM(tiny_config("llama") if model is None else model, **options)
    module.configure_model()
    return module


def trainer_of(**options: Any) -> Any:
    return quiet_trainer(callbacks=[PackedAttention(monitor=False)], **{"max_epochs": 1, **options})


# --- building ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    saved = tiny_model("qwen3")
    saved.save_pretrained(tmp_path / "model")
    module = built(tmp_path / "model", dtype="float64")
    assert module.hparams["model"] == str(tmp_path / "model")
    assert module.model.training  # transformers loads in evaluation mode
    for (name, a), b in zip(saved.state_dict().items(), module.model.state_dict().values(), strict=True):
        assert b.dtype == torch.float64
        assert torch.equal(a.double(), b), name


def test_building_twice_keeps_the_weights() -> None:
    module = built()
    before = module.model
    module.configure_model()
    assert module.model is before


@pytest.mark.parametrize("place", ["nowhere/at/all", "meta-llama/Llama-3.2-1B"])
def test_what_is_no_folder_is_refused(place: str) -> None:
    with pytest.raises(
        ValueError, match=f"model='{place}' is not a local folder with a config.json, and nothing is downloaded"
    ):
        built(place)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8}, "model_type=None of the model's configuration is not known"),
        ({"model_type": "lama"}, "model_type='lama' of the model's configuration is not known"),
        ({**tiny_config("llama"), "num_layers": 3}, "configuration of 'llama' has no num_layers: correct or remove it"),
        ({**tiny_config("llama"), "hidden_sise": 64, "rope_theta": 1e4}, "configuration of 'llama' has no hidden_sise: "),
        (
            {"model_type": "qwen3_vl", "vision_config": {"dept": 3}, "text_config": {"hidden_size": 64}},
            "configuration of 'qwen3_vl' has no vision_config.dept: correct or remove it",
        ),
        (
            {"model_type": "qwen3_vl", "text_config": {"hidden_sise": 64, "rope_theta": 1e4, "model_type": "qwen3_vl_text"}},
            "configuration of 'qwen3_vl' has no text_config.hidden_sise: ",
        ),
        (
            {"model_type": "qwen3_vl", "vision_config": {"depth": "two"}},
            "refuses the configuration of 'qwen3_vl': .*'depth'.*'two'.*: correct it",
        ),
        # What is read elsewhere may be repeated, and not contradicted.
        (
            {"model_type": "qwen3_vl", "text_config": {"tie_word_embeddings": True}},
            "configuration of 'qwen3_vl' has no text_config.tie_word_embeddings: ",
        ),
        (
            {"model_type": "qwen2_vl", "vision_config": {"in_chans": 3, "spatial_patch_size": 16}},
            "configuration of 'qwen2_vl' has no vision_config.spatial_patch_size: ",
        ),
        ({**tiny_config("llama"), "hidden_size": 9, "num_attention_heads": 2}, "refuses the configuration of 'llama': .*9"),
        ({**tiny_config("qwen3_moe"), "output_router_logits": True}, "output_router_logits=True.*no router loss"),
    ],
)
def test_bad_configurations_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(config)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma3n", "gemma4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava"])
def test_a_configuration_that_transformers_saves_has_no_unknown_name(kind: str) -> None:
    saved = CONFIG_MAPPING[kind]().to_dict()
    del saved["model_type"]
    assert len(saved) > 5
    assert list(_unknown_names(CONFIG_MAPPING[kind], saved)) == []


@pytest.mark.parametrize(
    ("kind", "published"),
    [
        ("qwen2_vl", {"vision_config": {"embed_dim": 64, "in_chans": 3, "patch_size": 16, "spatial_patch_size": 16}}),
        (
            "qwen3_vl",
            {"tie_word_embeddings": True, "text_config": {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}},
        ),
    ],
)
def test_parts_of_published_configurations_repeat_what_is_read_elsewhere(kind: str, published: dict[str, Any]) -> None:
    known = CONFIG_MAPPING[kind]().to_dict()
    parts = [(name, values) for name, values in published.items() if isinstance(values, dict)]
    assert any(field not in known[name] for name, values in parts for field in values)
    assert list(_unknown_names(CONFIG_MAPPING[kind], published)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "step"}, "schedule='step' is not one of"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"dtype": "int64"}, "dtype='int64' is not the name of a floating-point type"),
        ({"dtype": "Tensor"}, "dtype='Tensor' is not the name"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedCausalLM(tiny_config("llama"), **options)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(5)
        module = built(gradient_checkpointing=checkpointing)
        assert module.model.is_activation_checkpointing == checkpointing
        loss, _ = module._loss(pack_row(make_sources()))
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in module.model.parameters()]))
    assert float(found[0].abs().max()) > 0
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-7)


# --- losses ------------------------------------------------------------------------------------------------------------


def test_logits_and_loss_are_those_of_the_sources_alone() -> None:
    module = built()
    module.model.load_state_dict(tiny_model("llama").state_dict())
    sources = make_sources()
    batch = pack_row(sources, multiple=4)
    logits = module(batch)
    for number, source in enumerate(sources):
        alone = alone_logits(module.model, source)
        torch.testing.assert_close(logits[batch.segment_ids == number + 1], alone, rtol=0, atol=1e-5)
    loss, count = module._loss(batch)
    expected, _ = alone_gradients(module.model, sources)
    assert abs(loss.item() - expected) < 1e-5
    assert int(count) == sum(max(0, length - 2) for length in LENGTHS)


def test_half_precision_weights_have_a_float32_loss() -> None:
    module = built(dtype="bfloat16")
    loss, _ = module._loss(pack_row(make_sources()))
    assert module(pack_row(make_sources())).dtype == torch.bfloat16
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("stage", ["val", "test"])
def test_evaluation_is_the_mean_over_all_targets(stage: str) -> None:
    module = built()
    module.model.load_state_dict(tiny_model("llama").state_dict())
    parts = [make_sources((20, 3), seed=1), make_sources((4,), seed=2), make_sources((3, 3, 5), seed=3)]
    losses = [[alone_loss(module.model, source) for source in sources] for sources in parts]
    total = sum(loss.item() for part in losses for loss, _ in part) / sum(count for part in losses for _, count in part)
    means = [sum(loss.item() for loss, _ in part) / sum(count for _, count in part) for part in losses]
    assert abs(sum(means) / 3 - total) > 1e-3  # a mean over rows would be another number
    trainer = trainer_of()
    run = trainer.validate if stage == "val" else trainer.test
    for _ in range(2):  # the second pass starts from nothing
        (logged,) = run(module, Rows(*(pack_row(sources, multiple=4) for sources in parts)), verbose=False)
        assert abs(logged[f"{stage}_loss"] - total) < 1e-5


def test_several_evaluation_loaders_are_refused() -> None:
    with pytest.raises(ValueError, match="val_loss is the mean over one loader, but there are several"):
        trainer_of().validate(built(), [Rows(pack_row(make_sources()))] * 2, verbose=False)


class Tokenized(LightningDataModule):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.tokenizer = ["token"] * size

    def train_dataloader(self) -> Rows:
        return Rows(pack_row(make_sources()))

    val_dataloader = test_dataloader = train_dataloader


@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_a_larger_vocabulary_is_refused(stage: str) -> None:
    getattr(trainer_of(), stage)(built(), datamodule=Tokenized(64))
    with pytest.raises(ValueError, match=r"tokenizer has 65 tokens, more than the model's vocabulary of 64.*vocab_size"):
        getattr(trainer_of(), stage)(built(), datamodule=Tokenized(65))


# --- optimizer ---------------------------------------------------------------------------------------------------------


def test_norms_and_biases_have_no_weight_decay() -> None:
    module = built(tiny_config("qwen2"), weight_decay=0.3, learning_rate=2e-3, betas=(0.8, 0.9))
    optimizer = module.configure_optimizers()["optimizer"]
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = {group["weight_decay"]: [names[id(p)] for p in group["params"]] for group in optimizer.param_groups}
    assert set(groups) == {0.3, 0.0}
    assert all(name.endswith(".bias") or "norm" in name for name in groups[0.0])
    assert any(name.endswith(".bias") for name in groups[0.0])
    assert not any(name.endswith(".bias") or "norm" in name for name in groups[0.3])
    assert sum(map(len, groups.values())) == len(list(module.parameters()))
    assert {(group["lr"], group["betas"]) for group in optimizer.param_groups} == {(2e-3, (0.8, 0.9))}


def test_frozen_weights_are_left_out() -> None:
    module = built()
    module.model.lm_head.weight.requires_grad_(False)
    held = [p for group in module.configure_optimizers()["optimizer"].param_groups for p in group["params"]]
    assert not any(p is module.model.lm_head.weight for p in held)
    assert len(held) == len(list(module.parameters())) - 1


def test_schedules_rise_and_fall() -> None:
    linear = learning_rate_factor("linear", 2, 6)
    assert [linear(step) for step in range(8)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = learning_rate_factor("cosine", 0, 4)
    assert [round(cosine(step), 4) for step in range(5)] == [1.0, 0.8536, 0.5, 0.1464, 0.0]
    constant = learning_rate_factor("constant", 4, None)
    assert [constant(step) for step in (0, 3, 4, 999)] == [0.25, 1.0, 1.0, 1.0]


class Rates(PackedCausalLM):
    def __init__(self, **options: Any) -> None:
        super().__init__(tiny_config("llama"), learning_rate=1.0, **options)
        self.rates: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def test_the_schedule_counts_optimizer_steps() -> None:
    rows = Rows(*(pack_row(make_sources(seed=seed)) for seed in range(8)))
    by_steps, by_epochs = Rates(schedule="linear", warmup_steps=2), Rates(schedule="linear", warmup_steps=2)
    trainer_of(max_epochs=-1, max_steps=6).fit(by_steps, rows)
    assert by_steps.rates == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    trainer_of(max_epochs=2, accumulate_grad_batches=3).fit(by_epochs, rows)
    assert by_epochs.rates == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


class Endless:
    def __iter__(self) -> Any:
        while True:
            yield pack_row(make_sources())


@pytest.mark.parametrize("options", [{"max_epochs": -1}, {"max_epochs": 3}])
def test_a_decaying_schedule_needs_an_end(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"schedule='cosine' falls to zero at the last step.*set max_steps.*'constant'"):
        trainer_of(**options).fit(Rates(schedule="cosine"), Endless())
    module = Rates(schedule="cosine")
    trainer_of(max_epochs=-1, max_steps=2).fit(module, Endless())
    assert module.rates == [1.0, 0.5]


def test_the_training_loader_is_not_made_too_early() -> None:
    # Where weights are restored after the optimizers are made, an estimate would fix the loader's position.
    module = built(schedule="linear")
    trainer = SimpleNamespace(max_steps=-1, strategy=SimpleNamespace(restore_checkpoint_after_setup=True))
    module._fabric = None
    module._trainer = trainer  # type: ignore[assignment]
    with pytest.raises(ValueError, match="set max_steps"):
        module._total_steps()


def test_a_warm_up_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup_steps=4 leaves nothing of the 4 steps"):
        trainer_of(max_epochs=-1, max_steps=4).fit(Rates(schedule="linear", warmup_steps=4), Endless())


# --- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_plain_values_only(tmp_path: Path) -> None:
    saved = tiny_model("llama")
    saved.save_pretrained(tmp_path / "model")
    for number, source in enumerate((tiny_config("llama"), tmp_path / "model")):
        module = built(source, betas=[0.9, 0.98], warmup_steps=1)
        trainer = trainer_of(max_steps=2)
        trainer.fit(module, Endless())
        path = tmp_path / f"{number}.ckpt"
        trainer.save_checkpoint(path)
        content = torch.load(path, weights_only=True)
        assert content["hyper_parameters"]["betas"] == (0.9, 0.98)
        again = PackedCausalLM.load_from_checkpoint(path, weights_only=True)
        batch = pack_row(make_sources())
        with torch.no_grad():
            assert torch.equal(module(batch), again(batch))


def test_training_learns_a_row_by_heart() -> None:
    module = Learner(tiny_config("qwen3"), learning_rate=1e-2)
    trainer_of(max_epochs=-1, max_steps=60).fit(module, Endless())
    assert module.losses[0] > 3
    assert module.losses[-1] < 0.5


class Learner(PackedCausalLM):
    losses: list[float]

    def on_train_start(self) -> None:
        self.losses = []

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss
