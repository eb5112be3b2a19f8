"""``lightning-pack bench owners``: all ways train on the same tokens, and its batches are what they are said to be."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_pack import cli
from lightning_pack.bench.configuration import configured, generated
from lightning_pack.bench.owner_runs import Meter, OwnerRun, OwnerRuns, checked, turns_of
from lightning_pack.bench.padding import grouped_by_length, padded_batch
from lightning_pack.bench.sample import PlainSample
from lightning_pack.policy import PackingPolicy
from tests.prepared_files import members
from tests.tiny_models import make_sources, tiny_config, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of ``fit`` for generated texts, with a model and rows that are small."""
    folder = tmp_path_factory.mktemp("owners")
    _, data = generated(folder, sources=200)
    model = {"model": tiny_config("llama", vocab_size=1000, max_position_embeddings=512)}
    packing = {"capacity": 512, "buffer_size": 64, "overlength": "truncate"}
    path = folder / "fit.yaml"
    path.write_text(yaml.safe_dump({"model": model, "data": {"path": data.path, "packing": packing, "num_workers": 1}}))
    return path


def test_the_command(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "owners.json"
    cli.main(["bench", "owners", "--config", str(config), "--rows", "3", "--turns", "1", "--out", str(out)])
    printed = capsys.readouterr().out
    found = {each["name"]: each for each in json.loads(out.read_text())}
    *packed, grouped, padded = found
    assert packed == ["packed while reading", "packed ahead, replayed", "packed over 8 batches", "packed in each batch"]
    assert (grouped, padded) == ("padded, grouped by length", "padded")
    # In one row more or less.
    steps = [each["real_tokens_per_step"] for each in found.values()]
    assert max(steps) <= 4 / 3 * min(steps)
    for name in packed:
        # A row of this capacity is nearly full of generated texts; a batch of theirs is mostly pads.
        assert found[name]["fill"] > 0.9
        assert found[name]["fill"] > 2 * found[padded]["fill"]
        assert found[name]["rate"] == found[name]["rates"][0] > 0
        assert f"{name:26} {found[name]['rate']:8,.0f} real tokens/s" in printed
    assert f"{found[packed[0]]['rate'] / found[padded]['rate']:5.2f}x" in printed
    assert " 1.00x   fill" in printed
    for way in packed:
        ratio = found[way]["rate"] / found[padded]["rate"]
        (line,) = [line for line in printed.splitlines() if line.startswith(f"owners/{found[way]['way']} ")]
        assert line.split()[1] == f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"
        assert f"{way}, against padded batches; more is better" in line
    for arguments, message in (
        (["--rows", "1"], "--rows 1: at least 2 is needed"),
        (["--turns", "0"], "--turns 0: at least 1 is needed"),
        (["--out", str(tmp_path / "nowhere" / "a.json")], "there is no folder"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(["bench", "owners", *arguments])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def test_the_sources_are_those_of_the_data_in_its_order(config: Path) -> None:
    _, data = configured(config)
    texts = [record["text"] for record in members(Path(data.path), "train").values()]
    assert len(texts) == 200
    data.setup("validate")
    sample = PlainSample.read(data.options, tokens=3 * 512)
    assert 30 < len(sample.records) == len(sample.sources) < 150
    assert [record["text"] for record in sample.records] == texts[: len(sample.records)]
    lengths = [min(len(data.encoder("k", {"text": text})), 512) for text in texts[: len(sample.records) + 1]]
    assert [len(source) for source in sample.sources] == lengths[:-1]
    assert sum(lengths[:-1]) <= 3 * 512 < sum(lengths)
    with pytest.raises(ValueError, match="no source to train on within its first 1 tokens"):
        PlainSample.read(data.options, tokens=1)


def test_pieces_of_a_source_stay_together(config: Path) -> None:
    _, data = configured(config)
    data.setup("validate")
    policy = PackingPolicy(64, overlength="split")
    sample = PlainSample.read(replace(data.options, policy=policy), tokens=2000)
    assert len(sample.sources) > len(sample.records) > 10
    again = [piece for i, record in enumerate(sample.records) for piece in policy.admit(data.encoder(str(i), record))]
    assert [source.input_ids.tolist() for source in sample.sources] == [piece.input_ids.tolist() for piece in again]


def test_groups_hold_similar_lengths_and_every_source_once() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 500, (1000,), generator=generator).tolist()
    order = torch.randperm(1000, generator=generator).tolist()
    batches = grouped_by_length(lengths, order, size=8, generator=generator)
    assert sorted(i for batch in batches for i in batch) == list(range(1000))
    assert {len(batch) for batch in batches} == {8}
    spread = [max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in batches]
    # 400 lengths are sorted at once, 200 at the end.
    assert max(spread) < 100
    longest = [max(lengths[i] for i in batch) for batch in batches]
    assert longest[:50] != sorted(longest[:50], reverse=True), "batches come in no order of length"


def test_a_padded_batch_is_what_a_model_takes() -> None:
    short, long = make_sources([3, 5])
    batch = padded_batch([short, long], pad_id=9)
    assert batch["input_ids"].tolist() == [[*short.input_ids.tolist(), 9, 9], long.input_ids.tolist()]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["labels"].tolist() == [[*short.labels.tolist(), -100, -100], long.labels.tolist()]


def test_no_turn_begins_that_would_take_too_long() -> None:
    class Slow:
        tokens = 20

        def __init__(self) -> None:
            self.turns: list[int] = []

        def __iter__(self) -> Iterator[OwnerRun]:
            yield OwnerRun("slow", "slowly", self.run)

        def run(self, turn: int) -> Meter:
            self.turns.append(turn)
            time.sleep(0.05)
            meter = Meter()
            meter.real, meter.slots, meter.times = [10, 10], [10, 10], [0.0, 1.0, 2.0]
            return meter

    for seconds, turns in ((60.0, [0, 1, 2]), (0.01, [0])):
        runs: Any = Slow()
        assert len(turns_of(runs, turns=3, seconds=seconds)["slow"]) == len(turns)
        assert runs.turns == turns


def test_figures_of_other_tokens_are_refused(config: Path, tmp_path: Path) -> None:
    run, meter = OwnerRun("padded", "padded", lambda turn: meter), Meter()
    meter.real, meter.slots, meter.times = [10, 20], [20, 20], [0.0, 1.0, 3.0]
    assert checked(run, meter, tokens=30).rate == 10
    with pytest.raises(RuntimeError, match="padded: 30 real tokens were trained on, and there are 31"):
        checked(run, meter, tokens=31)
    meter.real = [30]
    with pytest.raises(RuntimeError, match="1 steps, of which the first is not measured"):
        checked(run, meter, tokens=30)
    _, data = configured(config)
    data.packs_per_batch = 2
    with pytest.raises(ValueError, match="packs_per_batch=2: rows written ahead come one by one"):
        OwnerRuns(tiny_model("llama"), data, rows=2, folder=tmp_path / "written")
