"""The cluster side of the router as a script in memory: for tests of HTTP, gRPC and text, without nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.errors import PdserveError, Unavailable
from engine.sampling_params import SamplingParams
from engine.tokens import FinishReason, PositionLogprobs, TokenLogprob
from router.generation import GenerationFacts, GenerationRequest, ModelLimits, TokenDelta


@dataclass(frozen=True, slots=True)
class ScriptedSequence:
    """What one sequence does.

    The rules of a node apply on top: an end token or a stop token ends it once `min_tokens` are out, `max_tokens` ends
    it with LENGTH, end wins over length. A script that runs out ends with `at_end`, in a delta without tokens.

    Attributes:
        token_ids: the tokens, in order.
        tokens_per_delta: how many come at once.
        delay_s: seconds before each delta.
        at_end: reason given when the script runs out first.
        error: raised to the reader after the tokens instead of an end.
        hang: say nothing more after the tokens, until the generation is closed.
        logprob: of every token, when asked for.
    """

    token_ids: Sequence[int] = ()
    tokens_per_delta: int = 1
    delay_s: float = 0.0
    at_end: FinishReason = FinishReason.STOP
    error: Exception | None = None
    hang: bool = False
    logprob: float = -0.25


Script = Callable[[GenerationRequest, int], ScriptedSequence]
"""Chooses what the sequence of that index does for that request."""


def fake_logprobs(token_id: int, top: int, vocab_size: int, logprob: float = -0.25) -> PositionLogprobs:
    """The chosen token at rank 1, then itself and its successors at falling probability: `top` of them."""
    chosen = TokenLogprob(token_id, logprob, 1)
    return (chosen, *(TokenLogprob((token_id + i) % vocab_size, logprob - i, i + 1) for i in range(top)))


class FakeGeneration:
    """A `Generation` that plays its script; what happened to it can be read afterwards.

    Attributes:
        request: as the API side sent it.
        delivered: deltas that were read.
        ended: indexes given to `end_sequence`, in order.
        close_calls: how often `aclose` was called.
        is_finished: every sequence ended (or failed) and its end was read.
        is_cancelled: closed while something still ran.
    """

    def __init__(self, request: GenerationRequest, scripts: Sequence[ScriptedSequence], vocab_size: int) -> None:
        self.request = request
        self.facts = GenerationFacts(attempts=1, prefill_node_id="prefill-fake", decode_node_id="decode-fake")
        self.delivered: list[TokenDelta] = []
        self.ended: list[int] = []
        self.close_calls = 0
        self.is_finished = False
        self.is_cancelled = False
        self._vocab_size = vocab_size
        self._queue: asyncio.Queue[TokenDelta | Exception | None] = asyncio.Queue()
        self._running = set(range(len(scripts)))
        self._tasks = {index: asyncio.create_task(self._play(index, script)) for index, script in enumerate(scripts)}
        top = request.sampling.prompt_logprobs
        if top is not None:
            later = request.prompt_token_ids[1:]
            self.facts.prompt_logprobs = [(), *(fake_logprobs(token_id, top, vocab_size) for token_id in later)]

    @property
    def is_closed(self) -> bool:
        """Whether `aclose` was called."""
        return self.close_calls > 0

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        while self._running and not self.is_closed:
            item = await self._queue.get()
            if isinstance(item, Exception):
                self._running.clear()
                self.is_finished = True
                raise item
            if item is None or item.sequence_index not in self._running:
                continue
            if item.finish_reason is not None:
                self._running.discard(item.sequence_index)
            self.delivered.append(item)
            return item
        self.is_finished = self.is_finished or not self.is_closed
        raise StopAsyncIteration

    def end_sequence(self, sequence_index: int) -> None:
        self.ended.append(sequence_index)
        self._running.discard(sequence_index)
        self._tasks[sequence_index].cancel()
        self._queue.put_nowait(None)

    async def aclose(self) -> None:
        self.close_calls += 1
        if self._running:
            self.is_cancelled = True
        for task in self._tasks.values():
            task.cancel()
        self._queue.put_nowait(None)
        for task in self._tasks.values():
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _play(self, index: int, script: ScriptedSequence) -> None:
        for delta in _deltas(index, script, self.request.sampling, self._vocab_size):
            await asyncio.sleep(script.delay_s)
            self._queue.put_nowait(delta)
            if delta.finish_reason is not None:
                return
        await asyncio.sleep(script.delay_s)
        if script.hang:
            await asyncio.Event().wait()
        if script.error is not None:
            self._queue.put_nowait(script.error)
        else:
            self._queue.put_nowait(TokenDelta(index, (), finish_reason=script.at_end))


def _deltas(index: int, script: ScriptedSequence, sampling: SamplingParams, vocab_size: int) -> Iterator[TokenDelta]:
    """The script's tokens as a node would send them, up to the token that ends the sequence."""
    pending: list[int] = []

    def take_delta(reason: FinishReason | None = None, stop_token_id: int | None = None) -> TokenDelta:
        token_ids = tuple(pending)
        pending.clear()
        top = sampling.logprobs
        logprobs: tuple[PositionLogprobs, ...] = ()
        if top is not None:
            logprobs = tuple(fake_logprobs(token_id, top, vocab_size, script.logprob) for token_id in token_ids)
        return TokenDelta(index, token_ids, logprobs, reason, stop_token_id)

    for count, token_id in enumerate(script.token_ids, 1):
        pending.append(token_id)
        reason, stop_token_id = _end_of(sampling, count, token_id)
        if reason is not None:
            yield take_delta(reason, stop_token_id)
            return
        if len(pending) == script.tokens_per_delta:
            yield take_delta()
    if pending:
        yield take_delta()


