"""The notebooks run, and what they show is kept, small."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from tests.notebooks import FOLDER, MOST, NOTEBOOKS, run
from tests.picture import LENGTHS, PICTURE, fill, packed, padded, picture

EACH = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all, so that the data is prepared once."""
    return tmp_path_factory.mktemp("notebooks")


@EACH
@pytest.mark.slow
def test_a_notebook_runs(notebook: Path, folder: Path) -> None:
    kept = nbformat.read(notebook, as_version=4)
    done = run(notebook, folder)
    code = [cell for cell in done.cells if cell.cell_type == "code"]
    assert len(code) >= 4
    assert all(cell.execution_count for cell in code)
    # Each cell still shows what it showed, in kind.
    for cell, before in zip(done.cells, kept.cells, strict=True):
        assert kinds(cell) == kinds(before), cell.source


def kinds(cell: nbformat.NotebookNode) -> set[str]:
    return {kind for output in cell.get("outputs", ()) for kind in output.get("data", {"stdout": None})}


@EACH
def test_outputs_are_kept_and_small(notebook: Path) -> None:
    text = notebook.read_text()
    kept = nbformat.reads(text, as_version=4)
    nbformat.validate(kept)
    assert len(text) < MOST
    outputs = [output for cell in kept.cells for output in cell.get("outputs", ())]
    assert outputs
    assert all(output.output_type != "error" for output in outputs)
    assert not re.search(r"/(tmp|home|root|work)/", text), "a path of the machine that it ran on"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("01_first_pack", {"image/png": 1, "text/html": 3}),
        ("02_plan_your_data", {"image/png": 1, "text/html": 2}),
        ("05_vision", {"text/html": 2}),
    ],
)
def test_pictures_and_tables_are_shown_as_such(name: str, shown: dict[str, int]) -> None:
    kept = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    found = [kind for cell in kept.cells for output in cell.get("outputs", ()) for kind in output.get("data", ())]
    for kind, number in shown.items():
        assert found.count(kind) >= number, (kind, found)


def test_the_picture_is_of_what_the_policy_does() -> None:
    rows = packed(LENGTHS)
    assert sorted(i for row in rows for i, _ in row if i >= 0) == list(range(len(LENGTHS)))
    assert fill(rows) > 2 * fill(row for batch in padded(LENGTHS) for row in batch)
    assert PICTURE.read_text() == picture()


def test_all_of_them_are_listed() -> None:
    assert len(NOTEBOOKS) == 5
    listed = re.findall(r"\(([\w]+\.ipynb)\)", (FOLDER / "README.md").read_text())
    assert listed == [path.name for path in NOTEBOOKS]
