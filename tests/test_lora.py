"""Adapters: a packed run is the unpacked one, checkpoints may hold adapters alone, and a resume from them is exact."""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_pack import LoraOptions, PackedCausalLM
from lightning_pack.attention import ActivatedModel, inspect_model
from lightning_pack.lora import BASE, frozen_weights
from lightning_pack.prepare import prepare_jsonl
from lightning_pack.source import IGNORE
from tests.test_exact_position import through_a_file
from tests.test_module import Endless, trainer_of
from tests.test_vision_rows import alone, summed_loss, vision_row, vision_sources
from tests.test_vision_training import needs_images
from tests.tiny_models import (
    alone_gradients,
    alone_logits,
    forward_inputs,
    gradients_of,
    largest_difference,
    make_sources,
    pack_row,
    tiny_config,
    tiny_model,
)
from tests.tiny_vision import VOCABULARY, vision_config, vision_tokenizer

CONFIGS = Path(__file__).parents[1] / "configs"
# Lightning calls jsonargparse in a way that it calls deprecated; the other command-line tests run in processes of their own.
JSONARGPARSE = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")


def adapted(config: dict[str, Any], *, seed: int = 0, **options: Any) -> PackedCausalLM:
    """A module whose adapters do something."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = PackedCausalLM(config, lora=LoraOptions(**{"rank": 4, **options}))
        module.configure_model()
        for name, parameter in module.model.named_parameters():
            assert parameter.requires_grad == ("lora_" in name)
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
            elif parameter.ndim == 2 and "embed" not in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return module


def test_a_packed_row_is_its_sources_alone() -> None:
    model, sources = adapted(tiny_config("qwen3")).model, make_sources()
    assert inspect_model(model) == []
    expected = [alone_logits(model, source) for source in sources]
    loss, gradients = alone_gradients(model, sources)
    assert all("lora_" in name for name in gradients)
    assert len(gradients) == 2 * 2 * 7
    assert min(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-5
    row = pack_row(sources, multiple=4)
    active = ActivatedModel.of(model)
    logits = model(**forward_inputs(row)).logits
    for number, one in enumerate(expected):
        assert (logits[row.segment_ids == number + 1] - one).abs().max() <= 1e-5
    packed = F.cross_entropy(logits[0], row.shift_labels[0], ignore_index=IGNORE)
    assert abs(packed.item() - loss) <= 1e-5
    model.zero_grad()
    packed.backward()
    assert largest_difference(gradients_of(model), gradients) <= 1e-5
    active.restore()


@pytest.mark.parametrize("vision", [False, True])
def test_a_packed_row_with_images_is_its_chats_alone(vision: bool) -> None:
    model, sources = adapted(vision_config("qwen3_vl"), vision=vision).model, vision_sources("qwen3_vl")
    total = torch.stack([summed_loss(alone(model, source), source) for source in sources]).sum()
    (total / sum(int((source.labels != IGNORE).sum()) for source in sources)).backward()
    gradients = gradients_of(model)
    assert any(name.startswith("model.visual") for name in gradients) == vision
    model.zero_grad()
    active = ActivatedModel.of(model)
    row = vision_row(sources)
    F.cross_entropy(model(**forward_inputs(row)).logits[0], row.shift_labels[0], ignore_index=IGNORE).backward()
    assert largest_difference(gradients_of(model), gradients) <= 1e-5
    active.restore()


def losses(run: Path, version: int) -> list[str]:
    with open(run / "logs" / f"version_{version}" / "metrics.csv") as file:
        return [line["train_loss"] for line in csv.DictReader(file) if line["train_loss"]]


def run_twice(config: dict[str, Any], folder: Path, *, steps: int) -> tuple[list[str], list[str]]:
    """Losses of a run, and of one that goes on in the middle of it."""
    from lightning_pack.cli import main

    config["trainer"] |= {"max_steps": steps, "val_check_interval": 999, "limit_val_batches": 0, "log_every_n_steps": 1}
    config["trainer"] |= {"enable_progress_bar": False}
    config["trainer"]["callbacks"][0]["init_args"]["every_n_train_steps"] = steps // 2
    config["data"]["num_workers"] = 0
    config["model"]["warmup_steps"] = 2
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", "config.yaml"])
    run = Path(config["trainer"]["default_root_dir"])
    main(["fit", "--config", "config.yaml", "--ckpt_path", str(run / f"step={steps // 2}.ckpt")])
    return losses(run, 0), losses(run, 1)


@JSONARGPARSE
def test_the_example_learns_and_goes_on_from_adapters_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = yaml.safe_load((CONFIGS / "lora.yaml").read_text())
    assert config["model"]["lora"]["dropout"] > 0
    assert config["model"]["lora"]["adapters_only"]
    monkeypatch.chdir(tmp_path)
    # Its own settings, with less data, fewer words and fewer steps.
    vision_tokenizer().save_pretrained("tokenizer")
    lines = [json.dumps({"text": "a cat and a horse in a picture " * (1 + i % 9)}) for i in range(80)]
    Path("texts.jsonl").write_text("\n".join(lines))
    prepare_jsonl("texts.jsonl", "data/stdlib", tokenizer="tokenizer", progress=False)
    config["data"]["packing"]["capacity"] = 256
    config["data"]["prepare"] = None
    config["model"]["model"]["vocab_size"] = VOCABULARY
    whole, again = run_twice(config, tmp_path, steps=16)
    assert len(whole) == 16
    # To the last digit, with the same dropout.
    assert again == whole[8:]
    assert sum(map(float, whole[-4:])) / 4 < float(whole[0]) - 0.5
    saved = torch.load(tmp_path / "runs/lora/last.ckpt", weights_only=True)
    assert all("lora_" in name for name in saved["state_dict"])
    assert len(saved["state_dict"]) == 2 * 3 * 7
    # Of which the embeddings are two, tied.
    assert config["model"]["model"]["tie_word_embeddings"]
    assert isinstance(saved[BASE], str)


@needs_images
@JSONARGPARSE
def test_the_vision_example_with_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = yaml.safe_load((CONFIGS / "vision_quickstart.yaml").read_text())
    config["model"]["lora"] = {"rank": 4, "dropout": 0.1, "vision": True}
    monkeypatch.chdir(tmp_path)
    whole, again = run_twice(config, tmp_path, steps=6)
    assert again == whole[3:]
    saved = torch.load(tmp_path / "runs/vision_quickstart/last.ckpt", weights_only=True)
    names = saved["state_dict"].keys()
    assert any("visual" in name and "lora_" in name for name in names)
    # Everything is in there unless it is asked to leave it out.
    assert any("lora_" not in name for name in names)
    assert BASE not in saved


def test_adapters_need_the_weights_that_they_were_trained_with(tmp_path: Path) -> None:
    module = adapted(tiny_config("llama"), adapters_only=True)
    trainer = trainer_of(max_steps=2)
    trainer.fit(module, Endless())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = adapted(tiny_config("llama"), adapters_only=True, seed=1)
    with pytest.raises(ValueError, match=r"adapters alone \(lora.adapters_only\), and they were trained with other frozen"):
        trainer_of(max_steps=3).fit(other, Endless(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    same = adapted(tiny_config("llama"), adapters_only=True)
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert content["hyper_parameters"]["lora"] == LoraOptions(rank=4, adapters_only=True).plain()
    same.on_load_checkpoint(content)
    same.load_state_dict(content["state_dict"])
    row = pack_row(make_sources())
    with torch.no_grad():
        assert torch.equal(same(row), module(row))
        assert not torch.equal(adapted(tiny_config("llama"))(row), module(row))


def test_adapters_need_the_configuration_that_they_were_trained_with() -> None:
    """Of weights that are equal: what else decides what they compute is compared."""
    config = vision_config("qwen3_vl")
    module = adapted(config, adapters_only=True)
    content = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    module.on_save_checkpoint(content)
    content = through_a_file(content)

    def resumed(change: Callable[[dict[str, Any]], Any]) -> None:
        other = copy.deepcopy(config)
        change(other)
        again = adapted(other, adapters_only=True)
        assert frozen_weights(again) == content[BASE]
        again.on_load_checkpoint(copy.copy(content))

    resumed(lambda other: other["text_config"].update(use_cache=not config["text_config"].get("use_cache", True)))
    for change, message in (
        (
            lambda other: other["text_config"]["rope_parameters"].update(rope_theta=1e4),
            r"text_config.rope_parameters.rope_theta: 500000.0 in the checkpoint, 10000.0 now\nSet it back",
        ),
        (lambda other: other["text_config"].update(rms_norm_eps=0.5), r"text_config.rms_norm_eps: 1e-06 in .*, 0.5 now"),
        (lambda other: other["vision_config"].update(hidden_act="relu"), r"vision_config.hidden_act: '.*' in .*, 'relu' now"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            resumed(change)
        assert str(caught.value).count(" in the checkpoint, ") == 1


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        ({}, {"rank": 2}, "lora.rank=4 in the checkpoint, 2 now"),
        ({}, {"alpha": 8.0}, "lora.alpha=16.0 in the checkpoint, 8.0 now"),
        ({}, {"target_modules": ("q_proj",)}, r"lora.target_modules='all-linear' in the checkpoint, \('q_proj',\) now"),
        ({"adapters_only": True}, None, r"the checkpoint was saved with lora=\{'rank': 4.*, and lora is null now"),
        (None, {}, r"the checkpoint was saved with lora=null, and lora is \{'rank': 4"),
        ({}, {"dropout": 0.5, "adapters_only": True}, None),
    ],
)
def test_a_run_goes_on_with_the_adapters_that_it_had(saved: Any, now: Any, message: str | None) -> None:
    def made(options: Any) -> PackedCausalLM:
        return PackedCausalLM(tiny_config("llama"), lora=None if options is None else LoraOptions(**{"rank": 4} | options))

    content = {"hyper_parameters": dict(made(saved).hparams)}
    if message is None:
        made(now).on_load_checkpoint(content)
    else:
        with pytest.raises(ValueError, match=message):
            made(now).on_load_checkpoint(content)


def test_adapters_are_loaded_beside_a_saved_model(tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path / "model")
    module = PackedCausalLM(tmp_path / "model", learning_rate=0.1, lora=LoraOptions(adapters_only=True))
    trainer = trainer_of(max_steps=2)
    trainer.fit(module, Endless())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = PackedCausalLM.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True).eval()
    row = pack_row(make_sources())
    with torch.no_grad():
        expected = module.eval()(row)
        assert torch.equal(again(row), expected)
        assert not torch.equal(tiny_model("qwen3")(**forward_inputs(row)).logits, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "lora.rank=0: a whole number of at least 1"),
        ({"alpha": 0}, "lora.alpha=0: a number above 0"),
        ({"alpha": "16"}, "lora.alpha='16': a number above 0"),
        ({"vision": "yes"}, "lora.vision='yes' is not True or False"),
        ({"adapters_only": 1}, "lora.adapters_only=1 is not True or False"),
        ({"dropout": 1.0}, "lora.dropout=1.0: a share of at least 0"),
        ({"target_modules": "q_proj"}, r"lora.target_modules='q_proj' is not 'all-linear': give a list of names"),
        ({"target_modules": ()}, "lora.target_modules is empty"),
        ({"target_modules": ["q_proj", "query"]}, "LlamaForCausalLM has no linear layers named query; it has down_proj, "),
        ({"vision": True}, "lora.vision=True: LlamaForCausalLM has no vision encoder"),
    ],
)
def test_what_is_of_no_use_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedCausalLM(tiny_config("llama"), lora=LoraOptions(**options)).configure_model()


def test_layers_of_the_vision_encoder_are_asked_for() -> None:
    config = vision_config("qwen3_vl")
    with pytest.raises(ValueError, match=r"named qkv; it has .* \(lora.vision=True takes those of its vision encoder too\)"):
        PackedCausalLM(config, lora=LoraOptions(target_modules=["qkv"])).configure_model()
    adapted(config, target_modules=["qkv"], vision=True)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'lightning-pack\[lora\]'"):
        PackedCausalLM(tiny_config("llama"), lora=LoraOptions()).configure_model()


def test_shards_are_not_saved_as_adapters_alone() -> None:
    module = PackedCausalLM(tiny_config("llama"), lora=LoraOptions(adapters_only=True))
    module.configure_model()

    class Sharded:
        strategy = ModelParallelStrategy()

    module._fabric = None
    module._trainer = Sharded()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"lora.adapters_only=True: ModelParallelStrategy saves weights in shards"):
        module.on_fit_start()
