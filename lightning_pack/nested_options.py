"""Options that name a value inside a part of the model's configuration, such as ``--model.model.vision_config.depth 3``."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

#: The part, and the way from there to the value.
_OPTION = re.compile(r"--model\.model\.([^.=]+)\.([^=]+)(?:=(.*))?", re.DOTALL)
#: A name that stands for such a value until it is parsed.
_STAND_IN = "lightning_pack_value_{}"


def with_whole_parts(args: Sequence[str], parsed: Callable[[list[str]], Any]) -> list[str]:
    """The arguments, in which parts of the model's configuration are given as a whole.

    A value inside a part would otherwise be text, and take the place of all else that the part holds.

    Args:
        args: of a command line.
        parsed: arguments -> ``model.model`` of what they and their configuration files say.
    """
    kept: list[str] = []
    found: list[tuple[str, list[str], str]] = []
    rest = iter(args)
    for arg in rest:
        match = _OPTION.fullmatch(arg)
        value = match and (match[3] if match[3] is not None else next(rest, None))
        if match is None or value is None:
            kept.append(arg)
        else:
            found.append((match[1], match[2].split("."), value))
    if not found:
        return list(args)
    stand_ins = [f"--model.model.{_STAND_IN.format(number)}={value}" for number, (_, _, value) in enumerate(found)]
    model = parsed([*kept, *stand_ins])
    parts: dict[str, Any] = {}
    for number, (name, (*way, last), _) in enumerate(found):
        place = parts.setdefault(name, _part(model.get(name)))
        for step in way:
            place[step] = _part(place.get(step))
            place = place[step]
        place[last] = model[_STAND_IN.format(number)]
    return kept + [f"--model.model.{name}={json.dumps(part)}" for name, part in parts.items()]


def _part(given: Any) -> dict[str, Any]:
    return copy.deepcopy(given) if isinstance(given, dict) else {}
