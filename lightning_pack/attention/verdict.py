"""What a check for isolation found, source by source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SourceIsolation:
    """How far one source of the row was from being alone. Differences are absolute, of logits."""

    #: Number of the source in the row, from 0.
    number: int
    #: Real tokens of the source.
    tokens: int
    #: Largest change of its logits when the tokens of another source changed.
    moved: float
    #: Number of the source whose change moved it most; None if nothing moved.
    moved_by: int | None
    #: Largest difference between its logits in the row and in a batch of its own, under the model's own attention.
    alone: float


@dataclass(frozen=True, kw_only=True)
class IsolationVerdict:
    """Whether the sources of a packed row are apart in a model, and by which numbers.

    ``str(verdict)`` is a table.
    """

    #: Class of the model.
    model: str
    #: Of its weights, such as ``float32``.
    dtype: str
    #: Where it ran.
    device: str
    #: Attention implementation that each source alone was computed with.
    reference: str
    sources: tuple[SourceIsolation, ...]
    #: Largest absolute logit of the row; the limits grow with it.
    scale: float
    #: Largest :attr:`SourceIsolation.moved` that counts as none.
    moved_limit: float
    #: Largest :attr:`SourceIsolation.alone` that counts as equal.
    alone_limit: float

    @property
    def leaking(self) -> tuple[int, ...]:
        """Numbers of the sources that another source moved."""
        return tuple(source.number for source in self.sources if not source.moved <= self.moved_limit)

    @property
    def different(self) -> tuple[int, ...]:
        """Numbers of the sources whose logits are not those that they have alone."""
        return tuple(source.number for source in self.sources if not source.alone <= self.alone_limit)

    @property
    def isolated(self) -> bool:
        """Whether no source moved another, and each is what it is alone."""
        return not self.leaking and not self.different

    def __str__(self) -> str:
        headings = ("source", "tokens", "moved by others", "differs from alone", "")
        rows = [(str(s.number), str(s.tokens), _number(s.moved), _number(s.alone), self._remark(s)) for s in self.sources]
        rows.append(("limit", "", _number(self.moved_limit), _number(self.alone_limit), ""))
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        lines = [
            f"  {row[0]:{widths[0]}}"
            + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:4], widths[1:4], strict=True))
            + (f"  {row[4]}" if row[4] else "")
            for row in (headings, *rows)
        ]
        return "\n".join([f"{self.model} ({self.dtype}, {self.device}): {self._summary()}", *lines])

    def _summary(self) -> str:
        if self.isolated:
            return "isolated"
        found = []
        if self.leaking:
            found.append(f"{len(self.leaking)} of {len(self.sources)} sources see another one")
        if self.different:
            found.append(f"{len(self.different)} of {len(self.sources)} sources are not what they are alone")
        return "NOT isolated, " + " and ".join(found)

    def _remark(self, source: SourceIsolation) -> str:
        remarks = [f"sees source {source.moved_by}"] if source.number in self.leaking else []
        if source.number in self.different:
            remarks.append("not as alone")
        return ", ".join(remarks)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
