"""Model and data to measure: those of a configuration of ``fit``, or small ones that are made for it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser

from lightning_pack.datamodule import EnergonPackDataModule
from lightning_pack.module import PackedCausalLM
from lightning_pack.policy import PackingPolicy
from lightning_pack.prepare import prepare_jsonl
from lightning_pack.prepare.tokenizer import train_tokenizer

_SYLLABLES = ("ka", "lo", "mi", "ren", "tu", "sa", "vel", "no", "ip", "dor", "gen", "us")
_VOCABULARY = 1000


def configured(config: Path) -> tuple[PackedCausalLM, EnergonPackDataModule]:
    """The model and data of a configuration, with a learning rate that stays as it is.

    Raises:
        ValueError: if it has no model or no data.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PackedCausalLM, "model")
    parser.add_class_arguments(EnergonPackDataModule, "data")
    given = yaml.safe_load(config.read_text())
    # A schedule depends on a number of steps that is another one here.
    given.get("model", {}).update(schedule="constant", warmup_steps=0)
    try:
        parsed = parser.instantiate_classes(parser.parse_object({name: given[name] for name in ("model", "data")}))
    except KeyError as e:
        raise ValueError(f"{config} has no {e}: a configuration of fit, with model and data, is needed") from e
    return parsed.model, parsed.data


def standard_library(folder: Path) -> tuple[PackedCausalLM, EnergonPackDataModule]:
    """Model, data and packing of the quickstart; the data is made in ``folder`` by ``prepare_data`` unless it is there.

    Args:
        folder: of the dataset.
    """
    model = {
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    packing = PackingPolicy(capacity=2048, algorithm="exact_fill", buffer_size=64, overlength="truncate")
    data = EnergonPackDataModule(folder, prepare="stdlib", packing=packing, num_workers=2)
    return PackedCausalLM(model, learning_rate=3e-3), data


def generated(folder: Path, *, sources: int, capacity: int = 2048) -> tuple[PackedCausalLM, EnergonPackDataModule]:
    """A model of a million parameters, and texts of long-tailed lengths (median 20 words) with a tokenizer of their own.

    Args:
        folder: where the data is written, unless it was before.
        sources: texts.
        capacity: of rows, in tokens; longer texts are cut.
    """
    if not (folder / "data").exists():
        _write(folder, sources=sources)
    model = {
        "model_type": "llama",
        "vocab_size": _VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    }
    packing = PackingPolicy(capacity=capacity, buffer_size=256, overlength="truncate")
    return PackedCausalLM(model, learning_rate=1e-3), EnergonPackDataModule(folder / "data", packing=packing)


def _write(folder: Path, *, sources: int) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(2000)]
    texts = [" ".join(rng.choices(words, k=min(max(int(rng.lognormvariate(3, 1)), 2), 1000))) for _ in range(sources)]
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(texts[:1000], vocab_size=_VOCABULARY).save_pretrained(folder / "tokenizer")
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare_jsonl(file, folder / "data", tokenizer=folder / "tokenizer", val_fraction=0, progress=False)
