"""The examples for an existing project, in the README and the pages beside the code, run as they stand."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightning_pack import PackedAttention, PackedBatch, PackingPolicy, TokenNormalizer
from lightning_pack.prepare import prepare_jsonl, train_tokenizer
from tests.padded_batches import Batches, HuggingFaceModule, pad, stay_double
from tests.tiny_models import alone_gradients, alone_loss, make_sources, quiet_trainer, tiny_model

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "lightning_pack").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LENGTHS = [(7, 3, 12), (5, 9, 4)]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed"),
]


def block(*words: str) -> str:
    """The first block of Python in which all of these stand."""
    texts = [
        text for page in PAGES for text in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    found = [text for text in texts if all(word in text for word in words)]
    assert found, f"no block has {words}"
    return found[0]


def run(text: str, names: dict[str, Any]) -> None:
    exec(compile(text, "an example", "exec"), names)


def example() -> str:
    return block("class Module(pl.LightningModule)", "PackedAttention(policy=")


def test_ten_lines_turn_an_existing_module_into_a_packed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stay_double(monkeypatch)
    text = example()
    assert len([line for line in text.splitlines() if line.strip()]) <= 10
    assert "PackedAttention(policy=PackingPolicy(capacity=4096))" in text
    parts = [make_sources(lengths, seed=seed) for seed, lengths in enumerate(LENGTHS)]
    names: dict[str, Any] = {
        "model": tiny_model("llama", dtype=torch.float64),
        "loader": Batches(*(lambda sources=sources: pad(sources) for sources in parts)),
    }
    shapes: list[torch.Size] = []
    names["model"].register_forward_pre_hook(lambda _, __, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True)
    run(text, names)
    assert shapes == [(1, sum(lengths)) for lengths in LENGTHS]
    assert "Packing" in capsys.readouterr().out
    expected = tiny_model("llama", dtype=torch.float64)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-3)
    for sources in parts:
        optimizer.zero_grad()
        each = [alone_loss(expected, source) for source in sources]
        torch.stack([loss for loss, _ in each]).sum().div(sum(n for _, n in each)).backward()
        optimizer.step()
    for a, b in zip(expected.parameters(), names["model"].parameters(), strict=True):
        # AdamW divides by the size of a gradient, so rounding shows where that is near nothing.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


@pytest.mark.filterwarnings("ignore:checkpoints of this run hold no position in the data")
def test_a_loader_is_packed_over_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loader = Batches(*(lambda i=i: pad(make_sources(LENGTHS[i], seed=i)) for i in range(2)))
    names: dict[str, Any] = {"model": tiny_model("llama"), "loader": loader}
    shapes: list[torch.Size] = []
    # The module of the example before.
    run(example().partition("packed = ")[0], names)
    names["my_module"] = names["Module"](names["model"])
    names["model"].register_forward_pre_hook(lambda _, __, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True)
    run(block("pack_loader(loader, ", ".fit(my_module, rows)"), names)
    assert shapes == [(1, sum(map(sum, LENGTHS)))]


class TwoSteps(HuggingFaceModule):
    """Two steps are enough."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model("llama", vocab_size=300)
        self.sources = 0

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        self.sources += len(batch.source_keys)
        self.trainer.should_stop = batch_idx == 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(**batch)


def test_a_datamodule_packs_while_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train_tokenizer(["why so it is"], vocab_size=300).save_pretrained("tokenizer")
    Path("chats.jsonl").write_text("\n".join(json.dumps({"prompt": f"Why {i}?", "completion": "So."}) for i in range(300)))
    prepare_jsonl("chats.jsonl", "data/mine", tokenizer="tokenizer", progress=False)
    module = TwoSteps()
    run(block('EnergonPackDataModule("data/mine"', "Trainer(max_steps=1000", "fit(my_module, data)"), {"my_module": module})
    assert len(module.shapes) == 2
    assert module.sources > 100
    assert all(3000 < width <= 4096 for _, width in module.shapes)


def test_a_module_that_optimizes_manually_normalizes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_double(monkeypatch)
    init, dots, step = block("self.normalizer = TokenNormalizer(self)").partition("...\n")
    assert dots
    indented = [textwrap.indent(part, " " * 8) for part in (init, step)]
    code = (
        "class Manual(HuggingFaceModule):\n    def __init__(self):\n        super().__init__()\n{}"
        "    def training_step(self, batch, batch_idx):\n        loss = self.model(**batch).loss\n"
        "        optimizer = self.optimizers()\n        optimizer.zero_grad()\n{}        optimizer.step()\n"
    ).format(*indented)
    names: dict[str, Any] = {"HuggingFaceModule": HuggingFaceModule, "TokenNormalizer": TokenNormalizer}
    run(code, names)
    module: pl.LightningModule = names["Manual"]()
    # The callbacks that a comment of the example asks for.
    callbacks = eval(
        init.partition("callbacks=")[2], {"PackedAttention": lambda **o: PackedAttention(policy=PackingPolicy(32), **o)}
    )
    sources = make_sources(LENGTHS[0])
    quiet_trainer(callbacks=callbacks, max_epochs=1).fit(module, Batches(lambda: pad(sources)))
    expected = tiny_model("llama", dtype=torch.float64)
    _, gradients = alone_gradients(expected, sources)
    optimizer = SGD(expected.parameters(), lr=0.5)
    for name, parameter in expected.named_parameters():
        parameter.grad = gradients[name]
    optimizer.step()
    for a, b in zip(expected.parameters(), module.model.parameters(), strict=True):  # type: ignore[union-attr, arg-type]
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
