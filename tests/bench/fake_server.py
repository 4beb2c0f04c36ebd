"""A server in the test's own process that speaks just enough of OpenAI's protocol, and misbehaves as told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Script = Callable[[dict[str, Any], web.StreamResponse], Awaitable[None]]


def event(tokens: int = 1, *, text: str = "x", finish: str | None = None, ids: bool = False) -> bytes:
    """A completion event with `tokens` tokens."""
    choice: dict[str, Any] = {"index": 0, "text": text * tokens, "finish_reason": finish}
    if ids:
        choice["token_ids"] = list(range(tokens))
    return data({"choices": [choice]})


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> bytes:
    """The event that counts."""
    counts: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return data({"choices": [], "usage": counts | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}})


def data(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class FakeServer:
    """Runs `script` for every request, after `refusals` of them were answered with 503.

    Remembers bodies, and the most requests that were under way together.
    """

    def __init__(self, script: Script) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.running = 0
        self.most_running = 0
        self.url = ""
        self.refusals = 0
        self._script = script

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.refusals:
            self.refusals -= 1
            return web.json_response({"error": {"message": "no node"}}, status=503)
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await reply.prepare(request)
            await self._script(self.bodies[-1], reply)
            return reply
        finally:
            self.running -= 1


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[FakeServer]:
    """A server for as long as the context lasts."""
    fake = FakeServer(script)
    app = web.Application()
    app.router.add_post("/v1/completions", fake.answer)
    app.router.add_post("/v1/chat/completions", fake.answer)
    server = TestServer(app)
    await server.start_server()
    fake.url = str(server.make_url("/v1/completions"))
    try:
        yield fake
    finally:
        await server.close()


async def whole_answer(body: dict[str, Any], reply: web.StreamResponse) -> None:
    """As many tokens as asked for, and their usage."""
    for _ in range(body["max_tokens"]):
        await asyncio.sleep(0)
        await reply.write(event())
    prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    await reply.write(usage(len(prompt), body["max_tokens"]) + DONE)
