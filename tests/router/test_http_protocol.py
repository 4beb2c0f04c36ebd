"""Connections that behave badly: huge headers, bodies that nobody wants, bytes that are no HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from router.http_protocol import MAX_HEADER_BYTES, RouterHttpProtocol
from tests.router.api_harness import MODEL, Serving, serving


async def exchange(server: Serving, *pieces: bytes) -> tuple[int, dict[str, Any]]:
    """Send the pieces, read one answer up to the end of its JSON."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            int(line.split(":")[1]) for line in head.lower().split("\r\n") if line.startswith("content-length")
        )
        return int(head.split()[1]), json.loads(await reader.readexactly(length))
    finally:
        writer.close()


async def test_header_of_100_kb_is_431_in_one_piece_and_in_many() -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n"
    async with serving() as server:
        for pieces in ((head,), [head[at : at + 9000] for at in range(0, len(head) - 9000, 9000)]):
            status, body = await exchange(server, *pieces)
            assert status == 431
            assert body["error"]["code"] == "headers_too_large"
        many = b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * (MAX_HEADER_BYTES // 4) + b"\r\n"
        assert (await exchange(server, many))[0] == 431
        assert (await server.client.get("/health")).status_code == 200


async def test_headers_after_the_last_chunk_are_limited_too() -> None:
    body = json.dumps({"model": MODEL, "prompt": "red"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    whole = head + b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    async with serving() as server:
        status, _ = await exchange(server, whole, b"X-Sum: 1\r\n", b"\r\n")
        assert status == 200
        for trailers in ([b"X-A: " + b"a" * 9000 + b"\r\n"] * 9, [b"X-A: ", *[b"a" * 9000] * 9]):
            status, refusal = await exchange(server, whole, *trailers)
            assert status == 431 and refusal["error"]["code"] == "headers_too_large"


async def test_header_below_the_limit_is_fine() -> None:
    async with serving() as server:
        response = await server.client.get("/health", headers={"X-Long": "a" * 30_000})
        assert response.status_code == 200


async def test_bytes_that_are_no_http_get_the_envelope() -> None:
    async with serving() as server:
        status, body = await exchange(server, b"\x16\x03\x01\x02\x00\x01 not http\r\n\r\n")
        assert status == 400 and body["error"]["code"] == "bad_http"


async def test_declared_body_beyond_the_limit_is_refused_before_it_is_sent() -> None:
    async with serving(max_body_bytes=1000) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        status, body = await exchange(server, head + b"Content-Length: 30000000\r\n\r\n{")
        assert status == 413 and body["error"]["code"] == "request_too_large"
        status, _ = await exchange(server, head + b"Content-Length: 99999999999999999999999999\r\n\r\n{")
        assert status in (400, 413)


async def test_large_body_is_answered_with_413_and_the_connection_lives_on() -> None:
    async with serving(max_body_bytes=100_000) as server:
        padded = b'{"model":"' + MODEL.encode() + b'"' + b" " * 5_000_000 + b"}"
        response = await server.client.post(
            "/v1/completions", content=padded, headers={"Content-Type": "application/json"}
        )
        assert response.status_code == 413
        assert (await server.complete()).status_code == 200


async def test_chunked_body_without_a_length_is_counted() -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 10_000

    async with serving(max_body_bytes=100_000) as server:
        response = await server.client.post(
            "/v1/completions", content=endless(), headers={"Content-Type": "application/json"}
        )
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"


async def test_body_of_several_pieces_is_not_taken_for_a_head() -> None:
    async with serving() as server:
        response = await server.complete(prompt="red", metadata={"note": "x" * 900_000})
        assert response.status_code == 200


async def test_small_writes_are_sent_at_once() -> None:
    async with serving() as server:
        await server.client.get("/health")
        (connection,) = [item for item in server.http.connections if not item.transport.is_closing()]
        raw = connection.transport.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


_POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.parametrize("pieces", [[b"GET /health HTTP/1.1\r\n", b"X-A: ", b"b"], [_POST, b"{", b" "]])
async def test_request_sent_drop_by_drop_is_408_and_the_connection_closed(
    pieces: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RouterHttpProtocol, "arrival_s", 0.2)
    async with serving() as server:
        status, body = await asyncio.wait_for(exchange(server, *pieces), 5)
        assert status == 408 and body["error"]["code"] == "request_timeout"


async def test_connection_that_never_asks_is_closed_and_one_that_did_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouterHttpProtocol, "arrival_s", 0.2)
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            await asyncio.sleep(0.5)
        assert not reader.at_eof()
        writer.close()


async def test_empty_lines_after_a_request_do_not_keep_a_connection_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouterHttpProtocol, "arrival_s", 0.2)
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\r\n")
        await asyncio.wait_for(reader.read(), 5)
        writer.close()


@pytest.mark.parametrize("wish", [b"h2c", b"websocket"])
async def test_wish_for_another_protocol_is_passed_over(wish: bytes) -> None:
    body = json.dumps({"model": MODEL, "prompt": "red", "max_tokens": 2}).encode()
    start = b" HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEA\r\nUpgrade: " + wish
    post = b"POST /v1/completions" + start + b"\r\nContent-Type: application/json\r\n"
    sized = post + b"Content-Length: %d\r\n\r\n" % len(body)
    chunked = post + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    asked = b"GET /v1/models" + start + b"\r\n\r\n"
    async with serving() as server:
        for pieces in ([sized + body], [sized, body[:9], body[9:]], [chunked], [post, chunked[len(post) :]]):
            status, answer = await exchange(server, *pieces)
            assert (status, answer["object"]) == (200, "text_completion")
        # One after the other, on the same connection.
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(asked + sized + body + asked + chunked)
        for kind in (b'"object":"list"', b'"object":"text_completion"') * 2:
            assert kind in await asyncio.wait_for(_answer(reader), 5)
        writer.close()


async def test_connect_with_a_wish_is_answered_and_the_server_goes_on() -> None:
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"CONNECT / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 4")
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200")
    return await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
