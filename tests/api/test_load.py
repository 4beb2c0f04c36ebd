"""Under load and when clients leave: what is refused, what is freed, and that nobody else waits for it."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from uuid import uuid4

import httpx
import orjson
import pytest

from tests.api.client import CHAT, COMPLETIONS, Api, check_error, check_error_body
from tests.api.conftest import MAX_WAITING, POOL_TOKENS, SEQUENCES_AT_ONCE
from tests.api.running_stream import RunningStream
from tests.e2e.cluster_processes import MODEL_NAME, ClusterProcesses, wait_until

pytestmark = pytest.mark.e2e


def lines_about(cluster: ClusterProcesses, request_id: str, response_id: str = "") -> list[str]:
    """What all processes have logged about a request, under any of its names."""
    names = {request_id, response_id} - {""}
    for line in cluster["router-0"].log:
        if request_id in line and "attempt_id=" in line:
            names.add(line.partition("attempt_id=")[2].split()[0])
    return [line for member in cluster.members.values() for line in member.log if any(name in line for name in names)]


def check_log_of_cancelled(cluster: ClusterProcesses, request_id: str, response_id: str = "") -> list[str]:
    """The few lines about a request whose client has left, one of which says so."""
    lines: list[str] = []

    def says_so() -> bool:
        lines[:] = lines_about(cluster, request_id, response_id)
        return any("outcome=cancelled" in line or "client_left" in line for line in lines)

    wait_until(says_so, 2.0, "the log says that the client has left")
    assert len(lines) < 5, lines
    return lines


def test_leaving_a_stream_frees_everything_within_a_second(api: Api, cluster: ClusterProcesses) -> None:
    request_id = f"left-{uuid4().hex}"
    cancelled = cluster.describe()["router"]["cancelled"]
    stream = RunningStream(api, "Tell a long story.", request_id=request_id, max_tokens=POOL_TOKENS - 64)
    stream.wait_for_events(2)
    assert cluster.node("decode-0")["running_sequences"] == 1
    stream.leave()
    cluster.assert_idle(timeout_s=1.0)
    assert not stream.has_finished
    assert cluster.describe()["router"]["cancelled"] == cancelled + 1
    lines = check_log_of_cancelled(cluster, request_id, stream.response_id)
    assert any("outcome=cancelled" in line for line in lines)


@contextmanager
def all_places_taken(api: Api, cluster: ClusterProcesses) -> Iterator[None]:
    """The decode node has as many sequences as it runs at once, which soon need more blocks than it has."""
    with ExitStack() as stack:
        streams = [
            stack.enter_context(RunningStream(api, [100 + number] * 100, max_tokens=POOL_TOKENS - 128))
            for number in range(SEQUENCES_AT_ONCE)
        ]
        for stream in streams:
            stream.wait_for_events(1)
        yield
        assert not any(stream.has_finished for stream in streams), "there was nothing to queue behind"


def send_and_keep(api: Api, body: dict[str, object], request_id: str) -> socket.socket:
    """Send a completion request over a connection of its own, which the caller closes."""
    content = orjson.dumps({"model": MODEL_NAME, **body})
    url = httpx.URL(api.url)
    connection = socket.create_connection((url.host, url.port))
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer {api.key}\r\n"
        f"X-Request-Id: {request_id}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


QUEUED: dict[str, object] = {"prompt": [7] * 250, "max_tokens": 200, "temperature": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_decode_has_no_place_frees_what_waits_for_it(
    api: Api, cluster: ClusterProcesses, stream: bool
) -> None:
    request_id = f"queued-{uuid4().hex}"
    with all_places_taken(api, cluster):
        with send_and_keep(api, {**QUEUED, "stream": stream}, request_id):
            wait_until(
                lambda: cluster.node("decode-0")["in_flight"] == SEQUENCES_AT_ONCE + 1,
                5.0,
                "the request waits at the decode node",
            )

        def is_gone() -> bool:
            description = cluster.describe()
            router, nodes = description["router"], description["nodes"]
            return (
                router["in_flight_requests"] == SEQUENCES_AT_ONCE
                and router["waiting_tokens"] == 0
                and sum(node["in_flight"] for node in nodes) == SEQUENCES_AT_ONCE
                and not any(node["leases"] for node in nodes)
            )

        wait_until(is_gone, 1.0, "the request is gone from every queue")
    cluster.assert_idle(timeout_s=1.0)
    check_log_of_cancelled(cluster, request_id)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_prompt_is_computed_leaves_nothing_behind(
    api: Api, cluster: ClusterProcesses, stream: bool
) -> None:
    """The prefill node stands still, so that the request has no first token yet."""
    request_id = f"early-{uuid4().hex}"
    decode = cluster.node("decode-0")
    cluster["prefill-0"].signal(signal.SIGSTOP)
    try:
        with send_and_keep(api, {**QUEUED, "stream": stream}, request_id):
            wait_until(lambda: bool(lines_about(cluster, request_id)), 5.0, "the request is in flight")

        def is_gone() -> bool:
            router, node = cluster.describe()["router"], cluster.node("decode-0")
            blocks = node["blocks"]
            return (
                router["in_flight_requests"] == router["waiting_tokens"] == node["in_flight"] == node["leases"] == 0
                and blocks["free"] + blocks["cached"] == blocks["total"]
            )

        wait_until(is_gone, 1.0, "the request is gone from router and decode node")
    finally:
        cluster["prefill-0"].signal(signal.SIGCONT)
    cluster.assert_idle(timeout_s=1.0)
    assert cluster.node("decode-0")["tokens_generated"] == decode["tokens_generated"]
    lines = check_log_of_cancelled(cluster, request_id)
    assert not any("completion_tokens=" in line and "completion_tokens=0 " not in line for line in lines), lines


def test_two_requests_of_one_id_are_two_requests(api: Api) -> None:
    fields = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    prompts = ["One", "Two"]
    alone = [api.complete(prompt, **fields)["choices"][0]["text"] for prompt in prompts]

    def send(prompt: str) -> httpx.Response:
        return api.post(COMPLETIONS, {"prompt": prompt, **fields}, headers={"X-Request-Id": "same-id"})

    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(send, prompts))
    assert [reply.status_code for reply in replies] == [200, 200]
    assert [reply.json()["choices"][0]["text"] for reply in replies] == alone
    assert replies[0].json()["id"] != replies[1].json()["id"]
    assert {reply.headers["x-request-id"] for reply in replies} == {"same-id"}


async def test_burst_is_served_as_far_as_there_is_room_and_the_rest_told_when_to_come_back(
    api: Api, cluster: ClusterProcesses
) -> None:
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "max_tokens": 64,
        "ignore_eos": True,
    }
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=api.url, headers=api.http.headers, timeout=60.0, limits=limits) as client:
        replies = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(200)))
    refused = [reply for reply in replies if reply.status_code != 200]
    assert refused and {reply.status_code for reply in refused} <= {429, 503}
    for reply in refused:
        check_error_body(reply.content)
        assert int(reply.headers["retry-after"]) >= 1
    served = [reply.json() for reply in replies if reply.status_code == 200]
    assert len(served) >= SEQUENCES_AT_ONCE + MAX_WAITING
    assert {answer["usage"]["completion_tokens"] for answer in served} == {64}
    assert len({answer["choices"][0]["message"]["content"] for answer in served}) == 1
    cluster.assert_idle()
    assert api.chat("Hi", max_tokens=2)["usage"]["completion_tokens"] > 0


def watch_health(api: Api, for_s: float) -> float:
    """The longest that /health took, asked every tenth of a second."""
    longest, end_s = 0.0, time.monotonic() + for_s
    with httpx.Client(base_url=api.url, timeout=10.0, verify=False) as client:
        while time.monotonic() < end_s:
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            longest = max(longest, time.monotonic() - started)
            time.sleep(0.1)
    return longest


def test_huge_prompt_stalls_neither_health_nor_streams(api: Api) -> None:
    body = {"messages": [{"role": "user", "content": "lorem ipsum " * 400_000}], "max_tokens": 1}
    with RunningStream(api, "Go", max_tokens=POOL_TOKENS - 64) as stream, ThreadPoolExecutor(1) as pool:
        stream.wait_for_events(2)
        started_s = time.monotonic()
        huge = pool.submit(api.post, CHAT, body)
        assert watch_health(api, 1.0) < 0.3
        reply = huge.result()
        check_error(reply, reply.status_code)
        assert reply.status_code in (400, 413)
        assert stream.longest_gap_s(started_s, time.monotonic()) < 1.0
        assert not stream.has_finished and stream.error is None


def test_deep_schema_is_refused_at_once_and_stalls_no_stream(api: Api) -> None:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(150):
        schema = {"type": "object", "properties": {"a": schema}}
    response_format = {"type": "json_schema", "json_schema": {"name": "d", "strict": True, "schema": schema}}
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": response_format, "max_tokens": 4}
    with RunningStream(api, "Go on", max_tokens=POOL_TOKENS - 64) as stream:
        stream.wait_for_events(2)
        started_s = time.monotonic()
        check_error(api.post(CHAT, body), 400)
        assert time.monotonic() - started_s < 2.0
        stream.wait_for_events(len(stream.arrivals_s) + 10)
        assert stream.longest_gap_s(started_s, time.monotonic()) < 1.0
        assert not stream.has_finished
