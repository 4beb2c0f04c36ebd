"""Errors look the same wherever they come from, and bodies that are no JSON object are the caller's fault."""

from __future__ import annotations

import json

import pytest

from router.http_edge import safe_request_id
from tests.router.api_harness import serving

JSON = {"Content-Type": "application/json"}
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/nope", 404),
        ("GET", "/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/health", 405),
        ("GET", "/v1/models/none", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/debug/route/none", 404),
    ],
)
async def test_wrong_paths_and_methods_get_the_envelope(method: str, path: str, status: int) -> None:
    async with serving() as server:
        response = await server.client.request(method, path)
        assert response.status_code == status
        if status >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert response.headers["content-type"] == "application/json"
        if status == 405:
            assert response.headers["allow"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"true",
        b"null",
        b"123",
        b'"str"',
        b"{",
        b'{"model":"tiny","messages":[{"role":"user","content":"Hi"}',
        b'{"model":"tiny","prompt":"\xff\xfe"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"hi","temperature":NaN}',
        b'{"prompt":"hi","temperature":Infinity}',
        b'{"prompt":"hi","temperature":-Infinity}',
        b'{"prompt":"hi","temperature":1e400}',
        b'{"messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"prompt":' + b"[[]," * 300_000 + b"1]}",
        b"\x00",
        b"a=b&c=d",
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda body: repr(body[:40]),
)
async def test_body_that_is_no_object_is_400_everywhere(body: bytes) -> None:
    async with serving() as server:
        for path in PATHS:
            response = await server.client.post(path, content=body, headers=JSON)
            assert response.status_code == 400
            error = json.loads(response.content)["error"]
            assert error["message"] and error["type"] and len(response.content) < 8192


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "nonsense", "application/xml"]
)
async def test_other_content_types_are_refused(content_type: str) -> None:
    async with serving() as server:
        for path in PATHS:
            response = await server.client.post(path, content=b'{"prompt":"x"}', headers={"Content-Type": content_type})
            assert response.status_code == 415 and response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8", "application/x+json"])
async def test_json_by_any_name_is_accepted(content_type: str) -> None:
    async with serving() as server:
        response = await server.client.post(
            "/v1/completions", content=b'{"prompt":"red"}', headers={"Content-Type": content_type}
        )
        assert response.status_code == 200


async def test_ready_follows_the_cluster() -> None:
    async with serving() as server:
        assert (await server.client.get("/ready")).status_code == 200
        server.cluster.ready = False
        response = await server.client.get("/ready")
        assert response.status_code == 503 and response.json() == {"status": "starting"}
        assert (await server.client.get("/health")).status_code == 200


async def test_head_has_no_body() -> None:
    async with serving() as server:
        assert (await server.client.head("/health")).status_code == 200
        response = await server.client.head("/nope")
        assert response.status_code == 404 and response.content == b""


def test_request_ids_lose_what_could_forge_a_log_line() -> None:
    assert safe_request_id("abc\r\nevil=1") == "abc__evil=1"
    assert safe_request_id(" ") and safe_request_id(None) != safe_request_id(None)
