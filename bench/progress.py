"""Shows a running load on standard error: a live line on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from bench.load import LoadRun

REDRAW_S = 0.5
PRINT_S = 10.0


@contextmanager
def showing(total: int, *, enabled: bool) -> Iterator[Callable[[LoadRun], None]]:
    """Gives what to call on every tick of the load."""
    if not enabled:
        yield lambda run: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
            task = progress.add_task("", total=total)

            def redraw(run: LoadRun) -> None:
                done = sum(record.is_done for record in run.records)
                progress.update(task, completed=done, description=status_of(run))

            yield _at_most_every(REDRAW_S, redraw)
    else:
        yield _at_most_every(PRINT_S, lambda run: print(status_of(run), file=sys.stderr, flush=True))


def status_of(run: LoadRun) -> str:
    """Counts so far, and the median TTFT."""
    done = sum(record.is_done for record in run.records)
    running = sum(record.sent_s > 0 and not record.is_done for record in run.records)
    failed = sum(bool(record.error_kind) for record in run.records)
    events = sum(len(record.event_times_s) for record in run.records)
    ttfts = [record.ttft_s for record in run.records if record.event_times_s]
    ttft = f", TTFT {median(ttfts) * 1000:.0f} ms" if ttfts else ""
    return f"{done}/{len(run.records)} done, {running} running, {failed} failed, {events} events{ttft}"


def _at_most_every(period_s: float, show: Callable[[LoadRun], None]) -> Callable[[LoadRun], None]:
    """Counting goes through all records, so it is not done on every tick; the last tick, with a duration, always is."""
    last_s = time.monotonic()

    def tick(run: LoadRun) -> None:
        nonlocal last_s
        if run.duration_s or time.monotonic() - last_s >= period_s:
            last_s = time.monotonic()
            show(run)

    return tick
