"""Runs one job for one HTTP request: an answer in one piece or a stream of events, ended at once when the client goes.

A stream's status line waits for the first token, so that whatever fails before has a status of its own. After that an
error is an event, and the stream ends without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http_errors import answer_for
from router.openai_job import CollectedChoice, Json, OpenAiJob, phase_milliseconds, timings_json
from router.running_request import RunningRequest

logger = logging.getLogger(__name__)

ABORT_CONNECTION = "abort_connection"
_JSON_HEADERS = {"content-type": "application/json"}
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_DONE = b"data: [DONE]\n\n"


class SlowClient(Exception):
    """The client left what was sent to it unread for too long."""


class GenerationResponse(Response):
    """What an endpoint that generates returns. `job` was checked already, but nothing was tokenised yet."""

    def __init__(self, job: OpenAiJob) -> None:
        super().__init__()
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream if self._job.body.stream else self._answer
        try:
            await _until_disconnect(work(send), receive)
        except SlowClient:
            logger.warning("slow_client_cut response_id=%s", self._job.response_id)
            abort: Callable[[], None] | None = scope.get("state", {}).get(ABORT_CONNECTION)
            if abort is not None:
                abort()
                await asyncio.sleep(0.01)  # Lets the server notice before it looks for a complete response.

    async def _submit(self) -> RunningRequest:
        try:
            return await self._job.submit()
        except asyncio.CancelledError:
            # What never ran has no books whose closing would be logged.
            logger.info("client_left request_id=%s response_id=%s", self._job.caller.request_id, self._job.response_id)
            raise

    async def _answer(self, send: Send) -> None:
        job = self._job
        running = await self._submit()
        try:
            collected = [CollectedChoice() for _ in range(running.num_choices)]
            async for batch in running.batches():
                for index, delta in batch:
                    collected[index].add(delta)
            body = job.whole(running, collected)
            if job.body.include_timings:
                body["timings"] = timings_json(running.times())
            headers = {**_JSON_HEADERS, **_timing_headers(running)}
        finally:
            await running.aclose()
        await self._send_in_time(_send_whole(send, 200, headers, orjson.dumps(body)))

    async def _stream(self, send: Send) -> None:
        job = self._job
        running = await self._submit()
        has_begun = False
        try:
            opened: set[int] = set()
            opening: dict[int, Json] | None = None
            async for batch in running.batches():
                events = []
                if opening is None:
                    opening = {choice["index"]: choice for choice in job.opening(running)}
                for index, delta in batch:
                    if index not in opened:
                        opened.add(index)
                        if index in opening:
                            events.append(_event(job.chunk(running, [opening[index]])))
                    choice = job.delta(running, index, delta)
                    if choice is not None:
                        events.append(_event(job.chunk(running, [choice])))
                if not events:
                    continue
                if not has_begun:
                    has_begun = True
                    await self._send_in_time(_send_start(send, 200, _STREAM_HEADERS))
                await self._send_in_time(_send_body(send, b"".join(events), more=True))
            end = _event(self._last_chunk(running)) if self._has_last_chunk else b""
            await self._send_in_time(_send_body(send, end + _DONE, more=False))
        except Exception as error:
            if not has_begun or isinstance(error, SlowClient):
                raise
            answer = answer_for(error)
            if answer.status == 500:
                logger.error("stream_failed response_id=%s", job.response_id, exc_info=error)
            await self._send_in_time(_send_body(send, answer.frame(), more=False))
        finally:
            await running.aclose()

    @property
    def _has_last_chunk(self) -> bool:
        return self._job.body.include_usage or self._job.body.include_timings

    def _last_chunk(self, running: RunningRequest) -> Json:
        job = self._job
        chunk = job.chunk(running, [])
        if job.body.include_usage:
            chunk["usage"] = job.usage(running)
        if job.body.include_timings:
            chunk["timings"] = timings_json(running.times())
        return chunk

    async def _send_in_time(self, sending: Awaitable[None]) -> None:
        """Wait for the client to make room in its connection, but not for ever."""
        timeout_s = self._job.api.config.slow_client_s
        try:
            async with asyncio.timeout(timeout_s):
                await sending
        except TimeoutError:
            raise SlowClient from None


async def _until_disconnect(work: Awaitable[None], receive: Receive) -> None:
    """Do `work`, but cancel it when the client goes away; it is over when this returns."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        left_early = not worker.done()
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)
    if left_early:
        # Nobody reads an error any more, so a failure while tidying up is only worth a line.
        error = None if worker.cancelled() else worker.exception()
        if error is not None:
            logger.warning("cancel_failed", exc_info=error)
        return
    worker.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(chunk: Json) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _timing_headers(running: RunningRequest) -> dict[str, str]:
    known = phase_milliseconds(running.times())
    headers = {f"x-pdserve-{name.replace('_', '-')}-ms": f"{value:.3f}" for name, value in known.items()}
    if known:
        headers["server-timing"] = ", ".join(f"{name};dur={value:.3f}" for name, value in known.items())
    return headers


async def _send_start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
        }
    )


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _send_whole(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    await _send_start(send, status, {**headers, "content-length": str(len(body))})
    await _send_body(send, body, more=False)
