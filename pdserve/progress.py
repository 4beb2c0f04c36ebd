"""Shows what a start is doing: a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def showing_progress() -> Iterator[Callable[[str], None]]:
    """Gives a function that tells the user, on stderr, what is being done now. It may be called from any thread."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("") as status:

        def report(text: str) -> None:
            status.update(text, spinner_style="cyan")

        yield report
