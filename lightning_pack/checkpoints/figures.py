"""The figures of a report in words and numbers, as both the page and the terminal tell them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lightning_pack.callbacks.history import Stretch
from lightning_pack.checkpoints.contents import Contents
from lightning_pack.checkpoints.record import TrainingRecord

_REASONS = {
    "overlength": "longer than the capacity of a pack; raise packing.capacity, or choose overlength truncate or split",
    "truncated": "cut at the capacity: its end was not trained on",
    "no_targets": "no token of it is a target: an empty answer, or a prompt that alone fills the capacity",
    "empty": "it became no tokens",
    "corrupt": "the record is not what the encoder takes",
    "encoder_error": "the encoder raised an error on it",
    "damaged": "it could not be read from the files of the dataset",
    "uneven_ranks": "at the end of a pass other ranks had no more rows to go with it",
    "image": "an image of it is missing, broken or of a size that is refused",
    "media_budget": "its images exceed the policy's limit for a row",
    "other": "a reason that the encoder gave itself",
}


class Figure(NamedTuple):
    """A number of the whole run."""

    name: str
    value: str
    note: str


class Waste(NamedTuple):
    """Tokens or slots that trained nothing."""

    cause: str
    tokens: int
    #: Of all slots, or of all tokens read.
    share: float
    of: str
    way_out: str


class LeftOutRow(NamedTuple):
    """What was left out for one reason."""

    reason: str
    sources: int
    tokens: int
    meaning: str
    keys: tuple[str, ...]


def figures(record: TrainingRecord) -> Iterator[Figure]:
    """The most telling first."""
    stats, total = record.stats, record.total
    gone = sum(stats.left_out.values())
    yield Figure("Fill", percent(stats.fill), f"real tokens of {stats.slots:,} slots")
    yield Figure("Real tokens seen", short(stats.real_tokens), f"{stats.real_tokens:,}")
    yield Figure("Target tokens", short(stats.target_tokens), f"{stats.target_tokens:,} that the loss counts")
    yield Figure("Sources seen", short(stats.sources), f"{stats.sources_per_pack:.2f} to a pack, {stats.packs:,} packs")
    read = stats.sources + gone
    yield Figure("Left out or cut", short(gone), f"sources, {percent(gone / read if read else 0.0)} of {read:,} read")
    if record.imbalance.steps:
        steps = f"{record.imbalance.steps:,} steps; 1 is equal work"
        yield Figure("Rank imbalance", f"{record.imbalance.mean:.3f}", f"largest / mean over ranks, of {steps}")
    if (rate := total.tokens_per_second) is not None:
        yield Figure("Real tokens/s", short(rate), f"all ranks, over {duration(total)} that were timed")
    if (flops := total.tflops_per_second) is not None:
        yield Figure("TFLOP/s", significant(flops), "of the model, forward and backward pass, all devices")
    if stats.ages is not None and stats.sources:
        yield Figure("Wait for a pack", f"{stats.ages.percentile(95):g}", "turnovers of the buffer that 95 % do not exceed")
    if stats.lengths is not None and stats.packs:
        yield Figure(
            "Gap to the bound", percent(stats.lengths.gap), "more packs than one packer with all sources at once needs"
        )


def wastes(record: TrainingRecord) -> list[Waste]:
    """By cause."""
    stats = record.stats
    long = sum(stats.left_out_tokens.get(reason, 0) for reason in ("overlength", "truncated"))
    others = sum(stats.left_out_tokens.values()) - long
    read = max(stats.tokens_read, 1)
    return [
        Waste(
            "tail padding", stats.tail_padding, stats.tail_fraction, "slots", "larger packing.buffer_size, or another algorithm"
        ),
        Waste(
            *("alignment padding", stats.alignment_padding, stats.alignment_fraction, "slots"),
            "smaller packing.multiple, where kernels and parallelism allow it",
        ),
        Waste(
            *("over-length", long, stats.overlength_fraction, "tokens read"),
            # Where sources are cut already, cutting is no advice.
            "larger packing.capacity, or overlength "
            + ("truncate or split" if stats.left_out_tokens.get("overlength") else "split, for plain text"),
        ),
        Waste("left out otherwise", others, others / read, "tokens read", "see the reasons below"),
    ]


def left_out(record: TrainingRecord) -> list[LeftOutRow]:
    """By reason, the most sources first."""
    stats = record.stats
    rows = [
        LeftOutRow(
            *(reason, number, stats.left_out_tokens.get(reason, 0), _REASONS.get(reason, "")),
            tuple(record.examples.get(reason, ())),
        )
        for reason, number in stats.left_out.items()
    ]
    return sorted(rows, key=lambda row: (-row.sources, row.reason))


def remarks(contents: Contents, record: TrainingRecord) -> list[str]:
    """What a reader must know about the figures."""
    found = record.remarks()
    if not record.stats.packs:
        found.insert(0, "No row was trained on before this checkpoint was written.")
    position = None if contents.data is None else contents.data.position
    if position is not None and "encoder.rows" in position.settings:
        found.append(
            "These rows were written ahead: what was left out or cut then is in the manifest.json of their folder, not here."
        )
    return found


def sources(number: int) -> str:
    """How many."""
    return f"{number:,} source{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """A share of 1."""
    return f"{100 * share:.2f} %"


def significant(value: float) -> str:
    """Three digits, without an exponent."""
    if value <= 0:
        return "0"
    for digits in range(12):
        if value >= 100 / 10**digits:
            return f"{value:,.{digits}f}"
    return f"{value:.3g}"


def short(value: float) -> str:
    """Three digits and a unit."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{significant(value / (1e3 if unit == 'k' else size))} {unit}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else significant(value)


def duration(stretch: Stretch) -> str:
    """How long was timed."""
    seconds = stretch.nanoseconds / 1e9
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{significant(seconds / size)} {unit}"
    return f"{significant(seconds)} s"
