"""Who may come in: what can never fit is refused for good, what does not fit now is told when to come back.

Counts sequences of requests in flight, and prompt tokens that have to be computed before a first token. Knows no nodes;
capacity is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

from engine.errors import InvalidRequest, Overloaded
from router.decay import RateEstimate
from router.generation import GenerationRequest, ModelLimits

SHORTEST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
_LEAST_OBSERVED_S = 1.0
"""What one completion soon after the start of an observation says about a rate is nothing."""

UNKNOWN_RETRY_S = 5.0
WAITING_POOLS = 4
"""Prompts that fill the decode nodes so many times may wait, where nothing else was said."""


class Outcome(Enum):
    """How an admitted request ended; exactly one of these, once."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the ready decode nodes hold at once: sequences in their steps, tokens in their KV blocks."""

    sequences: int = 0
    kv_tokens: int = 0


class Ticket:
    """One admitted request. Frees its places when closed; closing twice is harmless."""

    __slots__ = ("_admission", "_is_open", "_num_sequences", "_waiting_tokens")

    def __init__(self, admission: Admission, num_sequences: int, waiting_tokens: int) -> None:
        self._admission = admission
        self._num_sequences = num_sequences
        self._waiting_tokens = waiting_tokens
        self._is_open = True

    def must_compute(self, tokens: int) -> None:
        """So much of the prompt is in no prefix cache, as it turned out."""
        if tokens < self._waiting_tokens:
            self._admission._waiting_tokens -= self._waiting_tokens - tokens
            self._waiting_tokens = tokens

    def first_token(self) -> None:
        """The prompt waits no longer."""
        if self._waiting_tokens:
            self._admission._computed(self._waiting_tokens)
            self._waiting_tokens = 0

    def close(self, outcome: Outcome) -> None:
        """The request ended."""
        if not self._is_open:
            return
        self._is_open = False
        self.first_token()
        self._admission._leave(self._num_sequences, outcome)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(Outcome.FINISHED if error is None else Outcome.FAILED)


class Admission:
    """The books of requests in flight at this router.

    Args:
        max_waiting_sequences: beyond those that the decode nodes run at once.
        max_waiting_tokens: of prompts without a first token; None takes WAITING_POOLS times what the decode nodes hold.
        clock: monotonic seconds.
        rate_half_life_s: how fast the past stops to count when a time to come back is worked out.
    """

    def __init__(
        self,
        *,
        max_waiting_sequences: int,
        max_waiting_tokens: int | None,
        clock: Callable[[], float],
        rate_half_life_s: float = 20.0,
    ) -> None:
        self._max_waiting_sequences = max_waiting_sequences
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._rate_half_life_s = rate_half_life_s
        self._completions = self._new_estimate()
        self._computed_tokens = self._new_estimate()
        self._waiting_tokens = 0
        self.requests = 0
        self.sequences = 0
        self.admitted = 0
        self.refused = 0
        self.outcomes = dict.fromkeys(Outcome, 0)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens to be computed for requests without a first token yet."""
        return self._waiting_tokens

    def admit(self, request: GenerationRequest, *, capacity: Capacity) -> Ticket:
        """Raises Overloaded. What is alone is always admitted; while no decode node is ready, tokens have no limit."""
        sequences, prompt_tokens = request.num_running, len(request.prompt_token_ids)
        if self.sequences < capacity.sequences:
            # How fast places become free shows only while all are taken; what came before says how few asked for one.
            self._completions = self._new_estimate()
        excess = self.sequences + sequences - capacity.sequences - self._max_waiting_sequences
        if excess > 0 and self.sequences > 0:
            raise self._overloaded("too many requests are in flight", "queue_full", self.retry_after_s(excess))
        most_tokens = self._max_waiting_tokens or WAITING_POOLS * capacity.kv_tokens
        excess = self._waiting_tokens + prompt_tokens - most_tokens
        if excess > 0 and self._waiting_tokens > 0 and most_tokens > 0:
            retry_after_s = self._seconds_until(self._computed_tokens, excess)
            raise self._overloaded("too many prompt tokens are waiting", "tokens_full", retry_after_s)
        if self._waiting_tokens == 0:
            # How fast prompts are computed shows only while some wait; what came before says how few there were.
            self._computed_tokens = self._new_estimate()
        self.requests += 1
        self.sequences += sequences
        self.admitted += 1
        self._waiting_tokens += prompt_tokens
        return Ticket(self, sequences, prompt_tokens)

    def retry_after_s(self, sequences: int = 1) -> float:
        """Seconds until that many sequences will have ended, at the rate observed since all places were taken."""
        return self._seconds_until(self._completions, sequences)

    def check_invariants(self) -> None:
        """Books agree with each other; called by tests and on close."""
        assert self.requests >= 0 and self.sequences >= 0 and self._waiting_tokens >= 0
        assert self.admitted == self.requests + sum(self.outcomes.values())

    def _new_estimate(self) -> RateEstimate:
        estimate = RateEstimate(self._rate_half_life_s, least_s=_LEAST_OBSERVED_S)
        estimate.add(0, self._clock())
        return estimate

    def _seconds_until(self, events: RateEstimate, count: int) -> float:
        rate = events.per_second(self._clock())
        if rate is None or rate <= 0.0:
            return UNKNOWN_RETRY_S
        return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, count / rate))

    def _overloaded(self, message: str, reason: str, retry_after_s: float) -> Overloaded:
        self.refused += 1
        return Overloaded(message, retry_after_s=retry_after_s, reason=reason)

    def _computed(self, waiting_tokens: int) -> None:
        self._waiting_tokens -= waiting_tokens
        self._computed_tokens.add(waiting_tokens, self._clock())

    def _leave(self, num_sequences: int, outcome: Outcome) -> None:
        self.requests -= 1
        self.sequences -= num_sequences
        self.outcomes[outcome] += 1
        # A cancelled request frees its places as well, so it counts towards how fast places become free.
        self._completions.add(num_sequences, self._clock())
        self.check_invariants()


def check_fits(request: GenerationRequest, limits: ModelLimits) -> None:
    """Raise InvalidRequest when no decode node could ever hold prompt and output, or so many sequences at once."""
    if request.num_running > limits.max_sequences:
        param = "n" if request.num_running == request.num_sequences else "best_of"
        raise InvalidRequest(f"no decode node runs more than {limits.max_sequences} sequences at once", param=param)
    total = len(request.prompt_token_ids) + request.sampling.max_tokens
    if total > limits.max_model_len:
        raise InvalidRequest(
            f"prompt and max_tokens are {total} tokens, more than the {limits.max_model_len} of the model's context",
            param="max_tokens",
            reason="context_length_exceeded",
        )
    blocks = -(-total // limits.block_size)
    if blocks > limits.max_request_blocks:
        room = limits.max_request_blocks * limits.block_size
        raise InvalidRequest(
            f"prompt and max_tokens are {total} tokens, more than the {room} that a decode node can hold",
            param="max_tokens",
            reason="pool_too_small",
        )
