"""Sends one streamed request to an OpenAI-compatible server and notes in its record when tokens came and what failed.

Cheap on purpose, since it shares the machine with the server: one time stamp for each piece of network data, taken
before anything is parsed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import orjson

from bench.request_record import CountedBy, RequestRecord, Work
from engine.errors import ConfigError

try:
    import aiohttp
except ImportError as missing:
    raise ConfigError("Benchmarks need more packages: pip install 'pdserve[bench]'.") from missing

DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Target:
    """What to ask, and how.

    Attributes:
        url: of the endpoint; one that ends with `chat/completions` gets messages.
        model: as the server calls it.
        body: further fields of every request.
        timeout_s: longest time of one request.
        keep_text: whether records keep the text of answers.
    """

    url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    keep_text: bool = False

    @property
    def is_chat(self) -> bool:
        """Whether the endpoint takes messages."""
        return self.url.rstrip("/").endswith("chat/completions")

    def request_body(self, work: Work) -> dict[str, Any]:
        """JSON of one request. Raises ConfigError for token ids to a chat endpoint."""
        length = {"max_tokens": work.output_tokens}
        prompt: dict[str, Any] = {"prompt": work.prompt}
        if self.is_chat:
            if not isinstance(work.prompt, str):
                raise ConfigError("Chat endpoints take text, not token ids: give --tokenizer and --send-text.")
            prompt = {"messages": [{"role": "user", "content": work.prompt}]}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **prompt, **length, **stream, **self.body}


class EventReader:
    """Cuts a byte stream into the data of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that is now complete; comments have none. Lines may end with LF or CRLF."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class AnswerReader:
    """Notes the events of one answer in its record. Knows no network and no clock.

    As in `vllm bench serve`, every event with a choice counts as tokens, unless the server says that it holds none.
    """

    def __init__(self, record: RequestRecord, *, keep_text: bool = False) -> None:
        self._record = record
        self._keep_text = keep_text
        self._is_closed = False
        self._has_full_length = False

    def take(self, data: bytes, now_s: float) -> None:
        """One event that came at `now_s`."""
        if data == DONE:
            self._is_closed = True
            return
        try:
            event = orjson.loads(data)
            choices, usage, error = event.get("choices"), event.get("usage"), event.get("error")
            if choices:
                self._take_choice(choices[0], now_s)
            if usage:
                self._take_usage(usage)
        except (ValueError, TypeError, AttributeError, LookupError) as problem:
            self._record.fail("bad_event", f"{problem!r} in {data[:200]!r}")
            return
        if error:
            self._record.fail("error_event", str(error))

    def _take_choice(self, choice: dict[str, Any], now_s: float) -> None:
        record = self._record
        if reason := choice.get("finish_reason"):
            self._is_closed, self._has_full_length = True, reason == "length"
        ids = choice.get("token_ids")
        if ids is not None and not ids:
            return
        record.event_times_s.append(now_s)
        if ids:
            record.event_tokens.append(len(ids))
        if self._keep_text:
            text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
            record.text.append(text or "")

    def _take_usage(self, usage: dict[str, Any]) -> None:
        record = self._record
        if usage.get("completion_tokens") is not None:
            record.output_tokens, record.counted_by = int(usage["completion_tokens"]), CountedBy.USAGE
        if usage.get("prompt_tokens") is not None:
            record.prompt_tokens = int(usage["prompt_tokens"])
        record.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def close(self) -> None:
        """The stream has ended: count, and fail what is not whole."""
        record = self._record
        if len(record.event_tokens) != len(record.event_times_s):
            record.event_tokens.clear()  # told for some events only, which tells nothing
        if record.counted_by is not CountedBy.USAGE:
            if record.event_tokens:
                record.output_tokens, record.counted_by = sum(record.event_tokens), CountedBy.TOKEN_IDS
            elif self._has_full_length:
                record.output_tokens, record.counted_by = record.asked_tokens, CountedBy.LENGTH
            else:
                record.output_tokens, record.counted_by = len(record.event_times_s), CountedBy.EVENTS
        if not self._is_closed:
            record.fail("cut", "the stream ended without an end")
        if not record.event_times_s:
            record.fail("no_tokens", "the answer holds no token")


class StreamClient:
    """Sends requests over pooled connections, any number at once. Use as a context; never raises for a failed one."""

    def __init__(self, target: Target, clock: Callable[[], float] = time.perf_counter) -> None:
        self.target = target
        self.clock = clock

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.target.timeout_s, sock_connect=30.0),
            headers=dict(self.target.headers),
            read_bufsize=2**18,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def send(self, work: Work, record: RequestRecord) -> None:
        """Send one request and fill in its record until the answer has ended, whatever becomes of it."""
        record.prompt_tokens = work.prompt_tokens
        body = orjson.dumps(self.target.request_body(work))
        reader = AnswerReader(record, keep_text=self.target.keep_text)
        record.sent_s = self.clock()
        try:
            headers = {"Content-Type": "application/json"}
            async with self._http.post(self.target.url, data=body, headers=headers) as reply:
                if reply.status != 200:
                    record.fail(f"http_{reply.status}", (await reply.content.read(2000)).decode(errors="replace"))
                    return
                events = EventReader()
                async for data in reply.content.iter_any():
                    now_s = self.clock()
                    for event in events.feed(data):
                        reader.take(event, now_s)
        except TimeoutError:
            record.fail("timeout", f"no end within {self.target.timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            record.fail("connect", str(error))
        except (aiohttp.ClientError, OSError) as error:
            record.fail("cut" if record.event_times_s else "connection", f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            record.fail("cancelled", "stopped before its end")
            raise
        finally:
            if not record.error_kind.startswith("http_"):
                reader.close()
            record.is_done = True
