"""The decode node: attempts in, tokens out. Knows no gRPC server.

Life of an attempt here (hand-off states in kv_transfer/handoff.py, queues in scheduler.py):

    start      checked                                        refused -> one error per sequence, nothing is held
    prefill    handed off to the first prefill node that takes it, or queued here when the uncached rest is short, none
               is given, or all have failed
    decode     its sequences run in every step
    over       every sequence ended by itself, by its router, or with an error; its hand-off is cancelled, its blocks
               are free or quarantined within the step
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from decode_node.attempt import Attempt, UpdateSink, refuse
from decode_node.config import DecodeConfig
from decode_node.receiver import HandoffReceiver
from decode_node.scheduler import DecodeDecision, DecodeScheduler, DecodeSequence, Slice
from decode_node.session import Session
from engine.block_hash import root_hash
from engine.block_pool import BlockPool
from engine.errors import (
    AttemptFailed,
    DeadlinePassed,
    InvalidRequest,
    Overloaded,
    PdserveError,
    Unavailable,
)
from engine.faults import Faults
from engine.forward_batch import SequenceSlice, WantedLogits, build_batch
from engine.ids import AttemptId, BlockId
from engine.model_runner import Runner
from engine.node_status import NodeCounters, status_message
from engine.sampling import SampleRow, prompt_logprobs, sample
from engine.step_loop import StepLoop
from engine.tokens import PositionLogprobs, SampledToken
from kv_transfer.channels import Channel, Channels
from kv_transfer.wire import sampling_from_wire
from proto import worker_pb2 as pb

logger = logging.getLogger(__name__)

_REAP_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class SliceResult:
    """What a step computed for one slice; tokens only for a sequence's last slice, one for it and each sibling."""

    tokens: tuple[SampledToken | AttemptFailed, ...]
    prompt_logprobs: tuple[PositionLogprobs, ...]
    error: AttemptFailed | None = None


