"""The mask function of a model as a compiler sees it while it traces.

There is no function then, only the compiler's note of one, whose closure plain code cannot read. torch has a hook for code that
runs as the compiler comes by, and no promise about what it finds there: what is not understood is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torch._dynamo.comptime import comptime
from torch._dynamo.variables import ConstantVariable, SymNodeVariable, TensorVariable

Parts = Callable[[Any], Iterator[tuple[str, bool]]]

#: What a closure may hold beside functions.
_VALUES = (ConstantVariable, SymNodeVariable, TensorVariable)


def traced_parts(context: Any, name: str, *, parts_of: Parts, known: Callable[[str, str], tuple[str, bool]]) -> dict[str, bool]:
    """Name of each function that a local variable is composed of, and whether it is known.

    Args:
        context: of the compiler, in the frame that has the variable.
        name: of the variable.
        parts_of: the same for a function that exists.
        known: (module, qualified name) -> name of the part, and whether it is known.
    """
    side_effects = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.side_effects

    def parts(variable: Any) -> Iterator[tuple[str, bool]]:
        variable = variable.realize()
        if isinstance(variable, _VALUES):
            return
        if hasattr(variable, "items") and isinstance(variable.items, list | tuple):
            for item in variable.items:
                yield from parts(item)
        elif isinstance(function := getattr(variable, "fn", None), FunctionType):
            yield from parts_of(function)
        elif hasattr(variable, "closure") and hasattr(variable, "f_globals"):
            part, understood = known(variable.f_globals["__name__"], variable.fn_name.as_python_constant())
            yield part, understood
            if understood and variable.closure is not None:
                for cell in variable.closure.items:
                    yield from parts(side_effects.load_cell(cell))
        else:
            yield f"{type(variable).__name__} of the compiler", False

    variable = context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
    return dict(parts(variable))


__all__ = ["comptime", "traced_parts"]
