"""The notebooks, run from top to bottom in a folder of their own.

``python -m tests.notebooks --write`` runs them and keeps their outputs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
#: Characters of a notebook with its outputs, at most.
MOST = 120_000


def run(notebook: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs; what its cells write lies in ``folder``.

    Raises:
        CellExecutionError: for a cell that fails, with its traceback.
    """
    read = nbformat.read(notebook, as_version=4)
    # A kernel finds the command of its own environment.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    there = {"metadata": {"path": str(folder)}}
    client = NotebookClient(read, timeout=240, startup_timeout=240, kernel_name="python3", resources=there)
    client.execute(env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"})
    for cell in read.cells:
        cell.metadata.pop("execution", None)
        # Warnings of libraries, with paths of this machine.
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return read


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for path in NOTEBOOKS:
            print(path.name, flush=True)
            done = run(path, Path(place))
            if "--write" in sys.argv[1:]:
                nbformat.write(done, path)
