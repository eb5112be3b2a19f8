"""The distributions: a wheel that is built from the source distribution trains the quickstart, with no source tree in sight."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from what is in it."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", out, cwd=ROOT)
    (source,) = out.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(out, filter="data")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=out / source.name.removesuffix(".tar.gz"))
    (wheel,) = out.glob("*.whl")
    return source, wheel


@pytest.mark.slow
def test_what_is_in_the_distributions(built: tuple[Path, Path]) -> None:
    source, wheel = built
    with tarfile.open(source) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "README.md",
        "LICENSE",
        "pyproject.toml",
        "constraints.txt",
        "configs/quickstart.yaml",
        "tests/conftest.py",
    } <= there
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        (notes,) = (name for name in files if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(notes).decode())
        (entries,) = (name for name in files if name.endswith("entry_points.txt"))
        assert "lightning-pack = lightning_pack.cli:main" in archive.read(entries).decode()
    # All modules, the mark of types and the pages beside the code; configurations are files that people copy and change.
    wanted = [path for ending in ("*.py", "*.md", "py.typed") for path in (ROOT / "lightning_pack").rglob(ending)]
    wanted = [str(path.relative_to(ROOT)) for path in wanted if "__pycache__" not in path.parts]
    assert {"lightning_pack/py.typed", "lightning_pack/MIGRATING.md", "lightning_pack/bench/__init__.py"} <= set(wanted)
    package = {name for name in files if ".dist-info/" not in name}
    assert package >= set(wanted)
    assert all(name.startswith("lightning_pack/") for name in package)
    assert not [name for name in files if name.endswith((".pyc", ".ckpt", ".tar"))]
    assert any(name.endswith("licenses/LICENSE") for name in files)
    assert metadata["Name"] == "lightning-pack"
    assert {"lora", "parquet", "plot", "s3", "vision", "test"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata.get_payload().startswith("# lightning-pack")


@pytest.mark.slow
def test_the_installed_wheel_trains_the_quickstart(built: tuple[Path, Path], tmp_path: Path) -> None:
    here, installed = tmp_path / "here", tmp_path / "installed"
    here.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", installed)
    run(*pip, built[1], cwd=here)
    places = {"PYTHONPATH": str(installed)}
    code = "import lightning_pack, importlib.metadata as m; print(lightning_pack.__file__, m.version('lightning-pack'))"
    where, version = run(sys.executable, "-c", code, cwd=here, **places).split()
    assert where.startswith(str(installed))
    assert version in built[1].name
    program = installed / "bin" / "lightning-pack"
    assert "check-model" in run(program, "--help", cwd=here, **places)
    shutil.copy(ROOT / "configs/quickstart.yaml", here)
    short = (
        "--trainer.max_steps",
        "2",
        "--model.warmup_steps",
        "0",
        "--trainer.val_check_interval",
        "2",
        "--trainer.limit_val_batches",
        "1",
    )
    said = run(program, "fit", "--config", "quickstart.yaml", *short, "--data.num_workers", "1", cwd=here, **places)
    assert "Packing" in said
    assert (here / "runs/quickstart/last.ckpt").exists()
    # What was trained on is in the checkpoint, and the installed program reads it.
    assert "step" in run(program, "inspect", "runs/quickstart/last.ckpt", cwd=here, **places)
