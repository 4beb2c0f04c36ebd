"""One request against a scripted server: what is noted, what is counted, and what each failure is called."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web

from bench.request_record import CountedBy, RequestRecord, Work
from bench.stream_client import AnswerReader, EventReader, StreamClient, Target
from engine.errors import ConfigError
from tests.bench.fake_server import DONE, Script, data, event, serving, usage, whole_answer

WORK = Work([1, 2, 3], 3, 4)


def read(*events: tuple[float, bytes]) -> RequestRecord:
    """The record of a request sent at 0 whose events came at these times."""
    record = RequestRecord(0, 4)
    reader, lines = AnswerReader(record, keep_text=True), EventReader()
    for time_s, content in events:
        for one in lines.feed(content):
            reader.take(one, time_s)
    reader.close()
    record.is_done = True
    return record


async def send(script: Script, **target: Any) -> RequestRecord:
    record = RequestRecord(0, WORK.output_tokens)
    async with serving(script) as server, StreamClient(Target(server.url, "m", **target)) as client:
        await client.send(WORK, record)
    assert record.is_done
    return record


def test_times_and_counts_come_from_the_events() -> None:
    record = read((0.5, event()), (0.7, event()), (1.1, event(2)), (1.2, usage(9, 4, 8) + DONE))
    assert record.has_succeeded
    assert record.event_times_s == [0.5, 0.7, 1.1]
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (9, 4, 8)
    assert record.counted_by is CountedBy.USAGE
    assert (record.ttft_s, record.latency_s, record.tpot_s) == (0.5, 1.1, pytest.approx(0.2))
    assert "".join(record.text) == "xxxx"


def test_without_usage_token_ids_count_then_the_length_then_events() -> None:
    with_ids = read((0.5, event(1, ids=True)), (0.7, event(3, ids=True)), (0.7, DONE))
    assert (with_ids.output_tokens, with_ids.counted_by, with_ids.event_tokens) == (4, CountedBy.TOKEN_IDS, [1, 3])
    without = read((0.5, event(1)), (0.7, event(3)), (0.7, DONE))
    assert (without.output_tokens, without.counted_by) == (2, CountedBy.EVENTS)
    full = read((0.5, event(1)), (0.7, event(3, finish="length")), (0.7, DONE))
    assert (full.output_tokens, full.counted_by) == (4, CountedBy.LENGTH)  # what was asked for
    stopped = read((0.5, event(1)), (0.7, event(3, finish="stop")), (0.7, DONE))
    assert (stopped.output_tokens, stopped.counted_by) == (2, CountedBy.EVENTS)


def test_an_event_that_says_it_holds_no_token_is_none() -> None:
    record = read((0.5, event(ids=True)), (0.9, event(0, finish="stop", ids=True)), (0.9, DONE))
    assert record.event_times_s == [0.5]
    assert record.has_succeeded


def test_an_event_with_empty_text_is_a_token_held_back() -> None:
    assert read((0.5, event(text="")), (0.9, event()), (0.9, DONE)).event_times_s == [0.5, 0.9]


def test_chat_deltas_are_read() -> None:
    role = data({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    word = data({"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]})
    record = read((0.5, role), (0.6, word))
    assert (record.event_times_s, record.text, record.has_succeeded) == ([0.5, 0.6], ["", "hi"], True)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_events_survive_any_cut_of_the_stream_and_either_line_end(size: int) -> None:
    stream = b": ping\n\n" + event() + b"data:{}\r\n\r\n" + DONE
    reader = EventReader()
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    found = [one for piece in pieces for one in reader.feed(piece)]
    assert found == [event().removeprefix(b"data: ").strip(), b"{}", b"[DONE]"]


def test_the_first_failure_of_an_answer_names_it() -> None:
    assert read((0.5, event())).error_kind == "cut"
    assert read((0.5, DONE)).error_kind == "no_tokens"
    assert read((0.5, event()), (0.6, b"data: {no json\n")).error_kind == "bad_event"
    assert read((0.5, b"data: 5\n")).error_kind == "bad_event"
    error = read((0.5, event()), (0.6, data({"error": {"message": "no node"}})), (0.6, DONE))
    assert (error.error_kind, "no node" in error.error) == ("error_event", True)


async def test_what_is_sent() -> None:
    async with serving(whole_answer) as server:
        target = Target(server.url, "m", {"Authorization": "Bearer k"}, {"temperature": 0, "ignore_eos": True})
        record = RequestRecord(0, 4)
        async with StreamClient(target) as client:
            await client.send(WORK, record)
    [body] = server.bodies
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    assert body == {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True, **stream}
    assert server.headers[0]["Authorization"] == "Bearer k"
    assert (record.has_succeeded, record.output_tokens, record.prompt_tokens) == (True, 4, 3)


async def test_chat_takes_text_and_refuses_token_ids() -> None:
    chat = Target("http://127.0.0.1:1/v1/chat/completions", "m")
    assert chat.request_body(Work("hi", 0, 1))["messages"] == [{"role": "user", "content": "hi"}]
    with pytest.raises(ConfigError, match="Chat endpoints take text"):
        chat.request_body(WORK)


async def test_times_follow_the_clock_of_the_client() -> None:
    """The server moves a clock of its own making before each event, and waits until the client has noted it."""
    now_s = 100.0
    record = RequestRecord(0, 3)

    async def script(body: dict[str, Any], reply: web.StreamResponse) -> None:
        nonlocal now_s
        for step, gap_s in enumerate((2.0, 0.25, 0.5), start=1):
            now_s += gap_s
            await reply.write(event())
            while len(record.event_times_s) < step:  # noqa: ASYNC110  (a record has no event to wait for)
                await asyncio.sleep(0.001)
        now_s += 60.0
        await reply.write(usage(3, 3) + DONE)

    async with serving(script) as server, StreamClient(Target(server.url, "m"), clock=lambda: now_s) as client:
        await client.send(WORK, record)
    assert (record.ttft_s, record.itls_s, record.latency_s) == (2.0, [0.25, 0.5], 2.75)
    assert record.tpot_s == 0.375


async def test_a_refusal_is_named_by_its_status() -> None:
    async def script(body: dict[str, Any], reply: web.StreamResponse) -> None:
        raise AssertionError("never reached")

    async with serving(script) as server:
        record = RequestRecord(0, 4)
        async with StreamClient(Target(server.url + "/nowhere", "m")) as client:
            await client.send(WORK, record)
    assert record.error_kind == "http_404"
    assert "Not Found" in record.error


async def test_a_stream_that_breaks_off_is_cut() -> None:
    record = RequestRecord(0, 4)

    async def script(body: dict[str, Any], reply: web.StreamResponse) -> None:
        await reply.write(event())
        while not record.event_times_s:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        raise ConnectionResetError

    async with serving(script) as server, StreamClient(Target(server.url, "m")) as client:
        await client.send(WORK, record)
    assert record.error_kind == "cut"


async def test_a_connection_lost_before_a_token_is_named_so() -> None:
    async def script(body: dict[str, Any], reply: web.StreamResponse) -> None:
        raise ConnectionResetError

    assert (await send(script)).error_kind == "connection"


async def test_a_stream_that_stops_is_a_timeout() -> None:
    async def script(body: dict[str, Any], reply: web.StreamResponse) -> None:
        await reply.write(event())
        await asyncio.sleep(30)

    assert (await send(script, timeout_s=0.3)).error_kind == "timeout"


async def test_nobody_there_is_a_failure_to_connect() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        record = RequestRecord(0, 4)
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1/completions"
        async with StreamClient(Target(url, "m")) as client:
            await client.send(WORK, record)
    assert record.error_kind == "connect"
