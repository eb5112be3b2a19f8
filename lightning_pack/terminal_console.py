"""The console that commands print to."""

from __future__ import annotations

import os
import sys

from rich.console import Console

#: Columns of a file or a pipe, which has no width of its own.
_WIDTH = 160


def terminal_console() -> Console:
    """Standard output: styled in a terminal, and plain text where it is none, or where ``NO_COLOR`` is set."""
    plain = bool(os.environ.get("NO_COLOR")) or not sys.stdout.isatty()
    # rich would still underline under NO_COLOR.
    return Console(
        color_system=None if plain else "auto",
        force_terminal=False if plain else None,
        width=None if sys.stdout.isatty() else _WIDTH,
        highlight=False,
    )
