"""``lightning-pack bench --all``: every benchmark in one table, failures and a busy machine told, and the README's table."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_pack import cli
from lightning_pack.bench.configuration import configured, standard_library
from lightning_pack.bench.everything import report_of, run_all
from lightning_pack.bench.processes import BenchProcessError, in_a_process
from lightning_pack.bench.report import BEGIN, END, BenchReport
from lightning_pack.bench.result import BenchResult
from lightning_pack.bench.suite import BENCHMARKS, SMALL, Benchmark, Findings, Sizes

ROOT = Path(__file__).parent.parent
ROWS = [row for benchmark in BENCHMARKS for row in benchmark.rows]


def names_in(table: str) -> list[str]:
    return re.findall(r"^\| `(.+?)` \|", table, flags=re.MULTILINE)


def _good(sizes: Sizes, folder: Path) -> Findings:
    result = BenchResult(name="good", what="one | two", value=float("nan"), unit="x", better="more", details=str(os.getpid()))
    return Findings(results=(result,), figures=(result,))


def _second(sizes: Sizes, folder: Path) -> Findings:
    return Findings(results=(replace(_good(sizes, folder).results[0], name="second"),), figures=())


def _third(sizes: Sizes, folder: Path) -> Findings:
    return Findings(results=(replace(_good(sizes, folder).results[0], name="third"),), figures=())


def _raises(sizes: Sizes, folder: Path) -> Findings:
    raise ValueError(f"no rows of {sizes.capacity}\nin this folder")


def _dies(sizes: Sizes, folder: Path) -> Findings:
    os.kill(os.getpid(), signal.SIGKILL)
    return _good(sizes, folder)


def _interrupted(sizes: Sizes, folder: Path) -> Findings:
    os.kill(os.getpid(), signal.SIGINT)
    return _good(sizes, folder)


GOOD = Benchmark(name="good", what="goes well", rows=("good",), run=_good)
FAILING = (
    Benchmark(name="raises", what="goes wrong", rows=("raises",), run=_raises),
    Benchmark(name="dies", what="takes too much memory", rows=("dies",), run=_dies),
    Benchmark(name="other", what="gives other rows", rows=("expected",), run=_good, separate=False),
)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\n| old |\n{END}\nafter\n")
    return path


@pytest.mark.usefixtures("idle")
def test_every_benchmark_is_in_the_files_and_on_the_page(
    tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "bench"
    cli.main(["bench", "--all", "--small", "--out", str(out), "--write", str(page)])
    found = json.loads((out / "bench.json").read_text())
    assert (found["schema"], found["small"], found["load"], found["busy"]) == (1, True, 0.0, False)
    assert found["date"].startswith("20")
    assert set(found["versions"]) >= {"python", "torch", "transformers", "lightning", "megatron-energon"}
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory"] > 2**28
    assert found["machine"]["cpu"]
    assert found["sizes"]["capacity"] == SMALL.capacity
    assert [run["name"] for run in found["runs"]] == [benchmark.name for benchmark in BENCHMARKS]
    results = [result for run in found["runs"] for result in run["results"]]
    assert [result["name"] for result in results] == ROWS
    for run in found["runs"]:
        assert (run["error"], run["load"]) == (None, 0.0)
        assert run["seconds"] > 0
        assert run["figures"]
    for result in results:
        assert set(result) == {"name", "what", "value", "unit", "better", "details"}
        # Memory is not known where all of it was at hand; fewer rows than the bound cannot be.
        assert result["value"] is None or result["value"] > 0 or (result["name"].startswith("bins/") and result["value"] == 0)
        assert result["better"] in ("more", "less")
    table = (out / "bench.md").read_text()
    assert names_in(table) == ROWS
    assert "with the sizes of `--small`" in table
    assert "busy" not in table
    printed = capsys.readouterr()
    # What is printed is what is in the table.
    for row in results:
        line = str(BenchResult(**{**row, "value": float("nan") if row["value"] is None else row["value"]}))
        assert line in printed.out.splitlines()
        figure = line.split()[1]
        assert re.search(rf"^\| `{row['name']}` \| .* \| {re.escape(figure)}[^|]* \| {row['better']} \|", table, re.MULTILINE)
    assert f"[{len(BENCHMARKS)}/{len(BENCHMARKS)}] {BENCHMARKS[-1].name}: " in printed.err
    before, _, rest = page.read_text().partition(BEGIN)
    inside, _, after = rest.partition(END)
    assert (before, inside.strip(), after) == ("before\n", table.strip(), "\nafter\n")


@pytest.mark.usefixtures("idle")
def test_a_benchmark_that_fails_is_a_row_and_the_others_go_on(
    tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = page.read_text()
    with pytest.raises(SystemExit) as stop:
        run_all(out=tmp_path, write=[page], small=True, benchmarks=(*FAILING, GOOD))
    assert stop.value.code == 1
    assert page.read_text() == before
    printed = capsys.readouterr()
    assert f"failed: raises, dies, other; {page} is left as it is" in printed.err
    table = (tmp_path / "bench.md").read_text()
    for line in (
        f"| raises | goes wrong | **failed** |  | ValueError: no rows of {SMALL.capacity} in this folder |",
        "| dies | takes too much memory | **failed** |  | its process ended before it was done, by SIGKILL |",
        "| other | gives other rows | **failed** |  | the results are good, and were to be expected |",
    ):
        assert line in table
    assert names_in(table) == ["good"]
    assert "| `good` | one \\| two | unknown | more |" in table
    *failed, good = json.loads((tmp_path / "bench.json").read_text())["runs"]
    assert [run["error"] is None for run in (*failed, good)] == [False, False, False, True]
    assert good["results"][0]["value"] is None
    assert int(good["results"][0]["details"]) != os.getpid()


@pytest.mark.usefixtures("idle")
def test_what_was_measured_before_an_interrupt_is_kept(tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = page.read_text()
    stopped = Benchmark(name="stopped", what="takes long", rows=("stopped",), run=_interrupted, separate=False)
    with pytest.raises(KeyboardInterrupt):
        run_all(out=tmp_path, write=[page], small=True, benchmarks=(GOOD, stopped, GOOD))
    assert page.read_text() == before
    good, *others = json.loads((tmp_path / "bench.json").read_text())["runs"]
    assert (good["error"], len(good["results"])) == (None, 1)
    assert [(run["name"], run["error"]) for run in others] == [("stopped", "interrupted"), ("good", "interrupted")]
    assert names_in((tmp_path / "bench.md").read_text()) == ["good"]
    assert "[3/3]" not in capsys.readouterr().err, "the third did not begin"
    # What was measured earlier is not replaced by nothing.
    kept = (tmp_path / "bench.json").read_text()
    with pytest.raises(KeyboardInterrupt):
        run_all(out=tmp_path, small=True, benchmarks=(stopped, GOOD))
    assert (tmp_path / "bench.json").read_text() == kept


@pytest.mark.usefixtures("idle")
def test_a_machine_that_was_busy_at_the_start_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(small=True, benchmarks=(replace(GOOD, separate=False),))
    cores = report.machine.cores

    def loaded(load: float | None) -> BenchReport:
        return replace(report, runs=tuple(replace(run, load=load) for run in report.runs))

    for load, busy in ((None, False), (0.0, False), (0.5 * cores, False), (0.5 * cores + 0.1, True)):
        assert loaded(load).busy == busy
        assert ("The machine was busy" in loaded(load).to_markdown()) == busy
    assert f"(load {0.5 * cores + 2:.1f} on {cores} cores at the start)" in loaded(0.5 * cores + 2).to_markdown()
    # Later benchmarks come after work of our own.
    later = replace(report, runs=(*report.runs, *loaded(100.0).runs))
    assert not later.busy
    monkeypatch.setattr(os, "getloadavg", lambda: (cores * 1.0, 0.0, 0.0))
    assert report_of(small=True, benchmarks=(replace(GOOD, separate=False),)).busy


def test_options_that_do_not_go_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--all", "--config", "a.yaml"], "--config does not go with --all"),
        (["--all", "--rows", "16"], "--rows does not go with --all"),
        (["--all", "--only", "loader"], "--only does not go with --all"),
        (["--config", "a.yaml", "--small"], "--small goes with --all only"),
        (["--write", "README.md"], "--write goes with --all only"),
        (["--config", "a.yaml", "--out", "here"], "--out goes with --all only"),
        ([], "--config FILE is needed, or --all"),
        (["bins", "--all"], "unrecognized arguments: --all"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(["bench", *options])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    page = tmp_path / "page.md"
    for text in ("no place", f"{END}\n{BEGIN}", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"):
        page.write_text(text)
        with pytest.raises(SystemExit) as stop:
            cli.main(["bench", "--all", "--out", str(tmp_path / "out"), "--write", str(page)])
        assert stop.value.code == 1
        assert f"{page} has no one place for the table: it goes between a line {BEGIN}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_processes_give_back_what_they_can() -> None:
    assert in_a_process(divmod, 17, 5) == (3, 2)
    with pytest.raises(BenchProcessError, match=r"^ZeroDivisionError: "):
        in_a_process(divmod, 17, 0)
    with pytest.raises(BenchProcessError, match=r"before it was done, with exit code 7$"):
        in_a_process(os._exit, 7)


@pytest.mark.parametrize("page", ["README.md", "lightning_pack/bench/README.md"])
def test_pages_have_the_rows_of_the_table(page: str) -> None:
    text = (ROOT / page).read_text()
    assert (text.count(BEGIN), text.count(END)) == (1, 1)
    table = text.partition(BEGIN)[2].partition(END)[0]
    wanted = re.search(r"<!-- rows: (.*?) -->", table, re.DOTALL)
    assert (wanted is None) == ("bench" in page), "the first page shows some of it"
    rows = ROWS if wanted is None else re.split(r",\s*", wanted[1])
    assert set(rows) <= set(ROWS)
    assert names_in(table) == rows
    assert len(ROWS) == len(set(ROWS)) > 15
    assert "**failed**" not in table


@pytest.mark.usefixtures("idle")
def test_a_page_may_ask_for_some_rows(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    asked = "<!-- rows: second,\n     good -->"
    page.write_text(f"{BEGIN}\n{asked}\n| old |\n{END}\nafter")
    both = [GOOD, replace(GOOD, rows=("second",), run=_second)]
    for _ in range(2):
        run_all(out=tmp_path, write=[page], small=True, benchmarks=[*both, replace(GOOD, rows=("third",), run=_third)])
        text = page.read_text()
        assert text.startswith(f"{BEGIN}\n{asked}\n\nMeasured on")
        assert names_in(text) == ["good", "second"]
        assert text.endswith(f"{END}\nafter")
    assert names_in((tmp_path / "bench.md").read_text()) == ["good", "second", "third"]


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_texts_of_the_standard_library_are_those_of_the_quickstart(tmp_path: Path) -> None:
    model, data = standard_library(tmp_path)
    theirs, configured_data = configured(ROOT / "configs" / "quickstart.yaml")

    def settings(of: Any) -> Any:
        return {name: value for name, value in of.hparams.items() if name not in ("schedule", "warmup_steps")}

    assert settings(model) == settings(theirs)
    assert (data.packing, data.prepare, data.num_workers) == (
        configured_data.packing,
        configured_data.prepare,
        configured_data.num_workers,
    )
    assert data.packing.capacity == 2048
