"""The life of an answer: errors before and during it, clients that leave or do not read, and the end of the server."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from engine.errors import AttemptFailed, DeadlinePassed, InvalidRequest, Overloaded, PdserveError, Unavailable
from router.generation import PhaseTimes
from router.testing import FakeCluster, ScriptedSequence
from tests.router.api_harness import LIMITS, MODEL, Serving, events, saying, serving, tokenizer

HANGING = ScriptedSequence(tuple(tokenizer().encode("the blue")), hang=True)
SILENT = ScriptedSequence((), hang=True)


async def soon(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)


async def send_raw(server: Serving, path: str = "/v1/completions", **body: Any) -> tuple[Any, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    content = json.dumps({"model": MODEL, "prompt": "red", **body}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("no", param="prompt"), 400, None),
        (Overloaded("full", retry_after_s=2.3), 429, "overloaded"),
        (Overloaded("full", retry_after_s=0.0), 429, "overloaded"),
        (Unavailable("none", retry_after_s=0.2), 503, "unavailable"),
        (AttemptFailed("gone"), 503, "attempt_failed"),
        (DeadlinePassed("late"), 504, "deadline"),
    ],
)
async def test_refusal_has_a_status_of_its_own(
    stream: bool, error: PdserveError, status: int, code: str | None
) -> None:
    async with serving(cluster=FakeCluster(model_limits=LIMITS, refuse=error)) as server:
        response = await server.complete(stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.headers["content-type"] == "application/json"
    if status in (429, 503):
        assert int(response.headers["retry-after"]) >= 1
    if isinstance(error, Overloaded) and error.retry_after_s > 1:
        assert response.headers["retry-after"] == "3"


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_the_first_token_has_a_status_of_its_own(stream: bool) -> None:
    async with serving(ScriptedSequence((), error=Unavailable("all nodes died"))) as server:
        response = await server.complete(stream=stream)
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "all nodes died"


async def test_failure_in_mid_stream_is_an_event_and_no_done() -> None:
    script = ScriptedSequence(tuple(tokenizer().encode("the blue")), delay_s=0.01, error=AttemptFailed("node died"))
    async with serving(script) as server:
        response = await server.complete(stream=True)
    assert response.status_code == 200
    chunks = events(response.text)
    assert chunks[-1] == {
        "error": {
            "message": "node died",
            "type": "service_unavailable_error",
            "param": None,
            "code": "attempt_failed",
        }
    }
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1]) and len(chunks) > 1


async def test_failure_after_some_tokens_fails_the_whole_answer() -> None:
    async with serving(ScriptedSequence((5, 6), error=AttemptFailed("node died"))) as server:
        response = await server.complete()
    assert response.status_code == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_mistake_of_ours_is_a_500_that_says_nothing_about_the_inside(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(ScriptedSequence((), error=KeyError("secret detail"))) as server:
        response = await server.complete(stream=stream)
        assert response.status_code == 500
        assert "secret" not in response.text and response.json()["error"]["type"] == "server_error"
    assert "secret detail" in caplog.text


async def test_client_that_leaves_in_mid_stream_frees_everything() -> None:
    async with serving(HANGING) as server:
        reader, writer = await send_raw(server, stream=True)
        await reader.readuntil(b"blue")
        writer.close()
        await soon(lambda: server.last.is_closed and server.api.num_running == 0)
        assert server.last.is_cancelled


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_before_the_first_token_frees_everything(stream: bool) -> None:
    async with serving(SILENT) as server:
        _, writer = await send_raw(server, stream=stream, n=3)
        await soon(lambda: bool(server.cluster.generations))
        await asyncio.sleep(0.02)
        writer.close()
        await soon(lambda: server.last.is_closed and server.api.num_running == 0)


async def test_client_that_leaves_while_it_is_admitted_leaves_nothing_but_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    cluster = FakeCluster(script=HANGING, model_limits=LIMITS, admit_delay_s=0.3)
    async with serving(cluster=cluster) as server:
        _, writer = await send_raw(server)
        await soon(lambda: server.api.num_running == 1)
        writer.close()
        await soon(lambda: server.api.num_running == 0)
        await asyncio.sleep(0.35)
        assert cluster.open_generations == []
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("router")]
    assert len(lines) == 1 and "client_left" in lines[0]


async def test_client_that_leaves_a_list_of_prompts_frees_all_of_them() -> None:
    async with serving(HANGING) as server:
        _, writer = await send_raw(server, prompt=[[first] for first in range(10, 50)], stream=True)
        await soon(lambda: len(server.cluster.generations) == 16)
        writer.close()
        await soon(lambda: server.api.num_running == 0 and not server.cluster.open_generations)
        assert len(server.cluster.generations) == 16


async def test_one_log_line_at_admission_and_one_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with serving(HANGING) as server:
        reader, writer = await send_raw(server, stream=True)
        await reader.readuntil(b"blue")
        writer.close()
        await soon(lambda: server.api.num_running == 0)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("router")]
    assert len(lines) == 2
    assert "request_admitted" in lines[0] and "outcome=cancelled" in lines[1]
    labels = [re.search(r"request_id='(\S+)'", line) for line in lines]
    assert labels[0] and labels[1] and labels[0][1] == labels[1][1]
    assert "red" not in " ".join(lines).replace("request", "")


async def test_client_that_does_not_read_is_cut_off() -> None:
    script = ScriptedSequence(tuple(tokenizer().encode("the blue sea ")) * 80_000, tokens_per_delta=2000)
    limits = LIMITS.__class__(
        vocab_size=512, max_model_len=400_000, block_size=16, max_request_blocks=30_000, max_sequences=128
    )
    cluster = FakeCluster(script=script, model_limits=limits)
    async with serving(cluster=cluster, slow_client_s=0.3) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", server.port))
        content = json.dumps(
            {"model": MODEL, "prompt": "red", "max_tokens": 300_000, "stream": True, "logprobs": 5}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        await asyncio.get_running_loop().sock_sendall(connection, head + content)
        await soon(lambda: bool(server.cluster.generations))
        await soon(lambda: server.api.num_running == 0)
        assert server.last.is_cancelled
        connection.close()


async def test_phases_are_headers_and_on_request_part_of_the_answer() -> None:
    times = PhaseTimes(queue_s=0.001, prefill_s=0.02, transfer_s=0.003, first_decode_s=0.004)

    class TimedCluster(FakeCluster):
        async def generate(self, request: Any) -> Any:
            generation = await super().generate(request)
            generation.facts.times = times
            return generation

    async with serving(cluster=TimedCluster(script=saying("x"), model_limits=LIMITS)) as server:
        response = await server.complete(include_timings=True)
        assert response.headers["x-pdserve-queue-ms"] == "1.000"
        assert response.headers["x-pdserve-first-decode-ms"] == "4.000"
        assert response.headers["server-timing"].startswith("queue;dur=1.000, prefill;dur=20.000, transfer;dur=3.000")
        expected = {"queue_ms": 1, "prefill_ms": 20, "transfer_ms": 3, "first_decode_ms": 4, "decode_ms": None}
        assert response.json()["timings"] == expected
        chunks = events((await server.complete(include_timings=True, stream=True)).text)
        assert chunks[-2]["timings"] == expected and chunks[-2]["choices"] == []


async def test_request_id_is_echoed_but_never_the_response_id() -> None:
    async with serving() as server:
        both = await asyncio.gather(
            *(
                server.client.post(
                    "/v1/completions", json={"model": MODEL, "prompt": "red"}, headers={"X-Request-Id": "same-id"}
                )
                for _ in range(2)
            )
        )
        assert [response.headers["x-request-id"] for response in both] == ["same-id", "same-id"]
        assert len({response.json()["id"] for response in both}) == 2
        odd = await server.client.get("/health", headers={"X-Request-Id": "a b\tc" + "x" * 500})
        assert odd.headers["x-request-id"].startswith("a_b_cx") and len(odd.headers["x-request-id"]) == 128
        assert len((await server.client.get("/health")).headers["x-request-id"]) == 32


async def test_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    async with serving(saying("the blue sea", delay_s=0.05)) as server:
        running = asyncio.create_task(server.complete(stream=True))
        await soon(lambda: server.api.num_running == 1)
        draining = asyncio.create_task(server.api.drain(5.0))
        await asyncio.sleep(0)
        assert (await server.client.get("/ready")).status_code == 503
        assert (await server.client.get("/health")).status_code == 200
        refused = await server.complete()
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        assert events((await running).text)[-1] == "[DONE]"
        assert await draining == 0


async def test_what_does_not_finish_while_draining_ends_with_an_error() -> None:
    async with serving(HANGING) as server:
        streamed = asyncio.create_task(server.complete(stream=True))
        whole = asyncio.create_task(server.complete())
        await soon(lambda: server.api.num_running == 2)
        await asyncio.sleep(0.05)
        assert await server.api.drain(0.05) == 2
        chunks = events((await streamed).text)
        assert chunks[-1]["error"]["code"] == "draining"
        assert (await whole).status_code == 503


async def test_request_that_still_waits_for_a_node_is_told_too() -> None:
    cluster = FakeCluster(script=HANGING, model_limits=LIMITS, admit_delay_s=30.0)
    async with serving(cluster=cluster) as server:
        waiting = asyncio.create_task(server.complete())
        await soon(lambda: server.api.num_running == 1)
        assert await server.api.drain(0.05) == 1
        response = await waiting
        assert response.status_code == 503 and response.json()["error"]["code"] == "draining"


async def test_long_text_is_tokenised_while_health_answers() -> None:
    limits = LIMITS.__class__(
        vocab_size=512, max_model_len=3_000_000, block_size=16, max_request_blocks=10**6, max_sequences=128
    )
    async with serving(cluster=FakeCluster(script=saying("x"), model_limits=limits)) as server:
        body = {"model": MODEL, "prompt": "lorem ipsum " * 60_000}
        long = asyncio.create_task(server.client.post("/v1/completions", json=body, timeout=60))
        answers = 0
        while not long.done():
            assert (await server.client.get("/health")).status_code == 200
            answers += 1
            await asyncio.sleep(0.01)
        assert (await long).status_code == 200
    # One that holds the interpreter's lock while it tokenises lets one or two through.
    assert answers >= 8


async def test_connection_is_kept_between_requests() -> None:
    async with (
        serving() as server,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{server.port}", limits=httpx.Limits(max_connections=1), trust_env=False
        ) as client,
    ):
        for _ in range(5):
            await client.post("/v1/completions", json={"prompt": "red"})
            await client.get("/nope")
        assert len(server.http.connections) == 1
