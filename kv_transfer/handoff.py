"""The hand-off as two state machines without IO: events in, actions out. Knows no gRPC, no pool and no clock.

One request's move from prefill to decode, states in order and what moves it on:

    QUEUED     decode opened the stream; prefill has not begun      -> Started
    STARTED    prefill computes; decode looks for blocks             -> Reserved (decode), GrantReceived (prefill)
    GRANTED    decode's blocks are reserved and promised             -> first block
    SENDING    blocks cross while later chunks still compute         -> Verified (decode), CommittedReceived (prefill)
    COMMITTED  decode has every block, digests match, prefill may unpin
    FAILED | CANCELLED   reachable from every state above

Who owns blocks: prefill keeps its source blocks pinned from Started until COMMITTED, FAILED or CANCELLED *and* its last
write has ended; there is no third way. Decode owns its destination blocks from Reserved on. When it gives up before
COMMITTED they are quarantined until prefill has proved that it writes no more (its stream ended, its fence answered, or
its process is dead), because over shared memory prefill writes into them directly.

`receiver.py` (decode node) and `sender.py` (prefill node) feed events and perform actions. An event that makes no sense
in a state yields `Ignore`, which is counted, never raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from engine.ids import BlockId


class HandoffState(Enum):
    """Where one hand-off stands; the same words on both sides."""

    QUEUED = 1
    STARTED = 2
    GRANTED = 3
    SENDING = 4
    COMMITTED = 5
    FAILED = 6
    CANCELLED = 7

    @property
    def is_final(self) -> bool:
        """Whether nothing but the proof that the other side stopped can still matter."""
        return self in (HandoffState.COMMITTED, HandoffState.FAILED, HandoffState.CANCELLED)


# -- events of both sides ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """Prefill began computing. `blocks_to_send` as it says; decode compares it with its own count."""

    blocks_to_send: int


@dataclass(frozen=True, slots=True)
class Failed:
    """This side or the other cannot go on; `reason` is short and stable."""

    reason: str


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The request ended or its client left."""

    reason: str


# -- events of the receiver (decode) -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks of our pool now belong to this hand-off."""

    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class PieceArrived:
    """Part of a block arrived."""


@dataclass(frozen=True, slots=True)
class CompleteArrived:
    """Prefill says that it sent everything."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Every block is there and every digest matches."""


@dataclass(frozen=True, slots=True)
class SenderStopped:
    """Proof that prefill writes no more for this hand-off."""


ReceiverEvent = (
    Started | Failed | CancelRequested | Reserved | PieceArrived | CompleteArrived | Verified | SenderStopped
)


# -- events of the sender (prefill) ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GrantReceived:
    """Decode reserved blocks; over shared memory these are their ids."""

    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class BlocksComputed:
    """Blocks below `end_block` of the prompt hold final K/V."""

    end_block: int


@dataclass(frozen=True, slots=True)
class CommittedReceived:
    """Decode has everything."""


@dataclass(frozen=True, slots=True)
class WritingStopped:
    """Our own writer has returned and will not run again for this hand-off."""


SenderEvent = Started | Failed | CancelRequested | GrantReceived | BlocksComputed | CommittedReceived | WritingStopped


# -- actions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReserveBlocks:
    """Receiver: reserve this many blocks, now or when there are some; answer with Reserved."""

    count: int


@dataclass(frozen=True, slots=True)
class SendGrant:
    """Receiver: tell prefill that it may send."""

    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class StorePiece:
    """Receiver: check the piece and put it into its block."""


@dataclass(frozen=True, slots=True)
class Verify:
    """Receiver: check counts and digests; answer with Verified or Failed."""


