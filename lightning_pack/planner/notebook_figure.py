"""A figure that a notebook shows. Needs matplotlib."""

from __future__ import annotations

from io import BytesIO

from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure without pyplot: no display, no global state. Notebooks know those of pyplot alone, so it brings its picture."""

    def _repr_png_(self) -> bytes:
        picture = BytesIO()
        self.savefig(picture, format="png", dpi=self.dpi)
        return picture.getvalue()
