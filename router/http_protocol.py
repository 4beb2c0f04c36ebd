"""How bytes of a connection become requests: uvicorn's protocol with limits on headers, time and discards."""

from __future__ import annotations

import asyncio
import socket

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.generation_response import ABORT_CONNECTION
from router.http_errors import ErrorAnswer

MAX_HEADER_BYTES = 64 * 1024
MAX_DISCARDED_BYTES = 64 * 1024 * 1024
LINGER_S = 1.0
"""Seconds for which a refused connection is still read, since closing it at once can destroy the answer on its way."""

ARRIVAL_S = 60.0
"""Seconds in which a request has to arrive whole, and in which a new connection has to begin one."""

_STATUS_TEXT = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class _HeadersTooLarge(Exception):
    pass


class RouterHttpProtocol(HttpToolsProtocol):
    """One connection.

    The parser itself puts no bound on headers, so they are counted twice: bytes of a head that is still incomplete (or
    of what follows a body's last chunk), and what a complete one held. A body that nobody wants, after an early answer,
    is read on for a while so that the client gets to see the answer. A client that sends its request drop by drop does
    not hold the connection for ever. One that would like another protocol (as Java's would HTTP/2) is served in this
    one: its request is parsed again without that wish, since the parser takes what follows for the other protocol.
    """

    arrival_s = ARRIVAL_S
    """Shorter in tests."""

    _is_in_head = False
    _is_in_body = False
    _has_moved = False
    _head_bytes = 0
    _discarded_bytes = 0
    _are_headers_too_large = False
    _is_refused = False
    _arrival: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        raw_socket = transport.get_extra_info("socket")
        if raw_socket is not None and raw_socket.family in (socket.AF_INET, socket.AF_INET6):
            raw_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_arrival()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._discard(len(data))
            return
        self._has_moved = False
        self._parse(data)
        # Where a body, or a message, ended in these bytes, most of them need not belong to what follows.
        if self._has_moved or self._is_refused:
            return
        if self._is_in_head or self._is_in_body:
            self._head_bytes += len(data)
            if self._head_bytes <= MAX_HEADER_BYTES:
                return
            if self._is_in_body and self.cycle.response_started:
                self.transport.abort()
                return
            self._are_headers_too_large = True
            self.send_400_response("")
        elif self._arrival is None:
            # Empty lines between requests: they have ended the wait for the next one.
            self._expect_request()

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while len(rest):
                try:
                    self.parser.feed_data(rest)
                    return
                except HttpParserUpgrade as upgrade:
                    if not self._asks_for_upgrade():
                        return  # CONNECT, which is refused.
                    rest = rest[upgrade.args[0] :]
                    head = self._head_without_upgrade()
                    self.parser = HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # As uvicorn's.
                    self.parser.feed_data(head)
        except HttpParserError:
            self.send_400_response("")

    def _asks_for_upgrade(self) -> bool:
        is_wish = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        return is_wish and any(name == b"upgrade" for name, _ in self.headers)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_request()
        self._is_in_head = True
        self._head_bytes = 0
        self._discarded_bytes = 0
        self.scope["state"][ABORT_CONNECTION] = self.transport.abort

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            self._are_headers_too_large = True
            raise _HeadersTooLarge
        if self._asks_for_upgrade():
            return
        self._is_in_head, self._is_in_body, self._has_moved = False, True, True
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._asks_for_upgrade():
            return
        super().on_message_complete()
        self._end_arrival()
        self._is_in_body = False
        self._has_moved = True

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        self._head_bytes = 0
        if self.cycle.response_complete:
            self._discard(len(body))
        super().on_body(body)

    def _expect_request(self) -> None:
        self._end_arrival()
        self._arrival = self.loop.call_later(self.arrival_s, self._arrival_failed)

    def _end_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _arrival_failed(self) -> None:
        earlier = None if self._is_in_body else self.cycle
        if self.pipeline or (earlier is not None and not earlier.response_complete):
            # The client sent this one while an earlier one is being answered: that comes first.
            self._expect_request()
            return
        self._arrival = None
        is_answered = not self._is_in_head and (self.cycle is None or self.cycle.response_started)
        if self._is_refused or is_answered:
            self.transport.close()
            return
        self._refuse(
            ErrorAnswer(
                408,
                f"The request did not arrive within {self.arrival_s:g} seconds.",
                "timeout_error",
                code="request_timeout",
            )
        )

    def _discard(self, num_bytes: int) -> None:
        self._discarded_bytes += num_bytes
        if self._discarded_bytes > MAX_DISCARDED_BYTES:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        answer = ErrorAnswer(400, "This is not a valid HTTP request.", "invalid_request_error", code="bad_http")
        if self._are_headers_too_large:
            answer = ErrorAnswer(
                431,
                f"The request's headers may have at most {MAX_HEADER_BYTES} bytes.",
                "invalid_request_error",
                code="headers_too_large",
            )
        self._refuse(answer)

    def _refuse(self, answer: ErrorAnswer) -> None:
        body = answer.body()
        head = (
            f"HTTP/1.1 {answer.status} {_STATUS_TEXT[answer.status]}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._is_refused = True
        self.transport.write(head.encode() + body)
        self.loop.call_later(LINGER_S, self.transport.close)
