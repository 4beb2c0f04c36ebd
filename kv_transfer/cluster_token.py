"""The secret that processes of one cluster show each other on their internal ports. Knows no protocol of its own.

A node that listens beyond loopback must have one, so that nobody else can feed it prompts or read KV. It travels as
metadata of every call and is compared in constant time; where the network itself is not trusted, TLS belongs around it.
"""

from __future__ import annotations

import functools
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

_KEY = "authorization"
_OPEN_SERVICES = ("/grpc.health.v1.Health/",)


class TokenChannel:
    """A channel whose calls all carry the token. What generated stubs need of a channel, and `close`."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = ((_KEY, f"Bearer {token}"),)

    def unary_unary(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """See grpc.aio.Channel."""
        return functools.partial(self._channel.unary_unary(*arguments, **options), metadata=self._metadata)

    def unary_stream(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """See grpc.aio.Channel."""
        return functools.partial(self._channel.unary_stream(*arguments, **options), metadata=self._metadata)

    def stream_unary(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """See grpc.aio.Channel."""
        return functools.partial(self._channel.stream_unary(*arguments, **options), metadata=self._metadata)

    def stream_stream(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """See grpc.aio.Channel."""
        return functools.partial(self._channel.stream_stream(*arguments, **options), metadata=self._metadata)

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel."""
        await self._channel.close(grace)


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses every call without the token with UNAUTHENTICATED, except health checks."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """See grpc.aio.ServerInterceptor."""
        if handler_call_details.method.startswith(_OPEN_SERVICES) or self._is_shown(handler_call_details):
            return await continuation(handler_call_details)
        return self._refusal

    def _is_shown(self, details: grpc.HandlerCallDetails) -> bool:
        shown = [value for key, value in details.invocation_metadata if key == _KEY]
        given = shown[0] if len(shown) == 1 else ""
        return hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._expected)


async def _refuse(request_iterator: object, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster token is missing or wrong")
