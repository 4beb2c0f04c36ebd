"""Errors as OpenAI's envelope: the one place where an error becomes an HTTP status. Knows no routes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from engine.errors import (
    AttemptFailed,
    DeadlinePassed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PdserveError,
    Unavailable,
)

MAX_MESSAGE_CHARACTERS = 1500


class HttpError(Exception):
    """An error that only HTTP knows: a wrong path, method, key, size or content type."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What a client gets to see of an error."""

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """The envelope as JSON."""
        message = self.message
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = message[:MAX_MESSAGE_CHARACTERS] + "..."
        error = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def frame(self) -> bytes:
        """The envelope as an event of a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"


def answer_for(error: BaseException) -> ErrorAnswer:
    """How `error` is told to the client. Anything unexpected is a 500 that says nothing about the inside."""
    message = str(error)
    match error:
        case HttpError():
            return ErrorAnswer(error.status, message, error.kind, code=error.code, headers=error.headers)
        case InvalidRequest():
            code = None if error.reason == InvalidRequest.reason else error.reason
            return ErrorAnswer(400, message, "invalid_request_error", param=error.param, code=code)
        case ModelNotFound():
            return ErrorAnswer(404, message, "invalid_request_error", param="model", code="model_not_found")
        case Overloaded():
            return ErrorAnswer(
                429, message, "rate_limit_error", code=error.reason, headers=_retry_after(error.retry_after_s)
            )
        case Unavailable():
            return ErrorAnswer(
                503, message, "service_unavailable_error", code=error.reason, headers=_retry_after(error.retry_after_s)
            )
        case DeadlinePassed():
            return ErrorAnswer(504, message, "timeout_error", code=error.reason)
        case AttemptFailed():
            return ErrorAnswer(503, message, "service_unavailable_error", code=error.reason, headers=_retry_after(1.0))
        case PdserveError():
            return ErrorAnswer(500, message, "server_error", code=error.reason)
        case _:
            return ErrorAnswer(500, "The server made a mistake; its log says more.", "server_error", code="internal")


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds) if math.isfinite(seconds) else 1))}
