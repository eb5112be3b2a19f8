"""The table that says at the end of a pass what packing made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import distributed

from lightning_pack import markup
from lightning_pack.callbacks.work import Imbalance
from lightning_pack.markup import Kind, Part
from lightning_pack.metrics import REASONS, PackingStats, counted_reason
from lightning_pack.source import LeftOut
from lightning_pack.visible_text import visible

#: Sample keys that are kept for each reason.
EXAMPLES = 3

#: Reason -> keys of sources left out for it, at most :data:`EXAMPLES`.
Examples = dict[str, list[str]]

_ROWS: dict[str, Callable[[PackingStats], str]] = {
    "packs": lambda s: f"{s.packs:,}",
    "sources": lambda s: f"{s.sources:,}",
    "sources per pack": lambda s: f"{s.sources_per_pack:.2f}",
    "target tokens": lambda s: f"{s.target_tokens:,}",
    "real tokens": lambda s: f"{s.real_tokens:,}",
    "alignment padding": lambda s: f"{s.alignment_padding:,}",
    "tail padding": lambda s: f"{s.tail_padding:,}",
    "slots": lambda s: f"{s.slots:,}",
    "fill": lambda s: f"{s.fill:.2%}",
    "waste by alignment": lambda s: f"{s.alignment_fraction:.2%}",
    "waste at tails": lambda s: f"{s.tail_fraction:.2%}",
    "over-length, of tokens read": lambda s: f"{s.overlength_fraction:.2%}",
    "gap to the bound": lambda s: "" if s.lengths is None else f"{s.lengths.gap:.2%}",
    "age of 50 %, in turnovers": lambda s: "" if s.ages is None else f"{s.ages.percentile(50):g}",
    "age of 95 %": lambda s: "" if s.ages is None else f"{s.ages.percentile(95):g}",
    "largest age": lambda s: "" if s.ages is None else f"{s.ages.largest:g}",
}


def add_examples(examples: Examples, left_out: Iterable[LeftOut]) -> None:
    """Keep the keys of these sources where there is room, each once, by the reason they are counted under."""
    for gone in left_out:
        keys = examples.setdefault(counted_reason(gone.reason), [])
        if len(keys) < EXAMPLES and gone.key not in keys:
            keys.append(gone.key)


def gather_examples(examples: Mapping[str, Examples], stages: Mapping[str, int], *, earlier: Examples) -> dict[str, Examples]:
    """The examples of all ranks by stage; a collective where there are several ranks.

    Args:
        examples: stage -> those of this rank.
        stages: those that are asked for -> number of ranks, one after the other, that share their rows.
        earlier: of the training before a resume, of all ranks.
    """
    ranks = [examples]
    if distributed.is_available() and distributed.is_initialized():
        ranks = [{} for _ in range(distributed.get_world_size())]
        distributed.all_gather_object(ranks, examples)
    before = {"train": earlier}
    return {
        stage: _merged([before.get(stage, {}), *(rank.get(stage, {}) for rank in ranks[::copies])])
        for stage, copies in stages.items()
    }


def _merged(parts: Iterable[Mapping[str, list[str]]]) -> Examples:
    """Those of earlier parts first, each once, cut to :data:`EXAMPLES` for each reason."""
    merged: Examples = {}
    for examples in parts:
        for reason, keys in examples.items():
            merged[reason] = list(dict.fromkeys([*merged.get(reason, []), *keys]))[:EXAMPLES]
    return merged


def saved_examples(plain: object) -> Examples:
    """Those of a checkpoint, which may be damaged or a stranger's: what is no key of a known reason is left out."""
    found: Examples = {}
    for reason, keys in plain.items() if isinstance(plain, dict) else ():
        if reason in REASONS and isinstance(keys, list):
            found[reason] = [key for key in keys if isinstance(key, str)][:EXAMPLES]
    return found


def print_summary(
    stats: Mapping[str, PackingStats], examples: Mapping[str, Examples], *, imbalance: Imbalance | None = None
) -> None:
    """Print one column for each stage, and under it what was left out, why, and a few keys.

    Args:
        stats: stage -> statistics.
        examples: stage -> reason -> keys.
        imbalance: of the ranks' work in the stage ``"train"``; None where it is not known.
    """
    table = Table(title="Packing")
    table.add_column("")
    for stage in stats:
        table.add_column(stage, justify="right")
    for row in _rows(stats, imbalance):
        table.add_row(*row)
    console = Console()
    console.print(table)
    for stage, column in stats.items():
        if not column.left_out:
            console.print(f"{stage}: no source was left out")
        for reason, number in column.left_out.items():
            # A key may command a terminal.
            keys = ", ".join(map(visible, examples.get(stage, {}).get(reason, [])))
            tokens, noun = column.left_out_tokens[reason], "source" if number == 1 else "sources"
            # Text, not markup: a key may hold square brackets.
            line = f"{stage}: left out for {reason}: {number:,} {noun}, {tokens:,} tokens"
            console.print(Text(f"{line}, for example {keys}" if keys else line), soft_wrap=True)


def _rows(stats: Mapping[str, PackingStats], imbalance: Imbalance | None) -> list[tuple[str, ...]]:
    """A name, then one cell for each stage."""
    rows = [(name, *(value(column) for column in stats.values())) for name, value in _ROWS.items()]
    if imbalance is not None and imbalance.steps:
        rows.append(("rank imbalance", *(f"{imbalance.mean:.3f}" if stage == "train" else "" for stage in stats)))
    return rows


def summary_html(
    title: str, stats: Mapping[str, PackingStats], examples: Mapping[str, Examples], *, imbalance: Imbalance | None = None
) -> str:
    """The same for a notebook, with a bar of the slots of each stage.

    Args:
        title: of it.
        stats: stage -> statistics.
        examples: stage -> reason -> keys.
        imbalance: of the ranks' work in the stage ``"train"``; None where it is not known.
    """
    if not stats:
        return markup.card(title, markup.note("no batch was counted yet"))
    parts = [part for stage, column in stats.items() for part in (markup.line(stage), *_slots(column))]
    gone = [
        (
            stage,
            reason,
            f"{number:,}",
            f"{column.left_out_tokens[reason]:,}",
            ", ".join(examples.get(stage, {}).get(reason, [])),
        )
        for stage, column in stats.items()
        for reason, number in column.left_out.items()
    ]
    headings = ("left out of", "reason", "sources", "tokens", "for example")
    return markup.card(
        title,
        *parts,
        markup.table(_rows(stats, imbalance), headings=("", *stats)),
        markup.table(gone, headings=headings) if gone else markup.note("no source was left out"),
    )


def _slots(stats: PackingStats) -> tuple[str, str]:
    """A bar of what is in the slots, and its legend."""
    kinds: dict[Kind, tuple[str, int]] = {
        "target": ("target tokens", stats.target_tokens),
        "token": ("other real tokens", stats.real_tokens - stats.target_tokens),
        "alignment": ("alignment padding", stats.alignment_padding),
        "tail": ("tail padding", stats.tail_padding),
    }
    told = {kind: f"{name} {size / max(stats.slots, 1):.1%}" for kind, (name, size) in kinds.items()}
    parts = [Part(size=size, kind=kind, title=f"{told[kind]}: {size:,}") for kind, (_, size) in kinds.items()]
    return markup.bar(parts), markup.legend(told.items())
