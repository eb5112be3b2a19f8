"""``lightning-pack bench attention``: both sides compute the same, a side that does not is noticed, and the target is met."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lightning_pack import cli
from lightning_pack.attention import SegmentsBackend, THDInputs
from lightning_pack.bench import attention
from lightning_pack.bench.attention import AttentionCost, AttentionSetting, compared, equal_lengths, measured, uneven_lengths
from lightning_pack.bench.processes import in_a_process


def test_lengths_fill_the_row() -> None:
    for lengths in (equal_lengths(1000, 32), uneven_lengths(1000, 32)):
        assert (len(lengths), sum(lengths)) == (32, 1000)
        assert min(lengths) >= 1
    assert max(equal_lengths(1000, 32)) == 32
    assert max(uneven_lengths(8192, 32)) > 3 * 8192 / 32


def test_both_sides_give_the_same_and_a_leak_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_in_a_process", measured)
    setting = AttentionSetting(lengths=uneven_lengths(300, 6), heads=4, kv_heads=2, head_size=16, turns=1)
    found = compared("tiny", setting, backend="segments")
    assert found.ours.results == pytest.approx(found.theirs.results, rel=1e-4)
    assert all(abs(value) > 1 for value in found.theirs.results)
    speed, memory = found.results
    assert (speed.name, memory.name) == ("attention/tiny/speed", "attention/tiny/memory")
    assert (speed.value, speed.better, memory.better) == (found.speed, "more", "less")
    assert "6 sources in 300 tokens, float32" in speed.details
    assert found.speed == (found.theirs.forward + found.theirs.backward) / (found.ours.forward + found.ours.backward)

    class Leaking(SegmentsBackend):
        def __call__(self, *row: Any, inputs: THDInputs, **options: Any) -> torch.Tensor:
            cu = inputs.cu_seqlens[[0, *range(2, len(inputs.cu_seqlens))]].contiguous()
            joined = replace(inputs, cu_seqlens=cu, cu_seqlens_padded=cu, max_seqlen=inputs.total)
            return super().__call__(*row, inputs=joined, **options)

    monkeypatch.setitem(attention._BACKENDS, "segments", Leaking)
    with pytest.raises(RuntimeError, match="tiny: segments and the full mask differ"):
        compared("tiny", setting, backend="segments")


def by_processor_time(side: str, setting: AttentionSetting) -> AttentionCost:
    """One side in this process, without the time in which others had its processor."""
    attention._now = lambda device: time.process_time()
    return measured(side, setting)


@pytest.mark.slow
def test_boundaries_are_faster_and_smaller_than_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    # One thread, so that its time is that of the process; twice the tokens make it twice as fast.
    setting = AttentionSetting(lengths=equal_lengths(4096, 16), turns=1, threads=1)
    monkeypatch.setattr(attention, "_in_a_process", partial(in_a_process, by_processor_time))
    found = compared("equal", setting, backend="segments")
    # It is 12 to 14 times as fast, with the vector instructions of a processor or without.
    assert found.speed > 6
    assert found.memory < 0.5


def test_the_command_refuses_what_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--tokens", "0"], "--tokens 0: at least 1 is needed"),
        (["--sources", "20", "--tokens", "10"], "--sources 20 do not fit in --tokens 10"),
        (["--heads", "3"], "--heads 3 cannot be shared out over --kv-heads 2"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(["bench", "attention", *options])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_in_a_process", measured)
    cli.main(["bench", "attention", "--tokens", "256", "--sources", "4", "--turns", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 sources in a row of 256 tokens, 8 heads, 2 of keys, of 64, float32 on cpu")
    rows = [f"attention/{shape}/{side}" for shape in ("equal", "long-tailed") for side in ("speed", "memory")]
    assert [line.split()[0] for line in lines[1:]] == rows
