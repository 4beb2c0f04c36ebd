"""Who may call: API keys, compared in constant time, asked for everywhere except on an explicit list of paths."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from router.http_errors import HttpError

OPEN_PATHS = frozenset({"/health", "/ready"})
API_KEY_SCOPE = "pdserve.api_key"


class ApiKeys:
    """The accepted keys; with none of them, everybody may call."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [(hashlib.sha256(key.encode()).digest(), key) for key in keys]

    @property
    def are_asked_for(self) -> bool:
        """Whether calls need a key."""
        return bool(self._digests)

    def find(self, authorization: str | None) -> str | None:
        """The key in an `Authorization` value of the form `Bearer KEY`, or None. Takes as long for any wrong key."""
        scheme, _, presented = (authorization or "").partition(" ")
        if scheme != "Bearer" or not presented:
            return None
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, key in self._digests:
            if hmac.compare_digest(digest, known):
                found = key
        return found


class AuthMiddleware:
    """Lets a request pass that brings a key, or asks for an open path by its exact name; refuses all others.

    Deny by default: a path that no route knows, or that reaches a route in some unusual spelling, needs a key like any
    other. The key is left in the scope for the tenant salt.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys.are_asked_for and scope["path"] not in OPEN_PATHS:
            key = self._keys.find(Headers(scope=scope).get("authorization"))
            if key is None:
                raise HttpError(
                    401,
                    "A valid API key is needed: send the header `Authorization: Bearer KEY`.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            scope[API_KEY_SCOPE] = key
        await self._app(scope, receive, send)
