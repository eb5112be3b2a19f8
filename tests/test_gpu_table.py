"""``python -m tests.gpu`` on a CPU: its rows, and that it fails where a backend does."""

from __future__ import annotations

import subprocess

import pytest
import torch

from tests.gpu import table
from tests.gpu.checks import Heads
from tests.gpu.table import COLUMNS, Setting, Table, main, measured
from tests.test_gpu_checks import Leaking, Unwritten, Waiting

CPU = torch.device("cpu")
TINY = Setting(device=CPU, dtype=torch.float32, tokens=(96,), sources=4, heads=Heads(queries=2, keys=1, size=8), turns=1)
WITH_COSTS = ["segments", "padded", "full mask"]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_script_prints_one_row_for_each_side_and_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {torch.__version__}" in lines[0]
    rows = [cells(line) for line in lines if line.startswith("|")]
    assert rows[0] == list(COLUMNS)
    assert {len(row) for row in rows} == {len(COLUMNS)}
    assert [row[:2] for row in rows[2:4]] == [["all", "varlen"], ["all", "te"]]
    assert [row[:2] for row in rows[4:]] == [[tokens, side] for tokens in ("128", "256") for side in WITH_COSTS]
    for row in rows[4::3]:
        assert float(row[2].removesuffix(" ms")) > 0
        assert all("x as fast" in ratio for ratio in row[4:6])
        assert float(row[6]) < 1e-5
        assert row[7:] == ["none", "0", "none"]
    assert lines[-1].startswith("The checks: python -m pytest -m gpu")


def test_the_script_fails_where_a_backend_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.BACKENDS, "segments", Leaking)
    assert main(["--device", "cpu", "--small"]) == 1
    out = capsys.readouterr().out
    for failure in (
        "segments: s0.1 sees source 0 of llama",
        "segments, 128 tokens: error of",
        "segments, 256 tokens: source 1 sees 0",
    ):
        assert f"FAILED {failure}" in out


class Refusing(Waiting):
    def __call__(self, *row: torch.Tensor, **options: object) -> torch.Tensor:
        raise RuntimeError("no kernel for this device")


def test_every_kind_of_fault_is_told_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_args: object, **_options: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 512.00 GiB")

    monkeypatch.setattr(table, "MODELS", ("llama",))
    monkeypatch.setattr(table, "full_mask", too_large)
    # The two that need CUDA are stood in for, so that three rows share a table.
    monkeypatch.setattr(table, "KERNELS", ())
    for name, kind in (("varlen", Unwritten), ("te", Refusing), ("segments", Waiting)):
        monkeypatch.setitem(table.BACKENDS, name, kind)
    found = measured(TINY, say=lambda line: None)
    rows = {row[1]: row for row in found.rows}
    assert list(rows) == ["varlen", "te", "segments", "padded", "full mask"]
    assert rows["full mask"][2] == "does not fit"
    assert rows["varlen"][5:7] == ("—", "inf")
    assert rows["varlen"][9].endswith("!")
    assert rows["te"][2:] == ("failed", "—", "—", "—", "—", "failed", "—", "—")
    assert rows["segments"][6:] == (rows["segments"][6], "none", "2", "none")
    assert float(rows["segments"][6]) < 1e-5
    told = "\n".join(found.failures)
    for part in (
        "varlen: gradients of model.embed_tokens.weight",
        "varlen, 96 tokens: error of inf",
        "te, leaks of llama: RuntimeError: no kernel for this device",
        "te, 96 tokens, cost: RuntimeError",
        "segments: a step waits 2 times for the device, not 1: ",
    ):
        assert part in told
    assert "segments, " not in told


def test_a_missing_package_is_a_row_and_a_missing_kernel_of_torch_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda = Setting(device=torch.device("cuda"), dtype=torch.bfloat16)
    found = Table()
    assert table._backend("te", on_cuda, found) is None
    assert (found.rows[0][:3], found.failures) == (("all", "te", "not installed"), [])

    def without_kernel() -> None:
        raise table.BackendError("backend 'varlen' needs torch.nn.attention.varlen")

    monkeypatch.setitem(table.BACKENDS, "varlen", without_kernel)
    assert table._backend("varlen", on_cuda, found) is None
    assert found.failures == ["varlen: backend 'varlen' needs torch.nn.attention.varlen"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_script_says_how_to_try_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "--device cpu --small" in capsys.readouterr().err


def test_memory_is_given_back_before_the_checks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("given back"))

    def run(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        order.append(" ".join(command[1:5]))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", run)
    assert table._tests(30.0) == "pytest -m gpu ended with 3"
    assert order == ["given back", "-m pytest -m gpu"]
