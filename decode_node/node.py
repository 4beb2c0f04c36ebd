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

from decode_node.attempt import Attempt, UpdateSink, refuse
from decode_node.beam_group import BeamGroup
from decode_node.beam_search import begin_search, commit_beam
from decode_node.config import DecodeConfig
from decode_node.door import Door
from decode_node.host_copies import RestoreBlocks
from decode_node.receiver import HandoffReceiver
from decode_node.scheduler import DecodeDecision, DecodeScheduler, Slice
from decode_node.sequence import DecodeSequence, next_place
from decode_node.session import Session
from decode_node.step import SliceResult, StepResult, run_step
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
from engine.ids import AttemptId, BlockId
from engine.model_runner import Runner
from engine.node_status import NodeCounters, status_message
from engine.step_loop import StepLoop
from engine.tokens import SampledToken
from kv_transfer.channels import Channel, Channels
from proto import worker_pb2 as pb

logger = logging.getLogger(__name__)

_REAP_INTERVAL_S = 0.25


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
            itl_bound_s=config.itl_bound_s,
            swap_bytes=config.swap_bytes,
            shortest_first=config.scheduling_policy == "priority",
        )
        self.step_loop: StepLoop[DecodeDecision, StepResult] = StepLoop(
            decide=self._decide, run=self._run, commit=self._commit, fail=self._fail
        )
        self._config = config
        self._runner = runner
        self._door = Door(
            identity=description.identity,
            layout=runner.layout,
            num_blocks=runner.num_blocks,
            vocab_size=runner.vocab_size,
            max_model_len=runner.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            by_priority=config.scheduling_policy == "priority",
        )
        self._offer = offer
        self._attempts: dict[AttemptId, Attempt] = {}
        self._by_sequence: dict[DecodeSequence, Attempt] = {}
        self._by_reservation: dict[object, HandoffReceiver] = {}
        self._receivers: dict[DecodeSequence, HandoffReceiver] = {}  # by leader
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
            self._compute(attempt, attempt.sequences)
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
        status.allocated_slots = self.scheduler.allocated_slots
        status.unused_slots = self.scheduler.unused_slots
        status.reserved_blocks = self.scheduler.num_reserved_blocks
        status.swaps = self.scheduler.host_copies.count
        status.swap_bytes = self.scheduler.host_copies.num_bytes
        status.expected_output_tokens = self.scheduler.lengths.mean
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
        if attempt.beams is not None:
            # A search chooses among many, and has the last prompt token computed here again for their probabilities.
            attempt.note_token()
            return
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
        transfer_s = time.monotonic() - receiver.granted_s
        self.counters.record_transfer(receiver.transport, receiver.bytes_received, transfer_s)
        self.scheduler.costs.handed_off.record(
            receiver.num_tokens - receiver.reservation.blocks_held * self.layout.block_size,
            time.monotonic() - receiver.opened_s,
        )
        self._by_reservation.pop(receiver.reservation, None)
        self._receivers.pop(receiver.leader, None)
        # Should it be preempted, that node is the likeliest to know its prompt.
        attempt.prefill_targets.insert(0, receiver.target)
        attempt.report_committed()
        self.scheduler.join(receiver.reservation)
        self._admit()
        self._flush()

    def on_given_up(self, receiver: HandoffReceiver, error: PdserveError, *, cancelled: bool) -> None:
        """The hand-off ended without commit: try the next prefill node, or compute the prompt here."""
        attempt = receiver.attempt
        self._by_reservation.pop(receiver.reservation, None)
        self._receivers.pop(receiver.leader, None)
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
            attempt.prefill_targets.insert(0, receiver.target)
            self._compute(attempt, receiver.family, use_cache=False)
        else:
            self._compute(attempt, receiver.family)
        self._flush()

    def count_ignored(self, count: int) -> None:
        """Messages out of their time."""
        self.counters.messages_ignored += count

    # -- prefill: elsewhere or here -------------------------------------------------------------------------

    def _compute(self, attempt: Attempt, family: Sequence[DecodeSequence], *, use_cache: bool = True) -> None:
        """Have the tokens of a family computed: by the next prefill node, or here."""
        alive = [sequence for sequence in family if not sequence.is_ended]
        if not alive:
            return
        for sequence in family:
            sequence.siblings = []
        if len(alive) > 1 and any(sequence.output_token_ids for sequence in alive):
            # With different first tokens there is no common prompt left to hand off.
            self._compute_here(alive)
            return
        leader, *leader.siblings = alive
        cached_blocks = self.scheduler.reusable_blocks(leader) if use_cache else 0
        uncached = leader.num_tokens - cached_blocks * self.layout.block_size
        if attempt.prefill_targets and (uncached > attempt.local_prefill_threshold or attempt.has_first_tokens):
            self._hand_off(attempt, leader, cached_blocks)
        else:
            self._compute_here([leader])

    def _hand_off(self, attempt: Attempt, leader: DecodeSequence, blocks_held: int) -> None:
        receiver = HandoffReceiver(self, attempt, leader, attempt.prefill_targets.pop(0), blocks_held)
        self.counters.transfers_started += 1
        self._receivers[leader] = receiver
        task = asyncio.create_task(receiver.run(), name=f"handoff-{receiver.handoff_id}")
        self._receiver_tasks[task] = receiver
        task.add_done_callback(self._on_receiver_done)

    def _compute_here(self, leaders: Sequence[DecodeSequence]) -> None:
        self.counters.local_prefills += 1
        for leader in leaders:
            self.scheduler.add(leader)
        self._admit()

    def _move_preempted(self) -> None:
        """What lost its K/V goes to a prefill node where that is quicker, and waits for its turn here where not."""
        for sequence in self.scheduler.take_preempted():
            attempt = self._by_sequence.get(sequence)
            # One that has no tokens yet was computed here by choice. A beam shares its prompt with idle siblings:
            # there may be no room for it once more.
            if attempt is None or not attempt.prefill_targets or not sequence.output_token_ids or attempt.beams:
                continue
            if self.scheduler.costs.hand_off_is_quicker(sequence.num_tokens):
                self.scheduler.withdraw(sequence)
                # Its blocks are the next to be evicted, so it does not count on them.
                self._hand_off(attempt, sequence, 0)

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
        decision = self.scheduler.decide()
        self._move_preempted()
        return decision

    def _run(self, decision: DecodeDecision) -> StepResult:
        return run_step(decision, self._runner, self.step_loop.pieces_done)

    def _commit(self, decision: DecodeDecision, result: StepResult) -> None:
        self.scheduler.commit(decision, result.moves.failed)
        self._record_costs(decision, result)
        for move in result.moves.failed:
            # What could not be saved is computed again; what could not be restored must not go on without it.
            attempt = self._by_sequence.get(move.sequence) if isinstance(move, RestoreBlocks) else None
            if attempt is not None:
                self._fail_attempt(attempt, AttemptFailed("its K/V could not be restored", reason="restore_failed"))
        for piece, slice_result in zip(decision.slices, result.slices, strict=True):
            attempt = self._by_sequence.get(piece.sequence)
            if attempt is not None:
                self._commit_slice(attempt, piece, slice_result)
        self._flush()
        self.faults.reach_now("after_decode_step")

    def _record_costs(self, decision: DecodeDecision, result: StepResult) -> None:
        costs = self.scheduler.costs
        costs.copied.record(result.moves.host_bytes, result.moves.host_seconds)
        seconds = time.monotonic() - self._step_started_s - result.moves.seconds
        prompts = [piece.length for piece in decision.slices if piece.length > 1]
        costs.record_step(
            seconds=seconds, decode_tokens=len(decision.slices) - len(prompts), prompt_tokens=sum(prompts)
        )
        if prompts:
            self.counters.prefill.record(sum(prompts), seconds)

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
        if attempt.beams is not None:
            # A beam that was computed again behind its siblings' backs: they have gone on, and it with them.
            if piece.start + piece.length == sequence.num_tokens:
                self._commit_beam(attempt, attempt.beams, sequence, result.tokens[0])
            return
        sampled = [sequence, *sequence.siblings]
        if sequence.siblings:
            self.scheduler.fork(sequence)
        for receiver_of_token, token in zip(sampled, result.tokens, strict=True):
            if receiver_of_token.is_ended:
                continue
            if isinstance(token, AttemptFailed):
                attempt.report_error(receiver_of_token.index, token)
                self.scheduler.end(receiver_of_token)
            else:
                self._add_token(attempt, receiver_of_token, token)
        self._finish_if_over(attempt)

    def _commit_beam(
        self, attempt: Attempt, beams: BeamGroup, sequence: DecodeSequence, token: SampledToken | AttemptFailed
    ) -> None:
        try:
            step = commit_beam(beams, attempt.sequences, sequence, token, self.scheduler)
        except AttemptFailed as error:
            self._fail_attempt(attempt, error)
            return
        if step is None:
            return
        attempt.note_token()
        attempt.sequences = step.beams
        for beam in step.born:
            self._by_sequence[beam] = attempt
        for beam in step.overtaken:
            self._drop_sequence(beam, "beam_overtaken")
        if beams.hypotheses is not None:
            self.counters.tokens_generated += attempt.report_hypotheses()
            for beam in step.beams:
                self.scheduler.end(beam)
            self._finish_if_over(attempt)

    def _drop_sequence(self, sequence: DecodeSequence, reason: str) -> None:
        """One that no attempt has any more."""
        del self._by_sequence[sequence]
        self.scheduler.end(sequence, is_whole=False)
        receiver = self._receivers.get(sequence)
        if receiver is not None:
            receiver.cancel(reason)

    def _fail(self, decision: DecodeDecision, error: Exception) -> None:
        self.scheduler.abandon(decision)
        for sequence in decision.sequences:
            attempt = self._by_sequence.get(sequence)
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
        sampling = self._door.check(message)
        root = root_hash(self._runner.fingerprint, tenant_salt=message.tenant_salt)
        prompt = list(message.prompt_token_ids)
        place_s = 0.0
        if self._door.by_priority:
            place_s = time.monotonic() + message.priority * self._config.priority_ageing_s
        if message.HasField("beam_search"):
            beams, sequences = begin_search(message, sampling, root, place_s, self._runner.max_model_len)
            return Attempt(message, sequences, session, beams)
        sequences = [
            DecodeSequence(
                start.index,
                prompt,
                sampling,
                root,
                list(start.output_token_ids),
                next_place(place_s),
                priority=message.priority,
            )
            for start in message.sequences
        ]
        return Attempt(message, sequences, session)

    def _add_token(self, attempt: Attempt, sequence: DecodeSequence, token: SampledToken) -> None:
        self.counters.tokens_generated += 1
        if attempt.add_token(sequence, token, self._runner.max_model_len) is not None:
            self.scheduler.end(sequence)

    def _cancel(self, attempt: Attempt, sequence_index: int | None, reason: str) -> None:
        for index in attempt.unended:
            if sequence_index in (None, index):
                attempt.report_cancelled(index)
        for sequence in attempt.sequences:
            # A search goes on while any of its results is wanted.
            if not attempt.unended if attempt.beams is not None else sequence_index in (None, sequence.index):
                self.scheduler.end(sequence)
        self._finish_if_over(attempt, reason)
        self._admit()  # What ended may have stood before others that wait.
        self._flush()

    def _fail_attempt(self, attempt: Attempt, error: PdserveError) -> None:
        for index in attempt.unended:
            attempt.report_error(index, error)
        for sequence in attempt.sequences:
            self.scheduler.end(sequence)
        self._finish_if_over(attempt, error.reason)

    def _finish_if_over(self, attempt: Attempt, reason: str = "finished") -> None:
        if not attempt.is_over or self._attempts.pop(attempt.attempt_id, None) is None:
            return
        for sequence in attempt.sequences:
            del self._by_sequence[sequence]
            receiver = self._receivers.get(sequence)
            if receiver is not None:
                receiver.cancel(reason)
        if not self._attempts:
            self._is_idle.set()
        self._admit()

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
