"""One hand-off on the decode side: performs the actions of its state machine on a stream. Knows no scheduling."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import grpc

from decode_node.attempt import Attempt
from decode_node.sequence import DecodeSequence, Reservation
from engine.errors import AttemptFailed, PdserveError
from engine.faults import Faults
from engine.ids import AttemptId, BlockId
from engine.kv_layout import KvLayout
from engine.tokens import SampledToken
from kv_transfer import handoff
from kv_transfer.channels import Channel
from kv_transfer.processes import process_is_alive
from kv_transfer.transports import BlockReceiver
from kv_transfer.wire import error_from_wire, logprobs_from_wire, sampling_to_wire
from proto import worker_pb2 as pb
from proto import worker_pb2_grpc

logger = logging.getLogger(__name__)

_RENEW_INTERVAL_S = 5.0
_ABORT_GRACE_S = 1.0
_FENCE_INTERVAL_S = 0.5


class ReceiverHost(Protocol):
    """What a receiver needs of its node."""

    faults: Faults
    layout: KvLayout
    description: pb.NodeDescription

    def block_bytes(self, block_id: BlockId) -> memoryview: ...
    def shared_memory_offer(self) -> pb.SharedMemoryOffer | None: ...
    def channel(self, address: str) -> Channel: ...
    def ask_blocks(self, receiver: HandoffReceiver) -> None: ...
    def quarantine(self, block_ids: Sequence[BlockId]) -> None: ...
    def end_quarantine(self, block_ids: Sequence[BlockId]) -> None: ...
    def on_first_tokens(self, receiver: HandoffReceiver, tokens: dict[int, SampledToken]) -> None: ...
    def on_committed(self, receiver: HandoffReceiver) -> None: ...
    def on_given_up(self, receiver: HandoffReceiver, error: PdserveError, *, cancelled: bool) -> None: ...
    def count_ignored(self, count: int) -> None: ...


class HandoffReceiver:
    """One try at one prefill node. `run` returns when nothing of it is left, which may be after its attempt went on.

    Args:
        host: the node.
        attempt: whose prompt it is.
        leader: the sequence, with its siblings, for which it is computed.
        target: the prefill node.
        blocks_held: leading blocks that this node has already.
    """

    def __init__(
        self,
        host: ReceiverHost,
        attempt: Attempt,
        leader: DecodeSequence,
        target: pb.PrefillTarget,
        blocks_held: int,
    ) -> None:
        self.attempt = attempt
        self.target = target
        self.leader = leader
        self.family = (leader, *leader.siblings)
        self.num_tokens = leader.num_tokens
        num_blocks = host.layout.blocks_for(self.num_tokens)
        self.reservation = Reservation(leader, blocks_held, num_blocks - blocks_held)
        self.machine = handoff.ReceivingHandoff(num_blocks - blocks_held)
        self.handoff_id = AttemptId(uuid.uuid4().hex)
        self.last_heard_s = self.opened_s = time.monotonic()
        self.granted_s = self.opened_s
        self.bytes_received = 0
        self.transport: pb.TransportKind = pb.TRANSPORT_KIND_GRPC
        self._host = host
        self._offered: frozenset[int] = frozenset()
        self._is_accepted = False
        self._blocks: BlockReceiver | None = None
        self._has_first_tokens = False
        self._prompt_positions = 0
        self._error: PdserveError | None = None
        self._piece = pb.BlockPiece()
        self._complete = pb.Complete()
        self._commands: asyncio.Queue[pb.HandoffCommand | None] = asyncio.Queue()
        self._over = asyncio.Event()
        self._process: tuple[int, int] | None = None

    # -- what the node tells --------------------------------------------------------------------------------

    def grant(self) -> None:
        """The reservation has its blocks, or lost its prefix."""
        if self.reservation.lost_prefix:
            self.fail(AttemptFailed("the cached prefix was evicted before the grant", reason="prefix_lost"))
            return
        self._perform(self.machine.handle(handoff.Reserved(tuple(self.reservation.block_ids))))

    def cancel(self, reason: str) -> None:
        """The attempt needs it no more."""
        if not self.machine.state.is_final:
            self._error = AttemptFailed(f"the hand-off was cancelled: {reason}", reason=reason)
            self._perform(self.machine.handle(handoff.CancelRequested(reason)))

    def fail(self, error: PdserveError) -> None:
        """This try cannot go on."""
        if not self.machine.state.is_final:
            self._error = error
            self._perform(self.machine.handle(handoff.Failed(error.reason)))

    def enforce_deadlines(self, now_s: float, progress_deadline_s: float, handoff_deadline_s: float) -> None:
        """Called by the node's reaper."""
        if self.machine.state.is_final:
            return
        if now_s - self.opened_s > handoff_deadline_s:
            self.fail(AttemptFailed("the hand-off outlived its deadline", reason="handoff_deadline"))
        elif now_s - self.last_heard_s > progress_deadline_s:
            self.fail(
                AttemptFailed(f"prefill node {self.target.identity.node_id} fell silent", reason="prefill_silent")
            )

    # -- the stream -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Open the stream and serve it until it has ended and nobody can write into our blocks any more."""
        stub = worker_pb2_grpc.PrefillServiceStub(self._host.channel(self.target.address))
        call = stub.Handoff()
        self._commands.put_nowait(pb.HandoffCommand(open=self._open_message()))
        tasks = [
            asyncio.create_task(self._read(call)),
            asyncio.create_task(self._write(call)),
            asyncio.create_task(self._renew()),
            asyncio.create_task(self._end_stream(call)),
        ]
        try:
            # The reader returns when the stream has ended, for whatever reason.
            is_proven = await tasks[0]
        except Exception:
            # Our own mistake ends this try only, and blocks that are written to from outside still need the proof.
            logger.exception("handoff_crashed handoff_id=%s", self.handoff_id)
            self.fail(AttemptFailed("the hand-off crashed on the decode node", reason="internal"))
            is_proven = self._proves_stop()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()
        if not is_proven:
            self.fail(AttemptFailed(f"lost prefill node {self.target.identity.node_id}", reason="prefill_lost"))
            await self._prove_stopped()
        if not self.machine.state.is_final:
            self._error = self._error or AttemptFailed("prefill ended the stream early", reason="sender_lost")
        self._perform(self.machine.handle(handoff.SenderStopped()))

    def _open_message(self) -> pb.OpenHandoff:
        leader = self.leader
        sampling = leader.sampling
        if leader.output_token_ids:
            # The prompt's were told before its first token.
            sampling = replace(sampling, prompt_logprobs=None)
        offer = self._host.shared_memory_offer()
        message = pb.OpenHandoff(
            attempt_id=self.handoff_id,
            request_id=self.attempt.request_id,
            decode_node=self._host.description.identity,
            prefill_node=self.target.identity,
            deadline_ms=max(1, int((self.attempt.deadline_s - time.monotonic()) * 1000)),
            fingerprint=self._host.description.fingerprint,
            token_ids=leader.tokens(0, self.num_tokens),
            prompt_length=len(leader.prompt_token_ids),
            sampling=sampling_to_wire(sampling),
            sequence_indices=[sequence.index for sequence in self.family],
            tenant_salt=self.attempt.tenant_salt,
            blocks_held=self.reservation.blocks_held,
            priority=self.attempt.priority,
            transports=[pb.TRANSPORT_KIND_GRPC],
        )
        if offer is not None:
            message.transports.append(pb.TRANSPORT_KIND_SHARED_MEMORY)
            message.shared_memory.CopyFrom(offer)
        self._offered = frozenset(message.transports)
        return message

    async def _read(self, call: grpc.aio.StreamStreamCall) -> bool:
        """Returns whether the end of the stream proves that prefill writes no more."""
        try:
            async for event in call:
                self.last_heard_s = time.monotonic()
                try:
                    await self._on_event(event)
                except PdserveError as error:
                    self.fail(error)
            return True
        except grpc.aio.AioRpcError as error:
            refused = error.code() in (
                grpc.StatusCode.FAILED_PRECONDITION,
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.UNIMPLEMENTED,
            )
            if refused:
                self.fail(AttemptFailed(str(error.details())[:200], reason="prefill_refused"))
            return self._proves_stop()
        except asyncio.CancelledError:
            # Ending the call ourselves looks the same as being cancelled.
            if not call.cancelled():
                raise
            return True
        finally:
            if not self.machine.state.is_final and self._error is None:
                self._error = AttemptFailed(
                    f"prefill node {self.target.identity.node_id} ended the hand-off early", reason="prefill_lost"
                )

    def _proves_stop(self) -> bool:
        """Whether losing the stream is enough: before a grant, or where only we write into our blocks."""
        return not self.machine.block_ids or self.transport == pb.TRANSPORT_KIND_GRPC

    async def _on_event(self, event: pb.HandoffEvent) -> None:
        match event.WhichOneof("event"):
            case "accepted":
                self._on_accepted(event.accepted)
            case "started":
                if self.machine.state is handoff.HandoffState.QUEUED:
                    held_tokens = self.reservation.blocks_held * self._host.layout.block_size
                    self.attempt.report_cached_tokens(max(held_tokens, event.started.cached_tokens))
                self._perform(self.machine.handle(handoff.Started(event.started.blocks_to_send)))
            case "first_tokens":
                self._on_first_tokens(event.first_tokens)
            case "prompt_logprobs":
                if not self.machine.state.is_final:
                    positions = [logprobs_from_wire(position) for position in event.prompt_logprobs.tokens]
                    self.attempt.report_prompt_logprobs(self._prompt_positions, positions)
                    self._prompt_positions += len(positions)
            case "block":
                self._piece = event.block
                self._perform(self.machine.handle(handoff.PieceArrived()))
            case "complete":
                self._complete = event.complete
                await self._host.faults.reach("before_commit")
                self._perform(self.machine.handle(handoff.CompleteArrived()))
            case "failed":
                self.fail(error_from_wire(event.failed))
            case "progress":
                pass  # Hearing it is all it is for.
            case _:
                self._host.count_ignored(1)

    def _on_accepted(self, message: pb.Accepted) -> None:
        if self._is_accepted or self.machine.state is not handoff.HandoffState.QUEUED:
            self._host.count_ignored(1)
            return
        self._is_accepted = True
        if message.identity != self.target.identity:
            raise AttemptFailed("another node or incarnation answered", reason="epoch_mismatch")
        if message.transport not in self._offered:
            raise AttemptFailed(f"transport {message.transport} was not offered", reason="bad_transport")
        has_writer = message.pid and message.pid_start_ticks
        if message.transport == pb.TRANSPORT_KIND_SHARED_MEMORY and not has_writer:
            # Without it nobody could ever tell that the writer is gone.
            raise AttemptFailed("shared memory was chosen without naming the writer", reason="bad_transport")
        self.transport = message.transport
        if has_writer:
            self._process = (message.pid, message.pid_start_ticks)

    def _on_first_tokens(self, message: pb.FirstTokens) -> None:
        if self.machine.state.is_final or self._has_first_tokens:
            self._host.count_ignored(1)
            return
        tokens = {
            token.sequence_index: SampledToken(token.token_id, logprobs_from_wire(token.logprobs))
            for token in message.tokens
        }
        expected = {sequence.index for sequence in self.family}
        if set(tokens) != expected:
            raise AttemptFailed("first tokens came for the wrong sequences", reason="first_tokens_mismatch")
        if any(token.token_id >= self._host.description.vocab_size for token in tokens.values()):
            raise AttemptFailed("a first token lies outside the vocabulary", reason="bad_first_token")
        self._has_first_tokens = True
        self.attempt.report_prefill(
            queue_s=message.queue_s, prefill_s=message.prefill_s, node_id=self.target.identity.node_id
        )
        self._host.on_first_tokens(self, tokens)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            while (command := await self._commands.get()) is not None:
                if command.HasField("committed"):
                    await self._host.faults.reach("after_commit_before_ack")
                await call.write(command)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, AttemptFailed):
            logger.debug("handoff_write_failed attempt_id=%s", self.handoff_id)  # The reader learns the reason.

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_INTERVAL_S)
            if not self.machine.state.is_final:
                self._commands.put_nowait(pb.HandoffCommand(renew=pb.RenewLease()))

    async def _end_stream(self, call: grpc.aio.StreamStreamCall) -> None:
        """Give prefill a moment to end the stream by itself; where only we write into our blocks, then end it."""
        await self._over.wait()
        await asyncio.sleep(_ABORT_GRACE_S)
        # What prefill does after the commit is no longer of interest: every block was compared with its digest.
        if self._proves_stop() or self.machine.state is handoff.HandoffState.COMMITTED:
            call.cancel()

    async def _prove_stopped(self) -> None:
        """Over shared memory a lost stream proves nothing: the process may be stopped now and write later."""
        stub = worker_pb2_grpc.PrefillServiceStub(self._host.channel(self.target.address))
        request = pb.FenceRequest(attempt_id=self.handoff_id, prefill_node=self.target.identity)
        while self._process is None or process_is_alive(*self._process):
            try:
                if (await stub.Fence(request, timeout=1.0)).stopped:
                    return
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    return  # Another incarnation answers at that address, so this one is gone.
            await asyncio.sleep(_FENCE_INTERVAL_S)

    # -- actions --------------------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[handoff.Action]) -> None:
        self._host.count_ignored(handoff.count_ignored(actions))
        for action in actions:
            match action:
                case handoff.ReserveBlocks():
                    self._host.ask_blocks(self)
                case handoff.SendGrant(block_ids):
                    self.granted_s = time.monotonic()
                    self._blocks = BlockReceiver(
                        self._host.layout,
                        kind=self.transport,
                        first_block=self.reservation.blocks_held,
                        destinations=[self._host.block_bytes(block_id) for block_id in block_ids],
                    )
                    self._commands.put_nowait(pb.HandoffCommand(grant=pb.Grant(block_ids=block_ids)))
                case handoff.StorePiece():
                    assert self._blocks is not None, "a grant comes before every piece"
                    self._blocks.accept(self._piece)
                case handoff.Verify():
                    self._verify()
                case handoff.Join():
                    self._over.set()
                    self._commands.put_nowait(pb.HandoffCommand(committed=pb.Committed()))
                    self._commands.put_nowait(None)
                    self._host.on_committed(self)
                case handoff.SendAbort(reason):
                    self._commands.put_nowait(pb.HandoffCommand(abort=pb.AbortHandoff(reason=reason)))
                    self._commands.put_nowait(None)
                case handoff.Quarantine(block_ids):
                    self._host.quarantine(block_ids)
                case handoff.FreeQuarantined(block_ids):
                    self._host.end_quarantine(block_ids)
                case handoff.GiveUp(reason, cancelled):
                    self._over.set()
                    error = self._error or AttemptFailed(f"the hand-off failed: {reason}", reason=reason)
                    self._host.on_given_up(self, error, cancelled=cancelled)
                case handoff.Ignore():
                    pass  # Counted above.
                case _:
                    raise AssertionError(f"not a receiver's action: {action}")

    def _verify(self) -> None:
        assert self._blocks is not None, "a grant comes before every complete"
        if not self._has_first_tokens:
            raise AttemptFailed("the hand-off completed without a first token", reason="no_first_token")
        self._blocks.finish(self._complete, num_tokens=self.num_tokens)
        self.bytes_received = self._blocks.bytes_received
        self._perform(self.machine.handle(handoff.Verified()))
