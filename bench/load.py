"""Sends work at its times, with at most so many requests at once, and watches itself while it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from bench.request_record import RequestRecord, Work
from bench.stream_client import StreamClient

TICK_S = 0.1


@dataclass(slots=True)
class LoadRun:
    """What came of a load.

    Attributes:
        records: one for each request, in the order of arrival.
        started_s: of the client's clock.
        duration_s: from the start to the end of the last request.
        client_cpu_s: processor time that the client used meanwhile.
        loop_lags_s: by how much a timer of the client's event loop was late, each tenth of a second. A time stamp may
            be late by as much.
    """

    records: list[RequestRecord]
    started_s: float = 0.0
    duration_s: float = 0.0
    client_cpu_s: float = 0.0
    loop_lags_s: list[float] = field(default_factory=list)


async def run_load(
    client: StreamClient,
    work: Sequence[Work],
    arrivals_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_tick: Callable[[LoadRun], None] = lambda run: None,
    returns_when_cancelled: bool = False,
) -> LoadRun:
    """Send each request at its time after the start; later while `max_concurrency` requests are under way.

    Args:
        arrivals_s: ascending, one for each request.
        on_tick: called about ten times a second, and once at the end.
        returns_when_cancelled: so that an interrupted benchmark still has a result, in which requests under way are
            failed as `cancelled` and those not yet sent as `not_sent`.
    """
    run = LoadRun([RequestRecord(index, one.output_tokens) for index, one in enumerate(work)])
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()

    async def send(one: Work, record: RequestRecord) -> None:
        async with places:
            await client.send(one, record)

    cpu_s = time.process_time()
    run.started_s = client.clock()
    ticker = asyncio.create_task(_tick(run, on_tick))
    tasks: list[asyncio.Task[None]] = []
    try:
        for one, record, at_s in zip(work, run.records, arrivals_s, strict=True):
            record.scheduled_s = run.started_s + at_s
            wait_s = record.scheduled_s - client.clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            record.arrived_s = max(client.clock(), record.scheduled_s)
            tasks.append(asyncio.create_task(send(one, record)))
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not returns_when_cancelled:
            raise
        for record in run.records:
            if not record.is_done:
                record.arrived_s = max(record.arrived_s, record.scheduled_s)
                record.fail("not_sent", "stopped before it was sent")
    finally:
        ticker.cancel()
    run.duration_s = client.clock() - run.started_s
    run.client_cpu_s = time.process_time() - cpu_s
    on_tick(run)
    return run


async def _tick(run: LoadRun, on_tick: Callable[[LoadRun], None]) -> None:
    while True:
        before_s = time.perf_counter()
        await asyncio.sleep(TICK_S)
        run.loop_lags_s.append(time.perf_counter() - before_s - TICK_S)
        on_tick(run)
