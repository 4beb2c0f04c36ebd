"""What is sent as one request, and what its client saw of the answer: when tokens came, how many, and what failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class CountedBy(StrEnum):
    """Where a count of output tokens comes from, the most trustworthy first."""

    USAGE = "usage"
    TOKEN_IDS = "token_ids"
    LENGTH = "length"
    EVENTS = "events"


@dataclass(frozen=True, slots=True)
class Work:
    """One request to send.

    Attributes:
        prompt: token ids, or text.
        prompt_tokens: length as the client knows it; 0 when it has no tokenizer for a text.
        output_tokens: what `max_tokens` asks for.
        at_s: when a trace sends it, in seconds from its start.
    """

    prompt: list[int] | str
    prompt_tokens: int
    output_tokens: int
    at_s: float | None = None


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Times are of one monotonic clock, in seconds.

    Attributes:
        asked_tokens: output tokens that were asked for.
        scheduled_s: when the arrival process wanted it to start.
        arrived_s: when the client got to it; later than `scheduled_s` when the client is too slow.
        sent_s: when it was sent; later than `arrived_s` when it waited for a place below the highest concurrency.
        event_times_s: when each event with tokens came.
        event_tokens: token ids in each of these events; empty when the server does not tell.
        error_kind: short and stable, for counting; empty when the answer is whole.
    """

    index: int
    asked_tokens: int
    scheduled_s: float = 0.0
    arrived_s: float = 0.0
    sent_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    counted_by: CountedBy = CountedBy.EVENTS
    event_times_s: list[float] = field(default_factory=list)
    event_tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    error_kind: str = ""
    error: str = ""
    is_done: bool = False

    @property
    def has_succeeded(self) -> bool:
        """Whether the answer came whole."""
        return self.is_done and not self.error_kind

    @property
    def ttft_s(self) -> float:
        """Time to first token: from sending to the first event with tokens."""
        return self.event_times_s[0] - self.sent_s if self.event_times_s else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Inter-token latencies: between events with tokens, as `vllm bench serve` takes them."""
        return [later - earlier for earlier, later in zip(self.event_times_s, self.event_times_s[1:], strict=False)]

    @property
    def latency_s(self) -> float:
        """E2EL: from sending to the last event with tokens."""
        return self.event_times_s[-1] - self.sent_s if self.event_times_s else 0.0

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def queue_s(self) -> float:
        """How long it waited for a place below the highest concurrency."""
        return self.sent_s - self.arrived_s

    def fail(self, kind: str, detail: str) -> None:
        """Note the first thing that went wrong."""
        if not self.error_kind:
            self.error_kind, self.error = kind, detail[:500]
