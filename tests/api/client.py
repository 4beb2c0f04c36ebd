"""Calls to the HTTP API of a real cluster, and what every answer has to look like."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.cluster_processes import MODEL_NAME, read_events

MAX_ERROR_BYTES = 8 * 1024
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
Json = dict[str, Any]


@dataclass
class StreamedAnswer:
    """A stream read to its end."""

    events: list[Json] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finish_reasons: dict[int, list[str]] = field(default_factory=dict)
    usage: Json | None = None
    is_done: bool = False

    @property
    def text(self) -> str:
        """Of choice 0, joined."""
        return self.texts[0]

    @property
    def finish_reason(self) -> str:
        """Of choice 0, which has exactly one."""
        (reason,) = self.finish_reasons[0]
        return reason

    def add(self, event: Json) -> None:
        assert "error" not in event, event
        self.events.append(event)
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            index = choice["index"]
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            self.texts[index] = self.texts.get(index, "") + (piece or "")
            self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or ())
            reasons = self.finish_reasons.setdefault(index, [])
            if choice["finish_reason"] is not None:
                reasons.append(choice["finish_reason"])


class Api:
    """One router, called with one key. Greedy unless a request says otherwise."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.key = key
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60.0, verify=False)

    def close(self) -> None:
        self.http.close()

    def post(self, path: str, body: Json, headers: dict[str, str] | None = None) -> httpx.Response:
        """POST a JSON body, with the model's name unless it has one."""
        return self.http.post(path, json={"model": MODEL_NAME, **body}, headers=headers)

    def post_bytes(self, path: str, body: bytes, content_type: str = "application/json") -> httpx.Response:
        """POST a body as it is."""
        return self.http.post(path, content=body, headers={"Content-Type": content_type})

    def complete(self, prompt: object, **fields: Any) -> Json:
        """A completion, whole."""
        return self._whole(COMPLETIONS, {"prompt": prompt, **fields})

    def chat(self, messages: str | list[Json], **fields: Any) -> Json:
        """A chat answer, whole; a text is what the user says."""
        return self._whole(CHAT, {"messages": as_messages(messages), **fields})

    def stream(self, prompt: object, **fields: Any) -> StreamedAnswer:
        """A completion, streamed to its end."""
        return self._streamed(COMPLETIONS, {"prompt": prompt, **fields})

    def stream_chat(self, messages: str | list[Json], **fields: Any) -> StreamedAnswer:
        """A chat answer, streamed to its end."""
        return self._streamed(CHAT, {"messages": as_messages(messages), **fields})

    def _whole(self, path: str, body: Json) -> Json:
        reply = self.post(path, {"temperature": 0, **body})
        assert reply.status_code == 200, reply.text
        answer: Json = reply.json()
        return answer

    def _streamed(self, path: str, body: Json) -> StreamedAnswer:
        answer = StreamedAnswer()
        body = {"model": MODEL_NAME, "temperature": 0, "stream": True, **body}
        body.setdefault("stream_options", {"include_usage": True})
        with self.http.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            lines = list(reply.iter_lines())
        for event in read_events(lines):
            answer.add(event)
        assert [line for line in lines if line][-1] == "data: [DONE]"
        return answer


def as_messages(messages: str | list[Json]) -> list[Json]:
    """A text is what the user says."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def check_error(reply: httpx.Response, status: int, *, param: str | None = None) -> Json:
    """The error in `reply`: OpenAI's envelope, small, and naming `param` where one is given."""
    assert reply.status_code == status, reply.text[:2000]
    return check_error_body(reply.content, param=param)


def check_error_body(body: bytes, *, param: str | None = None) -> Json:
    """As `check_error`, for bytes."""
    assert len(body) < MAX_ERROR_BYTES

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    envelope = json.loads(body, parse_constant=refuse)
    assert set(envelope) == {"error"}
    error: Json = envelope["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and error["type"]
    if param is not None:
        assert error["param"] is not None and error["param"].startswith(param), error
    return error
