"""Open and closed loops against a server in the same process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from bench.load import LoadRun, run_load
from bench.request_record import Work
from bench.stream_client import StreamClient, Target
from tests.bench.fake_server import DONE, event, serving, usage, whole_answer


def make_work(count: int) -> list[Work]:
    return [Work([index], 1, 2) for index in range(count)]


async def test_a_closed_loop_never_exceeds_its_concurrency_and_loses_nothing() -> None:
    async with serving(whole_answer) as server, StreamClient(Target(server.url, "m")) as client:
        run = await run_load(client, make_work(12), [0.0] * 12, max_concurrency=3)
    assert server.most_running <= 3
    assert sorted(body["prompt"][0] for body in server.bodies) == list(range(12))
    assert all(record.has_succeeded for record in run.records)
    assert run.duration_s > 0
    assert max(record.queue_s for record in run.records[3:]) > 0


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    """All requests have to be under way before the first is answered."""
    arrived = 0
    everybody = asyncio.Event()

    async def script(body: dict[str, Any], reply: web.StreamResponse) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == 5:
            everybody.set()
        await everybody.wait()
        await reply.write(event() + event() + usage(1, 2) + DONE)

    async with serving(script) as server, StreamClient(Target(server.url, "m")) as client:
        run = await run_load(client, make_work(5), [0.0, 0.01, 0.02, 0.03, 0.04])
    assert all(record.has_succeeded for record in run.records)
    for record, at_s in zip(run.records, (0.0, 0.01, 0.02, 0.03, 0.04), strict=True):
        assert record.sent_s >= record.arrived_s >= record.scheduled_s == run.started_s + at_s


async def test_failures_are_records_too() -> None:
    async def script(body: dict[str, Any], reply: web.StreamResponse) -> None:
        await reply.write(event())
        if body["prompt"][0] % 2 == 0:
            await reply.write(event() + usage(1, 2) + DONE)

    async with serving(script) as server, StreamClient(Target(server.url, "m")) as client:
        run = await run_load(client, make_work(4), [0.0] * 4)
    assert [record.error_kind for record in run.records] == ["", "cut", "", "cut"]


async def test_an_interrupted_load_still_has_a_result() -> None:
    async def script(body: dict[str, Any], reply: web.StreamResponse) -> None:
        if body["prompt"][0] == 0:
            await reply.write(event() + event() + usage(1, 2) + DONE)
            return
        await reply.write(event())
        await asyncio.sleep(60)

    seen: list[int] = []

    def tick(run: LoadRun) -> None:
        seen.append(sum(record.is_done for record in run.records))
        if not run.duration_s and run.records[0].is_done and run.records[1].event_times_s:
            loading.cancel()

    async with serving(script) as server, StreamClient(Target(server.url, "m")) as client:
        loading = asyncio.create_task(
            run_load(client, make_work(3), [0.0, 0.0, 3600.0], on_tick=tick, returns_when_cancelled=True)
        )
        run = await loading
    assert [record.error_kind for record in run.records] == ["", "cancelled", "not_sent"]
    assert seen[-1] == 2
    assert run.records[2].arrived_s >= run.records[2].scheduled_s


async def test_cancelling_ends_the_requests_too() -> None:
    async def script(body: dict[str, Any], reply: web.StreamResponse) -> None:
        await reply.write(event())
        await asyncio.sleep(60)

    def tick(run: LoadRun) -> None:
        if run.records[0].event_times_s:
            loading.cancel()

    async with serving(script) as server, StreamClient(Target(server.url, "m")) as client:
        loading = asyncio.create_task(run_load(client, make_work(1), [0.0], on_tick=tick))
        with pytest.raises(asyncio.CancelledError):
            await loading
