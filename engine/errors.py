"""Every error that crosses a boundary, by who can act on it.

PdserveError
├── InvalidRequest    the caller's fault; names the field; trying elsewhere is of no use
├── ModelNotFound     the caller asked for a model that is not served
├── Overloaded        full; try elsewhere, or later
├── Unavailable       no node is ready, or this one drains
├── AttemptFailed     this try failed; another node may do it
│   └── DeadlinePassed
└── ConfigError       the operator's fault; ends a start with one sentence

Mapped to HTTP once (router/http_errors.py), to gRPC once (router/grpc_server.py) and to the wire once
(kv_transfer/wire.py).
"""

from __future__ import annotations


class PdserveError(Exception):
    """Base of all errors that pdserve raises on purpose."""

    reason: str = "internal"
    """Short and stable, for counters."""

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class InvalidRequest(PdserveError):
    """The request is wrong. `param` names the field as the caller spelled it."""

    reason = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.param = param


class ModelNotFound(PdserveError):
    """The named model is not served here."""

    reason = "model_not_found"


class Overloaded(PdserveError):
    """No room now. `retry_after_s` is an honest estimate of when there will be."""

    reason = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class Unavailable(PdserveError):
    """No node can serve this now: none is ready, or the router drains."""

    reason = "unavailable"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class AttemptFailed(PdserveError):
    """This try failed for a reason that another node need not share."""

    reason = "attempt_failed"


class DeadlinePassed(AttemptFailed):
    """A state outlived its deadline."""

    reason = "deadline"


class ConfigError(PdserveError):
    """A setting, a model or a machine that cannot work; said in one sentence at start."""

    reason = "config"
