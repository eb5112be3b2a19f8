"""The table of logged metrics in the README of the callbacks.

``python -m tests.metrics_table`` prints it; with ``--write`` it goes into the README.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_pack.callbacks.logged_metrics import markdown

README = Path(__file__).parents[1] / "lightning_pack" / "callbacks" / "README.md"
BEGIN, END = "<!-- metrics: python -m tests.metrics_table --write -->", "<!-- /metrics -->"


def in_readme() -> str:
    """What the README says now."""
    return README.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    """Print the table, or write it into the README."""
    if "--write" not in sys.argv[1:]:
        print(markdown())
        return
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{markdown()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
