"""The prefill node: hand-offs in, KV blocks and first tokens out. Knows no gRPC.

Life of a hand-off here (states in kv_transfer/handoff.py, queues in scheduler.py):

    open      checked, queued                              refused -> `PdserveError`, nothing is held
    start     blocks reserved, first chunk chosen          decode is told, and looks for blocks of its own
    compute   chunk by chunk; each full block goes out as soon as decode has granted
    first     the last chunk's logits give the first token of every sequence; it goes out before the last block
    over      committed, failed or cancelled: the writer has returned, then the blocks are released (still findable)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from dataclasses import dataclass

import torch

from engine.block_hash import hash_chain, root_hash
from engine.block_pool import BlockPool
from engine.errors import AttemptFailed, InvalidRequest, Overloaded, Unavailable
from engine.faults import Faults
from engine.forward_batch import SequenceSlice, WantedLogits, build_batch
from engine.ids import AttemptId, BlockId
from engine.model_runner import Runner
from engine.node_status import NodeCounters, status_message
from engine.sampling import SampleRow, prompt_logprobs, sample
from engine.step_loop import StepLoop
from engine.tokens import PositionLogprobs, SampledToken
from kv_transfer.handoff import HandoffState
from kv_transfer.pool_memory import PeerPools
from kv_transfer.transports import choose_transport
from kv_transfer.wire import fingerprint_from_wire, sampling_from_wire
from prefill_node.config import PrefillConfig
from prefill_node.scheduler import Chunk, PrefillDecision, PrefillJob, PrefillScheduler
from prefill_node.sender import HandoffSender
from proto import worker_pb2 as pb

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 0.5
_REAP_INTERVAL_S = 0.25
_MAX_SEQUENCES = 1024
"""First tokens of one hand-off; a step samples them one by one."""


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What a step computed for one chunk; `first_tokens` only for a job's last chunk."""

    first_tokens: tuple[SampledToken | AttemptFailed, ...]
    prompt_logprobs: tuple[PositionLogprobs, ...]
    error: AttemptFailed | None = None


