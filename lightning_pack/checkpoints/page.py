"""The report of a checkpoint as one HTML file: no scripts, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from time import gmtime, strftime

from lightning_pack import markup
from lightning_pack.callbacks.history import Stretch
from lightning_pack.checkpoints.charts import Chart, Series, Span
from lightning_pack.checkpoints.contents import Contents
from lightning_pack.checkpoints.figures import figures, left_out, percent, remarks, short, significant, wastes
from lightning_pack.checkpoints.record import TrainingRecord
from lightning_pack.checkpoints.style import STYLE

_SUFFIXES = (".html", ".htm")
#: No script, no picture and no font may be loaded, whatever a key says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(contents: Contents, record: TrainingRecord | str, *, details: Sequence[str], chosen: str | None = None) -> str:
    """The whole file.

    Args:
        contents: of the checkpoint.
        record: of its training, or why there is none.
        details: what the terminal prints of the checkpoint, line by line.
        chosen: how the checkpoint was chosen.
    """
    name = markup.text(Path(contents.path).name)
    body = "".join(_body(contents, record, details=details, chosen=chosen))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name} - training report</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<main>\n{body}</main>\n"
        "</body>\n</html>\n"
    )


def check_target(path: Path) -> None:
    """Refuse early what a report cannot be written to.

    Raises:
        ValueError: saying what to do.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"--html {path}: a file that ends in .html is needed, so that nothing else is overwritten")
    if path.is_dir():
        raise ValueError(f"--html {path} is a folder: name a file in it, such as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise ValueError(f"--html {path}: there is no folder {str(path.parent)!r}; make it first, or name another file")


def write(path: Path, text: str) -> None:
    """Write the file.

    Raises:
        ValueError: if that is not possible, saying what to do.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--html {path} cannot be written ({error.strerror or error}): name a file in a folder that you may write to and "
            "that has room"
        ) from error


def _body(contents: Contents, record: TrainingRecord | str, *, details: Sequence[str], chosen: str | None) -> Iterator[str]:
    path = Path(contents.path)
    place = [] if contents.step is None else [f"step {contents.step:,}"]
    place += [] if contents.epoch is None else [f"epoch {contents.epoch:,}"]
    saved = (path / "meta.pt" if contents.sharded else path).stat().st_mtime
    place += [f"saved {strftime('%Y-%m-%d %H:%M UTC', gmtime(saved))}"]
    place += [] if contents.lightning is None else [f"Lightning {markup.text(contents.lightning)}"]
    yield f'<header>\n<p class="eyebrow">lightning-pack training report</p>\n<h1>{markup.text(path.name)}</h1>\n'
    yield f'<p class="sub">{" · ".join(place)}<br><span class="mono">{markup.text(path.resolve())}</span></p>\n'
    told = [] if chosen is None else [chosen]
    told += [f"No record of training: {record}."] if isinstance(record, str) else remarks(contents, record)
    yield "".join(f'<p class="remark">{markup.text(remark)}</p>\n' for remark in told) + "</header>\n"
    if not isinstance(record, str):
        yield from _training(record)
    yield '<h2>The checkpoint</h2>\n<div class="card"><pre class="mono">'
    yield "\n".join(map(markup.text, details)) + "</pre></div>\n"
    yield "<footer><p>Counts are of all data-parallel ranks since the run began, resumed parts included. Shares are of slots, "
    yield "places for tokens, unless it says otherwise.</p></footer>\n"


def _training(record: TrainingRecord) -> Iterator[str]:
    yield '<section class="tiles">\n'
    for each in figures(record):
        yield f'<dl class="tile"><dt>{each.name}</dt><dd>{markup.text(each.value)}</dd><dd>{markup.text(each.note)}</dd></dl>\n'
    yield "</section>\n"
    if record.history is not None and (charts := list(_charts(record.points))):
        yield '<h2>Over time</h2>\n<section class="charts">\n'
        yield "\n".join(chart.html() for chart in charts) + "\n</section>\n"
    yield from _waste(record)
    yield from _left_out(record)


def _charts(points: Iterable[Stretch]) -> Iterator[Chart]:
    known = [point for point in points if point.steps]
    if not known:
        return
    ends = [0]
    for point in known:
        ends.append(ends[-1] + point.steps)
    spans = [Span(start=start, end=end) for start, end in pairwise(ends)]
    fill = [point.fill for point in known]
    yield Chart(
        title="Fill",
        note="real tokens per slot; the axis need not begin at 0",
        spans=spans,
        series=[Series(name="fill", values=fill, style="real")],
        low=None,
        high=1.0,
        form=_percent,
    )
    if min(fill) < 1:
        yield Chart(
            title="Waste by cause",
            note="share of the slots that hold no real token",
            spans=spans,
            series=[
                Series(name="tail padding", values=[point.tail for point in known], style="tail"),
                Series(name="alignment padding", values=[point.alignment for point in known], style="alignment"),
            ],
            stacked=True,
            form=_percent,
        )
    read = [max(point.real_tokens + point.left_out_tokens, 1) for point in known]
    if any(point.left_out_tokens for point in known):
        lost = [point.left_out_tokens / tokens for point, tokens in zip(known, read, strict=True)]
        series = [Series(name="left out", values=lost, style="lost")]
        yield Chart(title="Tokens left out", note="share of the tokens read", spans=spans, series=series, form=_percent)
    rates = [point.tokens_per_second for point in known]
    if any(rates):
        series = [Series(name="real tokens/s", values=rates, style="speed")]
        yield Chart(title="Throughput", note="real tokens per second, all ranks", spans=spans, series=series, form=short)
    flops = [point.tflops_per_second for point in known]
    if any(flops):
        series = [Series(name="TFLOP/s", values=flops, style="speed")]
        note = "TFLOP/s of forward and backward pass, all devices"
        yield Chart(title="Work of the model", note=note, spans=spans, series=series, form=significant)
    imbalance = [point.imbalance for point in known]
    if any(value is not None and value > 1 for value in imbalance):
        series = [Series(name="imbalance", values=imbalance, style="work")]
        note = "largest / mean over ranks of the squared lengths of a step; 1 is equal work"
        yield Chart(title="Rank imbalance", note=note, spans=spans, series=series, low=1.0, form=lambda v: f"{v:.3g}")


def _waste(record: TrainingRecord) -> Iterator[str]:
    stats = record.stats
    shares = [
        ("real", "real tokens", stats.fill),
        ("alignment", "alignment padding", stats.alignment_fraction),
        ("tail", "tail padding", stats.tail_fraction),
    ]
    bar = "".join(f'<i class="{style}" style="width:{100 * share:.3f}%"></i>' for style, _, share in shares if share > 0)
    legend = "".join(f'<span><i class="{style}"></i>{name} {percent(share)}</span>' for style, name, share in shares)
    yield f'<h2>Where the slots went</h2>\n<div class="card whole"><div class="bar">{bar}</div><p class="legend">{legend}</p>\n'
    yield '<div class="more"><table class="stack"><thead><tr><th>waste</th><th class="number">tokens</th>'
    yield '<th class="number">share</th>'
    yield "<th>of</th><th>what lowers it</th></tr></thead><tbody>\n"
    for each in wastes(record):
        way_out = each.way_out if each.tokens else ""
        yield f'<tr><td>{each.cause}</td><td class="number" data-name="tokens">{each.tokens:,}</td>'
        yield f'<td class="number" data-name="share">{percent(each.share)}</td><td class="soft" data-name="of">{each.of}</td>'
        yield f'<td class="soft">{way_out}</td></tr>\n'
    yield "</tbody></table></div></div>\n"


def _left_out(record: TrainingRecord) -> Iterator[str]:
    yield "<h2>Left-out sources</h2>\n"
    rows = left_out(record)
    if not rows:
        yield '<div class="card"><p>No source was left out or cut.</p></div>\n'
        return
    yield '<div class="card"><table class="stack"><thead><tr><th>reason</th><th class="number">sources</th>'
    yield '<th class="number">tokens</th><th>meaning</th><th>for example</th></tr></thead><tbody>\n'
    for row in rows:
        keys = " ".join(f"<code>{markup.text(key)}</code>" for key in row.keys) or '<span class="soft">no keys are kept</span>'
        yield f'<tr><td>{markup.text(row.reason)}</td><td class="number" data-name="sources">{row.sources:,}</td>'
        yield f'<td class="number" data-name="tokens">{row.tokens:,}</td><td class="soft">{markup.text(row.meaning)}</td>'
        yield f"<td>{keys}</td></tr>\n"
    yield "</tbody></table></div>\n"


def _percent(share: float) -> str:
    # Ticks between 99.9 % and 100 % need five digits.
    return f"{100 * share:.5g} %"
