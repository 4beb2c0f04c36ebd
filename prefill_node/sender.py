"""One hand-off on the prefill side: performs the actions of its state machine on a stream. Knows no scheduling."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from engine.errors import AttemptFailed, PdserveError
from engine.faults import Faults
from engine.ids import BlockId
from engine.kv_layout import KvLayout
from engine.tokens import PositionLogprobs, SampledToken
from kv_transfer import handoff
from kv_transfer.transports import BlockSender, SentBlocks
from kv_transfer.wire import error_to_wire, logprobs_to_wire
from prefill_node.scheduler import PrefillJob
from proto import worker_pb2 as pb

logger = logging.getLogger(__name__)

_STOP_GRACE_S = 1.0
_PROGRESS_INTERVAL_S = 0.5
_FAULT_PLACES = {"started": "before_start", "first_tokens": "before_first_token"}


class SenderHost(Protocol):
    """What a sender needs of its node."""

    faults: Faults
    layout: KvLayout

    def block_bytes(self, block_id: BlockId) -> memoryview: ...
    def on_stopping(self, sender: HandoffSender) -> None: ...
    def on_writing_stopped(self, sender: HandoffSender) -> None: ...
    def on_grant(self, sender: HandoffSender) -> None: ...
    def count_ignored(self, count: int) -> None: ...
    def peer_slot(self, peer: tuple[str, int]) -> asyncio.Semaphore: ...


class HandoffSender:
    """Owns the outgoing half of one hand-off stream.

    Args:
        host: the node.
        open_message: what decode asked for.
        job: the prompt being computed; the scheduler owns its counters.
        transport: how blocks travel to this peer.
        num_blocks: blocks of the whole prompt.
    """

    def __init__(
        self,
        host: SenderHost,
        open_message: pb.OpenHandoff,
        job: PrefillJob,
        transport: BlockSender,
        num_blocks: int,
    ) -> None:
        self.job = job
        self.transport = transport
        self.machine = handoff.SendingHandoff(open_message.blocks_held, num_blocks)
        self.created_s = time.monotonic()
        self.started_s = self.created_s
        self.last_heard_s = self.created_s
        self.deadline_s = self.created_s + open_message.deadline_ms / 1000
        self.sent = SentBlocks()
        self.sending_s = 0.0
        self._request_id = open_message.request_id
        self.peer = (open_message.decode_node.node_id, open_message.decode_node.epoch)
        self._host = host
        self._outbox: deque[pb.HandoffEvent | handoff.SendBlocks | handoff.SendComplete] = deque()
        self._wake = asyncio.Event()
        self._error: PdserveError | None = None
        self._stopping_since_s: float | None = None
        self._writer: asyncio.Task[None] | None = None

    # -- what the node tells --------------------------------------------------------------------------------

    def say_accepted(self, message: pb.Accepted) -> None:
        """The first message of the stream."""
        self._outbox.appendleft(pb.HandoffEvent(accepted=message))

    def on_started(self) -> None:
        """The first chunk is about to be computed."""
        self.started_s = time.monotonic()
        self._perform(self.machine.handle(handoff.Started(self.machine.num_blocks - self.machine.first_block)))
        self._send(
            pb.HandoffEvent(
                started=pb.Started(
                    blocks_to_send=self.machine.num_blocks - self.machine.first_block,
                    cached_tokens=self.job.cached_tokens,
                )
            )
        )

    def on_computed(self, end_block: int) -> None:
        """Blocks below `end_block` are final."""
        self._perform(self.machine.handle(handoff.BlocksComputed(end_block)))

    def on_prompt_logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """Log probabilities of the next prompt tokens are known."""
        message = pb.PromptLogprobs(tokens=[logprobs_to_wire(position) for position in positions])
        self._send(pb.HandoffEvent(prompt_logprobs=message))

    def on_first_tokens(self, tokens: Sequence[SampledToken]) -> None:
        """The prompt is computed and its next tokens are chosen."""
        now = time.monotonic()
        message = pb.FirstTokens(queue_s=self.started_s - self.created_s, prefill_s=now - self.started_s)
        for index, token in zip(self.job.sequence_indices, tokens, strict=True):
            first = message.tokens.add(sequence_index=index, token_id=token.token_id)
            if token.logprobs:
                first.logprobs.CopyFrom(logprobs_to_wire(token.logprobs))
        self._send(pb.HandoffEvent(first_tokens=message))

    def send_progress(self) -> None:
        """Tell decode that the node lives; skipped while earlier messages wait."""
        if not self._outbox:
            self._send(self._progress())

    def fail(self, error: PdserveError) -> None:
        """This attempt cannot go on; decode is told why."""
        if self.machine.state.is_final:
            return
        self._error = error
        self._perform(self.machine.handle(handoff.Failed(error.reason)))

    def enforce_deadlines(self, now_s: float, lease_s: float) -> None:
        """Called by the node's reaper."""
        if self._stopping_since_s is not None:
            if now_s - self._stopping_since_s > _STOP_GRACE_S and self._writer is not None:
                self._writer.cancel()
        elif now_s > self.deadline_s:
            self.fail(AttemptFailed("the hand-off outlived its deadline", reason="handoff_deadline"))
        elif now_s - self.last_heard_s > lease_s:
            self.fail(AttemptFailed("nothing was heard from the decode node", reason="lease_expired"))

    # -- the stream -----------------------------------------------------------------------------------------

    async def serve(
        self,
        commands: AsyncIterator[pb.HandoffCommand],
        write: Callable[[pb.HandoffEvent], Awaitable[None]],
    ) -> None:
        """Run until the hand-off is over; the stream ends when this returns. Cancelled when decode is gone."""
        reader = asyncio.create_task(self._read(commands))
        self._writer = asyncio.create_task(self._write_all(write))
        try:
            await asyncio.wait((self._writer,))
        finally:
            self._cancel("stream_closed")
            for task in (reader, self._writer):
                task.cancel()
            try:
                await asyncio.gather(reader, self._writer, return_exceptions=True)
            finally:
                # Writing is synchronous up to each await, so a cancelled writer writes no more, awaited or not.
                self._perform(self.machine.handle(handoff.WritingStopped()))

    async def _read(self, commands: AsyncIterator[pb.HandoffCommand]) -> None:
        try:
            async for command in commands:
                self._on_command(command)
        finally:
            # Decode closed its half; it may still read, but it can never commit.
            self._cancel("commands_closed")

    def _on_command(self, command: pb.HandoffCommand) -> None:
        self.last_heard_s = time.monotonic()
        match command.WhichOneof("command"):
            case "grant":
                ids = tuple(BlockId(block_id) for block_id in command.grant.block_ids)
                self._perform(self.machine.handle(handoff.GrantReceived(ids)))
                self._host.on_grant(self)
            case "abort":
                self._perform(self.machine.handle(handoff.CancelRequested(command.abort.reason[:64])))
            case "committed":
                self._perform(self.machine.handle(handoff.CommittedReceived()))
            case "renew":
                pass  # Hearing it is all it is for.
            case _:
                self._host.count_ignored(1)

    def _cancel(self, reason: str) -> None:
        if not self.machine.state.is_final:
            self._perform(self.machine.handle(handoff.CancelRequested(reason)))

    async def _write_all(self, write: Callable[[pb.HandoffEvent], Awaitable[None]]) -> None:
        try:
            await self._write_outbox(write)
        except PdserveError as error:
            # A bad grant, for one: decode is told why before the stream ends.
            self.fail(error)
            await self._write_outbox(write)
        except Exception as error:
            # As a rule the stream broke; `serve` ends the hand-off.
            logger.warning("handoff_write_failed attempt_id=%s error=%s", self.job.attempt_id, type(error).__name__)

    async def _write_outbox(self, write: Callable[[pb.HandoffEvent], Awaitable[None]]) -> None:
        while True:
            while self._outbox:
                item = self._outbox.popleft()
                match item:
                    case handoff.SendBlocks(first, end):
                        await self._host.faults.reach("before_send")
                        async with self._slot(write):
                            begun_s = time.monotonic()
                            await self._write_blocks(first, end, write)
                            self.sending_s += time.monotonic() - begun_s
                    case handoff.SendComplete():
                        await self._host.faults.reach("before_complete")
                        complete = self.sent.complete(num_tokens=self.job.num_tokens, layout=self._host.layout)
                        await write(pb.HandoffEvent(complete=complete))
                    case _:
                        if place := _FAULT_PLACES.get(item.WhichOneof("event") or ""):
                            await self._host.faults.reach(place)
                        await write(item)
            if self._stopping_since_s is not None:
                return
            self._wake.clear()
            await self._wake.wait()

    async def _write_blocks(self, first: int, end: int, write: Callable[[pb.HandoffEvent], Awaitable[None]]) -> None:
        for index in range(first, end):
            if self.machine.state.is_final:
                return
            source = self._host.block_bytes(self.job.block_ids[index])
            destination = self.machine.destinations[index - self.machine.first_block]
            for piece in self.transport.send(index, source, destination):
                self.sent.note(piece, layout=self._host.layout)
                await write(pb.HandoffEvent(block=piece))
                if self.machine.state.is_final:
                    return

    @contextlib.asynccontextmanager
    async def _slot(self, write: Callable[[pb.HandoffEvent], Awaitable[None]]) -> AsyncIterator[None]:
        """Wait for a place among those that send to this peer, without falling silent meanwhile."""
        slot = self._host.peer_slot(self.peer)
        while True:
            try:
                await asyncio.wait_for(slot.acquire(), _PROGRESS_INTERVAL_S)
                break
            except TimeoutError:
                await write(self._progress())
        try:
            yield
        finally:
            slot.release()

    def _progress(self) -> pb.HandoffEvent:
        return pb.HandoffEvent(progress=pb.Progress(tokens_computed=self.job.num_computed))

    def _send(self, event: pb.HandoffEvent) -> None:
        self._outbox.append(event)
        self._wake.set()

    def _perform(self, actions: Sequence[handoff.Action]) -> None:
        self._host.count_ignored(handoff.count_ignored(actions))
        for action in actions:
            match action:
                case handoff.SendBlocks() | handoff.SendComplete():
                    self._outbox.append(action)
                    self._wake.set()
                case handoff.StopWriting():
                    # What was not sent is not wanted any more.
                    self._outbox.clear()
                    self._stopping_since_s = time.monotonic()
                    self._wake.set()
                    self._host.on_stopping(self)
                case handoff.GiveUp(reason, cancelled):
                    logger.info(
                        "handoff_%s attempt_id=%s request_id=%s reason=%s",
                        "cancelled" if cancelled else "failed",
                        self.job.attempt_id,
                        self._request_id,
                        reason,
                    )
                    if not cancelled:
                        error = self._error or AttemptFailed(f"the hand-off failed: {reason}", reason=reason)
                        self._send(pb.HandoffEvent(failed=error_to_wire(error)))
                case handoff.Unpin():
                    self._host.on_writing_stopped(self)
                case handoff.Ignore():
                    pass  # Counted above.
                case _:
                    raise AssertionError(f"not a sender's action: {action}")
