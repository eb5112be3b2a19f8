"""The stand-in for TransformerEngine against the sources of what was released, which need no CUDA to be read."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.te_stub import SIGNATURES

#: Releases with wheels, by the version that names their signatures in the table; before 2.1 there are none.
RELEASES = {
    "2.1.0": "2.0",
    "2.2.0": "2.2",
    "2.8.0": "2.8",
    "2.9.0": "2.9",
    "2.10.0": "2.10",
    "2.12.0": "2.12",
    "2.16.1": "2.16",
    "2.17.1": "2.17",
    "2.19.0": "2.19",
    "2.20.2": "2.20",
}


def arguments(wheel: Path) -> dict[str, list[str]]:
    """Names of the arguments of ``DotProductAttention``, by method, in order."""
    with zipfile.ZipFile(wheel) as archive:
        sources = [archive.read(name) for name in archive.namelist() if "/pytorch/" in name and name.endswith(".py")]
    (found,) = [
        node
        for source in sources
        if b"class DotProductAttention(" in source
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "DotProductAttention"
    ]
    methods = [node for node in found.body if isinstance(node, ast.FunctionDef)]
    return {method.name: [argument.arg for argument in method.args.args[1:]] for method in methods}


@pytest.mark.parametrize(("release", "version"), RELEASES.items())
def test_the_table_of_arguments_is_that_of_the_release(tmp_path: Path, release: str, version: str) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(tmp_path)]
    try:
        got = subprocess.run([*pip, f"transformer-engine=={release}"], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the wheel of {release} cannot be fetched: no answer in 120 s")
    if got.returncode:
        pytest.skip(f"the wheel of {release} cannot be fetched: {got.stderr.strip()[-200:]}")
    (wheel,) = tmp_path.glob("*.whl")
    methods = arguments(wheel)
    init, forward = SIGNATURES[version]
    assert methods["__init__"] == init
    assert methods["forward"] == forward
    assert "cp_group" in methods["set_context_parallel_group"]
