"""The fake server as a process: `python -c "import tests.bench.fake_process" PORT`."""

from __future__ import annotations

import sys

from aiohttp import web

from tests.bench.fake_server import FakeServer, whole_answer


async def complete(request: web.Request) -> web.StreamResponse:
    """Streams when asked; else an answer that is good enough for a first try."""
    if (await request.json()).get("stream"):
        return await FakeServer(whole_answer).answer(request)
    return web.json_response({"choices": [{"text": "x"}]})


async def models(request: web.Request) -> web.StreamResponse:
    """One."""
    return web.json_response({"data": [{"id": "m"}]})


app = web.Application(client_max_size=1 << 26)
app.router.add_post("/v1/completions", complete)
app.router.add_get("/v1/models", models)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, shutdown_timeout=0.1)
