"""The proxy that joins vLLM's prefill and decode servers, against scripted ones."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from bench.vllm_pd import Proxy
from tests.bench.fake_server import DONE, event, serving

HELD = {"remote_engine_id": "e", "remote_block_ids": [3, 4]}


async def prefill_server(seen: list[dict[str, Any]], status: int = 200) -> TestServer:
    async def complete(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({"kv_transfer_params": HELD, "error": "full"}, status=status)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": []})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/v1/models", models)
    server = TestServer(app)
    await server.start_server()
    return server


async def ask(proxy: Proxy) -> tuple[int, bytes]:
    body = {"prompt": [1, 2], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    async with TestClient(TestServer(proxy.app())) as client:
        reply = await client.post("/v1/completions", json=body)
        return reply.status, await reply.read()


async def test_prefill_holds_its_kv_and_decode_gets_to_know_where() -> None:
    async def decode(body: dict[str, Any], reply: web.StreamResponse) -> None:
        await reply.write(event() + DONE)

    seen: list[dict[str, Any]] = []
    prefill = await prefill_server(seen)
    async with serving(decode) as server:
        proxy = Proxy(str(prefill.make_url("")).rstrip("/"), server.url.removesuffix("/v1/completions"))
        assert await ask(proxy) == (200, event() + DONE)
    await prefill.close()
    [first], [second] = seen, server.bodies
    assert (first["max_tokens"], first["stream"], "stream_options" in first) == (1, False, False)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert (second["max_tokens"], second["stream"], second["kv_transfer_params"]) == (9, True, HELD)


async def test_a_refusal_of_prefill_reaches_the_client() -> None:
    prefill = await prefill_server([], status=503)
    status, content = await ask(Proxy(str(prefill.make_url("")).rstrip("/"), "http://127.0.0.1:1"))
    await prefill.close()
    assert status == 503
    assert b"full" in content


async def test_no_model_is_named_before_both_servers_answer() -> None:
    prefill = await prefill_server([])
    proxy = Proxy(str(prefill.make_url("")).rstrip("/"), "http://127.0.0.1:1")
    async with TestClient(TestServer(proxy.app())) as client:
        assert (await client.get("/v1/models")).status == 503
        proxy.decode_url = proxy.prefill_url
        assert await (await client.get("/v1/models")).json() == {"data": []}
    await prefill.close()
