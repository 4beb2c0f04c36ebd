"""What the API side of the router asks of the cluster side: tokens in, tokens out. Knows no HTTP, no text, no nodes.

The API side (HTTP, gRPC, text) calls `Cluster.generate`; the cluster side (dispatch, failover) implements it. A twin in
memory for tests is `router/testing.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from engine.ids import RequestId
from engine.sampling_params import SamplingParams
from engine.tokens import FinishReason, PositionLogprobs
from router.beam_search import BeamSearch


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to go on from it.

    Attributes:
        request_id: label for logs.
        prompt_token_ids: at least one, all within the vocabulary.
        sampling: `seed` is always set.
        num_sequences: n.
        beam_search: search instead of sampling; sequence i is then the hypothesis of rank i, and comes in one delta.
        priority: lower values go first, where nodes schedule by priority.
        tenant_salt: 16 bytes derived from the caller's key; empty without keys.
        deadline_s: seconds from now until the request must have ended.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    num_sequences: int = 1
    beam_search: BeamSearch | None = None
    priority: int = 0
    tenant_salt: bytes = b""
    deadline_s: float = 600.0

    @property
    def num_running(self) -> int:
        """Sequences that run side by side on a node."""
        return self.num_sequences if self.beam_search is None else self.beam_search.width


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one sequence. The last delta of a sequence has `finish_reason`; it may have no tokens."""

    sequence_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(slots=True)
class PhaseTimes:
    """Seconds spent in each phase so far; None until known."""

    queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    first_decode_s: float | None = None
    decode_s: float | None = None


@dataclass(slots=True)
class GenerationFacts:
    """What becomes known about a generation while it runs."""

    cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    times: PhaseTimes = field(default_factory=PhaseTimes)
    prefill_node_id: str | None = None
    decode_node_id: str | None = None
    attempts: int = 0


class Generation(Protocol):
    """One running generation. Iterate to receive deltas; `aclose` frees everything everywhere and may be called twice.

    Iteration ends after every sequence has ended. It raises an `engine.errors.PdserveError` when the request failed
    for good; failover to other nodes is invisible here.
    """

    facts: GenerationFacts

    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    def end_sequence(self, sequence_index: int) -> None:
        """Stop one sequence (its stop string was found). Never blocks; no further delta comes for it."""
        ...

    async def aclose(self) -> None:
        """Cancel what still runs. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the cluster can serve right now, as its nodes describe themselves.

    Attributes:
        max_model_len: tokens of prompt and output.
        block_size: tokens.
        max_request_blocks: of the largest pool.
        max_sequences: that one decode node runs at once.
    """

    vocab_size: int
    max_model_len: int
    block_size: int
    max_request_blocks: int
    max_sequences: int


class Cluster(Protocol):
    """The cluster side of the router."""

    @property
    def limits(self) -> ModelLimits:
        """Raises Unavailable while no decode node has ever been seen."""
        ...

    def is_ready(self) -> bool:
        """Whether a request would be served now."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Admit and dispatch. Raises InvalidRequest (can never fit), Overloaded or Unavailable."""
        ...

    async def describe(self) -> dict[str, object]:
        """The JSON of /debug/cluster; asks the nodes, waits at most one second."""
        ...
