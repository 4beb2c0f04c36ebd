"""One request while it runs: its tokens so far, its attempts, and what happens when a node refuses, fails or is lost.

Each unfinished sequence is on one attempt, or on its way to the next:

    placed --- tokens ---> placed                       (progress: earlier failures are forgiven)
    placed --- finish reason, end_sequence ---> over
    placed --- node lost / refusal / error ---> orphaned ---> placed on another attempt, with the tokens so far
    any    --- deadline, too many fruitless attempts, wrong request, aclose ---> all of the request is over

Sequences orphaned by one message that have no output yet go together; one that has output goes alone. Tokens of a
sequence are believed from its current attempt only, so none is delivered twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.errors import AttemptFailed, DeadlinePassed, Overloaded, PdserveError, Unavailable
from engine.fingerprint import Fingerprint
from engine.ids import AttemptId
from engine.sequence import finish_reason
from kv_transfer.wire import DRAINING, error_from_wire, finish_reason_from_wire, logprobs_from_wire, sampling_to_wire
from proto import worker_pb2 as pb
from router.admission import Outcome, Ticket
from router.attempt import Attempt
from router.cluster_counters import ClusterCounters
from router.cluster_timing import ClusterTiming
from router.generation import GenerationFacts, GenerationRequest, TokenDelta
from router.node import Node

logger = logging.getLogger(__name__)

MAX_FRUITLESS_ATTEMPTS = 4
MAX_ATTEMPTS_OF_SEQUENCE = 16
UINT32_MAX = 2**32 - 1


class Placer(Protocol):
    """Finds a place for sequences; `router/dispatch.py`."""

    async def place(self, generation: DispatchedGeneration, indices: Sequence[int]) -> None:
        """Start an attempt for those of the sequences that still need one. Raises PdserveError when none can be had."""
        ...

    def allow_retry(self) -> bool:
        """Whether the cluster-wide budget has a retry left; takes it."""
        ...

    def max_model_len(self) -> int: ...

    def retry_after_s(self) -> float: ...

    def on_over(self, generation: DispatchedGeneration) -> None:
        """The generation ended, in whatever way."""
        ...


@dataclass(slots=True)
class SequenceProgress:
    """One sequence. `fruitless` counts attempts since its last token; `attempts` all of them."""

    output_token_ids: list[int] = field(default_factory=list)
    attempt: Attempt | None = None
    is_over: bool = False
    fruitless: int = 0
    attempts: int = 0


class DispatchedGeneration:
    """Implements Generation for the API side and AttemptOwner for the cluster side."""

    def __init__(
        self,
        request: GenerationRequest,
        ticket: Ticket,
        placer: Placer,
        *,
        timing: ClusterTiming,
        counters: ClusterCounters,
        clock: Callable[[], float],
        dice: random.Random,
    ) -> None:
        self.request = request
        self.facts = GenerationFacts()
        self.fingerprint: Fingerprint | None = None
        self.avoided: set[Node] = set()
        self.error: PdserveError | None = None
        self.outcome: Outcome | None = None
        self._ticket = ticket
        self._placer = placer
        self._timing = timing
        self._counters = counters
        self._clock = clock
        self._dice = dice
        self._sequences = [SequenceProgress() for _ in range(request.num_sequences)]
        self._orphans: dict[int, bool] = {}
        self._moving: set[asyncio.Task[None]] = set()
        self._deltas: deque[TokenDelta] = deque()
        self._arrived = asyncio.Event()
        self._started_at = clock()
        self._placed_at: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._cache_witness: Attempt | None = None
        self._is_cache_settled = False
        self._times_from: Attempt | None = None
        self._prompt_logprobs_from: Attempt | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(request.deadline_s + timing.deadline_grace_s, self._deadline_passed)

    # The API side

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        while True:
            if self._deltas:
                return self._deltas.popleft()
            if self.error is not None:
                raise self.error
            if self.outcome is not None:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()

    def end_sequence(self, sequence_index: int) -> None:
        """See Generation."""
        progress = self._sequences[sequence_index]
        if any(delta.sequence_index == sequence_index for delta in self._deltas):
            self._deltas = deque(delta for delta in self._deltas if delta.sequence_index != sequence_index)
        if progress.is_over or self.outcome is not None:
            return
        self._orphans.pop(sequence_index, None)
        if progress.attempt is not None:
            progress.attempt.cancel_sequence(sequence_index)
        self._end(progress)

    async def aclose(self) -> None:
        """See Generation. What matters happens before the first await."""
        self._finish(Outcome.CANCELLED)
        self._deltas.clear()
        moving = [task for task in self._moving if task is not asyncio.current_task()]
        if moving:
            await asyncio.wait(moving)

    # The dispatcher

    @property
    def is_over(self) -> bool:
        return self.outcome is not None

    def unplaced(self, indices: Iterable[int]) -> list[int]:
        """Those of the sequences that still need an attempt."""
        if self.is_over:
            return []
        return [i for i in indices if not self._sequences[i].is_over and self._sequences[i].attempt is None]

    def tokens_so_far(self, index: int) -> tuple[int, ...]:
        """Prompt and output of one sequence."""
        return self.request.prompt_token_ids + tuple(self._sequences[index].output_token_ids)

    def remaining_s(self) -> float:
        """Until the request's deadline."""
        return self._started_at + self.request.deadline_s - self._clock()

    def start_message(
        self, attempt_id: AttemptId, node: Node, indices: Sequence[int], *, local_prefill_threshold: int
    ) -> pb.StartAttempt:
        """The command for an attempt, its prefill nodes not yet listed."""
        request = self.request
        sampling = request.sampling
        if sampling.prompt_logprobs is not None and self._has_all_prompt_logprobs():
            sampling = replace(sampling, prompt_logprobs=None)
        beams = request.beam_search
        return pb.StartAttempt(
            attempt_id=attempt_id,
            request_id=request.request_id,
            decode_node=pb.NodeIdentity(node_id=node.node_id, epoch=node.epoch),
            deadline_ms=min(UINT32_MAX, max(1, int(self.remaining_s() * 1000))),
            prompt_token_ids=request.prompt_token_ids,
            sampling=sampling_to_wire(sampling),
            sequences=[
                pb.SequenceStart(index=index, output_token_ids=self._sequences[index].output_token_ids)
                for index in indices
            ],
            tenant_salt=request.tenant_salt,
            local_prefill_threshold=local_prefill_threshold,
            priority=request.priority,
            beam_search=None
            if beams is None
            else pb.BeamSearch(width=beams.width, length_penalty=beams.length_penalty),
        )

    def note_placed(self, attempt: Attempt, indices: Sequence[int], tokens_to_compute: int) -> None:
        """An attempt for these sequences has started; the other tokens lie in a prefix cache."""
        self._ticket.must_compute(tokens_to_compute)
        if self._placed_at is None:
            self._placed_at = self._clock()
        if self._cache_witness is None and not self._is_cache_settled:
            self._cache_witness = attempt
        self.facts.attempts += 1
        self.facts.decode_node_id = attempt.node.node_id
        for index in indices:
            self._sequences[index].attempt = attempt
            self._sequences[index].attempts += 1

    def fail(self, error: PdserveError) -> None:
        """The request ends here; tokens that arrived before are still delivered."""
        if self._finish(Outcome.FAILED, error):
            logger.warning(
                "request_failed request_id=%s attempts=%d reason=%s message=%r",
                self.request.request_id,
                self.facts.attempts,
                error.reason,
                str(error),
            )

    def abandon(self) -> None:
        """The caller left before it had the generation."""
        self._finish(Outcome.CANCELLED)

    # What attempts tell

    def on_facts(self, attempt: Attempt, update: pb.AttemptUpdate) -> None:
        """See AttemptOwner."""
        facts = self.facts
        if update.prompt_logprobs and not self._has_all_prompt_logprobs():
            if self._prompt_logprobs_from is not attempt:
                self._prompt_logprobs_from = attempt
                facts.prompt_logprobs.clear()
            try:
                facts.prompt_logprobs.extend(logprobs_from_wire(entry) for entry in update.prompt_logprobs)
            except AttemptFailed as error:
                self._reject(attempt, error)
                return
        if update.HasField("cached_tokens") and attempt is self._cache_witness:
            self._settle_cache()
            facts.cached_tokens = min(update.cached_tokens, len(self.request.prompt_token_ids))
            self._counters.prefix_tokens_queried += len(self.request.prompt_token_ids)
            self._counters.prefix_tokens_hit += facts.cached_tokens
        if update.HasField("prefill_node_id"):
            facts.prefill_node_id = update.prefill_node_id or None
        if update.HasField("times"):
            self._take_times(attempt, update.times)

    def on_sequence(self, attempt: Attempt, update: pb.SequenceUpdate) -> None:
        """See AttemptOwner."""
        index = update.sequence_index
        progress = self._sequences[index]
        assert progress.attempt is attempt and not progress.is_over, (index, attempt.attempt_id)
        is_error = update.finish_reason in (pb.FINISH_REASON_ERROR, pb.FINISH_REASON_CANCELLED)
        try:
            reason = None if is_error else finish_reason_from_wire(update.finish_reason)
            logprobs = tuple(logprobs_from_wire(entry) for entry in update.logprobs)
        except AttemptFailed as error:
            self._reject(attempt, error)
            return
        stop_token_id = update.stop_token_id if update.HasField("stop_token_id") else None
        if update.token_ids:
            self._note_tokens(attempt, progress, update.token_ids)
        if update.token_ids or reason is not None:
            self._push(TokenDelta(index, tuple(update.token_ids), logprobs, reason, stop_token_id))
        if is_error:
            progress.attempt = None
            attempt.let_go(index)
            self._handle_error(attempt, index, update)
        elif reason is not None:
            attempt.let_go(index)
            self._end(progress)

    def on_node_lost(self, attempt: Attempt, reason: str) -> None:
        """See AttemptOwner."""
        if self.is_over:
            return
        if attempt is self._cache_witness:
            self._settle_cache()
        self.avoided.add(attempt.node)
        error = Unavailable(f"the node that served this was lost ({reason}) and no other took over")
        for index, progress in enumerate(self._sequences):
            if progress.attempt is attempt:
                progress.attempt = None
                self._orphan(index, error, is_loss=True)

    # Inside

    def _handle_error(self, attempt: Attempt, index: int, update: pb.SequenceUpdate) -> None:
        if update.finish_reason == pb.FINISH_REASON_CANCELLED:
            error: PdserveError = AttemptFailed("the node gave the attempt up", reason="cancelled_by_node")
        else:
            error = error_from_wire(update.error)
        logger.info(
            "attempt_failed request_id=%s attempt_id=%s node_id=%s sequence=%d reason=%s message=%r",
            self.request.request_id,
            attempt.attempt_id,
            attempt.node.node_id,
            index,
            error.reason,
            str(error),
        )
        match update.error.kind if update.finish_reason == pb.FINISH_REASON_ERROR else pb.ERROR_KIND_TRY_ELSEWHERE:
            case pb.ERROR_KIND_INVALID:
                self.fail(error)
                return
            case pb.ERROR_KIND_DEADLINE:
                self.fail(DeadlinePassed("the request did not end within its time"))
                return
            case pb.ERROR_KIND_INTERNAL:
                attempt.node.breaker.fault(self._clock())
            case pb.ERROR_KIND_BUSY if attempt is self._cache_witness:
                # Refused unseen: the next attempt is the first that is worked on.
                self._cache_witness = None
        if attempt is self._cache_witness:
            self._settle_cache()
        self.avoided.add(attempt.node)
        self._orphan(index, error, is_loss=error.reason == DRAINING)

    def _orphan(self, index: int, error: PdserveError, *, is_loss: bool) -> None:
        """Move a sequence, or fail the request when moving has proved of no use."""
        progress = self._sequences[index]
        progress.fruitless += 1
        if progress.fruitless >= MAX_FRUITLESS_ATTEMPTS or progress.attempts >= MAX_ATTEMPTS_OF_SEQUENCE:
            self.fail(self._final(error))
            return
        ended = finish_reason(
            self.request.sampling,
            len(self.request.prompt_token_ids),
            progress.output_token_ids,
            self._placer.max_model_len(),
        )
        if ended is not None:
            # Its last token had arrived; only the word that it was the last had not.
            self._push(TokenDelta(index, (), (), ended[0], ended[1]))
            self._end(progress)
            return
        if not self._orphans:
            self._loop.call_soon(self._move_orphans, error)
        self._orphans[index] = is_loss

    def _move_orphans(self, error: PdserveError) -> None:
        """Called after the message or loss that orphaned them was taken in whole, so that fresh ones go together."""
        orphans, self._orphans = self._orphans, {}
        orphans = {index: is_loss for index, is_loss in orphans.items() if self.unplaced((index,))}
        fresh = [index for index in orphans if not self._sequences[index].output_token_ids]
        groups = [[index] for index in orphans if index not in fresh]
        if fresh:
            groups.append(fresh)
        for group in groups:
            is_loss = all(orphans[index] for index in group)
            fruitless = max(self._sequences[index].fruitless for index in group)
            if is_loss:
                self._counters.failovers += 1
            elif self._placer.allow_retry():
                self._counters.retries += 1
            else:
                self._counters.retries_denied += 1
                self.fail(self._final(error))
                return
            if is_loss and fruitless == 1:
                pause_s = 0.0
            else:
                longest_s = min(self._timing.retry_longest_s, self._timing.retry_first_s * 2 ** (fruitless - 1))
                pause_s = self._dice.uniform(0.0, longest_s)
            logger.info(
                "request_moved request_id=%s sequences=%d tokens_so_far=%d because=%s",
                self.request.request_id,
                len(group),
                len(self._sequences[group[0]].output_token_ids),
                "node_lost" if is_loss else error.reason,
            )
            task = asyncio.create_task(self._move(group, pause_s))
            self._moving.add(task)
            task.add_done_callback(self._moving.discard)

    async def _move(self, indices: Sequence[int], pause_s: float) -> None:
        try:
            if pause_s > 0.0:
                await asyncio.sleep(pause_s)
            await self._placer.place(self, indices)
        except PdserveError as error:
            self.fail(error)
        except Exception:
            # Whatever it is, the client must be told.
            logger.exception("move_failed request_id=%s", self.request.request_id)
            self.fail(PdserveError("an internal error ended this request"))

    def _reject(self, attempt: Attempt, error: AttemptFailed) -> None:
        """The node sent what no correct node sends: take nothing more from this attempt."""
        logger.error("bad_update attempt_id=%s node_id=%s error=%s", attempt.attempt_id, attempt.node.node_id, error)
        attempt.node.breaker.fault(self._clock())
        if attempt is self._cache_witness:
            self._settle_cache()
        self.avoided.add(attempt.node)
        attempt.cancel()
        for index, progress in enumerate(self._sequences):
            if progress.attempt is attempt and not self.is_over:
                progress.attempt = None
                self._orphan(index, error, is_loss=False)

    def _final(self, error: PdserveError) -> PdserveError:
        """What the client is told when there are no more tries."""
        if isinstance(error, Overloaded):
            return Overloaded(str(error), retry_after_s=self._placer.retry_after_s(), reason=error.reason)
        return error

    def _note_tokens(self, attempt: Attempt, progress: SequenceProgress, token_ids: Sequence[int]) -> None:
        now = self._clock()
        attempt.note_tokens()
        progress.output_token_ids.extend(token_ids)
        progress.fruitless = 0
        self.avoided.clear()
        if self._first_token_at is None:
            self._first_token_at = now
            self._ticket.first_token()
        self._last_token_at = now

    def _push(self, delta: TokenDelta) -> None:
        self._deltas.append(delta)
        self._arrived.set()

    def _end(self, progress: SequenceProgress) -> None:
        progress.is_over = True
        progress.attempt = None
        if all(each.is_over for each in self._sequences):
            self._finish(Outcome.FINISHED)

    def _finish(self, outcome: Outcome, error: PdserveError | None = None) -> bool:
        """End in one way, once: cancel what still runs, give everything back, wake the reader."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        self.error = error
        self._timer.cancel()
        for progress in self._sequences:
            if progress.attempt is not None:
                progress.attempt.cancel()
                progress.attempt = None
        for task in self._moving:
            if task is not asyncio.current_task():
                task.cancel()
        self._orphans.clear()
        self._measure_decode()
        self._ticket.close(outcome)
        self._placer.on_over(self)
        self._arrived.set()
        return True

    def _deadline_passed(self) -> None:
        self.fail(DeadlinePassed(f"the request did not end within {self.request.deadline_s:g} s"))

    def _has_all_prompt_logprobs(self) -> bool:
        return len(self.facts.prompt_logprobs) >= len(self.request.prompt_token_ids)

    def _settle_cache(self) -> None:
        """From now on hits are no news: a later attempt finds in the cache what an earlier one computed."""
        self._cache_witness = None
        self._is_cache_settled = True

    def _take_times(self, attempt: Attempt, sent: pb.PhaseTimes) -> None:
        """Phases of the first attempt that tells them; a later one only fills in what that one did not reach."""
        times = self.facts.times
        if self._times_from is None:
            self._times_from = attempt
        waited_s = self._placed_at - self._started_at if self._placed_at is not None else 0.0
        for name, seconds in (
            ("queue_s", sent.queue_s + waited_s),
            ("prefill_s", sent.prefill_s),
            ("transfer_s", sent.transfer_s),
            ("first_decode_s", sent.first_decode_s),
        ):
            known = getattr(times, name)
            if known is None or (attempt is self._times_from and seconds > known):
                setattr(times, name, seconds)

    def _measure_decode(self) -> None:
        """What of the time between first and last token was neither transfer nor the first decode step."""
        if self._first_token_at is None or self._last_token_at is None:
            return
        times = self.facts.times
        before_s = (times.transfer_s or 0.0) + (times.first_decode_s or 0.0)
        times.decode_s = max(0.0, self._last_token_at - self._first_token_at - before_s)

    def output_lengths(self) -> list[int]:
        """Tokens of each sequence so far."""
        return [len(progress.output_token_ids) for progress in self._sequences]
