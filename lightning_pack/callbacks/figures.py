"""The figure of an epoch: how long sources were and where slots and tokens went, for the loggers that take figures."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_pack.histogram import LENGTH_BINS, LengthHistogram
from lightning_pack.metrics import PackingStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What loggers call it; MLflow has a folder of that name among its artifacts, with a file for each step.
FIGURE = "packing/figure"
_TAKERS = (TensorBoardLogger, WandbLogger, MLFlowLogger)


def figures_wanted(trainer: Trainer) -> bool:
    """Whether there is a logger to draw for and something to draw with; a warning says what is missing."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return False
    if not any(isinstance(logger, _TAKERS) for logger in trainer.loggers):
        names = ", ".join(type(logger).__name__ for logger in trainer.loggers) or "no logger"
        known = ", ".join(taker.__name__ for taker in _TAKERS)
        _no_figures(f"the trainer has {names}, and figures go to {known}: add one of them, or leave figures=True out")
        return False
    if find_spec("matplotlib") is None:
        _no_figures("they are drawn with matplotlib: pip install 'lightning-pack[plot]', or leave figures=True out")
        return False
    return True


def _no_figures(why: str) -> None:
    rank_zero_warn(f"PackingMonitor(figures=True) logs no figures: {why}")


def log_figure(loggers: Iterable[Logger], figure: Figure, *, step: int) -> None:
    """Give it to each logger that takes figures. For rank 0.

    Args:
        loggers: of the trainer.
        figure: drawn already.
        step: that the epoch's numbers are logged with.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(FIGURE, figure, global_step=step)
        elif isinstance(logger, WandbLogger):
            logger.log_image(FIGURE, [figure], step=step)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, figure, f"{FIGURE}/step_{step:08}.png")


def drawn(stats: PackingStats, *, title: str) -> Figure:
    """Lengths of the sources on the left, where they are known; slots by what fills them, and tokens left out, on the right."""
    from matplotlib.figure import Figure

    # Without pyplot: no display, and no state that outlives the figure.
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title)
    if stats.lengths is None:
        _slots(figure.subplots(), stats)
    else:
        lengths, slots = figure.subplots(1, 2)
        _lengths(lengths, stats.lengths)
        _slots(slots, stats)
    return figure


def _lengths(axes: Axes, lengths: LengthHistogram) -> None:
    edges = np.linspace(0, lengths.capacity, LENGTH_BINS + 1)
    axes.stairs(lengths.counts, edges, fill=True, color="tab:blue", alpha=0.8)
    axes.axvline(lengths.capacity, color="tab:red", label=f"capacity {lengths.capacity:,}")
    axes.set_xlabel("length of a source with its alignment (tokens)")
    axes.set_ylabel("sources")
    axes.legend()


def _slots(axes: Axes, stats: PackingStats) -> None:
    """Bars from the top: what fills the slots with its share of them, then what was left out with its number of sources."""
    slots = {
        "target tokens": (stats.target_tokens, "tab:green"),
        "other real tokens": (stats.real_tokens - stats.target_tokens, "tab:blue"),
        "alignment padding": (stats.alignment_padding, "tab:orange"),
        "tail padding": (stats.tail_padding, "tab:gray"),
    }
    names, tokens, colors = [*slots], [number for number, _ in slots.values()], [color for _, color in slots.values()]
    labels = [f"{number / stats.slots:.1%}" for number in tokens]
    for reason, sources in stats.left_out.items():
        names.append(f"left out: {reason}")
        tokens.append(stats.left_out_tokens[reason])
        colors.append("tab:red")
        labels.append(f"{sources:,} sources")
    axes.bar_label(axes.barh(names, tokens, color=colors), labels, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens (slots)")
