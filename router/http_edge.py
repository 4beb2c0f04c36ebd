"""The outermost layer of the HTTP server: request ids, and an envelope for every error that nobody else answered."""

from __future__ import annotations

import logging
import re
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http_errors import answer_for
from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

REQUEST_ID_SCOPE = "pdserve.request_id"
_MAX_REQUEST_ID = 128
_UNSAFE = re.compile(r"[^A-Za-z0-9._:/+=@-]")


def safe_request_id(chosen: str | None) -> str:
    """The client's own id, cut short and freed of what has no place in a log or header; one of ours without it."""
    shown = _UNSAFE.sub("_", chosen.strip()[:_MAX_REQUEST_ID]) if chosen else ""
    return shown or uuid4().hex


class EdgeMiddleware:
    """Gives every request its label, echoes it as `X-Request-Id`, and turns what is raised below into an answer."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = safe_request_id(Headers(scope=scope).get("x-request-id"))
        scope[REQUEST_ID_SCOPE] = request_id
        has_begun = False

        async def labelled_send(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, labelled_send)
        except ClientDisconnect:
            logger.info("client_left request_id=%s", request_id)
        except Exception as error:
            if has_begun:
                raise
            await self._answer(error, scope, labelled_send)

    async def _answer(self, error: Exception, scope: Scope, send: Send) -> None:
        answer = answer_for(error)
        reason = answer.code or "invalid_request"
        self._metrics.request_refused(reason)
        log = logger.error if answer.status == 500 else logger.info
        log(
            "request_refused request_id=%s status=%d reason=%s",
            scope[REQUEST_ID_SCOPE],
            answer.status,
            reason,
            exc_info=error if answer.status == 500 else None,
        )
        body = answer.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