class PrefillNode:
    """Owns the pool, the scheduler and every hand-off of one prefill process."""

    def __init__(self, config: PrefillConfig, runner: Runner, description: pb.NodeDescription, faults: Faults) -> None:
        self.description = description
        self.faults = faults
        self.layout = runner.layout
        self.counters = NodeCounters()
        self.pool = BlockPool(runner.num_blocks)
        engine = config.node.engine
        self.scheduler = PrefillScheduler(
            self.pool,
            runner.layout,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
            max_ungranted=config.max_ungranted,
            policy=config.scheduling_policy,
        )
        self.step_loop: StepLoop[PrefillDecision, list[ChunkResult]] = StepLoop(
            decide=self._decide, run=self._run, commit=self._commit, fail=self._fail
        )
        self._config = config
        self._runner = runner
        self._peer_pools = PeerPools()
        self._senders: dict[AttemptId, HandoffSender] = {}
        self._by_job: dict[PrefillJob, HandoffSender] = {}
        self._peer_slots: defaultdict[tuple[str, int], asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(config.max_sending_per_peer)
        )
        self._step_started_s = 0.0
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    # -- for the server -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.step_loop.run())
            tasks.create_task(self._show_progress())
            tasks.create_task(self._reap())

    def open(self, message: pb.OpenHandoff) -> HandoffSender:
        """Check and queue a hand-off.

        Raises:
            InvalidRequest: no prefill node of this kind could do it.
            Overloaded, Unavailable, AttemptFailed: another might.
        """
        attempt_id = AttemptId(message.attempt_id)
        self._check_admission(attempt_id)
        fingerprint = fingerprint_from_wire(message.fingerprint)
        difference = self._runner.fingerprint.difference(fingerprint)
        if difference is not None:
            raise AttemptFailed(f"the decode node runs something else: {difference}", reason="fingerprint_mismatch")
        job = self._job(attempt_id, message)
        num_blocks = self.layout.blocks_for(job.num_tokens)
        transport = choose_transport(message, self._peer_pools, self.layout)
        sender = HandoffSender(self, message, job, transport, num_blocks)
        self._senders[attempt_id] = sender
        self._is_idle.clear()
        self._by_job[job] = sender
        self.scheduler.add(job)
        self.counters.transfers_started += 1
        self.step_loop.wake()
        return sender

    def is_writing(self, attempt_id: str) -> bool:
        """Whether this attempt may still write into decode's memory."""
        return attempt_id in self._senders

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
        status.leases = self.scheduler.num_leases
        status.in_flight = len(self._senders)
        status.running_sequences = self.scheduler.num_computing
        status.waiting_sequences = self.scheduler.num_waiting
        status.waiting_tokens = self.scheduler.waiting_tokens
        return status

    async def drain(self, timeout_s: float) -> tuple[int, int]:
        """Refuse new hand-offs, finish what is held; returns (finished, cut short)."""
        self._is_draining = True
        held = len(self._senders)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        cut_short = len(self._senders)
        for sender in list(self._senders.values()):
            sender.fail(Unavailable("the prefill node shuts down", reason="draining"))
        return held - cut_short, cut_short

    async def close(self) -> None:
        """End what still runs and give back mapped memory."""
        for sender in list(self._senders.values()):
            sender.fail(Unavailable("the prefill node shuts down", reason="draining"))
        self._peer_pools.close()

    # -- for the senders ------------------------------------------------------------------------------------

    def block_bytes(self, block_id: BlockId) -> memoryview:
        """The bytes of one block of the pool."""
        return self._runner.block_bytes(block_id)

    def on_grant(self, sender: HandoffSender) -> None:
        """Decode has room: another job may start."""
        sender.job.is_ungranted = sender.machine.is_ungranted
        self.step_loop.wake()

    def on_stopping(self, sender: HandoffSender) -> None:
        """The hand-off is over; its blocks are read until the writer has returned."""
        self.scheduler.stop(sender.job)

    def on_writing_stopped(self, sender: HandoffSender) -> None:
        """The hand-off is over and nothing reads its blocks any more."""
        del self._senders[sender.job.attempt_id]
        del self._by_job[sender.job]
        if not self._senders:
            self._is_idle.set()
        match sender.machine.state:
            case HandoffState.COMMITTED:
                self.counters.transfers_committed += 1
            case HandoffState.CANCELLED:
                self.counters.transfers_aborted += 1
            case _:
                self.counters.transfers_failed += 1
                self.counters.record_failure(sender.machine.reason)
        self.counters.record_transfer(sender.transport.kind, sender.sent.bytes_sent, sender.sending_s)
        self.scheduler.finish(sender.job)
        self.step_loop.wake()

    def count_ignored(self, count: int) -> None:
        """Messages out of their time."""
        self.counters.messages_ignored += count

    def peer_slot(self, peer: tuple[str, int]) -> asyncio.Semaphore:
        """Bounds what one decode node can hold up; others have slots of their own."""
        return self._peer_slots[peer]

    # -- steps ----------------------------------------------------------------------------------------------

    def _decide(self) -> PrefillDecision | None:
        decision = self.scheduler.decide()
        if decision is None:
            return None
        for job in decision.started:
            self.counters.prefill_tokens_cached += job.cached_tokens
            self._by_job[job].on_started()
            # Blocks of a cached prefix are final already.
            self._by_job[job].on_computed(job.cached_tokens // self.layout.block_size)
        self._step_started_s = time.monotonic()
        return decision

    def _run(self, decision: PrefillDecision) -> list[ChunkResult]:
        slices = [
            SequenceSlice(
                token_ids=chunk.job.token_ids[chunk.start : chunk.start + chunk.length],
                start=chunk.start,
                block_ids=chunk.job.block_ids,
                logits=_wanted_logits(chunk),
            )
            for chunk in decision.chunks
        ]
        batch = build_batch(slices, block_size=self.layout.block_size)
        logits = self._runner.run(batch, layers_done=self.step_loop.pieces_done)
        results: list[ChunkResult] = []
        row = 0
        for chunk, piece in zip(decision.chunks, slices, strict=True):
            num_rows = {"none": 0, "last": 1, "all": chunk.length}[piece.logits]
            try:
                results.append(_chunk_result(chunk, logits[row : row + num_rows]))
            except AttemptFailed as error:
                results.append(ChunkResult((), (), error))
            row += num_rows
        self.faults.reach_now("after_chunk")
        return results

    def _commit(self, decision: PrefillDecision, results: list[ChunkResult]) -> None:
        self.counters.prefill.record(
            sum(chunk.length for chunk in decision.chunks), time.monotonic() - self._step_started_s
        )
        self.scheduler.commit(decision)
        for chunk, result in zip(decision.chunks, results, strict=True):
            self.counters.prefill_tokens_computed += chunk.length
            sender = self._by_job.get(chunk.job)
            if sender is None or sender.machine.state.is_final:
                continue
            if result.error is not None:
                sender.fail(result.error)
                continue
            if result.prompt_logprobs:
                sender.on_prompt_logprobs(result.prompt_logprobs)
            if chunk.is_last:
                failed = next((token for token in result.first_tokens if isinstance(token, AttemptFailed)), None)
                if failed is not None:
                    sender.fail(failed)
                    continue
                tokens = [token for token in result.first_tokens if isinstance(token, SampledToken)]
                self.counters.tokens_generated += len(tokens)
                sender.on_first_tokens(tokens)
                sender.on_computed(self.layout.blocks_for(chunk.job.num_tokens))
            else:
                sender.on_computed(chunk.job.num_computed // self.layout.block_size)

    def _fail(self, decision: PrefillDecision, error: Exception) -> None:
        self.scheduler.abandon(decision)
        for chunk in decision.chunks:
            sender = self._by_job.get(chunk.job)
            if sender is not None:
                sender.fail(AttemptFailed(f"the step failed: {type(error).__name__}", reason="step_failed"))

    # -- inside ---------------------------------------------------------------------------------------------

    def _check_admission(self, attempt_id: AttemptId) -> None:
        if self._is_draining:
            raise Unavailable("the prefill node drains", reason="draining")
        if self.scheduler.num_waiting >= self._config.max_waiting:
            raise Overloaded("the prefill node's queue is full", reason="prefill_queue_full")
        if not attempt_id or attempt_id in self._senders:
            raise AttemptFailed("the attempt id is missing or in use", reason="attempt_id_reused")

    def _job(self, attempt_id: AttemptId, message: pb.OpenHandoff) -> PrefillJob:
        token_ids = list(message.token_ids)
        sampling = sampling_from_wire(message.sampling)
        sampling.check_token_ids(self._runner.vocab_size)
        if not token_ids or max(token_ids) >= self._runner.vocab_size:
            raise InvalidRequest("the prompt is empty or has a token id outside the vocabulary", param="prompt")
        if not 0 < message.prompt_length <= len(token_ids):
            raise InvalidRequest("prompt_length does not fit the tokens", param="prompt_length")
        indices = message.sequence_indices
        if not indices or len(set(indices)) < len(indices) or len(indices) > _MAX_SEQUENCES:
            raise InvalidRequest(
                f"sequences must be distinct, at least 1 and at most {_MAX_SEQUENCES}", param="sequence_indices"
            )
        if len(token_ids) > self._runner.max_model_len:
            raise AttemptFailed("the prompt is longer than this node's context", reason="prompt_too_long")
        if self.layout.blocks_for(len(token_ids)) > self.pool.counts.total:
            raise AttemptFailed("the prompt needs more blocks than this node has", reason="pool_too_small")
        if message.blocks_held > (len(token_ids) - 1) // self.layout.block_size:
            raise InvalidRequest("blocks_held covers the whole prompt", param="blocks_held")
        root = root_hash(self._runner.fingerprint, tenant_salt=message.tenant_salt)
        return PrefillJob(
            attempt_id=attempt_id,
            token_ids=token_ids,
            prompt_length=message.prompt_length,
            sampling=sampling,
            sequence_indices=tuple(indices),
            block_hashes=hash_chain(root, token_ids, self.layout.block_size),
            peer=(message.decode_node.node_id, message.decode_node.epoch),
            priority=message.priority,
        )

    async def _show_progress(self) -> None:
        """Silence is how decode notices that this node hangs, so say nothing when the step loop does not move."""
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL_S)
            if self.step_loop.last_step_age_s <= self._config.node.progress_deadline_s:
                for sender in list(self._senders.values()):
                    if not sender.machine.state.is_final:
                        sender.send_progress()

    async def _reap(self) -> None:
        """End what outlives its deadline; independent of admission and of new work."""
        while True:
            await asyncio.sleep(_REAP_INTERVAL_S)
            now_s = time.monotonic()
            for sender in list(self._senders.values()):
                try:
                    sender.enforce_deadlines(now_s, self._config.lease_s)
                except Exception:  # One hand-off's trouble must not keep the others from being reaped.
                    logger.exception("reap_failed attempt_id=%s", sender.job.attempt_id)
            self._peer_pools.sweep()
            for peer, slot in list(self._peer_slots.items()):
                if not slot.locked() and not any(sender.peer == peer for sender in self._senders.values()):
                    del self._peer_slots[peer]


def _wanted_logits(chunk: Chunk) -> WantedLogits:
    if chunk.job.sampling.prompt_logprobs is not None and chunk.start < chunk.job.prompt_length:
        return "all"
    return "last" if chunk.is_last else "none"


def _chunk_result(chunk: Chunk, logits: torch.Tensor) -> ChunkResult:
    """Args: logits: [rows, vocab], the rows that `_wanted_logits` asked for."""
    job = chunk.job
    positions: list[PositionLogprobs] = []
    if job.sampling.prompt_logprobs is not None and chunk.start < job.prompt_length:
        if chunk.start == 0:
            positions.append(())
        following = job.token_ids[chunk.start + 1 : min(chunk.start + chunk.length + 1, job.prompt_length)]
        positions += prompt_logprobs(logits[: len(following)], following, job.sampling.prompt_logprobs)
    tokens: list[SampledToken | AttemptFailed] = []
    if chunk.is_last:
        rows = [
            SampleRow(
                params=job.sampling,
                sequence_index=index,
                prompt_token_ids=job.token_ids[: job.prompt_length],
                output_token_ids=job.token_ids[job.prompt_length :],
            )
            for index in job.sequence_indices
        ]
        tokens = list(sample(logits[-1:].expand(len(rows), -1), rows))
    return ChunkResult(tuple(tokens), tuple(positions))
