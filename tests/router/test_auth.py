"""Who may call what: every path but two needs a key, however it is spelled."""

from __future__ import annotations

import pytest

from router.app import build_app
from router.auth import OPEN_PATHS, ApiKeys
from tests.router.api_harness import MODEL, serving

KEYS = ("first-key", "second-key")
BODY = {"model": MODEL, "prompt": "red"}


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer wrong",
        "Bearer  first-key",
        "bearer first-key",
        "BEARER first-key",
        "Basic first-key",
        "first-key",
        "Bearer first-keysecond-key",
        "Bearer \xe9",
    ],
)
async def test_anything_but_a_key_is_401(authorization: str | None) -> None:
    async with serving(keys=KEYS) as server:
        del server.client.headers["Authorization"]
        headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
        response = await server.client.post("/v1/completions?api_key=first-key", json=BODY, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert "first-key" not in response.text
        assert server.cluster.generations == []


@pytest.mark.parametrize("key", KEYS)
async def test_each_key_is_accepted(key: str) -> None:
    async with serving(keys=KEYS) as server:
        response = await server.client.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200


async def test_no_route_but_the_open_ones_answers_without_a_key() -> None:
    async with serving(keys=KEYS) as server:
        del server.client.headers["Authorization"]
        paths = {getattr(route, "path", "") for route in build_app(server.api).routes}
        assert {"/v1/completions", "/metrics", "/debug/cluster", *OPEN_PATHS} <= paths
        odd = ["//v1/chat/completions", "/v1/../v1/completions", "/V1/completions", "/docs", "/redoc", "/openapi.json"]
        odd += [
            "/admin/x",
            "/invocations",
            "/health/",
            "/health/../v1/models",
            "//health",
            "/HEALTH",
            "/health%2f..",
            "/",
        ]
        for path in [*paths, *odd]:
            for method in ("GET", "POST", "OPTIONS", "DELETE"):
                response = await server.client.request(method, path)
                expected = {200, 503, 405} if path in OPEN_PATHS else {401, 404}
                assert response.status_code in expected, (method, path, response.status_code)


async def test_open_paths_need_no_key() -> None:
    async with serving(keys=KEYS) as server:
        del server.client.headers["Authorization"]
        assert (await server.client.get("/health")).status_code == 200
        assert (await server.client.get("/ready")).json() == {"status": "ready"}


async def test_documentation_pages_do_not_exist_even_with_a_key() -> None:
    async with serving(keys=KEYS) as server:
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert (await server.client.get(path)).status_code == 404


async def test_keys_never_reach_a_log_or_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with serving(keys=KEYS) as server:
        await server.complete()
        await server.complete(temperature=-1)
        answers = [(await server.client.get(path)).text for path in ("/metrics", "/debug/cluster", "/v1/models")]
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith("http")]
    assert "first-key" not in " ".join([*answers, *ours]) and "first-key" not in repr(server.api.config)


async def test_tenants_get_salts_of_their_own_that_no_cache_salt_bridges() -> None:
    async with serving(keys=KEYS) as server:
        seen = {}
        for name, key, cache_salt in (
            ("A", KEYS[0], None),
            ("B", KEYS[1], None),
            ("B as A", KEYS[1], KEYS[0]),
            ("A divided", KEYS[0], KEYS[0]),
            ("A again", KEYS[0], None),
        ):
            body = BODY if cache_salt is None else {**BODY, "cache_salt": cache_salt}
            await server.client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
            seen[name] = server.last.request.tenant_salt
    assert seen["A"] == seen.pop("A again")
    assert len(set(seen.values())) == len(seen) and all(len(salt) == 16 for salt in seen.values())


async def test_without_keys_there_is_no_salt_unless_asked_for() -> None:
    async with serving() as server:
        await server.complete()
        assert server.last.request.tenant_salt == b""
        await server.complete(cache_salt="mine")
        assert len(server.last.request.tenant_salt) == 16


def test_key_is_found_whatever_its_place() -> None:
    keys = ApiKeys(KEYS)
    assert keys.are_asked_for and not ApiKeys(()).are_asked_for
    assert keys.find("Bearer second-key") == "second-key"
    assert keys.find("Bearer third-key") is None and ApiKeys(()).find("Bearer x") is None
