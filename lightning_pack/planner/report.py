"""A plan for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_pack import markup
from lightning_pack.planner.table import Table
from lightning_pack.policy import BYTES_PER_TOKEN
from lightning_pack.prepare.result import LengthStatistics

if TYPE_CHECKING:
    from lightning_pack.planner.memory import MeasuredMemory
    from lightning_pack.planner.result import Plan


def text(plan: Plan) -> str:
    """What was read, the tables, and the recommendation."""
    parts = ["\n".join(_data(plan)), combinations(plan).text(), f"{_CAPACITIES}:\n{capacities(plan).text()}"]
    if plan.balance is not None:
        parts.append(_balance(plan))
    return "\n\n".join([*parts, "\n".join(_recommendation(plan))])


def html(plan: Plan) -> str:
    """The same with HTML tables, and the YAML block."""
    return markup.card(
        "Plan",
        *map(markup.line, _data(plan)),
        combinations(plan).html(),
        markup.line(_CAPACITIES),
        capacities(plan).html(),
        *([] if plan.balance is None else [markup.line(_balance(plan))]),
        *map(markup.line, _recommendation(plan)),
        markup.details("as a configuration", f"<pre>{markup.text(plan.yaml())}</pre>"),
    )


_CAPACITIES = "Capacities at equal token slots in a step, each with its best algorithm and the recommended buffer"


def combinations(plan: Plan) -> Table:
    """Every algorithm with every buffer size; the recommended one is marked."""
    policy = plan.policy
    marked = [
        number
        for number, each in enumerate(plan.combinations)
        if (each.policy.algorithm, each.policy.buffer_size) == (policy.algorithm, policy.buffer_size)
    ]
    return Table(
        headings=("algorithm", "buffer", "fill", "gap to bound", "tail", "alignment", "oldest", "ranks", "memory"),
        rows=[
            (
                each.name,
                f"{each.policy.buffer_size:,}",
                f"{each.fill:.2%}",
                f"{each.gap:.2%}",
                f"{each.tail:.2%}",
                f"{each.alignment:.2%}",
                f"{each.oldest:.1f}",
                f"{each.imbalance:.2f}",
                size(each.memory),
            )
            for each in plan.combinations
        ],
        marked=marked[0],
    )


def capacities(plan: Plan) -> Table:
    """Several capacities; the one that was asked for is marked."""
    at = [each.capacity for each in plan.capacities]
    return Table(
        headings=(
            *("capacity", "packs/step", "sources/step", "fill", "gap to bound", "over", "tokens lost"),
            *("sum(len^2)/token", "algorithm"),
        ),
        rows=[
            (
                f"{each.capacity:,}",
                f"{each.packs_per_step:.4g}",
                f"{each.sources_per_step:,.1f}",
                f"{each.combination.fill:.2%}",
                f"{each.combination.gap:.2%}",
                f"{each.combination.overlength.over:.2%}",
                f"{each.combination.overlength.lost:.2%}",
                f"{each.squares_per_token:,.0f}",
                each.combination.name,
            )
            for each in plan.capacities
        ],
        marked=at.index(plan.policy.capacity),
    )


def _data(plan: Plan) -> list[str]:
    sources, policy = plan.sources, plan.policy
    count, packed = len(sources.lengths), plan.combinations[0].sources
    said = "all" if sources.whole else "the first"
    repeated = ", repeated in new orders as an endless training stream does" if packed > count else ""
    lines = [
        f"{sources.name}: {said} {count:,} sources; each dry run packs {packed:,}{repeated}",
        LengthStatistics.of(sources.lengths).summary().replace("records taken evenly", "sources"),
    ]
    if sources.left_out:
        gone = ", ".join(f"{each.reason} {each.sources:,}" for each in sources.left_out)
        lines.append(f"left out at any capacity: {gone}")
    over = plan.recommendation.combination.overlength
    lines.append(
        f"{over.over:.2%} of the sources are longer than capacity {policy.capacity:,}; overlength={policy.overlength!r} loses "
        f"{over.lost:.2%} of the tokens read"
    )
    media = plan.recommendation.combination.media
    if media is not None:
        share = sum(cost.tokens for cost in sources.costs) / sum(sources.lengths)
        lines.append(
            f"{share:.0%} of the tokens are placeholders of images; a source holds {size(media.held)} of encoded images and "
            f"positions while it waits, in shuffle and packing buffers, and {size(media.nbytes)} of tensors in its row"
        )
        if media.beyond:
            lines.append(
                f"{media.beyond:.2%} of the sources have more images than a pack may: they are left out (media_budget)"
            )
    lines.append(
        "fill, tail and alignment are shares of the slots; the oldest wait is in turnovers; ranks is the largest over the mean "
        "attention work in a step; memory is per loader worker, estimated from the sizes of the sources"
    )
    return lines


def _balance(plan: Plan) -> str:
    balance = plan.balance
    assert balance is not None
    windows = ", ".join(
        f"{each.imbalance:.2f} with window={each.window} (up to {size(BYTES_PER_TOKEN * each.tokens)} more per loader worker)"
        for each in balance.windows
    )
    return (
        f"Attention work of {balance.ranks} ranks, largest / mean, mean of {balance.steps:,} steps: {balance.unbalanced:.2f}; "
        f"under balance='quadratic' {windows}"
    )


def _recommendation(plan: Plan) -> list[str]:
    policy, memory = plan.policy, plan.recommendation.combination.memory
    balance = "" if policy.balance is None else f", balance={policy.balance!r}"
    lines = [
        f"Recommended: algorithm={policy.algorithm!r}, buffer_size={policy.buffer_size}{balance}.",
        f"{plan.recommendation.reason[0].upper()}{plan.recommendation.reason[1:]}.",
        f"The {plan.workers} loader workers of a rank then hold about {size(plan.workers * memory)}, by this estimate."
        if plan.workers > 1
        else f"The loader of a rank then holds about {size(memory)}, by this estimate.",
    ]
    if plan.memory is not None:
        lines.append(_measured(plan.memory, workers=plan.workers))
    return lines + [f"{remark[0].upper()}{remark[1:]}." for remark in plan.recommendation.remarks]


def _measured(memory: MeasuredMemory, *, workers: int) -> str:
    if memory.nbytes is None:
        return f"It was not measured: {memory.problem}."
    each = size(memory.nbytes)
    total = f", so {workers} take {size(workers * memory.nbytes)}" if workers > 1 else ""
    short = "" if memory.whole else "; its buffers were not full by then, so it may take more (measure_seconds)"
    return (
        f"Measured: a loader worker took {each} for itself, beyond what it shares with the process that starts it{total} (at "
        f"most, in {memory.seconds:.1f} seconds, while {memory.rows:,} rows were taken{short})."
    )


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / 1e3:,.0f} kB" if count < 1e6 else f"{count / 1e6:,.1f} MB"
