"""A plan as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_pack.planner.result import Plan

_BINS = 60


class MissingPlotError(ImportError, ValueError):
    """matplotlib is not there."""


def figure_class() -> type[Figure]:
    """The Figure of matplotlib, without pyplot; it shows itself in a notebook.

    Raises:
        MissingPlotError: naming the extra that brings matplotlib.
    """
    try:
        from lightning_pack.planner.notebook_figure import NotebookFigure
    except ModuleNotFoundError as error:
        raise MissingPlotError(
            "the picture of a plan needs matplotlib: pip install 'lightning-pack[plot]' (everything else works without it)"
        ) from error
    return NotebookFigure


def drawn(plan: Plan) -> Figure:
    """Lengths with the capacity on the left, fill by buffer size on the right."""
    figure = figure_class()(figsize=(11, 4.2), layout="constrained")
    lengths, fill = figure.subplots(1, 2)
    _lengths(lengths, plan)
    _fill(fill, plan)
    return figure


def _lengths(axes: Axes, plan: Plan) -> None:
    lengths = np.array(plan.sources.lengths)
    capacity = plan.policy.capacity
    edges = np.unique(np.geomspace(lengths.min(), max(lengths.max(), capacity) + 1, _BINS).round())
    axes.hist(lengths, bins=edges.tolist(), color="tab:blue", alpha=0.8)
    axes.axvline(capacity, color="tab:red", label=f"capacity {capacity:,}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda length, _: f"{length:,.0f}")
    axes.set_xlabel("length of a source (tokens)")
    axes.set_ylabel("sources")
    axes.legend()


def _fill(axes: Axes, plan: Plan) -> None:
    for name in dict.fromkeys(each.name for each in plan.combinations):
        line = sorted((each.policy.buffer_size, 100 * each.fill) for each in plan.combinations if each.name == name)
        axes.plot(*zip(*line, strict=True), marker="o", label=name)
    chosen = plan.recommendation.combination
    at = (chosen.policy.buffer_size, 100 * chosen.fill)
    axes.plot(*at, marker="o", markersize=14, fillstyle="none", color="black", linestyle="none", label="recommended")
    sizes = sorted({each.policy.buffer_size for each in plan.combinations})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("buffer size (sources per loader worker)")
    axes.set_ylabel("fill (% of the slots)")
    axes.legend(fontsize="small")
