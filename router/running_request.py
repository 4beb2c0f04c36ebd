"""One accepted request while it runs: generations in, text of all choices out, its books kept. Knows no protocol."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from engine.errors import Overloaded, PdserveError
from engine.tokenizer import Tokenizer
from router.generation import Cluster, Generation, GenerationFacts, GenerationRequest, PhaseTimes
from router.metrics import RouterMetrics
from router.request_builder import GenerateParams
from router.stop_strings import StopStrings
from router.text_stream import TextDelta, TextStream, join_deltas, stream_text

logger = logging.getLogger(__name__)

PROMPTS_AT_ONCE = 16
_MAX_READY_DELTAS = 1024
_RETRY_PROMPT_S = 0.05

Batch = list[tuple[int, TextDelta]]
"""What is new, with the index of the choice that it belongs to."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request so far: each prompt counted once, all choices summed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class _Choice:
    tokens: int = 0
    first_at: float | None = None
    last_at: float | None = None
    finish_reason: str | None = None


class RunningRequest:
    """Iterate over `batches()` for the text, and `aclose()` whatever happens: that frees everything everywhere.

    Prompts of one request run side by side, at most PROMPTS_AT_ONCE of them; a later prompt for which the cluster has
    no room waits for an earlier one to end. Choice `prompt_index * params.n + i` belongs to that prompt. Where more is
    made than shown, the choices are known when all have ended, and come in one batch then.

    Attributes:
        response_id: ours, unique.
        model: the name to report.
        requests: one for each prompt.
        params: what the caller asked for.
        created_at: seconds since 1970.
    """

    def __init__(
        self,
        response_id: str,
        model: str,
        requests: Sequence[GenerationRequest],
        params: GenerateParams,
        *,
        cluster: Cluster,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        on_close: Callable[[RunningRequest], None],
        started: float | None = None,
    ) -> None:
        self.response_id = response_id
        self.model = model
        self.requests = tuple(requests)
        self.params = params
        self.created_at = int(time.time())
        self._cluster = cluster
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._on_close = on_close
        self._started = time.monotonic() if started is None else started
        self._stop = StopStrings(params.stop)
        self._made = [_Choice() for _ in range(len(self.requests) * params.num_sequences)]
        self._facts: list[GenerationFacts | None] = [None] * len(self.requests)
        self._generations: set[Generation] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._unfinished = len(self.requests)
        self._next_prompt = 0
        self._ready: Batch = []
        self._wake_reader = asyncio.Event()
        self._wake_writers = asyncio.Event()
        self._error: BaseException | None = None
        self._admission: asyncio.Future[Generation] | None = None
        self._is_admitted = False
        self._is_closed = False

    # -- what is known so far ---------------------------------------------------------------------------------------

    @property
    def num_choices(self) -> int:
        """Choices of all prompts that are shown."""
        return len(self.requests) * self.params.n

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            prompt_tokens=sum(len(request.prompt_token_ids) for request in self.requests),
            completion_tokens=sum(choice.tokens for choice in self._made),
            cached_tokens=sum(facts.cached_tokens for facts in self._facts if facts is not None),
        )

    def facts(self, prompt_index: int) -> GenerationFacts | None:
        """What is known about one prompt; None until it was admitted."""
        return self._facts[prompt_index]

    def times(self) -> PhaseTimes:
        """The phases; of several prompts the longest each."""
        merged = PhaseTimes()
        for facts in self._facts:
            if facts is None:
                continue
            for name in ("queue_s", "prefill_s", "transfer_s", "first_decode_s", "decode_s"):
                ours, theirs = getattr(merged, name), getattr(facts.times, name)
                if theirs is not None and (ours is None or theirs > ours):
                    setattr(merged, name, theirs)
        return merged

    # -- running ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Admit the first prompt, so that a refusal is an answer of its own; then let all of them run."""
        generation = await self._admit_first()
        self._is_admitted = True
        self._metrics.requests_open.inc()
        self._adopt(0, generation)
        self._next_prompt = 1
        logger.info(
            "request_admitted response_id=%s request_id=%r prompts=%d choices=%d prompt_tokens=%d",
            self.response_id,
            self.requests[0].request_id,
            len(self.requests),
            self.num_choices,
            self.usage.prompt_tokens,
        )
        lanes = min(PROMPTS_AT_ONCE, len(self.requests))
        self._tasks = [asyncio.create_task(self._run_lane(0, generation))]
        self._tasks += [asyncio.create_task(self._run_lane(None, None)) for _ in range(lanes - 1)]

    def batches(self) -> AsyncIterator[Batch]:
        """All that is ready, again and again, one delta for each choice in a batch, until every choice has ended.

        Raises the PdserveError that ended the request for good.
        """
        return self._best_choices() if self.params.chooses_best else self._ready_batches()

    async def _best_choices(self) -> AsyncIterator[Batch]:
        """Of every prompt the `n` choices whose tokens have the highest mean log probability, best first."""
        parts: list[list[TextDelta]] = [[] for _ in self._made]
        async for batch in self._ready_batches():
            for index, delta in batch:
                parts[index].append(delta)
        made = [join_deltas(of_choice) for of_choice in parts]
        best: list[TextDelta] = []
        for first in range(0, len(made), self.params.num_sequences):
            of_prompt = made[first : first + self.params.num_sequences]
            best += sorted(of_prompt, key=_mean_logprob, reverse=True)[: self.params.n]
        if self.params.logprobs is None:  # They were asked for to choose by, not to be shown.
            best = [replace(choice, logprobs=()) for choice in best]
        yield list(enumerate(best))

    async def _ready_batches(self) -> AsyncIterator[Batch]:
        while True:
            if self._ready:
                ready, self._ready = self._ready, []
                self._wake_writers.set()
                yield ready if len(ready) == 1 else _coalesce(ready)
            elif self._error is not None:
                raise self._error
            elif self._unfinished == 0:
                return
            else:
                self._wake_reader.clear()
                await self._wake_reader.wait()

    def fail(self, error: PdserveError) -> None:
        """End the request with `error`, after what is ready. The reader still has to close it."""
        if self._error is None and self._unfinished:
            self._error = error
            self._wake_reader.set()
            if self._admission is not None:
                self._admission.cancel()

    async def aclose(self) -> None:
        """Cancel what still runs, free it and count the request as over. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*(generation.aclose() for generation in list(self._generations)))
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._generations.clear()
            self._close_books()
            self._on_close(self)

    async def _admit_first(self) -> Generation:
        """Admit the first prompt, unless `fail` or the caller's leaving ends the waiting."""
        self._admission = asyncio.ensure_future(self._cluster.generate(self.requests[0]))
        try:
            return await self._admission
        except asyncio.CancelledError:
            if not self._admission.cancelled() and self._admission.exception() is None:
                # Admitted in the very moment of the cancellation: nobody else knows of it.
                await self._admission.result().aclose()
            task = asyncio.current_task()
            if self._error is not None and (task is None or not task.cancelling()):
                raise self._error from None
            raise
        finally:
            self._admission = None

    async def _run_lane(self, prompt_index: int | None, generation: Generation | None) -> None:
        """Run prompts one after the other until none is left."""
        try:
            while True:
                if prompt_index is None or generation is None:
                    if self._next_prompt >= len(self.requests):
                        return
                    prompt_index = self._next_prompt
                    self._next_prompt += 1
                    generation = await self._admit_later(prompt_index)
                await self._pump(prompt_index, generation)
                self._generations.discard(generation)
                await generation.aclose()
                self._unfinished -= 1
                self._wake_reader.set()
                prompt_index = generation = None
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # Whatever it is belongs to the reader, who answers the client with it.
            self._error = self._error or error
            self._wake_reader.set()

    async def _admit_later(self, prompt_index: int) -> Generation:
        """Admit a prompt after the first; while one of ours runs, a full cluster is only a reason to wait."""
        while True:
            try:
                generation = await self._cluster.generate(self.requests[prompt_index])
            except Overloaded:
                if not self._generations:
                    raise
                await asyncio.sleep(_RETRY_PROMPT_S)
                continue
            self._adopt(prompt_index, generation)
            return generation

    def _adopt(self, prompt_index: int, generation: Generation) -> None:
        self._generations.add(generation)
        self._facts[prompt_index] = generation.facts

    async def _pump(self, prompt_index: int, generation: Generation) -> None:
        params = self.params
        request = self.requests[prompt_index]
        streams = [
            TextStream(
                self._tokenizer,
                stop=self._stop,
                include_stop_str=params.include_stop_str,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=request.sampling.min_tokens,
                prompt_ids=request.prompt_token_ids,
            )
            for _ in range(params.num_sequences)
        ]
        first_choice = prompt_index * params.num_sequences
        async for sequence_index, delta in stream_text(generation, streams):
            index = first_choice + sequence_index
            self._count(index, delta)
            self._ready.append((index, delta))
            self._wake_reader.set()
            while len(self._ready) >= _MAX_READY_DELTAS:
                self._wake_writers.clear()
                await self._wake_writers.wait()

    # -- books ------------------------------------------------------------------------------------------------------

    def _count(self, index: int, delta: TextDelta) -> None:
        choice = self._made[index]
        num_tokens = len(delta.token_ids)
        if num_tokens:
            now = time.monotonic()
            choice.tokens += num_tokens
            self._metrics.generation_tokens.inc(num_tokens)
            if choice.last_at is None:
                choice.first_at = now
                self._metrics.time_to_first_token.observe(now - self._started)
            else:
                gap = (now - choice.last_at) / num_tokens
                for _ in range(num_tokens):
                    self._metrics.inter_token_latency.observe(gap)
            choice.last_at = now
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason.value

    def _close_books(self) -> None:
        if not self._is_admitted:
            return
        metrics, usage, now = self._metrics, self.usage, time.monotonic()
        metrics.requests_open.dec()
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.prefix_cache_queries.inc(usage.prompt_tokens)
        metrics.prefix_cache_hits.inc(usage.cached_tokens)
        for request in self.requests:
            metrics.request_prompt_tokens.observe(len(request.prompt_token_ids))
        for choice in self._made:
            if choice.finish_reason is None:
                continue
            metrics.choice_finished(choice.finish_reason)
            metrics.request_generation_tokens.observe(choice.tokens)
            if choice.tokens > 1 and choice.first_at is not None and choice.last_at is not None:
                metrics.time_per_output_token.observe((choice.last_at - choice.first_at) / (choice.tokens - 1))
        times = self.times()
        metrics.phases(times)
        if all(choice.finish_reason is not None for choice in self._made):
            outcome = "finished"
            metrics.e2e_latency.observe(now - self._started)
        else:
            outcome = "failed" if self._error is not None else "cancelled"
        metrics.request_ended(outcome)
        logger.info(
            "request_ended response_id=%s request_id=%r outcome=%s reason=%s prompt_tokens=%d cached_tokens=%d "
            "completion_tokens=%d seconds=%.3f",
            self.response_id,
            self.requests[0].request_id,
            outcome,
            _reason(self._error),
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            now - self._started,
        )


def _mean_logprob(choice: TextDelta) -> float:
    chosen = [position[0].logprob for position in choice.logprobs]
    return sum(chosen) / len(chosen) if chosen else -math.inf


def _coalesce(deltas: Sequence[tuple[int, TextDelta]]) -> Batch:
    """One delta for each choice that has any, in the order in which the choices first appear."""
    grouped: dict[int, list[TextDelta]] = {}
    for index, delta in deltas:
        grouped.setdefault(index, []).append(delta)
    return [(index, parts[0] if len(parts) == 1 else join_deltas(parts)) for index, parts in grouped.items()]


def _reason(error: BaseException | None) -> str:
    if error is None:
        return "-"
    return error.reason if isinstance(error, PdserveError) else type(error).__name__