@dataclass(frozen=True, slots=True)
class Join:
    """Receiver: tell prefill that it is committed, and let the sequences join the next step."""


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Receiver: ask prefill to stop."""

    reason: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Receiver: keep these blocks from everybody until FreeQuarantined."""

    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class FreeQuarantined:
    """Receiver: nobody writes there any more."""

    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Both sides: the hand-off ended without commit; say why to whoever waits for it."""

    reason: str
    cancelled: bool


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Sender: send blocks [first, end) of the prompt."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class SendComplete:
    """Sender: say that everything was sent."""


@dataclass(frozen=True, slots=True)
class StopWriting:
    """Sender: let the writer return at its next block; answer with WritingStopped."""


@dataclass(frozen=True, slots=True)
class Unpin:
    """Sender: release the source blocks and end the stream."""


@dataclass(frozen=True, slots=True)
class Ignore:
    """An event out of its time; count it."""

    what: str


Action = (
    ReserveBlocks
    | SendGrant
    | StorePiece
    | Verify
    | Join
    | SendAbort
    | Quarantine
    | FreeQuarantined
    | GiveUp
    | SendBlocks
    | SendComplete
    | StopWriting
    | Unpin
    | Ignore
)


class ReceivingHandoff:
    """Decode's side of one hand-off.

    Args:
        expected_blocks: blocks that decode lacks, by its own count.
    """

    def __init__(self, expected_blocks: int) -> None:
        self.expected_blocks = expected_blocks
        self.state = HandoffState.QUEUED
        self.block_ids: tuple[BlockId, ...] = ()
        self.reason = ""
        self._sender_stopped = False
        self._complete = False

    def handle(self, event: ReceiverEvent) -> list[Action]:
        """Advance by one event. Never blocks, never raises for what another process said."""
        match event:
            case SenderStopped():
                return self._on_sender_stopped()
            case Reserved(block_ids) if self.state.is_final:
                # They came too late to be promised to anybody, so nobody writes there.
                return [Quarantine(block_ids), FreeQuarantined(block_ids)]
            case _ if self.state.is_final:
                return [Ignore(type(event).__name__)]
            case CancelRequested(reason):
                return self._end(HandoffState.CANCELLED, reason)
            case Failed(reason):
                return self._end(HandoffState.FAILED, reason)
            case Started(blocks_to_send) if self.state is HandoffState.QUEUED:
                if blocks_to_send != self.expected_blocks:
                    return self._end(HandoffState.FAILED, "block_count_mismatch")
                self.state = HandoffState.STARTED
                return [ReserveBlocks(self.expected_blocks)]
            case Reserved(block_ids) if self.state is HandoffState.STARTED:
                self.state, self.block_ids = HandoffState.GRANTED, block_ids
                return [SendGrant(block_ids)]
            case PieceArrived() if self.state in (HandoffState.GRANTED, HandoffState.SENDING) and not self._complete:
                self.state = HandoffState.SENDING
                return [StorePiece()]
            case PieceArrived():
                return self._end(HandoffState.FAILED, "block_before_grant")
            case CompleteArrived() if self.state in (HandoffState.GRANTED, HandoffState.SENDING) and not self._complete:
                self._complete = True
                return [Verify()]
            case Verified() if self._complete:
                self.state = HandoffState.COMMITTED
                return [Join()]
            case _:
                return [Ignore(type(event).__name__)]

    def _end(self, state: HandoffState, reason: str) -> list[Action]:
        self.state, self.reason = state, reason
        actions: list[Action] = [] if self._sender_stopped else [SendAbort(reason)]
        if self.block_ids:
            actions.append(Quarantine(self.block_ids))
            if self._sender_stopped:
                actions.append(FreeQuarantined(self.block_ids))
        actions.append(GiveUp(reason, cancelled=state is HandoffState.CANCELLED))
        return actions

    def _on_sender_stopped(self) -> list[Action]:
        if self._sender_stopped:
            return [Ignore("SenderStopped")]
        self._sender_stopped = True
        if self.state is HandoffState.COMMITTED:
            return []
        if self.state.is_final:
            return [FreeQuarantined(self.block_ids)] if self.block_ids else []
        # The stream ended although nothing was agreed: prefill died or broke the protocol.
        return self._end(HandoffState.FAILED, "sender_lost")


class SendingHandoff:
    """Prefill's side of one hand-off.

    Args:
        first_block: first block of the prompt that decode lacks.
        num_blocks: all blocks of the prompt.
    """

    def __init__(self, first_block: int, num_blocks: int) -> None:
        self.first_block = first_block
        self.num_blocks = num_blocks
        self.state = HandoffState.QUEUED
        self.destinations: tuple[BlockId, ...] = ()
        self.reason = ""
        self.computed_end = 0
        self.requested_end = first_block
        self._completed = False
        self._writing_stopped = False

    @property
    def is_ungranted(self) -> bool:
        """Whether it holds computed or computing blocks that decode has no room for yet."""
        return self.state is HandoffState.STARTED

    def handle(self, event: SenderEvent) -> list[Action]:
        """Advance by one event. Never blocks, never raises for what another process said."""
        match event:
            case WritingStopped():
                if self._writing_stopped or not self.state.is_final:
                    return [Ignore("WritingStopped")]
                self._writing_stopped = True
                return [Unpin()]
            case _ if self.state.is_final:
                return [Ignore(type(event).__name__)]
            case CancelRequested(reason):
                return self._end(HandoffState.CANCELLED, reason)
            case Failed(reason):
                return self._end(HandoffState.FAILED, reason)
            case Started() if self.state is HandoffState.QUEUED:
                self.state = HandoffState.STARTED
                return []
            case GrantReceived(block_ids) if self.state is HandoffState.STARTED:
                if len(block_ids) != self.num_blocks - self.first_block:
                    return self._end(HandoffState.FAILED, "grant_count_mismatch")
                self.state, self.destinations = HandoffState.GRANTED, block_ids
                return self._send_ready()
            case BlocksComputed(end_block) if self.state is not HandoffState.QUEUED:
                self.computed_end = max(self.computed_end, min(end_block, self.num_blocks))
                return self._send_ready()
            case CommittedReceived() if self._completed:
                self.state = HandoffState.COMMITTED
                return [StopWriting()]
            case _:
                return [Ignore(type(event).__name__)]

    def _send_ready(self) -> list[Action]:
        if self.state not in (HandoffState.GRANTED, HandoffState.SENDING):
            return []
        actions: list[Action] = []
        if self.computed_end > self.requested_end:
            self.state = HandoffState.SENDING
            actions.append(SendBlocks(self.requested_end, self.computed_end))
            self.requested_end = self.computed_end
        if self.computed_end == self.num_blocks and not self._completed:
            self._completed = True
            actions.append(SendComplete())
        return actions

    def _end(self, state: HandoffState, reason: str) -> list[Action]:
        self.state, self.reason = state, reason
        return [StopWriting(), GiveUp(reason, cancelled=state is HandoffState.CANCELLED)]


def count_ignored(actions: Sequence[Action]) -> int:
    """How many of the actions only say that an event came out of its time."""
    return sum(isinstance(action, Ignore) for action in actions)
