"""What a checkpoint's position holds for, and the refusal to go on from it with other settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Version of the datamodule's state in a checkpoint.
STATE_VERSION = 1

NEW_RUN = "Or start a new run; LightningModule.load_from_checkpoint gives it the weights."


class ResumeError(ValueError):
    """A checkpoint that cannot be continued exactly with the settings of this run."""


def flat(settings: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names, so that a difference names just what differs.

    >>> flat({"packing": {"capacity": 8}, "seed": 0})
    {'packing.capacity': 8, 'seed': 0}
    """
    result: dict[str, Any] = {}
    for name, value in settings.items():
        inner = flat(value, prefix=f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        result |= inner
    return result


def refuse_other_settings(state: Mapping[str, Any], *, settings: Mapping[str, Any]) -> None:
    """Compare the settings of a checkpoint's state with those of this run.

    Raises:
        ResumeError: naming each setting that differs, with both values.
    """
    if state.get("version") != STATE_VERSION:
        raise ResumeError(
            f"the checkpoint's data position has version {state.get('version')}, this package reads version {STATE_VERSION}"
        )
    saved = state["settings"]
    different = [
        f"  {name}: {saved.get(name, 'not set')!r} in the checkpoint, {settings.get(name, 'not set')!r} now"
        for name in {**saved, **settings}
        if saved.get(name) != settings.get(name)
    ]
    if different:
        raise ResumeError(
            "the run cannot continue exactly, because these settings decide which batches come:\n"
            + "\n".join(different)
            + f"\nSet them back to resume. {NEW_RUN}"
        )
