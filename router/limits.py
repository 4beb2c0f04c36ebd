"""How large a request may be: its body counted while it arrives, its JSON checked before anything walks it."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import InvalidRequest
from router.http_errors import HttpError

MAX_JSON_DEPTH = 100
MAX_JSON_BRACKETS = 250_000
"""Opening brackets in a body, inside strings or not: what bounds the time that parsing holds up everything else."""


class BodyLimitMiddleware:
    """Refuses a body that says it is too large before reading it, and stops reading one that turns out to be."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > self._max_body_bytes:
            raise self._too_large()
        received = 0

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_body_bytes:
                    raise self._too_large()
            return message

        await self._app(scope, counted_receive, send)

    def _too_large(self) -> HttpError:
        return HttpError(
            413, f"The request body may have at most {self._max_body_bytes} bytes.", code="request_too_large"
        )


async def read_body(receive: Receive) -> bytes:
    """The whole body; BodyLimitMiddleware bounds it."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def check_content_type(content_type: str | None) -> None:
    """Raise HttpError unless the body calls itself JSON, or nothing at all."""
    if content_type is None:
        return
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise HttpError(415, "The Content-Type must be application/json.", code="unsupported_media_type")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises InvalidRequest for anything else: NaN, lone surrogates, nesting that the
    parser refuses (more than 1024 deep)."""
    if not body:
        raise InvalidRequest("The request body is empty; it must be a JSON object.")
    if body.count(b"[") + body.count(b"{") > MAX_JSON_BRACKETS:
        raise InvalidRequest(f"The request body has more than {MAX_JSON_BRACKETS} opening brackets.")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # Only what and where: the error object also holds the whole document.
        raise InvalidRequest(
            f"The request body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return value


def check_depth(value: object, *, param: str) -> None:
    """Raise InvalidRequest when lists and objects are nested more than MAX_JSON_DEPTH deep. Does not recurse."""
    pending = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        nested = [(child, depth + 1) for child in children if isinstance(child, (dict, list))]
        if nested and depth >= MAX_JSON_DEPTH:
            raise InvalidRequest(f"{param} is nested more than {MAX_JSON_DEPTH} deep", param=param)
        pending += nested
