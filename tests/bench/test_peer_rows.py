"""Each row against a scripted server: the work it sends, its figures, and that failures are not numbers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from bench import peer_rows
from bench.datasets import PromptMaker
from bench.peer_rows import ROWS, RowFailed, gaps_ms
from bench.request_record import RequestRecord
from bench.stream_client import StreamClient, Target
from bench.vocabulary import Vocabulary
from tests.bench.fake_server import FakeServer, Script, event, serving, whole_answer


def make_maker() -> PromptMaker:
    return PromptMaker(Vocabulary(), np.random.default_rng(0), as_text=False)


async def measure(name: str, script: Script, *, is_quick: bool = False) -> tuple[dict[str, float], FakeServer]:
    async with serving(script) as server, StreamClient(Target(server.url, "m")) as client:
        return await ROWS[name].measure(client, make_maker(), is_quick), server


@pytest.mark.parametrize(
    ("name", "lengths", "at_once"),
    [
        ("single", [(128, 128)] * 2, 1),
        ("prefill", [(2048, 1)] * 3, 1),
        ("concurrent", [(256, 64)] * 16, 16),
        ("prefix", [(1532, 8)] * 5, 1),
    ],
)
async def test_work_and_figures(name: str, lengths: list[tuple[int, int]], at_once: int) -> None:
    figures, server = await measure(name, whole_answer)
    assert figures.keys() == ROWS[name].figures.keys()
    assert all(value > 0 for value in figures.values())
    assert [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies] == lengths
    assert server.most_running <= at_once
    starts = {tuple(body["prompt"][:1500]) for body in server.bodies}
    assert len(starts) == (1 if name == "prefix" else len(lengths))


async def test_interference_keeps_four_streams_while_prompts_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_rows, "QUIET_S", 1.0)

    async def script(body: dict[str, Any], reply: web.StreamResponse) -> None:
        if body["max_tokens"] == 1:
            await whole_answer(body, reply)
            return
        while True:
            await reply.write(event())
            await asyncio.sleep(0.005)

    figures, server = await measure("interference", script, is_quick=True)
    assert figures.keys() == ROWS["interference"].figures.keys()
    assert figures["busy_over_quiet"] == pytest.approx(figures["busy_itl_p99_ms"] / figures["quiet_itl_p99_ms"])
    assert [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies] == [(128, 1500)] * 4 + [(2048, 1)] * 2


async def test_streams_that_end_early_fail_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_rows, "QUIET_S", 0.05)

    async def script(body: dict[str, Any], reply: web.StreamResponse) -> None:
        await whole_answer({**body, "max_tokens": min(3, body["max_tokens"])}, reply)

    with pytest.raises(RowFailed, match="4 of the four streams ended early: finished"):
        await measure("interference", script, is_quick=True)


@pytest.mark.parametrize("name", ["single", "concurrent", "prefix"])
async def test_an_answer_that_is_too_short_is_no_measurement(name: str) -> None:
    async def script(body: dict[str, Any], reply: web.StreamResponse) -> None:
        await whole_answer({**body, "max_tokens": 5}, reply)

    with pytest.raises(RowFailed, match="an answer has 5 of"):
        await measure(name, script)


async def test_an_error_is_no_measurement() -> None:
    async def script(body: dict[str, Any], reply: web.StreamResponse) -> None:
        await reply.write(event())

    with pytest.raises(RowFailed, match="3 of 3 requests: cut"):
        await measure("prefill", script)


def test_gaps_count_in_the_window_in_which_they_end() -> None:
    record = RequestRecord(0, 9)
    record.event_times_s = [1.0, 1.5, 2.5, 2.6]
    assert gaps_ms([record, record], 1.2, 2.55) == pytest.approx([500, 1000, 500, 1000])