class DecodeNode:
    """Owns the pool, the scheduler and every attempt of one decode process.

    Args:
        offer: how the pool can be written to from other processes of this host; None offers nothing.
    """

    def __init__(
        self,
        config: DecodeConfig,
        runner: Runner,
        description: pb.NodeDescription,
        faults: Faults,
        offer: Callable[[], pb.SharedMemoryOffer] | None = None,
    ) -> None:
        self.description = description
        self.faults = faults
        self.layout = runner.layout
        self.counters = NodeCounters()
        self.pool = BlockPool(runner.num_blocks)
        engine = config.node.engine
        self.scheduler = DecodeScheduler(
            self.pool,
            runner.layout,
            max_num_batched_tokens=max(engine.max_num_batched_tokens, engine.max_num_seqs),
            max_num_seqs=engine.max_num_seqs,
        )
        self.step_loop: StepLoop[DecodeDecision, list[SliceResult]] = StepLoop(
            decide=self._decide, run=self._run, commit=self._commit, fail=self._fail
        )
        self._config = config
        self._runner = runner
        self._offer = offer
        self._device = torch.device(engine.device)
        self._attempts: dict[AttemptId, Attempt] = {}
        self._by_sequence: dict[DecodeSequence, Attempt] = {}
        self._by_reservation: dict[object, HandoffReceiver] = {}
        self._receivers: dict[Attempt, HandoffReceiver] = {}
        self._receiver_tasks: dict[asyncio.Task[None], HandoffReceiver] = {}
        self._sessions: set[Session] = set()
        self._channels = Channels(config.node.cluster_token)
        self._step_started_s = 0.0
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    # -- for the server -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.step_loop.run())
            tasks.create_task(self._reap())

    def open_session(self, router_id: str) -> Session:
        """A router connected."""
        session = Session(router_id, self.description.identity)
        self._sessions.add(session)
        return session

    def close_session(self, session: Session) -> None:
        """A router is gone: free everything it had here."""
        self._sessions.discard(session)
        for attempt in [attempt for attempt in self._attempts.values() if attempt.sink is session]:
            self._cancel(attempt, None, "router_gone")

    def start(self, message: pb.StartAttempt, session: Session) -> None:
        """Begin an attempt; whatever is wrong with it is told to its router."""
        try:
            attempt = self._attempt(message, session)
        except PdserveError as error:
            logger.info("attempt_refused attempt_id=%s reason=%s", message.attempt_id[:64], error.reason)
            refuse(session, message, error)
            session.flush()
            return
        self._attempts[attempt.attempt_id] = attempt
        self._is_idle.clear()
        for sequence in attempt.sequences:
            self._by_sequence[sequence] = attempt
        try:
            self._begin_prefill(attempt, message.local_prefill_threshold)
        except Exception as error:  # One request's trouble must not break its router's session.
            logger.exception("attempt_crashed attempt_id=%s", attempt.attempt_id)
            self._fail_attempt(attempt, AttemptFailed(f"it failed to start: {type(error).__name__}", reason="internal"))
            self._flush()

    def cancel(self, message: pb.CancelAttempt, session: Session) -> None:
        """End an attempt or one sequence of it. Unknown ones are counted and ignored: they may just have ended."""
        attempt = self._attempts.get(AttemptId(message.attempt_id))
        if attempt is None or attempt.sink is not session:
            self.counters.messages_ignored += 1
            return
        index = message.sequence_index if message.HasField("sequence_index") else None
        self._cancel(attempt, index, "cancelled")

    def status(self) -> pb.NodeStatus:
        """How the node is now."""
        status = status_message(
            self.description.identity,
            self.pool.counts,
            self.counters,
            steps=self.step_loop.steps,
            last_step_age_s=self.step_loop.last_step_age_s,
            progress_deadline_s=self._config.node.progress_deadline_s,
            is_draining=self._is_draining,
        )
        status.leases = self.scheduler.num_reserved
        status.in_flight = len(self._attempts)
        status.running_sequences = self.scheduler.num_running
        status.waiting_sequences = self.scheduler.num_waiting
        status.waiting_tokens = self.scheduler.waiting_tokens
        status.preemptions = self.scheduler.preemptions
        return status

    async def drain(self, timeout_s: float) -> tuple[int, int]:
        """Refuse new attempts, finish what is held; returns (finished, cut short)."""
        self._is_draining = True
        held = len(self._attempts)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        cut_short = len(self._attempts)
        for attempt in list(self._attempts.values()):
            self._fail_attempt(attempt, Unavailable("the decode node shuts down", reason="draining"))
        self._flush()
        return held - cut_short, cut_short

    async def close(self) -> None:
        """End what still runs and give back connections."""
        for attempt in list(self._attempts.values()):
            self._cancel(attempt, None, "node_closes")
        for task in list(self._receiver_tasks):
            task.cancel()
        await asyncio.gather(*self._receiver_tasks, return_exceptions=True)
        await self._channels.close()

    # -- for the receivers ----------------------------------------------------------------------------------

    def block_bytes(self, block_id: BlockId) -> memoryview:
        """The bytes of one block of the pool."""
        return self._runner.block_bytes(block_id)

    def shared_memory_offer(self) -> pb.SharedMemoryOffer | None:
        """How prefill nodes of this host may write into the pool."""
        return self._offer() if self._offer is not None else None

    def channel(self, address: str) -> Channel:
        """The connection to a prefill node."""
        return self._channels.get(address)

    def ask_blocks(self, receiver: HandoffReceiver) -> None:
        """A prefill node has begun: reserve blocks, now or in turn."""
        self._by_reservation[receiver.reservation] = receiver
        self.scheduler.ask(receiver.reservation)
        self._admit()

    def quarantine(self, block_ids: Sequence[BlockId]) -> None:
        """A prefill node may still write there."""
        self.pool.quarantine(block_ids)

    def end_quarantine(self, block_ids: Sequence[BlockId]) -> None:
        """Nobody writes there any more."""
        self.pool.end_quarantine(block_ids)
        self._admit()

    def on_first_tokens(self, receiver: HandoffReceiver, tokens: dict[int, SampledToken]) -> None:
        """The prompt's next tokens: the client may have them before the last block has arrived."""
        attempt = receiver.attempt
        for sequence in attempt.sequences:
            token = tokens.get(sequence.index)
            if token is not None and not sequence.is_ended:
                self._add_token(attempt, sequence, token)
        if attempt.is_over:
            self._finish_if_over(attempt)
        self._flush()

    def on_committed(self, receiver: HandoffReceiver) -> None:
        """Every block is here: decode from the next step on."""
        attempt = receiver.attempt
        self.counters.transfers_committed += 1
        self.counters.kv_bytes += receiver.bytes_received
        self._by_reservation.pop(receiver.reservation, None)
        self._receivers.pop(attempt, None)
        attempt.report_committed()
        self._copy_blocks(self.scheduler.join(receiver.reservation))
        self._admit()
        self._flush()

    def on_given_up(self, receiver: HandoffReceiver, error: PdserveError, *, cancelled: bool) -> None:
        """The hand-off ended without commit: try the next prefill node, or compute the prompt here."""
        attempt = receiver.attempt
        self._by_reservation.pop(receiver.reservation, None)
        self._receivers.pop(attempt, None)
        self.scheduler.give_up(receiver.reservation)
        if cancelled:
            self.counters.transfers_aborted += 1
        else:
            self.counters.transfers_failed += 1
            self.counters.record_failure(error.reason)
            logger.warning(
                "handoff_failed handoff_id=%s request_id=%s prefill_node=%s reason=%s",
                receiver.handoff_id,
                attempt.request_id,
                receiver.target.identity.node_id,
                error.reason,
            )
        self._admit()
        if attempt.attempt_id not in self._attempts or attempt.is_over:
            return
        if isinstance(error, InvalidRequest):
            self._fail_attempt(attempt, error)
        elif receiver.reservation.lost_prefix:
            # Nothing is wrong with that node; only our own cache changed, and must not be counted on again.
            self._hand_off(attempt, receiver.target, use_cache=False)
        else:
            self._try_next(attempt)
        self._flush()

    def count_ignored(self, count: int) -> None:
        """Messages out of their time."""
        self.counters.messages_ignored += count

    # -- prefill: elsewhere or here -------------------------------------------------------------------------

    def _begin_prefill(self, attempt: Attempt, local_prefill_threshold: int) -> None:
        cached_blocks = self.scheduler.reusable_blocks(attempt.leader)
        uncached = attempt.leader.num_tokens - cached_blocks * self.layout.block_size
        if attempt.prefill_targets and uncached > local_prefill_threshold:
            self._hand_off(attempt)
        else:
            self._prefill_here(attempt)

    def _try_next(self, attempt: Attempt) -> None:
        # With several sequences that already have different first tokens there is no common prompt left to hand off.
        alone = len([sequence for sequence in attempt.sequences if not sequence.is_ended]) == 1
        if attempt.prefill_targets and (alone or not attempt.has_first_tokens):
            self._hand_off(attempt)
        else:
            self._prefill_here(attempt)

    def _hand_off(self, attempt: Attempt, target: pb.PrefillTarget | None = None, *, use_cache: bool = True) -> None:
        leader = self._lead(attempt)
        target = target or attempt.prefill_targets.pop(0)
        blocks_held = self.scheduler.reusable_blocks(leader) if use_cache else 0
        receiver = HandoffReceiver(self, attempt, target, blocks_held)
        self.counters.transfers_started += 1
        self._receivers[attempt] = receiver
        task = asyncio.create_task(receiver.run(), name=f"handoff-{receiver.handoff_id}")
        self._receiver_tasks[task] = receiver
        task.add_done_callback(self._on_receiver_done)

    def _prefill_here(self, attempt: Attempt) -> None:
        self.counters.local_prefills += 1
        if attempt.has_first_tokens:
            for sequence in attempt.sequences:
                sequence.siblings = []
                if not sequence.is_ended:
                    self.scheduler.add(sequence)
        else:
            self.scheduler.add(self._lead(attempt))
        self._admit()
        self.step_loop.wake()

    def _lead(self, attempt: Attempt) -> DecodeSequence:
        """Make the first wanted sequence the one whose prompt is computed for all."""
        leader = attempt.leader
        for sequence in attempt.sequences:
            sequence.siblings = []
        leader.siblings = [
            sequence for sequence in attempt.sequences if sequence is not leader and not sequence.is_ended
        ]
        return leader

    def _on_receiver_done(self, task: asyncio.Task[None]) -> None:
        receiver = self._receiver_tasks.pop(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("handoff_crashed handoff_id=%s", receiver.handoff_id, exc_info=task.exception())
            receiver.fail(AttemptFailed("the hand-off crashed on the decode node", reason="internal"))

    # -- steps ----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Blocks or places may have become free."""
        self._grant()
        self.step_loop.wake()

    def _grant(self) -> None:
        for reservation in self.scheduler.admit():
            self._by_reservation[reservation].grant()

    def _decide(self) -> DecodeDecision | None:
        self._grant()
        self._step_started_s = time.monotonic()
        return self.scheduler.decide()

    def _run(self, decision: DecodeDecision) -> list[SliceResult]:
        slices = [
            SequenceSlice(
                token_ids=piece.sequence.tokens(piece.start, piece.start + piece.length),
                start=piece.start,
                block_ids=piece.sequence.block_ids,
                logits=_wanted_logits(piece),
            )
            for piece in decision.slices
        ]
        batch = build_batch(slices, block_size=self.layout.block_size, device=self._device)
        logits = self._runner.run(batch, on_layer=lambda layer: self.step_loop.record_progress())
        sample_rows: list[SampleRow] = []
        logits_rows: list[int] = []
        row = 0
        prompt_rows: list[tuple[PositionLogprobs, ...] | AttemptFailed] = []
        for piece, slice_ in zip(decision.slices, slices, strict=True):
            num_rows = {"none": 0, "last": 1, "all": piece.length}[slice_.logits]
            try:
                prompt_rows.append(_prompt_logprobs(piece, logits[row : row + num_rows]))
            except AttemptFailed as error:
                prompt_rows.append(error)
            row += num_rows
            if piece.is_last:
                for sequence in _sampled(piece):
                    sample_rows.append(_sample_row(sequence))
                    logits_rows.append(row - 1)
        sampled = iter(sample(logits[logits_rows], sample_rows) if sample_rows else [])
        return [
            _slice_result(tuple(next(sampled) for _ in _sampled(piece)) if piece.is_last else (), positions)
            for piece, positions in zip(decision.slices, prompt_rows, strict=True)
        ]

    def _commit(self, decision: DecodeDecision, results: list[SliceResult]) -> None:
        self.scheduler.commit(decision)
        prompt_tokens = sum(piece.length for piece in decision.slices if piece.length > 1)
        if prompt_tokens:
            self.counters.record_prefill_rate(prompt_tokens, time.monotonic() - self._step_started_s)
        for piece, result in zip(decision.slices, results, strict=True):
            attempt = self._by_sequence.get(piece.sequence)
            if attempt is None:
                continue
            self._commit_slice(attempt, piece, result)
        self._flush()
        self.faults.reach_now("after_decode_step")

    def _commit_slice(self, attempt: Attempt, piece: Slice, result: SliceResult) -> None:
        sequence = piece.sequence
        if not attempt.has_first_tokens:
            attempt.note_local_prefill(self._step_started_s)
            if sequence.num_preemptions == 0:
                self.counters.prefill_tokens_computed += piece.length
                if attempt.report_cached_tokens(piece.start):
                    self.counters.prefill_tokens_cached += piece.start
        if result.error is not None and not piece.is_last:
            self._fail_attempt(attempt, result.error)
            return
        if result.prompt_logprobs:
            first = piece.start + 1 if piece.start else 0
            attempt.report_prompt_logprobs(first, result.prompt_logprobs)
        if not piece.is_last:
            return
        sampled = [sequence, *sequence.siblings]
        if sequence.siblings:
            self._copy_blocks(self.scheduler.fork(sequence))
        for receiver_of_token, token in zip(sampled, result.tokens, strict=True):
            if receiver_of_token.is_ended:
                continue
            if isinstance(token, AttemptFailed):
                attempt.report_error(receiver_of_token, token)
                self.scheduler.end(receiver_of_token)
            else:
                self._add_token(attempt, receiver_of_token, token)
        self._finish_if_over(attempt)

    def _fail(self, decision: DecodeDecision, error: Exception) -> None:
        self.scheduler.abandon(decision)
        for piece in decision.slices:
            attempt = self._by_sequence.get(piece.sequence)
            if attempt is not None:
                self._fail_attempt(
                    attempt, AttemptFailed(f"the step failed: {type(error).__name__}", reason="step_failed")
                )
        self._flush()

    # -- inside ---------------------------------------------------------------------------------------------

    def _attempt(self, message: pb.StartAttempt, session: UpdateSink) -> Attempt:
        if self._is_draining:
            raise Unavailable("the decode node drains", reason="draining")
        if len(self._attempts) >= self._config.max_waiting + self._config.node.engine.max_num_seqs:
            raise Overloaded("the decode node's queue is full", reason="decode_queue_full")
        if not message.attempt_id or message.attempt_id in self._attempts:
            raise AttemptFailed("the attempt id is missing or in use", reason="attempt_id_reused")
        if message.decode_node != self.description.identity:
            raise AttemptFailed("the attempt is for another incarnation of this node", reason="epoch_mismatch")
        sampling = sampling_from_wire(message.sampling)
        sampling.check_token_ids(self._runner.vocab_size)
        prompt = list(message.prompt_token_ids)
        outputs = [list(start.output_token_ids) for start in message.sequences]
        if not prompt or max((*prompt, *(token for output in outputs for token in output))) >= self._runner.vocab_size:
            raise InvalidRequest("the prompt is empty or has a token id outside the vocabulary", param="prompt")
        indices = [start.index for start in message.sequences]
        if not indices or len(set(indices)) < len(indices) or (len(indices) > 1 and any(outputs)):
            raise InvalidRequest("sequences must be distinct, and a moved one must come alone", param="sequences")
        places = self._config.node.engine.max_num_seqs
        if len(indices) > places:
            raise InvalidRequest(f"n is {len(indices)}, and a decode node runs {places} sequences at once", param="n")
        if any(len(output) >= sampling.max_tokens for output in outputs):
            raise InvalidRequest("a sequence has all of its tokens already", param="sequences")
        longest = min(len(prompt) + sampling.max_tokens, self._runner.max_model_len)
        if len(prompt) >= self._runner.max_model_len:
            raise InvalidRequest("the prompt is longer than the context", param="prompt")
        if any(len(prompt) + len(output) >= self._runner.max_model_len for output in outputs):
            raise AttemptFailed("the moved sequence is longer than this node's context", reason="context_too_short")
        if self.layout.blocks_for(longest) > self.pool.counts.total:
            raise InvalidRequest("prompt and max_tokens need more KV blocks than a decode node has", param="max_tokens")
        root = root_hash(self._runner.fingerprint, tenant_salt=message.tenant_salt)
        sequences = [
            DecodeSequence(start.index, prompt, sampling, root, output)
            for start, output in zip(message.sequences, outputs, strict=True)
        ]
        return Attempt(message, sequences, session)

    def _add_token(self, attempt: Attempt, sequence: DecodeSequence, token: SampledToken) -> None:
        self.counters.tokens_generated += 1
        if attempt.add_token(sequence, token, self._runner.max_model_len) is not None:
            self.scheduler.end(sequence)

    def _cancel(self, attempt: Attempt, sequence_index: int | None, reason: str) -> None:
        for sequence in attempt.sequences:
            if sequence_index in (None, sequence.index) and not sequence.is_ended:
                attempt.report_cancelled(sequence)
                self.scheduler.end(sequence)
        self._finish_if_over(attempt, reason)
        self._flush()

    def _fail_attempt(self, attempt: Attempt, error: PdserveError) -> None:
        for sequence in attempt.sequences:
            if not sequence.is_ended:
                attempt.report_error(sequence, error)
                self.scheduler.end(sequence)
        self._finish_if_over(attempt, error.reason)

    def _finish_if_over(self, attempt: Attempt, reason: str = "finished") -> None:
        if not attempt.is_over or self._attempts.pop(attempt.attempt_id, None) is None:
            return
        for sequence in attempt.sequences:
            del self._by_sequence[sequence]
        receiver = self._receivers.get(attempt)
        if receiver is not None:
            receiver.cancel(reason)
        if not self._attempts:
            self._is_idle.set()
        self._admit()

    def _copy_blocks(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        for source, destination in copies:
            self._runner.copy_block(source, destination)

    def _flush(self) -> None:
        for session in self._sessions:
            session.flush()

    async def _reap(self) -> None:
        """End what outlives its deadline; independent of admission and of new work."""
        while True:
            await asyncio.sleep(_REAP_INTERVAL_S)
            now_s = time.monotonic()
            for attempt in list(self._attempts.values()):
                if now_s > attempt.deadline_s:
                    self._fail_attempt(attempt, DeadlinePassed("the request's deadline passed"))
            for receiver in list(self._receiver_tasks.values()):
                try:
                    receiver.enforce_deadlines(
                        now_s, self._config.node.progress_deadline_s, self._config.handoff_deadline_s
                    )
                except Exception:  # One hand-off's trouble must not keep the others from being reaped.
                    logger.exception("reap_failed handoff_id=%s", receiver.handoff_id)
            await self._channels.close_unused({receiver.target.address for receiver in self._receiver_tasks.values()})
            self._flush()


def _slice_result(
    tokens: tuple[SampledToken | AttemptFailed, ...], positions: tuple[PositionLogprobs, ...] | AttemptFailed
) -> SliceResult:
    if isinstance(positions, AttemptFailed):
        return SliceResult(tuple(positions for _ in tokens), (), positions)
    return SliceResult(tokens, positions)


def _sampled(piece: Slice) -> tuple[DecodeSequence, ...]:
    return (piece.sequence, *piece.sequence.siblings)


def _sample_row(sequence: DecodeSequence) -> SampleRow:
    return SampleRow(
        params=sequence.sampling,
        sequence_index=sequence.index,
        prompt_token_ids=sequence.prompt_token_ids,
        output_token_ids=sequence.output_token_ids,
    )


def _wants_prompt_logprobs(piece: Slice) -> bool:
    sequence = piece.sequence
    return sequence.sampling.prompt_logprobs is not None and not sequence.output_token_ids


def _wanted_logits(piece: Slice) -> WantedLogits:
    if _wants_prompt_logprobs(piece):
        return "all"
    return "last" if piece.is_last else "none"


def _prompt_logprobs(piece: Slice, logits: torch.Tensor) -> tuple[PositionLogprobs, ...]:
    """Args: logits: [rows, vocab], the rows that `_wanted_logits` asked for."""
    sequence = piece.sequence
    top = sequence.sampling.prompt_logprobs
    if top is None or not _wants_prompt_logprobs(piece):
        return ()
    positions: list[PositionLogprobs] = [()] if piece.start == 0 else []
    end = min(piece.start + piece.length + 1, len(sequence.prompt_token_ids))
    following = sequence.prompt_token_ids[piece.start + 1 : end]
    return (*positions, *prompt_logprobs(logits[: len(following)], following, top))
