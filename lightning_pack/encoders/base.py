"""What every encoder is: a deterministic, stateless function from one record to one source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from lightning_pack.source import EncodedSource


class LeaveOut(ValueError):  # noqa: N818 (it names what happens to the record)
    """Raised by an encoder for a record that cannot be trained on; it is reported, never lost silently.

    Args:
        reason: ``"corrupt"``, ``"empty"`` or ``"no_targets"``, as counted in :class:`~lightning_pack.source.LeftOut`.
        message: what is wrong with this record, in words.
        problem: short name of the fault, the same for every record that has it; ``reason`` unless given.
    """

    def __init__(self, reason: str, message: str, problem: str | None = None) -> None:
        super().__init__(reason, message, problem)
        self.reason = reason
        self.problem = problem or reason

    def __str__(self) -> str:
        return str(self.args[1])


class TemplateError(ValueError):
    """The tokenizer's chat template does not tell which tokens the assistant wrote."""


@runtime_checkable
class Encoder(Protocol):
    """Turns one record of the dataset into tokens and labels.

    An encoder keeps no state and uses no random numbers: the same record always gives the same tokens, because a stopped
    run is continued by encoding its buffered records again.
    """

    @property
    def pad_id(self) -> int:
        """Token id that fills gaps between sources."""

    def __call__(self, key: str, record: Mapping[str, Any]) -> EncodedSource:
        """Encode ``record``, whose sample key is ``key``.

        Raises:
            LeaveOut: for a record that cannot be trained on.
        """

    def fingerprint(self) -> dict[str, Any]:
        """Plain values that are equal exactly where the same record gives the same tokens."""