def _end_of(sampling: SamplingParams, count: int, token_id: int) -> tuple[FinishReason | None, int | None]:
    if count > sampling.min_tokens:
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP, token_id
        if token_id in sampling.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP, None
    return (FinishReason.LENGTH, None) if count >= sampling.max_tokens else (None, None)


@dataclass
class FakeCluster:
    """A `Cluster` that plays a script for every request.

    Attributes:
        script: what each sequence does; a single ScriptedSequence serves for all.
        model_limits: what the cluster claims to be able to serve; None: no node was ever seen.
        ready: what `is_ready` says.
        refuse: raised by `generate` while set.
        admit_delay_s: seconds that `generate` takes.
        cached_tokens: put into the facts of every generation.
        generations: every generation that was started, oldest first.
    """

    script: Script | ScriptedSequence = field(default_factory=ScriptedSequence)
    model_limits: ModelLimits | None = field(
        default_factory=lambda: ModelLimits(
            vocab_size=49152, max_model_len=2048, block_size=16, max_request_blocks=512, max_sequences=128
        )
    )
    ready: bool = True
    refuse: PdserveError | None = None
    admit_delay_s: float = 0.0
    cached_tokens: int = 0
    generations: list[FakeGeneration] = field(default_factory=list)

    @property
    def limits(self) -> ModelLimits:
        if self.model_limits is None:
            raise Unavailable("no decode node has been seen yet")
        return self.model_limits

    def is_ready(self) -> bool:
        return self.ready

    async def generate(self, request: GenerationRequest) -> FakeGeneration:
        await asyncio.sleep(self.admit_delay_s)
        if self.refuse is not None:
            raise self.refuse
        scripts = [self._script_for(request, index) for index in range(request.num_sequences)]
        generation = FakeGeneration(request, scripts, self.limits.vocab_size)
        generation.facts.cached_tokens = self.cached_tokens
        self.generations.append(generation)
        return generation

    async def describe(self) -> dict[str, object]:
        return {"nodes": [], "router": {"in_flight": len(self.open_generations)}}

    @property
    def open_generations(self) -> list[FakeGeneration]:
        """Those neither finished nor closed; empty once everything is tidied up."""
        return [generation for generation in self.generations if not (generation.is_finished or generation.is_closed)]

    def _script_for(self, request: GenerationRequest, index: int) -> ScriptedSequence:
        return self.script if isinstance(self.script, ScriptedSequence) else self.script(request, index)
