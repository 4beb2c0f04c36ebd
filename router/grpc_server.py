"""The public gRPC server: who may call, health, reflection, and the one place where an error becomes a gRPC status."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine.errors import (
    AttemptFailed,
    ConfigError,
    DeadlinePassed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PdserveError,
    Unavailable,
)
from proto import inference_pb2 as pb
from proto import inference_pb2_grpc as rpc
from router.auth import ApiKeys
from router.config import RouterConfig
from router.grpc_inference import Call, InferenceServicer
from router.inference_api import InferenceApi
from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_OURS = f"/{SERVICE_NAME}/"
_OPEN = "/grpc.health.v1.Health/"
_HEALTH_NAMES = ("", SERVICE_NAME)
_HEALTH_POLL_S = 0.25
_MAX_DETAILS = 1500
_MAX_METADATA_BYTES = 16 * 1024

Metadata = tuple[tuple[str, str], ...]


class GrpcServer:
    """A running server.

    Attributes:
        port: the TCP port it listens on.
    """

    def __init__(self, server: grpc.aio.Server, health: HealthServicer, port: int) -> None:
        self.port = port
        self._server = server
        self._health = health

    async def stop(self, grace_s: float) -> None:
        """Say NOT_SERVING, refuse new calls, let running ones end within `grace_s`, cancel the rest. Idempotent."""
        self._health.stop()
        await self._server.stop(grace_s)


async def start_grpc_server(config: RouterConfig, api: InferenceApi) -> GrpcServer:
    """Listen on the configured host and port (0 takes a free one). Raises ConfigError when that cannot be had."""
    keys = ApiKeys(config.api_keys)
    interceptors: list[Any] = [_Edge(keys, api.metrics)]
    server = grpc.aio.server(
        interceptors=interceptors,
        options=[
            ("grpc.so_reuseport", 0),  # A port that is taken is an error, not half of the calls.
            ("grpc.max_receive_message_length", config.max_body_bytes),
            ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
            # A client may ping to see whether we are there; we ping to see whether it still is.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
        ],
    )
    health = HealthServicer(api)
    rpc.add_InferenceServicer_to_server(InferenceServicer(api, keys), server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        port = server.add_insecure_port(f"{host}:{config.grpc_port or 0}")
    except RuntimeError as error:
        raise ConfigError(
            f"gRPC port {config.grpc_port} on {config.host} cannot be listened on; is it taken?"
        ) from error
    await server.start()
    logger.info("grpc_listening host=%s port=%d", config.host, port)
    return GrpcServer(server, health, port)


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str, Metadata]:
    """Code, message and trailing metadata that tell a client of `error`; the unexpected shows nothing of the inside."""
    code = grpc.StatusCode
    if not isinstance(error, PdserveError):
        return code.INTERNAL, "The server made a mistake; its log says more.", (("pdserve-reason", "internal"),)
    message = str(error)[:_MAX_DETAILS]
    reason: Metadata = (("pdserve-reason", error.reason),)
    match error:
        case InvalidRequest():
            is_named = error.param is None or re.search(rf"\b{re.escape(error.param)}\b", message) is not None
            return code.INVALID_ARGUMENT, message if is_named else f"{error.param}: {message}", reason
        case ModelNotFound():
            return code.NOT_FOUND, message, reason
        case Overloaded():
            return code.RESOURCE_EXHAUSTED, message, (*reason, _retry_after(error.retry_after_s))
        case Unavailable():
            return code.UNAVAILABLE, message, (*reason, _retry_after(error.retry_after_s))
        case DeadlinePassed():
            return code.DEADLINE_EXCEEDED, message, reason
        case AttemptFailed():
            return code.UNAVAILABLE, message, (*reason, _retry_after(1.0))
        case _:
            return code.INTERNAL, "The server made a mistake; its log says more.", reason


def _retry_after(seconds: float) -> tuple[str, str]:
    return "retry-after", str(max(1, math.ceil(seconds)) if math.isfinite(seconds) else 1)


class HealthServicer:
    """Standard health: SERVING when a request would be served now. Asked, not told, so it is never out of date."""

    def __init__(self, api: InferenceApi) -> None:
        self._api = api
        self._is_stopping = False

    def stop(self) -> None:
        """NOT_SERVING from now on; ends every Watch."""
        self._is_stopping = True

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: health_pb2.HealthListRequest, context: Any) -> health_pb2.HealthListResponse:
        answers = {name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in _HEALTH_NAMES}
        return health_pb2.HealthListResponse(statuses=answers)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        told = None
        while True:
            is_last = self._is_stopping
            status = self._status(request.service)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            if is_last:
                return
            await asyncio.sleep(_HEALTH_POLL_S)

    def _status(self, service: str) -> int:
        if service not in _HEALTH_NAMES:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        is_serving = not self._is_stopping and self._api.is_ready()
        response = health_pb2.HealthCheckResponse
        return int(response.SERVING if is_serving else response.NOT_SERVING)


Behaviour = Callable[[Any, Any], Awaitable[Any]]


class _Edge:
    """The outermost layer: asks for a key everywhere but on health, and answers errors that our calls raise.

    A grpc.aio.ServerInterceptor by registration.
    """

    def __init__(self, keys: ApiKeys, metrics: RouterMetrics) -> None:
        self._keys = keys
        self._metrics = metrics

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if self._keys.are_asked_for and not details.method.startswith(_OPEN):
            presented = dict(details.invocation_metadata or ()).get("authorization")
            if self._keys.find(presented if isinstance(presented, str) else None) is None:
                self._metrics.request_refused("invalid_api_key")
                return _unauthenticated(handler)
        if handler is None or not details.method.startswith(_OURS):
            return handler
        if handler.response_streaming:
            return handler._replace(unary_stream=self._answering(details.method, handler.unary_stream))
        return handler._replace(unary_unary=self._answering(details.method, handler.unary_unary))

    def _answering(self, method: str, behaviour: Behaviour) -> Behaviour:
        async def answer(request: Any, context: Any) -> Any:
            call = Call(context)
            try:
                return await behaviour(request, call)
            except Exception as error:
                code, message, metadata = status_of(error)
                is_ours_to_fix = code is grpc.StatusCode.INTERNAL
                reason = dict(metadata)["pdserve-reason"]
                if not call.has_begun:
                    self._metrics.request_refused(reason)
                logger.log(
                    logging.ERROR if is_ours_to_fix else logging.INFO,
                    "grpc_call_failed method=%s status=%s reason=%s",
                    method,
                    code.name,
                    reason,
                    exc_info=error if is_ours_to_fix else None,
                )
                return await context.abort(code, message, metadata)

        return answer


_interceptor: Any = grpc.aio.ServerInterceptor
_interceptor.register(_Edge)


def _unauthenticated(handler: Any) -> Any:
    """A handler of the same shape that refuses, so that a stream's client is told too."""

    async def refuse(request: Any, context: Any) -> None:
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED, "A valid API key is needed: send the metadata `authorization: Bearer KEY`."
        )

    async def refuse_stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await refuse(request, context)
        yield

    if handler is None or not (handler.request_streaming or handler.response_streaming):
        return grpc.unary_unary_rpc_method_handler(refuse)
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.stream_unary_rpc_method_handler(refuse)
