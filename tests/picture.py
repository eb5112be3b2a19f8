"""The README's picture: real lengths in padded batches and in the rows that a policy makes of them.

``python -m tests.picture`` writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_pack import PackingPolicy

PICTURE = Path(__file__).parents[1] / "notebooks" / "packed.svg"
#: Tokens of 48 sources of the quickstart's data, as they come; the one of 2048 is longer and cut.
LENGTHS = [
    *(124, 75, 47, 242, 250, 68, 103, 135, 57, 67, 68, 155, 177, 78, 181, 442, 47, 83, 89, 84, 151, 177, 627, 55),
    *(46, 63, 473, 61, 51, 85, 103, 66, 48, 57, 68, 42, 80, 134, 89, 51, 119, 70, 67, 47, 50, 51, 173, 2048),
]
CAPACITY = 2048
#: Batches of four rows, the size of which is nearest to ``CAPACITY`` in the mean over the quickstart's data.
BATCH = 4
WIDTH = 880
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")

Row = list[tuple[int, int]]


def padded(lengths: Sequence[int]) -> list[list[Row]]:
    """Batches of rows of (source, tokens); -1 is padding."""
    batches = []
    for start in range(0, len(lengths), BATCH):
        sources = range(start, start + BATCH)
        longest = max(lengths[i] for i in sources)
        batches.append([[(i, lengths[i]), (-1, longest - lengths[i])] for i in sources])
    return batches


def packed(lengths: Sequence[int]) -> list[Row]:
    """Rows of (source, tokens), unfilled at their ends."""
    policy = PackingPolicy(CAPACITY, algorithm="minimum_bin_slack")
    rows = policy.pack(list(lengths))
    return [[*((i, lengths[i]) for i in row), (-1, CAPACITY - sum(lengths[i] for i in row))] for row in rows]


def fill(rows: Iterable[Row]) -> float:
    """Share of the slots that hold tokens."""
    slots = [part for row in rows for part in row]
    return sum(n for i, n in slots if i >= 0) / sum(n for _, n in slots)


def _bars(row: Row, y: float, height: float) -> list[str]:
    drawn, x, scale = [], 0.0, WIDTH / CAPACITY
    for source, tokens in row:
        look = f'fill="{COLOURS[source % len(COLOURS)]}"' if source >= 0 else 'fill="#888" fill-opacity="0.22"'
        if tokens:
            drawn.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(tokens * scale - 0.6, 0.4):.1f}" height="{height}" {look}/>'
            )
        x += tokens * scale
    return drawn


def picture() -> str:
    """The picture as SVG, for light and dark pages."""
    shapes, y = [], 0.0

    def title(text: str) -> None:
        nonlocal y
        y += 22
        shapes.append(f'<text x="0" y="{y - 7:.0f}" font-family="sans-serif" font-size="14" fill="#888">{text}</text>')

    batches, rows = padded(LENGTHS), packed(LENGTHS)
    share = fill(row for batch in batches for row in batch)
    title(f"{len(LENGTHS)} sources in padded batches of {BATCH}: {share:.0%} of the slots hold tokens, grey is padding")
    for batch in batches:
        for row in batch:
            shapes += _bars(row, y, 5)
            y += 6
        y += 3
    y += 6
    title(f"the same sources in packed rows of {CAPACITY:,}: {fill(rows):.0%}")
    for row in rows:
        shapes += _bars(row, y, 13)
        y += 16
    body = "\n".join(shapes)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" width="{WIDTH}">\n{body}\n</svg>\n'


if __name__ == "__main__":
    PICTURE.write_text(picture())
