"""``lightning-pack bench --all``: every benchmark, one after the other, as one table."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from lightning_pack.bench.machine import Machine, commit, load, threads, versions
from lightning_pack.bench.processes import in_a_process
from lightning_pack.bench.report import BenchReport, BenchRun, check_place, write_between
from lightning_pack.bench.suite import BENCHMARKS, SMALL, Benchmark, Findings, Sizes, measured

#: Where figures go unless told otherwise.
FOLDER = Path("runs/bench")
#: Why benchmarks have no figures after Ctrl-C.
INTERRUPTED = "interrupted"


def report_of(*, small: bool = False, benchmarks: Sequence[Benchmark] = BENCHMARKS) -> BenchReport:
    """Run benchmarks, each in a process of its own. Lines go to stdout, progress to stderr; one that fails does not end it.

    Ctrl-C ends it: benchmarks that were not done fail as :data:`INTERRUPTED`, and what was measured is kept.

    Args:
        small: tiny sizes, to try the run out.
        benchmarks: in this order.
    """
    sizes = SMALL if small else Sizes()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    runs: list[BenchRun] = []
    # Before measuring, so that what was measured is what is told, whatever happens to the files meanwhile.
    of_packages, of_clone = versions(), commit()
    with tempfile.TemporaryDirectory(prefix="lightning-pack-bench-") as folder:
        for number, benchmark in enumerate(benchmarks, 1):
            if runs and runs[-1].error == INTERRUPTED:
                runs.append(BenchRun(name=benchmark.name, what=benchmark.what, seconds=0.0, load=None, error=INTERRUPTED))
                continue
            before = load()
            told = "" if before is None else f" (load {before:.1f})"
            print(f"[{number}/{len(benchmarks)}] {benchmark.name}: {benchmark.what}{told}", file=sys.stderr, flush=True)
            run = _run(benchmark, sizes, Path(folder), before)
            print(f"        {run.seconds:.0f} s" if run.error is None else f"        {run.error}", file=sys.stderr, flush=True)
            for result in run.results:
                print(result, flush=True)
            runs.append(run)
    return BenchReport(
        date=date,
        small=small,
        sizes=sizes,
        machine=Machine.here(),
        threads=threads(),
        versions=of_packages,
        commit=of_clone,
        runs=tuple(runs),
    )


def _run(benchmark: Benchmark, sizes: Sizes, folder: Path, before: float | None) -> BenchRun:
    started = time.perf_counter()
    found: Findings | None = None
    error: str | None = None
    try:
        found = in_a_process(measured, benchmark, sizes, folder) if benchmark.separate else measured(benchmark, sizes, folder)
    except Exception as failure:
        error = str(failure) or type(failure).__name__
    except KeyboardInterrupt:
        error = INTERRUPTED
    return BenchRun(
        name=benchmark.name,
        what=benchmark.what,
        seconds=time.perf_counter() - started,
        load=before,
        results=() if found is None else found.results,
        figures=() if found is None else found.figures,
        error=error,
    )


def run_all(
    *, out: Path = FOLDER, write: Sequence[Path] = (), small: bool = False, benchmarks: Sequence[Benchmark] = BENCHMARKS
) -> None:
    """Run all benchmarks, and write ``bench.json`` and ``bench.md``.

    Args:
        out: folder of these files, which are replaced.
        write: files with a place for the table, see :mod:`lightning_pack.bench.report`.
        small: tiny sizes, to try the run out.
        benchmarks: in this order.

    Raises:
        ValueError: if one of ``write`` has no place for the table; known before anything is measured.
        SystemExit: with 1 if a benchmark failed; all others are in the table.
        KeyboardInterrupt: for one that came while measuring, once what was measured is written.
    """
    for path in write:
        check_place(path)
    out.mkdir(parents=True, exist_ok=True)
    takes = "less than a minute" if small else "about five minutes on two cores"
    print(f"This takes {takes}; the machine should have nothing else to do.", file=sys.stderr)
    report = report_of(small=small, benchmarks=benchmarks)
    interrupted = any(run.error == INTERRUPTED for run in report.runs)
    if interrupted and not any(run.results for run in report.runs):
        raise KeyboardInterrupt
    (out / "bench.json").write_text(report.to_json())
    (out / "bench.md").write_text(report.to_markdown())
    print(f"written: {out / 'bench.json'}, {out / 'bench.md'}")
    if report.warning is not None:
        print(f"warning: {report.warning}", file=sys.stderr)
    if interrupted:
        raise KeyboardInterrupt
    if report.failed:
        # A table with holes does not replace one without.
        kept = "".join(f"; {path} is left as it is" for path in write)
        print(f"lightning-pack: error: failed: {', '.join(report.failed)}{kept}", file=sys.stderr)
        sys.exit(1)
    for path in write:
        write_between(path, report)
        print(f"written: {path}")
