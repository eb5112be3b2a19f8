"""One table, for a terminal and for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pack import markup


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text; the first column is left-aligned, the others are numbers.

    Args:
        headings: of the columns.
        rows: as many cells as headings each.
        marked: number of the row that is pointed out.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: int | None = None

    def text(self) -> str:
        """Aligned columns; ``*`` marks the row."""
        widths = [max(map(len, column)) for column in zip(self.headings, *self.rows, strict=True)]

        def line(cells: Sequence[str], mark: str) -> str:
            first, *others = zip(cells, widths, strict=True)
            return f"{mark} {first[0]:{first[1]}}" + "".join(f"  {cell:>{width}}" for cell, width in others)

        rows = [line(row, "*" if number == self.marked else " ") for number, row in enumerate(self.rows)]
        return "\n".join([line(self.headings, " "), *rows])

    def html(self) -> str:
        """A ``<table>``; the marked row is bold."""
        return markup.table(self.rows, headings=self.headings, marked=self.marked)
