"""The report of a checkpoint in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_pack.callbacks.history import Stretch
from lightning_pack.checkpoints.contents import Contents
from lightning_pack.checkpoints.figures import figures, left_out, percent, remarks, short, sources, wastes
from lightning_pack.checkpoints.record import TrainingRecord
from lightning_pack.visible_text import visible

_LEVELS = "▁▂▃▄▅▆▇█"
#: Columns of a line over time.
_COLUMNS = 60


def shown(console: Console, contents: Contents, record: TrainingRecord | str) -> None:
    """Print the report."""
    console.print()
    if isinstance(record, str):
        console.print(Text(visible(f"No record of training: {record}.")), soft_wrap=True)
        return
    for each in _parts(contents, record):
        console.print(each, soft_wrap=isinstance(each, Text))


def _parts(contents: Contents, record: TrainingRecord) -> Iterator[RenderableType]:
    table = _table("Training", ("", ""), numbers=())
    for each in figures(record):
        table.add_row(each.name, Text.assemble((each.value, "bold"), f"  {each.note}"))
    yield table
    if record.history is not None:
        yield from _over_time(record.points)
    yield Text()
    table = _table("Waste", ("cause", "tokens", "share", "of", "what lowers it"), numbers=(1, 2))
    for waste in wastes(record):
        table.add_row(waste.cause, f"{waste.tokens:,}", percent(waste.share), waste.of, waste.way_out if waste.tokens else "")
    yield table
    yield Text()
    rows = left_out(record)
    if not rows:
        yield Text("No source was left out or cut.")
    for row in rows:
        yield Text.assemble(
            "Left out for ", (visible(row.reason), "bold"), f": {sources(row.sources)}, {row.tokens:,} tokens ({row.meaning})"
        )
        if row.keys:
            yield Text(f"  for example {', '.join(map(visible, row.keys))}")
    for remark in remarks(contents, record):
        yield Text(remark, style="yellow")


def _over_time(points: Sequence[Stretch]) -> Iterator[Text]:
    columns = _resampled([point for point in points if point.steps])
    if len(columns) < 2:
        return
    yield Text()
    steps = sum(point.steps for point in columns)
    yield Text(f"Over {steps:,} steps", style="bold")
    lines: dict[str, tuple[Sequence[float | None], Callable[[float], str]]] = {
        "fill": ([each.fill for each in columns], percent),
        "tail padding": ([each.tail for each in columns], percent),
        "alignment padding": ([each.alignment for each in columns], percent),
        "real tokens/s": ([each.tokens_per_second for each in columns], short),
        "TFLOP/s": ([each.tflops_per_second for each in columns], lambda value: f"{value:.4g}"),
        "rank imbalance": ([each.imbalance for each in columns], lambda value: f"{value:.3f}"),
    }
    for name, (values, form) in lines.items():
        known = [value for value in values if value is not None]
        if not known or (name == "rank imbalance" and max(known) <= 1) or not any(known):
            continue
        low, high = min(known), max(known)
        marks = "".join(" " if v is None else _LEVELS[_level(v, low, high)] for v in values)
        ends = f"{form(low)} to {form(high)}" if high > low else f"always {form(low)}"
        yield Text(f"  {name:18}{marks}  {ends}")


def _level(value: float, low: float, high: float) -> int:
    return round((value - low) / (high - low) * (len(_LEVELS) - 1)) if high > low else 3


def _resampled(points: list[Stretch]) -> list[Stretch]:
    """Neighbours merged into at most :data:`_COLUMNS` columns of about as many steps."""
    total = sum(point.steps for point in points)
    columns: dict[int, Stretch] = {}
    done = 0
    for point in points:
        place = done * _COLUMNS // total
        columns[place] = columns.get(place, Stretch()).plus(point)
        done += point.steps
    return list(columns.values())


def _table(title: str, names: Sequence[str], *, numbers: Sequence[int]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=any(names))
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index in numbers else "left", overflow="fold")
    return table
