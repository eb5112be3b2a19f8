"""The table that says at the end of a pass what packing made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_pack.metrics import PackingStats, counted_reason
from lightning_pack.row import LeftOut

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
}


def add_examples(examples: Examples, left_out: Iterable[LeftOut]) -> None:
    """Keep the keys of these sources where there is room, by the reason they are counted under."""
    for gone in left_out:
        keys = examples.setdefault(counted_reason(gone.reason), [])
        if len(keys) < EXAMPLES:
            keys.append(gone.key)


def merge_examples(ranks: Iterable[Mapping[str, list[str]]]) -> Examples:
    """The examples of all ranks, those of lower ranks first, cut to :data:`EXAMPLES` for each reason."""
    merged: Examples = {}
    for examples in ranks:
        for reason, keys in examples.items():
            merged[reason] = [*merged.get(reason, []), *keys][:EXAMPLES]
    return merged


def print_summary(stats: Mapping[str, PackingStats], examples: Mapping[str, Examples]) -> None:
    """Print one column for each stage, and under it what was left out, why, and a few keys.

    Args:
        stats: stage -> statistics.
        examples: stage -> reason -> keys.
    """
    table = Table(title="Packing")
    table.add_column("")
    for stage in stats:
        table.add_column(stage, justify="right")
    for name, value in _ROWS.items():
        table.add_row(name, *(value(column) for column in stats.values()))
    console = Console()
    console.print(table)
    for stage, column in stats.items():
        if not column.left_out:
            console.print(f"{stage}: no source was left out")
        for reason, number in column.left_out.items():
            keys = ", ".join(examples.get(stage, {}).get(reason, []))
            tokens = column.left_out_tokens[reason]
            # Text, not markup: a key may hold square brackets.
            line = f"{stage}: left out for {reason}: {number:,} sources, {tokens:,} tokens"
            console.print(Text(f"{line}, for example {keys}" if keys else line), soft_wrap=True)
