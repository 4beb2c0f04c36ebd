"""Who may see what: keys on every path, tenants that share no cache, and links that are never followed."""

from __future__ import annotations

import http.client
import socket
from types import SimpleNamespace
from typing import cast
from uuid import uuid4

import httpx
import pytest
from prometheus_client import CollectorRegistry

from router.app import build_app
from router.auth import OPEN_PATHS
from router.config import RouterConfig
from router.inference_api import InferenceApi
from router.metrics import RouterMetrics
from tests.api.client import CHAT, COMPLETIONS, Api, Json, check_error
from tests.api.conftest import KEY, OTHER_KEY
from tests.e2e.cluster_processes import MODEL_NAME, ClusterProcesses

pytestmark = pytest.mark.e2e

HI: Json = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 2}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": ""},
        {"Authorization": f"bearer {KEY}"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": KEY},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"X-Api-Key": KEY},
        {"Cookie": f"Authorization=Bearer {KEY}"},
    ],
    ids=str,
)
def test_anything_but_a_key_is_401(api: Api, headers: dict[str, str]) -> None:
    query = f"api_key={KEY}&key={KEY}&Authorization=Bearer%20{KEY}"
    reply = httpx.post(f"{api.url}{CHAT}?{query}", json=HI, headers=headers)
    check_error(reply, 401)
    assert reply.headers["www-authenticate"] == "Bearer"
    assert KEY not in reply.text


def test_each_key_is_accepted_and_health_needs_none(api: Api) -> None:
    for key in (KEY, OTHER_KEY):
        reply = httpx.post(api.url + CHAT, json=HI, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == 200
    assert httpx.get(f"{api.url}/health").status_code == 200


def served_paths() -> set[str]:
    """Every path that the application has a route for, as the router builds it."""
    parts = SimpleNamespace(config=RouterConfig("m"), metrics=RouterMetrics(CollectorRegistry(), model_name="m"))
    return {route.path for route in build_app(cast(InferenceApi, parts)).routes}  # type: ignore[attr-defined]


def test_no_route_but_the_open_ones_answers_without_a_key(api: Api) -> None:
    """Paths are sent as they are written here, which most clients would not do."""
    paths = served_paths()
    assert {CHAT, COMPLETIONS, "/metrics", "/debug/cluster", "/v1/models", *OPEN_PATHS} <= paths
    odd = [
        "//v1/chat/completions",
        "/v1//chat/completions",
        "/v1/../v1/completions",
        "/V1/completions",
        "/v1/completions/",
        "/v1/completions?",
        "/v1/completions;x",
        "/v1/completions%2f",
        "/%76%31/completions",
        "/./v1/completions",
        "/docs",
        "/redoc",
        "/openapi.json",
        "/admin",
        "/admin/x",
        "/admin/../v1/models",
        "/invocations",
        "/ping",
        "/generate",
        "/health/",
        "/health/../v1/models",
        "/health/..%2fv1/models",
        "//health",
        "/HEALTH",
        "/health%2f..%2fv1%2fmodels",
        "/ready/../metrics",
        "/health;/../v1/models",
        "/metrics/",
        "/",
        "*",
    ]
    url = httpx.URL(api.url)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=10.0)
    for path in sorted(paths) + odd:
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
            connection.request(method, path, body=b"{}" if method == "POST" else None)
            reply = connection.getresponse()
            reply.read()
            if path in OPEN_PATHS:
                assert reply.status == (200 if method in ("GET", "HEAD") else 405), (method, path)
            else:
                assert reply.status in (401, 404), (method, path, reply.status)
    connection.request("GET", f"http://{url.host}:{url.port}/v1/models")
    assert connection.getresponse().status in (400, 401, 404)
    connection.close()


def test_tenants_never_share_a_cache(api: Api, other_tenant: Api) -> None:
    """Not even one that guesses the other's salt; the same tenant does find its own prompt."""

    prompt = f"secret plan of {uuid4().hex}: " + "to go on " * 6

    def cached_tokens(caller: Api, **fields: str) -> int:
        usage = caller.complete(prompt, max_tokens=2, **fields)["usage"]
        tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert cached_tokens(api) == 0
    assert cached_tokens(other_tenant) == 0
    assert cached_tokens(other_tenant, cache_salt=KEY) == 0
    assert cached_tokens(api, cache_salt="divided") == 0
    assert cached_tokens(other_tenant, cache_salt="divided") == 0
    assert cached_tokens(api) > 0
    assert cached_tokens(other_tenant) > 0
    assert cached_tokens(api, cache_salt="divided") > 0


def test_images_are_refused_and_never_fetched(api: Api) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        parts: list[Json] = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image_url", "image_url": url},
            {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
            {"type": "input_image", "image_url": url},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "audio_url", "audio_url": {"url": url}},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            {"type": "file", "file": {"file_id": url}},
        ]
        for part in parts:
            content = [{"type": "text", "text": "What is this?"}, part]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
            check_error(api.post(CHAT, body), 400, param="messages")
        listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_keys_and_prompts_reach_no_log(api: Api, cluster: ClusterProcesses) -> None:
    canary = "canary-of-a-prompt"
    api.complete(canary, max_tokens=2)
    check_error(api.post(COMPLETIONS, {"prompt": canary, "temperature": canary}), 400)
    for member in cluster.members.values():
        log = "".join(member.log)
        assert canary not in log and KEY not in log and OTHER_KEY not in log
