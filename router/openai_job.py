"""What a job of an OpenAI endpoint is: how it starts, and how its chunks and its whole answer look."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.tokenizer import Tokenizer
from engine.tokens import PositionLogprobs
from router.generation import PhaseTimes
from router.inference_api import InferenceApi
from router.logprob_text import TokenNames
from router.metrics import PHASES
from router.openai_protocol import GenerationBody
from router.running_request import RunningRequest, Usage
from router.text_stream import TextDelta

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and how: what a job needs of the HTTP request besides its body.

    Attributes:
        request_id: label for logs, chosen by the client or by us.
        api_key: the key it came with; None when none is asked for.
        started: time.monotonic() of its arrival.
    """

    request_id: str
    api_key: str | None
    started: float


@dataclass(slots=True)
class CollectedChoice:
    """All of one choice, for an answer in one piece."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: TextDelta) -> None:
        """Append what is new."""
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.text_offsets += delta.text_offsets
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            self.stop_reason = delta.stop_reason


class OpenAiJob(ABC):
    """One request to an endpoint that generates."""

    id_prefix: str
    chunk_object: str

    def __init__(self, api: InferenceApi, body: GenerationBody, caller: Caller) -> None:
        body.check()
        self.api = api
        self.body = body
        self.caller = caller
        self.model = api.check_model(body.model)
        self.response_id = api.new_id(self.id_prefix)
        names = TokenIdNames(api.tokenizer) if body.return_tokens_as_token_ids else api.tokenizer
        self.names: TokenNames = names

    @property
    def tenant_salt(self) -> bytes:
        """Keeps this caller's prefix cache apart."""
        return self.api.tenant_salt(self.caller.api_key, self.body.cache_salt)

    @abstractmethod
    async def submit(self) -> RunningRequest:
        """Tokenise and submit."""

    @abstractmethod
    def opening(self, running: RunningRequest) -> list[Json]:
        """Choices to send before any delta of theirs."""

    @abstractmethod
    def delta(self, running: RunningRequest, index: int, delta: TextDelta) -> Json | None:
        """The streamed form of what is new for one choice; None when that is nothing to show."""

    @abstractmethod
    def whole(self, running: RunningRequest, choices: list[CollectedChoice]) -> Json:
        """The answer in one piece."""

    def usage(self, running: RunningRequest) -> Json:
        """The usage object."""
        return usage_json(running.usage)

    def chunk(self, running: RunningRequest, choices: list[Json]) -> Json:
        """One event of a stream."""
        chunk: Json = {
            "id": self.response_id,
            "object": self.chunk_object,
            "created": running.created_at,
            "model": self.model,
            "choices": choices,
        }
        if self.body.continuous_usage:
            chunk["usage"] = self.usage(running)
        elif self.body.include_usage:
            chunk["usage"] = None
        return chunk


class TokenIdNames:
    """Shows tokens as `token_id:123`, which tells apart tokens that look alike."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)


JobFactory = Callable[[InferenceApi, Json, Caller], OpenAiJob]


def usage_json(usage: Usage) -> Json:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def phase_milliseconds(times: PhaseTimes) -> dict[str, float]:
    """The known phases, in order, in milliseconds."""
    known = ((name, getattr(times, f"{name}_s")) for name in PHASES)
    return {name: round(seconds * 1000, 3) for name, seconds in known if seconds is not None}


def timings_json(times: PhaseTimes) -> Json:
    """The `timings` object; a phase that did not happen is null."""
    known = phase_milliseconds(times)
    return {f"{name}_ms": known.get(name) for name in PHASES}
