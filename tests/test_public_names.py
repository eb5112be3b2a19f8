"""The public names: complete, documented, typed."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import lightning_pack
from tests.code_checks import PACKAGE, SUB_PACKAGES, has, resolved
from tests.documents import ROOT

PACKAGES = ["lightning_pack", *SUB_PACKAGES]
SOURCES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
#: How a docstring tells a shape: ``[1, T]``, ``[]`` for a scalar.
SHAPE = re.compile(r"\[[^\]\n]*\]")


def test_public_names_are_sorted_and_there() -> None:
    assert lightning_pack.__all__ == sorted(lightning_pack._HOMES)
    for name in lightning_pack.__all__:
        assert getattr(lightning_pack, name).__name__ == name
        assert name in dir(lightning_pack)
    with pytest.raises(AttributeError, match="no attribute 'Packer'"):
        lightning_pack.Packer  # noqa: B018


def test_rules_and_rows_need_neither_lightning_nor_energon() -> None:
    code = (
        "import sys\n"
        "from lightning_pack import PackedBatch, PackingPolicy, ParallelLayout\n"
        "import lightning_pack.encoders\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert 'lightning' not in loaded and 'megatron' not in loaded, loaded\n"
        "import lightning_pack.energon, lightning_pack.prepare, lightning_pack.attention\n"
        "assert 'lightning' not in {name.partition('.')[0] for name in sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- complete ----------------------------------------------------------------------------------------------------------------


def is_ours(value: Any) -> bool:
    home = getattr(value, "__module__", None)
    return (inspect.isclass(value) or inspect.isfunction(value)) and isinstance(home, str) and home.startswith("lightning_pack")


def in_order(names: list[str]) -> list[str]:
    """Constants, classes and functions, each sorted."""
    return sorted(names, key=lambda name: (0 if name.isupper() else 1 if name[0].isupper() else 2, name))


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_sorted_and_complete(package: str) -> None:
    module = import_module(package)
    own = {name for name, value in vars(module).items() if not name.startswith("_") and is_ours(value)}
    listed = getattr(module, "__all__", [])
    assert len(set(listed)) == len(listed)
    assert list(listed) == in_order(listed)
    for name in listed:
        assert hasattr(module, name)
    # A package that is a command gives nothing else to others.
    command = getattr(getattr(module, "main", None), "__module__", None) == package
    assert command or own <= set(listed), "what a package imports is public, and listed"


def test_references_of_docstrings_lead_somewhere() -> None:
    found = 0
    wrong = []
    for path, text in SOURCES.items():
        for name in re.findall(r":(?:class|func|meth|mod|data|attr):`~?(lightning_pack[\w.]*)`", text):
            found += 1
            owner, _, last = name.rpartition(".")
            there = resolved(name, {}) is not None or has(resolved(owner, {}), last)
            wrong += [] if there else [f"{path.relative_to(ROOT)}: {name}"]
    assert found > 50
    assert not wrong


# --- documented --------------------------------------------------------------------------------------------------------------


def public_objects() -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for module in map(import_module, PACKAGES):
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if is_ours(value) and id(value) not in seen:
                seen.add(id(value))
                yield name, value


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """The public functions and properties that a class defines itself, as functions."""
    for name, value in vars(owner).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(function):
            yield f"{owner.__name__}.{name}", function


def functions() -> Iterator[tuple[str, Any]]:
    for name, value in public_objects():
        yield from members(value) if inspect.isclass(value) else [(name, value)]


def test_every_public_name_has_a_docstring() -> None:
    objects, callables = dict(public_objects()), dict(functions())
    assert len(objects) > 80
    assert len(callables) > 150
    # What a class inherits its text for is not enough: each says what it is itself.
    silent = [
        name for name, value in objects.items() if inspect.isclass(value) and not (vars(value).get("__doc__") or "").strip()
    ]
    silent += [name for name, value in callables.items() if not (value.__doc__ or "").strip()]
    assert not silent


def test_every_public_constant_is_explained() -> None:
    constants = {
        name
        for module in map(import_module, PACKAGES)
        for name in getattr(module, "__all__", ())
        if not is_ours(getattr(module, name))
    }
    assert {"STRICT_ATTENTION", "Packer"} <= constants
    for name in constants:
        places = [text for text in SOURCES.values() if re.search(rf"^{name}(: .*)? = ", text, flags=re.M)]
        assert places, name
        assert any(re.search(rf"^#: .*\n(?:# .*\n)*{name}(: .*)? = ", text, flags=re.M) for text in places), name


def test_docstrings_of_tensors_tell_shapes() -> None:
    told = []
    for name, function in functions():
        kind = str(inspect.signature(function).return_annotation)
        if re.fullmatch(r"(Tensor|np\.ndarray|tuple\[Tensor, Tensor\])( \| None)?", kind):
            told.append(name)
            assert SHAPE.search(inspect.getdoc(function) or ""), f"{name} gives {kind}: say its shape"
    assert {"PackedBatch.padding_mask", "ModelFlops.squared_lengths"} <= set(told)


def test_comments_of_tensor_fields_tell_shapes() -> None:
    told = []
    for owner, value in public_objects():
        if not inspect.isclass(value) or not hasattr(value, "__dataclass_fields__"):
            continue
        lines = inspect.getsource(value).splitlines()
        body = ast.parse(inspect.cleandoc("\n".join(lines))).body[0]
        assert isinstance(body, ast.ClassDef)
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and re.fullmatch(r"Tensor( \| None)?", ast.unparse(node.annotation)):
                name = f"{owner}.{ast.unparse(node.target)}"
                assert SHAPE.search(comment_above(lines, node.lineno - 1)), f"{name}: say its shape in a comment '#:'"
                told.append(name)
    assert {"PackedBatch.input_ids", "ContextSlice.indices", "THDInputs.cu_seqlens"} <= set(told)


def comment_above(lines: list[str], number: int) -> str:
    """The comment ``#:`` of a field, which fields that follow each other share."""
    at = number
    while at > 0 and not lines[at].lstrip().startswith("#:"):
        at -= 1
    return "\n".join(line for line in lines[max(0, at - 4) : at + 1] if line.lstrip().startswith("#"))


