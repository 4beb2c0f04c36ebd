"""Limits: bodies, headers and numbers that are too large are refused before they cost anything."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.api.client import CHAT, COMPLETIONS, Api, check_error, check_error_body
from tests.e2e.cluster_processes import ClusterProcesses

pytestmark = pytest.mark.e2e

MEBIBYTE = 1024 * 1024
MAX_BODY_BYTES = 8 * MEBIBYTE


class PeakMemory:
    """How far the router's resident memory has risen at most since this was made."""

    def __init__(self, pid: int) -> None:
        self._process = Path(f"/proc/{pid}")
        (self._process / "clear_refs").write_text("5")
        self._before = self._peak()

    def _peak(self) -> int:
        match = re.search(r"VmHWM:\s+(\d+) kB", (self._process / "status").read_text())
        assert match is not None
        return int(match[1]) * 1024

    @property
    def rise(self) -> int:
        return self._peak() - self._before


def padded(total: int) -> Iterator[bytes]:
    """A chat request of `total` bytes, most of them spaces, in pieces."""
    yield b'{"max_tokens":1,"messages":[{"role":"user","content":"Hi"}]'
    for _ in range(total // 100_000):
        yield b" " * 100_000
    yield b"}"


def test_declared_body_of_30_mb_is_413_and_never_held(api: Api, cluster: ClusterProcesses) -> None:
    memory = PeakMemory(cluster["router-0"].pid)
    check_error(api.post_bytes(CHAT, b"".join(padded(30_000_000))), 413)
    assert memory.rise < MAX_BODY_BYTES
    assert api.chat("Hi", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_declared_length_is_refused_before_the_body_is_sent(api: Api) -> None:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.key}\r\n"
        "Content-Type: application/json\r\nContent-Length: 30000000\r\n\r\n{"
    )
    assert answer_to(api, head.encode()) == 413


def test_chunked_body_of_30_mb_is_413_as_soon_as_it_is_too_long(api: Api, cluster: ClusterProcesses) -> None:
    memory = PeakMemory(cluster["router-0"].pid)
    reply = api.http.post(CHAT, content=padded(30_000_000), headers={"Content-Type": "application/json"})
    assert "transfer-encoding" in reply.request.headers
    check_error(reply, 413)
    assert memory.rise < 2 * MAX_BODY_BYTES


def answer_to(api: Api, request: bytes) -> int:
    """The status of the answer to bytes sent over a connection of their own; its body is an error's."""
    url = httpx.URL(api.url)
    with socket.create_connection((url.host, url.port), timeout=10.0) as connection:
        connection.sendall(request)
        reader = connection.makefile("rb")
        status = int(reader.readline().split()[1])
        length = 0
        while line := reader.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        check_error_body(reader.read(length))
        return status


def test_header_of_100_kb_is_431(api: Api) -> None:
    head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.key}\r\nX-Long: {'a' * 100_000}\r\n\r\n"
    assert answer_to(api, head.encode()) == 431
    assert api.http.get("/v1/models").status_code == 200


def resident_bytes(cluster: ClusterProcesses) -> dict[str, int]:
    return {name: psutil.Process(member.pid).memory_info().rss for name, member in cluster.members.items()}


def test_huge_numbers_are_refused_at_once_and_cost_no_memory(api: Api, cluster: ClusterProcesses) -> None:
    messages = [{"role": "user", "content": "Name three colours."}]
    before = resident_bytes(cluster)
    for path, param, body in (
        (CHAT, "n", {"messages": messages, "n": 100_000, "max_tokens": 100_000}),
        (COMPLETIONS, "best_of", {"prompt": "x", "best_of": 100_000, "max_tokens": 100_000}),
        (COMPLETIONS, "n", {"prompt": "x", "n": 100_000, "best_of": 100_000, "max_tokens": 100_000}),
        (CHAT, "max_tokens", {"messages": messages, "max_tokens": 100_000}),
        (CHAT, "max_tokens", {"messages": messages, "max_tokens": 10**30}),
        (COMPLETIONS, "logprobs", {"prompt": "x", "logprobs": 100_000}),
        (CHAT, "top_logprobs", {"messages": messages, "logprobs": True, "top_logprobs": 100_000}),
        (COMPLETIONS, "stop", {"prompt": "x", "stop": ["s"] * 100_000}),
        (COMPLETIONS, "n", {"prompt": [[5]] * 1000, "n": 4}),
    ):
        started = time.monotonic()
        reply = api.post(path, body)
        assert time.monotonic() - started < 0.5, json.dumps(body)[:100]
        check_error(reply, 400, param=param)
    risen = {name: after - before[name] for name, after in resident_bytes(cluster).items()}
    assert max(risen.values()) < 8 * MEBIBYTE, risen
