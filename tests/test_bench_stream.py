"""``lightning-pack bench stream``: its baselines and rules against known figures, and the command."""

import json
from pathlib import Path

import pytest

from lightning_pack import PackingPolicy, cli
from lightning_pack.bench.bins import drawn
from lightning_pack.bench.stream import StreamFill, balanced, flushed, measured
from lightning_pack.simulation import simulate
from tests.conftest import vectors


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_fill_of_20000_sources_through_a_buffer_of_64(name: str) -> None:
    known = vectors("bins")["streaming"]
    found: dict[str, StreamFill] = {line.name: line for line in measured(name, count=20_000, buffer_sizes=[64])}
    lengths, capacity = drawn(name, 20_000)
    flush = found["flush, best-fit decreasing"]
    assert flush.fill == pytest.approx(known["flush"][name]["64"], abs=0.003)
    policy = PackingPolicy(capacity, algorithm="best_fit_decreasing", carry_over=False, buffer_size=64)
    assert flush.fill == pytest.approx(simulate(policy, lengths).fill, abs=1e-9)
    (auto,) = [line for label, line in found.items() if label.startswith("auto: ")]
    assert flush.fill + 0.02 < known["target"][name]["64"] <= auto.fill + 0.0005
    assert auto.oldest is not None
    assert auto.oldest <= 6
    assert found["next fit"].fill < auto.fill
    assert auto.fill == found[auto.name.removeprefix("auto: ")].fill
    assert auto.rate > 0


def test_the_flushed_baseline_packs_each_source_once() -> None:
    lengths, capacity = drawn("B", 500)
    groups = flushed(lengths, capacity, buffer_size=64)
    assert sorted(i for group in groups for i in group) == list(range(500))
    assert max(sum(lengths[i] for i in group) for group in groups) <= capacity
    assert all(len({i // 64 for i in group}) == 1 for group in groups), "no row mixes buffers"
    assert any(len(group) > 1 for group in groups)


def test_eight_ranks_do_about_the_same_work_in_a_step() -> None:
    found = balanced(count=6000, ranks=8)
    assert found.steps > 500
    assert found.unbalanced > 2
    small, large = found.windows
    assert (small.window, large.window) == (64, 128)
    assert small.imbalance <= 1.35
    assert large.imbalance <= 1.25


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "stream.json"
    size = ["--count", "600", "--sets", "A", "C", "--buffer-sizes", "16", "--ranks", "2"]
    cli.main(["bench", "stream", *size, "--loader", "--out", str(out)])
    printed = capsys.readouterr().out
    written = json.loads(out.read_text())
    assert len(written["fill"]) == 2 * 5
    for line in written["fill"]:
        assert f"{line['name']:26} fill {line['fill']:7.2%}" in printed
    planned = {line["set_name"]: line["fill"] for line in written["fill"] if line["name"].startswith("auto")}
    assert {line["set_name"]: line["fill"] for line in written["loader"]} == pytest.approx(planned)
    assert printed.count("(real loader)") == 2
    assert "attention work of 2 ranks" in printed
    assert written["balance"]["ranks"] == 2
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "stream", "--ranks", "1"])
    assert stop.value.code == 2
    assert "--ranks 1: at least 2 is needed" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "stream", "--out", str(tmp_path / "nowhere" / "stream.json")])
    assert stop.value.code == 2
    assert "there is no folder" in capsys.readouterr().err
