"""Charts over the steps of training as HTML with inline SVG: they stretch with the page, and their words keep their size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

_WIDTH, _HEIGHT = 1000, 240


@dataclass(frozen=True, kw_only=True)
class Span:
    """Where a value holds: the steps after ``start``, up to ``end``."""

    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values over the spans of a chart.

    Args:
        name: for the legend.
        values: one for each span; None where it is not known.
        style: class of the style sheet that colours it.
    """

    name: str
    values: Sequence[float | None]
    style: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart over steps.

    Args:
        title: what it shows.
        note: unit and reading aid.
        spans: one after the other.
        series: of one line, or areas on top of each other.
        stacked: whether they are areas.
        low: where the axis begins; None finds it.
        high: where it ends; None finds it.
        form: number -> text.
    """

    title: str
    note: str
    spans: Sequence[Span]
    series: Sequence[Series]
    stacked: bool = False
    low: float | None = 0.0
    high: float | None = None
    form: Callable[[float], str] = str

    def html(self) -> str:
        """A ``figure``."""
        low, high, ticks = self._axis()
        first, last = self.spans[0].start, self.spans[-1].end
        across = [_WIDTH * (span.start - first) / (last - first) for span in self.spans] + [float(_WIDTH)]

        def height(value: float) -> float:
            return _HEIGHT * (1 - min(max((value - low) / (high - low), 0.0), 1.0))

        parts = [_line("grid", height(tick)) for tick in ticks]
        base = [0.0] * len(self.spans)
        for series in self.series:
            if self.stacked:
                top = [under + (value or 0.0) for under, value in zip(base, series.values, strict=True)]
                parts.append(_area(series.style, across, [height(v) for v in base], [height(v) for v in top]))
                base = top
            else:
                parts.append(_steps(series.style, across, [None if v is None else height(v) for v in series.values]))
        parts += [self._hint(index, across) for index in range(len(self.spans))]
        marks = "".join(f'<span style="top:{100 * height(t) / _HEIGHT:.1f}%">{escape(self.form(t))}</span>' for t in ticks)
        xs = [x for x in _nice(first, last, most=5) if x == int(x)]
        steps = "".join(_step_mark(x, 100 * (x - first) / (last - first)) for x in xs)
        legend = "".join(f'<span><i class="{s.style}"></i>{escape(s.name)}</span>' for s in self.series)
        words = f"{self.title} over optimizer steps {first + 1:,} to {last:,}"
        return (
            f'<figure class="chart"><figcaption><h3>{escape(self.title)}</h3><p>{escape(self.note)}</p></figcaption>'
            f'<div class="plot"><div class="y" aria-hidden="true">{marks}</div>'
            f'<svg role="img" aria-label="{escape(words)}" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">'
            f'{"".join(parts)}</svg><div class="x" aria-hidden="true">{steps}</div></div>'
            f'<p class="legend">{legend if len(self.series) > 1 else ""}<span class="unit">optimizer steps</span></p></figure>'
        )

    def _axis(self) -> tuple[float, float, list[float]]:
        known = [[v for v in series.values if v is not None] for series in self.series]
        tops = [sum(v or 0.0 for v in each) for each in zip(*(s.values for s in self.series), strict=True)]
        most = max(tops if self.stacked else [v for values in known for v in values], default=1.0)
        least = min((v for values in known for v in values), default=0.0)
        high = self.high if self.high is not None else (most or 1.0)
        low = self.low
        if low is None:
            # The lowest value lies well above the axis.
            low = max(0.0, least - max(high - least, 0.02 * abs(high)) * 0.05)
        ticks = _nice(low, high, most=5)
        step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
        if self.low is None:
            low = max(0.0, floor(low / step + 1e-9) * step)
        if self.high is None and ticks[-1] < high:
            high = ticks[-1] + step
        return low, high, [tick for tick in _nice(low, high, most=5) if low - 1e-9 <= tick <= high + 1e-9]

    def _hint(self, index: int, across: Sequence[float]) -> str:
        span = self.spans[index]
        values = [(s.name, s.values[index]) for s in self.series]
        told = ", ".join(f"{name} {self.form(value)}" for name, value in values if value is not None) or "not known"
        text = f"steps {span.start + 1:,} to {span.end:,}: {told}"
        left, width = across[index], across[index + 1] - across[index]
        place = f'x="{left:.2f}" y="0" width="{width:.2f}" height="{_HEIGHT}"'
        return f'<rect class="hint" {place}><title>{escape(text)}</title></rect>'


def _step_mark(step: float, percent: float) -> str:
    # The last one must not leave the card.
    at = f"right:{100 - percent:.1f}%;transform:none" if percent > 92 else f"left:{percent:.1f}%"
    return f'<span style="{at}">{step:,.0f}</span>'


def _line(style: str, y: float) -> str:
    return f'<line class="{style}" x1="0" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _steps(style: str, across: Sequence[float], heights: Sequence[float | None]) -> str:
    """A line with a step for each span, broken where nothing is known."""
    path, drawn = [], False
    for i, y in enumerate(heights):
        if y is not None:
            path.append(f"{'L' if drawn else 'M'}{across[i]:.2f} {y:.2f}H{across[i + 1]:.2f}")
        drawn = y is not None
    return f'<path class="line {style}" d="{"".join(path)}"/>'


def _area(style: str, across: Sequence[float], lower: Sequence[float], upper: Sequence[float]) -> str:
    there = [f"{'L' if i else 'M'}{across[i]:.2f} {y:.2f}H{across[i + 1]:.2f}" for i, y in enumerate(upper)]
    back = [f"L{across[i + 1]:.2f} {y:.2f}H{across[i]:.2f}" for i, y in reversed(list(enumerate(lower)))]
    return f'<path class="area {style}" d="{"".join(there)}{"".join(back)}Z"/>'


def _nice(low: float, high: float, *, most: int) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    if high <= low:
        return [low]
    rough = (high - low) / (most - 1)
    size = 10 ** floor(log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * (1 - 1e-9))
    first = -(-low // step) * step
    return [first + i * step for i in range(most + 1) if first + i * step <= high + 1e-9 * step]
