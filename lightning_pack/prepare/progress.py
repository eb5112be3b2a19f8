"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str, *, total: float, shown: bool) -> Iterator[Callable[[float], None]]:
    """Gives a function that moves the bar on by an amount, in the unit of ``total``.

    Args:
        title: what is being done.
        total: the amount at the end.
        shown: False for no bar; there is none either where stderr is no terminal.
    """
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not (shown and sys.stderr.isatty())) as progress:
        task = progress.add_task(title, total=total)
        waiting = 0.0

        def advance(amount: float) -> None:
            # Moving the bar costs more than reading a line, so it moves in a thousand steps.
            nonlocal waiting
            waiting += amount
            if waiting * 1000 >= total:
                progress.advance(task, waiting)
                waiting = 0.0

        yield advance
