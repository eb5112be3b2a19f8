"""The README's example for an existing project, run as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.padded_batches import Batches, pad, stay_double
from tests.tiny_models import alone_loss, make_sources, tiny_model

README = Path(__file__).parent.parent / "README.md"
LENGTHS = [(7, 3, 12), (5, 9, 4)]


def example() -> str:
    _, _, after = README.read_text().partition("## In an existing project")
    return after.partition("```python\n")[2].partition("```")[0]


@pytest.mark.filterwarnings("ignore:.*smaller than the logging interval")
@pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed")
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
    exec(compile(text, str(README), "exec"), names)
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
