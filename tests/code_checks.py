"""Uses of public names in code that is not run: whether the names exist, and whether calls fit their signatures."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

import lightning_pack

PACKAGE = Path(lightning_pack.__file__).parent
#: Packages below ``lightning_pack``, by their dotted names.
SUB_PACKAGES = [
    "lightning_pack." + ".".join(path.parent.relative_to(PACKAGE).parts)
    for path in sorted(PACKAGE.glob("**/__init__.py"))
    if path.parent != PACKAGE
]


def public() -> dict[str, Any]:
    """What pages may speak of by a bare name: everything in ``__all__`` that is one object under its name, and the Trainer."""
    found: dict[str, Any] = {"Trainer": Trainer}
    twice: set[str] = set()
    for module in map(import_module, ("lightning_pack", *SUB_PACKAGES)):
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if found.setdefault(name, value) is not value:
                twice.add(name)
    return {name: value for name, value in found.items() if name not in twice}


def faults(tree: ast.AST, *, whole: bool) -> Iterator[str]:
    """What is wrong with the uses of public names in some code.

    Args:
        tree: of the code.
        whole: whether calls have all their arguments; else those that are named are compared.
    """
    names = public()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = _dotted(node)
            if dotted is not None and dotted.startswith("lightning_pack."):
                if resolved(dotted, names) is None:
                    yield f"no {dotted}"
                continue
            base = node.value.func if isinstance(node.value, ast.Call) else node.value
            owner = names.get(base.id) if isinstance(base, ast.Name) else None
            if isinstance(owner, type) and not has(owner, node.attr):
                yield f"{owner.__name__} has no {node.attr}"
        elif isinstance(node, ast.Call):
            dotted = _dotted(node.func)
            target = None if dotted is None else resolved(dotted, names)
            if callable(target):
                yield from _call(node, target, whole=whole)


def _call(node: ast.Call, target: Any, *, whole: bool) -> Iterator[str]:
    signature = inspect.signature(target)
    open_ended = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    given = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
    unknown = [] if open_ended else [name for name in given if name not in signature.parameters]
    for name in unknown:
        yield f"{target.__name__} takes no {name}"
    shortened = any(isinstance(each, ast.Starred) or getattr(each, "value", None) is Ellipsis for each in node.args)
    if not whole or unknown or shortened or len(given) < len(node.keywords):
        return
    try:
        signature.bind(*node.args, **dict.fromkeys(given))
    except TypeError as error:
        yield f"{target.__name__}: {error}"


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None


def resolved(dotted: str, names: dict[str, Any]) -> Any:
    """What a name is: one of ``names``, or with dots what it leads to in ``lightning_pack``; None if there is nothing."""
    first, *rest = dotted.split(".")
    if first != "lightning_pack":
        return names.get(dotted)
    found: Any = lightning_pack
    path = first
    for name in rest:
        path = f"{path}.{name}"
        try:
            found = getattr(found, name)
        except AttributeError:
            try:
                found = import_module(path)
            except ImportError:
                return None
    return found


def has(owner: Any, name: str) -> bool:
    """Whether an object of a class has an attribute, one that it gives itself included."""
    if not isinstance(owner, type):
        return False
    fields = getattr(owner, "__dataclass_fields__", {})
    return hasattr(owner, name) or name in fields or f"self.{name}" in inspect.getsource(owner)
