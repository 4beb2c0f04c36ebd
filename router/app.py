"""The routes of the HTTP API. Each parses, asks InferenceApi and answers; what is decided is decided elsewhere."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from router.auth import API_KEY_SCOPE, ApiKeys, AuthMiddleware
from router.chat import ChatJob
from router.completions import CompletionJob
from router.generation_response import GenerationResponse
from router.http_edge import REQUEST_ID_SCOPE, EdgeMiddleware
from router.http_errors import HttpError
from router.inference_api import InferenceApi
from router.limits import BodyLimitMiddleware, check_content_type, parse_object, read_body
from router.metrics import CONTENT_TYPE
from router.openai_job import Caller, JobFactory, Json
from router.tokenize import detokenize, tokenize

_PARSE_ON_THREAD_BYTES = 128 * 1024


def build_app(api: InferenceApi) -> FastAPI:
    """The ASGI application over `api`, without schema and documentation pages."""
    app = FastAPI(
        title="pdserve", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, version=_version()
    )
    # The last one added is the first to see a request.
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=api.config.max_body_bytes)
    app.add_middleware(AuthMiddleware, keys=ApiKeys(api.config.api_keys))
    app.add_middleware(EdgeMiddleware, metrics=api.metrics)
    app.add_exception_handler(HTTPException, _no_route)
    _add_operator_routes(app, api)
    _add_model_routes(app, api)
    app.add_api_route("/v1/completions", _generating(api, CompletionJob), methods=["POST"])
    app.add_api_route("/v1/chat/completions", _generating(api, ChatJob), methods=["POST"])
    app.add_api_route("/tokenize", _converting(api, tokenize), methods=["POST"])
    app.add_api_route("/detokenize", _converting(api, detokenize), methods=["POST"])
    return app


def _add_operator_routes(app: FastAPI, api: InferenceApi) -> None:
    async def health() -> Response:
        return Response(status_code=200)

    async def ready() -> Response:
        if api.is_ready():
            return _json({"status": "ready"})
        status = "draining" if api.is_draining else "starting"
        return _json({"status": status}, status=503, headers={"Retry-After": "1"})

    async def show_version() -> Response:
        return _json({"version": _version()})

    async def metrics() -> Response:
        return Response(await api.in_thread(api.metrics.exposition), headers={"content-type": CONTENT_TYPE})

    async def debug_cluster() -> Response:
        cluster = await api.cluster.describe()
        own = {"open_requests": api.num_running, "is_draining": api.is_draining, "is_ready": api.is_ready()}
        return _json({**cluster, "api": own})

    async def debug_route(request_id: str) -> Response:
        explanation = api.explain_route(request_id)
        if explanation is None:
            raise HttpError(404, "No route is remembered for this request id.", code="not_found")
        return _json(explanation)

    app.add_api_route("/health", health, methods=["GET", "HEAD"])
    app.add_api_route("/ready", ready, methods=["GET", "HEAD"])
    app.add_api_route("/version", show_version, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"])
    app.add_api_route("/debug/cluster", debug_cluster, methods=["GET"])
    app.add_api_route("/debug/route/{request_id:path}", debug_route, methods=["GET"])


def _add_model_routes(app: FastAPI, api: InferenceApi) -> None:
    def card(name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": api.started_at,
            "owned_by": "pdserve",
            "root": api.model_names[0],  # Not where it lies: that is for nobody outside.
            "parent": None,
            "max_model_len": api.max_model_len,
        }

    async def list_models() -> Response:
        return _json({"object": "list", "data": [card(name) for name in api.model_names]})

    async def show_model(model: str) -> Response:
        if not model:
            raise HttpError(404, "There is no such path.", code="not_found")
        return _json(card(api.check_model(model)))

    app.add_api_route("/v1/models", list_models, methods=["GET"])
    # A path, since names of models hold slashes.
    app.add_api_route("/v1/models/{model:path}", show_model, methods=["GET"])


def _generating(api: InferenceApi, make_job: JobFactory) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        started = time.monotonic()
        body = await _read(request)
        caller = Caller(request.scope[REQUEST_ID_SCOPE], request.scope.get(API_KEY_SCOPE), started)

        def parse() -> GenerationResponse:
            return GenerationResponse(make_job(api, parse_object(body), caller))

        # A large body takes a while to check; a usual one less than handing it to a thread.
        return await api.in_thread(parse) if len(body) > _PARSE_ON_THREAD_BYTES else parse()

    return endpoint


def _converting(
    api: InferenceApi, convert: Callable[[InferenceApi, Json], Awaitable[Json]]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        body = await _read(request)
        large = len(body) > _PARSE_ON_THREAD_BYTES
        value = await api.in_thread(lambda: parse_object(body)) if large else parse_object(body)
        return _json(await convert(api, value))

    return endpoint


async def _read(request: Request) -> bytes:
    check_content_type(request.headers.get("content-type"))
    return await read_body(request.receive)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        raise HttpError(404, "There is no such path.", code="not_found")
    if error.status_code == 405:
        raise HttpError(
            405,
            f"The method {request.method[:20]} is not allowed here.",
            code="method_not_allowed",
            headers=error.headers,
        )
    raise HttpError(error.status_code, str(error.detail), headers=error.headers)


def _json(value: Json, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json", headers=headers)


def _version() -> str:
    try:
        return version("pdserve")
    except PackageNotFoundError:
        return "unknown"