# --- typed -------------------------------------------------------------------------------------------------------------------


def test_signatures_are_typed() -> None:
    checked = 0
    for name, function in functions():
        hints = inspect.signature(function)
        assert hints.return_annotation is not inspect.Signature.empty, name
        for parameter in list(hints.parameters.values()):
            assert parameter.name in ("self", "cls") or parameter.annotation is not inspect.Parameter.empty, (
                f"{name}: {parameter}"
            )
            checked += 1
    assert checked > 300
    assert (PACKAGE / "py.typed").exists()


#: What no public signature names; reading it would take most of the time.
PASSED_OVER = (
    *("IPython", "PIL", "aiohttp", "fsspec", "jsonargparse", "matplotlib", "megatron", "mlflow", "mpmath", "numpy", "peft"),
    *("pydantic", "rich", "sympy", "tensorboard", "torchmetrics", "transformers", "wandb", "lightning.pytorch.loggers"),
    *(f"torch.{name}" for name in ("_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor", "_subclasses", "ao")),
    *(f"torch.{name}" for name in ("distributed", "export", "fx", "onnx", "profiler", "testing")),
)


@pytest.mark.slow
def test_a_project_that_uses_the_names_passes_a_strict_check(tmp_path: Path) -> None:
    config = tmp_path / "mypy.ini"
    kinds = {"lightning_pack.*,lightning.*,torch.*": "silent", ",".join(f"{name}.*" for name in PASSED_OVER): "skip"}
    sections = [f"[mypy-{names}]\nfollow_imports = {how}\n" for names, how in kinds.items()]
    config.write_text(
        "[mypy]\nstrict = true\nignore_missing_imports = true\nexplicit_package_bases = true\n" + "".join(sections)
    )
    project = tmp_path / "project.py"
    right = (Path(__file__).parent / "consumer.py").read_text()
    mistaken = (
        "from lightning_pack import Packer, PackingPolicy, plan\nPackingPolicy(capacity='many')\nplan([1], capacities=3)\n"
    )
    project.write_text(right)
    (tmp_path / "mistaken.py").write_text(mistaken)
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path), str(project)]
    run = subprocess.run(
        [*command, str(tmp_path / "mistaken.py")],
        capture_output=True,
        text=True,
        timeout=280,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        cwd=tmp_path,
        check=False,
    )
    said = [line for line in run.stdout.splitlines() if "error:" in line]
    assert not [line for line in said if line.startswith("project.py")], run.stdout + run.stderr
    # The same check finds what is wrong.
    wrong = [line for line in said if line.startswith("mistaken.py")]
    kinds = [line.rpartition("[")[2].rstrip("]") for line in wrong]
    assert kinds == ["attr-defined", "arg-type", "call-arg", "arg-type"], run.stdout
