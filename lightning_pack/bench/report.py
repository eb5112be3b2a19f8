"""All benchmarks of one run: as JSON with every figure, and as a table in Markdown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_pack.bench.machine import BUSY, Machine
from lightning_pack.bench.result import BenchResult

#: What stands before and after the table in a file that has one. A line ``<!-- rows: NAME, NAME -->`` after the first asks for
#: these rows only.
BEGIN, END = "<!-- bench: lightning-pack bench --all --write FILE -->", "<!-- /bench -->"
_ROWS = re.compile(r"<!-- rows: (.*?) -->", re.DOTALL)
_HEAD = ("benchmark", "what is compared", "ratio", "better", "details")
#: Of the layout of the JSON.
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """One benchmark.

    Args:
        name: of the benchmark.
        what: it measures.
        seconds: that it took, preparation included.
        load: of the machine before it began; None where the system does not tell.
        results: lines of the table; none if it failed.
        figures: everything that was measured, as dataclasses.
        error: why it failed; None if it did not.
    """

    name: str
    what: str
    seconds: float
    load: float | None
    results: tuple[BenchResult, ...] = ()
    figures: tuple[Any, ...] = ()
    error: str | None = None

    def cells(self) -> Iterator[tuple[str, ...]]:
        """Rows of the table."""
        if self.error is not None:
            yield self.name, self.what, "**failed**", "", self.error
        for result in self.results:
            yield f"`{result.name}`", result.what, result.figure, result.better, result.details


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """All of them.

    Args:
        date: when the run began, ISO 8601.
        small: whether sizes were those of ``--small``, whose figures say little.
        sizes: of every benchmark, a dataclass.
        machine: that it ran on.
        threads: of torch.
        versions: by name of the package.
        commit: of lightning-pack, if it ran from a clone.
        runs: the benchmarks, in order.
    """

    date: str
    small: bool
    sizes: Any
    machine: Machine
    threads: int
    versions: Mapping[str, str]
    commit: str | None
    runs: tuple[BenchRun, ...]

    @property
    def load(self) -> float | None:
        """Of the machine before the first benchmark; later ones come after work of our own."""
        return self.runs[0].load

    @property
    def busy(self) -> bool:
        """Whether the machine had other work when the run began."""
        return self.load is not None and self.load > BUSY * self.machine.cores

    @property
    def failed(self) -> list[str]:
        """Benchmarks that failed."""
        return [run.name for run in self.runs if run.error is not None]

    @property
    def warning(self) -> str | None:
        """What to say of a machine that was busy."""
        if not self.busy:
            return None
        return f"The machine was busy (load {self.load:.1f} on {self.machine.cores} cores at the start): times are rough."

    def to_json(self) -> str:
        """Everything, as JSON; what could not be measured is null."""
        content = {
            "schema": SCHEMA,
            "date": self.date,
            "small": self.small,
            "sizes": asdict(self.sizes),
            "machine": asdict(self.machine),
            "threads": self.threads,
            "versions": dict(self.versions),
            "commit": self.commit,
            "load": self.load,
            "busy": self.busy,
            "runs": [asdict(run) for run in self.runs],
        }
        return json.dumps(_finite(content), indent=2, allow_nan=False) + "\n"

    def to_markdown(self, rows: Collection[str] | None = None) -> str:
        """Where it ran, a warning if the machine was busy, and the table.

        Args:
            rows: names of those that are wanted; None takes all.
        """
        packages = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        commit = f" (commit {self.commit})" if self.commit else ""
        small = " with the sizes of `--small`, whose figures say little" if self.small else ""
        loads = "" if self.load is None else f", load {self.load:.1f} at the start"
        lines = [
            f"Measured on {self.date[:10]} in one run{small}, on {self.machine}; {self.threads} threads of torch{loads}; "
            f"{packages}{commit}.",
            "",
        ]
        if self.warning is not None:
            lines += [f"**{self.warning}**", ""]
        lines += [_row(_HEAD), "|" + "---|" * len(_HEAD)]
        for run in self.runs:
            lines += [_row(cells) for cells in run.cells() if rows is None or cells[0].strip("`") in rows]
        return "\n".join(lines) + "\n"


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_place(path: Path) -> None:
    """See whether a file has a place for the table.

    Raises:
        ValueError: if it has not, or more than one.
        OSError: if it cannot be read.
    """
    text = path.read_text()
    if (text.count(BEGIN), text.count(END)) != (1, 1) or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{path} has no one place for the table: it goes between a line {BEGIN} and a line {END}")


def write_between(path: Path, report: BenchReport) -> None:
    """Put the table, or the rows that the file asks for, into its place.

    Raises:
        ValueError: if there is none, see :func:`check_place`.
    """
    check_place(path)
    before, _, rest = path.read_text().partition(BEGIN)
    inside, _, after = rest.partition(END)
    wanted = _ROWS.match(inside.lstrip())
    head = BEGIN if wanted is None else f"{BEGIN}\n{wanted[0]}"
    table = report.to_markdown(None if wanted is None else wanted[1].replace(",", " ").split())
    path.write_text(f"{before}{head}\n\n{table.strip()}\n\n{END}{after}")
