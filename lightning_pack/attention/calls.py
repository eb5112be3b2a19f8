"""What the code of a model does with keyword arguments, read from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

#: Where FullyShardedDataParallel, checkpoint_wrapper, torch.compile and DistributedDataParallel keep what they wrap.
_INSIDE = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module")


def losing_calls(model: nn.Module) -> list[str]:
    """Calls inside ``model`` that reach attention and hand no further keyword arguments on, as ``Class.child``, sorted.

    A module whose forward takes ``attention_mask`` is on the way to attention. Code whose source cannot be read is passed over.
    """
    found = set()
    for module in model.modules():
        kind: Any = type(module)
        if not _takes_mask(kind):
            continue
        for name in _closed_calls(kind):
            child: Any = _unwrapped(module._modules.get(name))
            child_kind: Any = type(child)
            # Embeddings count positions by the mask and attend to nothing.
            if child is not None and not isinstance(child, nn.Embedding) and _takes_mask(child_kind):
                found.add(f"{kind.__name__}.{name}")
    return sorted(found)


def _unwrapped(module: nn.Module | None) -> nn.Module | None:
    # Sharding, recomputation and compilers put modules of their own around one, whose forward takes anything.
    while module is not None and type(module).__module__.startswith("torch."):
        inside = next((module._modules[name] for name in _INSIDE if name in module._modules), None)
        if inside is None:
            break
        module = inside
    return module


@lru_cache(maxsize=1024)
def _takes_mask(kind: Any) -> bool:
    try:
        return "attention_mask" in inspect.signature(kind.forward).parameters
    except (TypeError, ValueError):  # compiled code
        return False


@lru_cache(maxsize=1024)
def _closed_calls(kind: Any) -> frozenset[str]:
    """Children that the forward of ``kind`` calls, never with ``**kwargs`` or boundaries."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    closed: set[str] = set()
    opened: set[str] = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        for name in _child_of_self(call.func):
            handed_on = any(keyword.arg in (None, "cu_seq_lens_q") for keyword in call.keywords)
            (opened if handed_on else closed).add(name)
    return frozenset(closed - opened)


def _child_of_self(function: Any) -> Iterator[str]:
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self":
        yield function.attr
