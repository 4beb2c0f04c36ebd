"""Requests as `vllm bench serve`, aiperf and guidellm send them, and what each of these reads from the answer.

The tools are not installed: bodies and reading follow their public sources, field for field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from tokenizers import Tokenizer

from tests.api.client import CHAT, COMPLETIONS, Api, Json
from tests.e2e.cluster_processes import MODEL_NAME

pytestmark = pytest.mark.e2e

TEXT = "one two three four"
TOKENS = 5
PARTS = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
EVERY_USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass
class Seen:
    """What a tool makes of a stream."""

    text: str = ""
    token_events: int = 0
    usage: Json = field(default_factory=dict)
    is_done: bool = False


def read_as_vllm(lines: Sequence[str]) -> Seen:
    """A token for each event with choices, whatever its text; counts only from an event without."""
    seen = Seen()
    for line in lines:
        if not line or line.startswith(":"):
            continue
        if (chunk := line.removeprefix("data: ")) == "[DONE]":
            seen.is_done = True
            continue
        data = json.loads(chunk)
        if choices := data.get("choices"):
            seen.token_events += 1
            seen.text += (choices[0]["delta"].get("content") if "delta" in choices[0] else choices[0].get("text")) or ""
        elif usage := data.get("usage"):
            seen.usage = usage
    return seen


def read_as_aiperf(lines: Sequence[str]) -> Seen:
    """Events of a known `object` only; a token for each that has text."""
    seen = Seen()
    for line in lines:
        if not line.startswith("data:"):
            continue
        if (chunk := line.removeprefix("data:").strip()) == "[DONE]":
            seen.is_done = True
            continue
        data = json.loads(chunk)
        choices, text = data.get("choices") or [], None
        if choices and data["object"] == "chat.completion.chunk":
            text = (choices[0].get("delta") or {}).get("content")
        elif choices and data["object"] == "text_completion":
            text = choices[0].get("text")
        seen.text += text or ""
        seen.token_events += bool(text)
        seen.usage = data.get("usage") or seen.usage
    return seen


def read_as_guidellm(lines: Sequence[str]) -> Seen:
    """A field that is there is taken for what it should be: null for a list or an object would end the run."""
    seen, ids = Seen(), set()
    for line in lines:
        if line == "data: [DONE]":
            seen.is_done = True
            break
        if not line.startswith("data:"):
            continue
        data = json.loads(line.removeprefix("data:").strip())
        ids.add(data["id"])
        choices = data.get("choices", [])
        choice = choices[0] if choices else {}
        delta = choice.get("delta", {})
        assert list(delta.get("tool_calls", [])) == []
        text = delta.get("content") if "delta" in choice else choice.get("text")
        seen.text += text or ""
        seen.token_events += bool(text)
        if usage := data.get("usage", {}):
            assert not (usage.get("prompt_tokens_details", {}) or {}).get("prompt_tokens")
            seen.usage = usage
    assert len(ids) == 1
    return seen


@pytest.mark.parametrize(
    ("read", "path", "body"),
    [
        (
            read_as_vllm,
            COMPLETIONS,
            {"prompt": TEXT, "repetition_penalty": 1.0, "max_tokens": TOKENS, "logprobs": None} | USAGE,
        ),
        (  # with its sampling flags, and a few fields that it sent in earlier versions
            read_as_vllm,
            COMPLETIONS,
            {"prompt": TEXT, "repetition_penalty": 1.0, "max_tokens": TOKENS, "logprobs": 2, "best_of": 1, "n": 1}
            | {"top_p": 1.0, "top_k": 1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
            | USAGE,
        ),
        (read_as_vllm, CHAT, {"messages": PARTS, "max_completion_tokens": TOKENS} | USAGE),
        (
            read_as_aiperf,
            CHAT,
            {"messages": [{"role": "user", "content": TEXT}], "max_completion_tokens": TOKENS, "min_tokens": TOKENS}
            | USAGE,
        ),
        (read_as_aiperf, COMPLETIONS, {"prompt": [TEXT], "max_tokens": TOKENS, "min_tokens": TOKENS} | USAGE),
        (read_as_guidellm, CHAT, {"messages": PARTS, "max_completion_tokens": TOKENS} | EVERY_USAGE),
        (read_as_guidellm, COMPLETIONS, {"prompt": TEXT, "max_tokens": TOKENS, "stop": None} | EVERY_USAGE),
    ],
)
def test_a_tool_reads_what_it_needs(
    api: Api,
    tokenizer: Tokenizer,
    words_only: dict[str, int],
    read: Callable[[Sequence[str]], Seen],
    path: str,
    body: Json,
) -> None:
    """Each token has a text of its own, since some tools count events with text."""
    extra = {"ignore_eos": True, "temperature": 0.0, "logit_bias": words_only}
    whole = api.post(path, {**body, **extra, "stream": False, "stream_options": None}).json()
    with api.http.stream(
        "POST", path, json={"model": MODEL_NAME, **body, **extra}, headers={"x-request-id": "benchmark-serving0"}
    ) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        seen = read(list(reply.iter_lines()))
    assert seen.is_done
    choice = whole["choices"][0]
    assert seen.text == (choice["message"]["content"] if path == CHAT else choice["text"]) != ""
    assert seen.usage["completion_tokens"] == whole["usage"]["completion_tokens"] == TOKENS
    assert seen.usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    if path == COMPLETIONS:
        assert seen.usage["prompt_tokens"] == len(tokenizer.encode(TEXT).ids)
    # vLLM's tool counts the role of a chat as an event, too, and any may count one that says how it ended.
    assert 1 <= seen.token_events <= TOKENS + 2


def test_what_tools_ask_before_they_start(api: Api) -> None:
    assert api.http.get("/health").status_code == 200
    first = api.http.get("/v1/models").json()["data"][0]
    assert first["id"] == MODEL_NAME and first["root"]
