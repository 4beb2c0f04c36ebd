"""The hand-off's two state machines: each race as events in the awkward order, and both against each other."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ids import BlockId
from kv_transfer.handoff import (
    Action,
    BlocksComputed,
    CancelRequested,
    CommittedReceived,
    CompleteArrived,
    Failed,
    FreeQuarantined,
    GiveUp,
    GrantReceived,
    HandoffState,
    Ignore,
    Join,
    PieceArrived,
    Quarantine,
    ReceivingHandoff,
    ReserveBlocks,
    Reserved,
    SendAbort,
    SendBlocks,
    SendComplete,
    SenderStopped,
    SendGrant,
    SendingHandoff,
    Started,
    StopWriting,
    StorePiece,
    Unpin,
    Verified,
    Verify,
    WritingStopped,
    count_ignored,
)

BLOCKS = (BlockId(7), BlockId(3))


def receiver(*events: object) -> ReceivingHandoff:
    """A receiver of two blocks that has seen `events`."""
    machine = ReceivingHandoff(len(BLOCKS))
    for event in events:
        machine.handle(event)  # type: ignore[arg-type]
    return machine


def sender(*events: object) -> SendingHandoff:
    """A sender of blocks 1 and 2 of three that has seen `events`."""
    machine = SendingHandoff(1, 3)
    for event in events:
        machine.handle(event)  # type: ignore[arg-type]
    return machine


GRANTED = (Started(2), Reserved(BLOCKS))
COMPLETE = (*GRANTED, PieceArrived(), PieceArrived(), CompleteArrived())
SENT_ALL = (Started(2), GrantReceived(BLOCKS), BlocksComputed(3))


class TestReceiver:
    def test_the_straight_way(self) -> None:
        machine = receiver()
        assert machine.handle(Started(2)) == [ReserveBlocks(2)]
        assert machine.handle(Reserved(BLOCKS)) == [SendGrant(BLOCKS)]
        assert machine.handle(PieceArrived()) == [StorePiece()]
        assert machine.state is HandoffState.SENDING
        assert machine.handle(CompleteArrived()) == [Verify()]
        assert machine.handle(Verified()) == [Join()]
        assert machine.state.name == "COMMITTED"
        assert machine.handle(SenderStopped()) == []

    def test_cancel_overtakes_the_last_check(self) -> None:
        machine = receiver(*COMPLETE)
        # The client leaves while the digests are being compared.
        assert machine.handle(CancelRequested("client_left")) == [
            SendAbort("client_left"),
            Quarantine(BLOCKS),
            GiveUp("client_left", cancelled=True),
        ]
        # The check ends well, too late: nothing joins.
        assert machine.handle(Verified()) == [Ignore("Verified")]
        # Prefill ends the stream: only now are the blocks free.
        assert machine.handle(SenderStopped()) == [FreeQuarantined(BLOCKS)]

    def test_cancel_after_commit_changes_nothing(self) -> None:
        machine = receiver(*COMPLETE, Verified())
        # The sequences run already; whoever ends them frees their blocks.
        assert machine.handle(CancelRequested("client_left")) == [Ignore("CancelRequested")]
        assert machine.handle(SenderStopped()) == []

    def test_cancel_while_waiting_for_blocks(self) -> None:
        machine = receiver(Started(2))
        # Nothing was promised, so nothing is quarantined.
        assert machine.handle(CancelRequested("x")) == [SendAbort("x"), GiveUp("x", cancelled=True)]
        # A reservation that was on its way comes back at once: prefill never heard of it.
        assert machine.handle(Reserved(BLOCKS)) == [Quarantine(BLOCKS), FreeQuarantined(BLOCKS)]

    def test_late_piece_after_cancel_is_not_stored(self) -> None:
        machine = receiver(*GRANTED, CancelRequested("x"))
        assert machine.handle(PieceArrived()) == [Ignore("PieceArrived")]
        assert machine.handle(CompleteArrived()) == [Ignore("CompleteArrived")]

    def test_stream_ends_in_the_middle(self) -> None:
        machine = receiver(*GRANTED, PieceArrived())
        # Prefill died; its end proves that it writes no more, so quarantine is over as it begins.
        assert machine.handle(SenderStopped()) == [
            Quarantine(BLOCKS),
            FreeQuarantined(BLOCKS),
            GiveUp("sender_lost", cancelled=False),
        ]

    def test_stream_ends_between_complete_and_verified(self) -> None:
        machine = receiver(*COMPLETE)
        assert GiveUp("sender_lost", cancelled=False) in machine.handle(SenderStopped())
        assert machine.handle(Verified()) == [Ignore("Verified")]

    def test_block_before_the_grant_fails(self) -> None:
        machine = receiver(Started(2))
        # A piece for blocks that nobody granted.
        assert machine.handle(PieceArrived()) == [
            SendAbort("block_before_grant"),
            GiveUp("block_before_grant", cancelled=False),
        ]

    def test_other_number_of_blocks_fails_before_anything_is_reserved(self) -> None:
        assert receiver().handle(Started(3)) == [
            SendAbort("block_count_mismatch"),
            GiveUp("block_count_mismatch", cancelled=False),
        ]

    @pytest.mark.parametrize("early", [CompleteArrived(), Verified(), Reserved(BLOCKS)])
    def test_out_of_order_before_start_is_ignored(self, early: object) -> None:
        machine = receiver()
        assert count_ignored(machine.handle(early)) == 1  # type: ignore[arg-type]
        assert machine.state is HandoffState.QUEUED

    def test_duplicates_are_ignored(self) -> None:
        machine = receiver(*COMPLETE)
        for again in (Started(2), CompleteArrived()):
            assert count_ignored(machine.handle(again)) == 1
        machine.handle(Verified())
        for late in (Verified(), Failed("x"), PieceArrived(), CompleteArrived(), Started(2)):
            assert count_ignored(machine.handle(late)) == 1
        machine.handle(SenderStopped())
        assert machine.handle(SenderStopped()) == [Ignore("SenderStopped")]


class TestSender:
    def test_the_straight_way(self) -> None:
        machine = sender()
        assert machine.handle(Started(2)) == []
        assert machine.is_ungranted
        # The first of our two blocks is ready before decode has room: computing does not wait, sending does.
        assert machine.handle(BlocksComputed(2)) == []
        assert machine.handle(GrantReceived(BLOCKS)) == [SendBlocks(1, 2)]
        assert not machine.is_ungranted
        assert machine.handle(BlocksComputed(3)) == [SendBlocks(2, 3), SendComplete()]
        assert machine.handle(CommittedReceived()) == [StopWriting()]
        assert machine.handle(WritingStopped()) == [Unpin()]

    def test_everything_is_computed_before_the_grant(self) -> None:
        machine = sender(Started(2), BlocksComputed(3))
        assert machine.handle(GrantReceived(BLOCKS)) == [SendBlocks(1, 3), SendComplete()]

    def test_blocks_that_decode_holds_are_not_sent(self) -> None:
        machine = sender(Started(2), GrantReceived(BLOCKS))
        assert machine.handle(BlocksComputed(1)) == []

    def test_abort_crosses_commit(self) -> None:
        machine = sender(*SENT_ALL)
        # Decode's client left just before; the abort is first on the stream, a commit cannot follow.
        assert machine.handle(CancelRequested("client_left")) == [
            StopWriting(),
            GiveUp("client_left", cancelled=True),
        ]
        assert machine.handle(CommittedReceived()) == [Ignore("CommittedReceived")]
        assert machine.handle(WritingStopped()) == [Unpin()]

    def test_blocks_stay_pinned_until_the_writer_has_returned(self) -> None:
        machine = sender(*SENT_ALL)
        assert Unpin() not in machine.handle(CancelRequested("x"))
        assert machine.handle(BlocksComputed(3)) == [Ignore("BlocksComputed")]
        assert machine.handle(WritingStopped()) == [Unpin()]
        assert machine.handle(WritingStopped()) == [Ignore("WritingStopped")]

    def test_commit_before_everything_was_sent_is_ignored(self) -> None:
        machine = sender(Started(2), GrantReceived(BLOCKS), BlocksComputed(2))
        assert machine.handle(CommittedReceived()) == [Ignore("CommittedReceived")]

    def test_grant_before_start_and_second_grant_are_ignored(self) -> None:
        machine = sender()
        assert machine.handle(GrantReceived(BLOCKS)) == [Ignore("GrantReceived")]
        machine = sender(Started(2), GrantReceived(BLOCKS))
        assert machine.handle(GrantReceived((BlockId(1), BlockId(2)))) == [Ignore("GrantReceived")]
        assert machine.destinations == BLOCKS

    def test_grant_of_other_size_fails(self) -> None:
        assert sender(Started(2)).handle(GrantReceived(BLOCKS[:1])) == [
            StopWriting(),
            GiveUp("grant_count_mismatch", cancelled=False),
        ]

    def test_writer_that_returns_early_means_nothing(self) -> None:
        machine = sender(*SENT_ALL)
        assert machine.handle(WritingStopped()) == [Ignore("WritingStopped")]
        machine.handle(Failed("x"))
        assert machine.handle(WritingStopped()) == [Unpin()]


# -- every event in every state that can be reached ---------------------------------------------------------------


@dataclass
class Watch:
    """What must hold of one machine's actions, whatever comes."""

    is_receiver: bool
    done: set[str] = field(default_factory=set)
    requested: int = 1
    has_sender_stopped: bool = False
    is_verifying: bool = False
    is_reserving: bool = False

    def once(self, name: str) -> None:
        assert name not in self.done, f"{name} twice"
        self.done.add(name)

    def check(self, event: object, actions: list[Action], before: HandoffState, after: HandoffState) -> None:
        self.has_sender_stopped |= isinstance(event, SenderStopped)
        if before.is_final:
            assert after is before, "a final state absorbs"
        for action in actions:
            self._check_action(event, action)
        ended = "end" in self.done
        assert ended == (after.is_final and after is not HandoffState.COMMITTED), "GiveUp iff it ended uncommitted"
        assert ("join" in self.done) == (self.is_receiver and after is HandoffState.COMMITTED)
        if ended and self.has_sender_stopped and "grant" in self.done:
            assert "freed" in self.done, "nothing stays in quarantine once the sender has stopped"
        if after is HandoffState.COMMITTED:
            assert ("verify" if self.is_receiver else "complete") in self.done
        if after.is_final and isinstance(event, WritingStopped):
            assert "unpin" in self.done

    def _check_action(self, event: object, action: Action) -> None:
        match action:
            case ReserveBlocks():
                self.once("reserve")
                self.is_reserving = True
            case SendGrant():
                self.once("grant")
            case Verify():
                self.once("verify")
                self.is_verifying = True
            case Join():
                assert "end" not in self.done
                self.once("join")
            case GiveUp():
                assert "join" not in self.done
                self.once("end")
            case Quarantine():
                self.once("quarantined")
            case FreeQuarantined():
                assert "quarantined" in self.done
                assert self.has_sender_stopped or "grant" not in self.done, "freed while prefill may write"
                self.once("freed")
            case Unpin():
                assert isinstance(event, WritingStopped) and "stop" in self.done
                self.once("unpin")
            case StopWriting():
                self.once("stop")
            case SendBlocks(first, end):
                assert "stop" not in self.done and first == self.requested < end <= 3
                self.requested = end
            case SendComplete():
                assert self.requested == 3
                self.once("complete")


def reachable(
    machine: ReceivingHandoff | SendingHandoff, watch: Watch, events: Callable[[Watch], Iterator[object]]
) -> int:
    """Take every event in every reachable pair of machine and watch; returns how many pairs there are."""

    def key(machine: object, watch: Watch) -> str:
        return repr((sorted(vars(machine).items()), sorted(watch.done), watch))

    seen = {key(machine, watch)}
    frontier = deque([(machine, watch)])
    while frontier:
        machine, watch = frontier.popleft()
        for event in events(watch):
            next_machine, next_watch = copy.deepcopy((machine, watch))
            before = next_machine.state
            if isinstance(event, Reserved):
                next_watch.is_reserving = False
            if isinstance(event, Verified):
                next_watch.is_verifying = False
            actions = next_machine.handle(event)  # type: ignore[arg-type]
            next_watch.check(event, actions, before, next_machine.state)
            if (name := key(next_machine, next_watch)) not in seen:
                seen.add(name)
                frontier.append((next_machine, next_watch))
    return len(seen)


def test_every_event_in_every_state_of_the_receiver() -> None:
    def events(watch: Watch) -> Iterator[object]:
        yield from (Started(2), Started(5), Failed("f"), CancelRequested("c"))
        yield from (PieceArrived(), CompleteArrived(), SenderStopped())
        # Answers of our own node come once and only when asked for.
        if watch.is_reserving:
            yield Reserved(BLOCKS)
        if watch.is_verifying:
            yield Verified()

    assert reachable(ReceivingHandoff(2), Watch(is_receiver=True), events) > 20


def test_every_event_in_every_state_of_the_sender() -> None:
    def events(watch: Watch) -> Iterator[object]:
        yield from (Started(2), Failed("f"), CancelRequested("c"), CommittedReceived(), WritingStopped())
        yield from (GrantReceived(BLOCKS), GrantReceived(()), *(BlocksComputed(end) for end in (0, 1, 2, 3, 9)))

    assert reachable(SendingHandoff(1, 3), Watch(is_receiver=False), events) > 20


# -- both sides against each other ---------------------------------------------------------------------------------


class Pair:
    """Decode and prefill with ordered queues between them, a writer that is slow, and a pool that remembers owners."""

    def __init__(self, *, in_place: bool) -> None:
        self.in_place = in_place
        self.decode = ReceivingHandoff(2)
        self.prefill = SendingHandoff(1, 3)
        self.down: deque[object] = deque()
        self.up: deque[object] = deque()
        self.work: deque[object] = deque()
        self.in_hand: int | None = None
        self.is_link_up = True
        self.is_stop_proven = False
        self.owner = dict.fromkeys(BLOCKS, "pool")
        self.is_reserve_due = self.is_verify_due = self.is_stopping = self.is_unpinned = False
        self.was_told: list[object] = []
        self.computed = 0

    # What may happen next, in any order.

    def steps(self) -> list[Callable[[], None]]:
        steps: list[Callable[[], None]] = []
        if self.is_link_up and self.down:
            steps.append(self.prefill_reads)
        if self.is_link_up and self.up:
            steps.append(self.decode_reads)
        if self.prefill.state is HandoffState.QUEUED:
            steps.append(self.prefill_starts)
        elif self.computed < 3 and not self.prefill.state.is_final:
            steps.append(self.prefill_computes)
        if self.in_hand is not None or self.work or self.is_stopping:
            steps.append(self.writer_moves)
        if self.is_reserve_due:
            steps.append(self.decode_reserves)
        if self.is_verify_due:
            steps.append(self.decode_verifies)
        if not self.is_link_up:
            steps.append(self.link_loss_is_noticed)
        return steps

    def mischief(self) -> list[Callable[[], None]]:
        return [
            lambda: self.decode_does(self.decode.handle(CancelRequested("client_left"))),
            lambda: self.decode_does(self.decode.handle(Failed("progress_deadline"))),
            lambda: self.prefill_does(self.prefill.handle(Failed("step_failed"))),
            self.link_breaks,
        ]

    def link_breaks(self) -> None:
        self.is_link_up = False

    def link_loss_is_noticed(self) -> None:
        self.down.clear()
        self.up.clear()
        self.prefill_does(self.prefill.handle(CancelRequested("stream_closed")))
        self.decode_does(self.decode.handle(Failed("prefill_lost")))
        # Over gRPC only decode writes into its blocks; over shared memory it asks until the writer has stopped.
        if not self.in_place or self.is_unpinned:
            self.decode_does(self.decode.handle(SenderStopped()))
            self.is_stop_proven = True

    @property
    def is_over(self) -> bool:
        ended = self.decode.state.is_final and self.prefill.state.is_final and self.is_unpinned
        return ended and (not (self.up or self.down) if self.is_link_up else self.is_stop_proven)

    def prefill_reads(self) -> None:
        self.prefill_does(self.prefill.handle(self.down.popleft()))  # type: ignore[arg-type]

    def decode_reads(self) -> None:
        event = self.up.popleft()
        self.decode_does(self.decode.handle(event))  # type: ignore[arg-type]

    def prefill_starts(self) -> None:
        self.prefill_does(self.prefill.handle(Started(2)))
        self.up.append(Started(2))

    def prefill_computes(self) -> None:
        self.computed += 1
        self.prefill_does(self.prefill.handle(BlocksComputed(self.computed)))

    def writer_moves(self) -> None:
        if self.in_hand is not None:
            block_id = self.prefill.destinations[self.in_hand - 1]
            if self.in_place:
                assert self.owner[block_id] in ("hand-off", "quarantine"), (
                    f"written into {self.owner[block_id]}'s block"
                )
            self.up.append(PieceArrived())
            self.in_hand = None
        elif self.work:
            item = self.work.popleft()
            if isinstance(item, int):
                self.in_hand = item
            else:
                self.up.append(item)
        else:
            self.is_stopping = False
            self.prefill_does(self.prefill.handle(WritingStopped()))

    def decode_reserves(self) -> None:
        self.is_reserve_due = False
        assert set(self.owner.values()) == {"pool"}
        self.owner = dict.fromkeys(BLOCKS, "hand-off")
        self.decode_does(self.decode.handle(Reserved(BLOCKS)))

    def decode_verifies(self) -> None:
        self.is_verify_due = False
        self.decode_does(self.decode.handle(Verified()))

    def decode_does(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ReserveBlocks():
                    self.is_reserve_due = True
                case SendGrant(block_ids):
                    self.down.append(GrantReceived(block_ids))
                case Verify():
                    self.is_verify_due = True
                case SendAbort(reason):
                    self.down.append(CancelRequested(reason))
                case Join():
                    self.down.append(CommittedReceived())
                    self.owner = dict.fromkeys(BLOCKS, "sequence")
                    self.was_told.append(action)
                case Quarantine():
                    self.owner = dict.fromkeys(BLOCKS, "quarantine")
                case FreeQuarantined():
                    assert set(self.owner.values()) == {"quarantine"}
                    self.owner = dict.fromkeys(BLOCKS, "pool")
                case GiveUp():
                    self.is_reserve_due = False
                    self.was_told.append(action)

    def prefill_does(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendBlocks(first, end):
                    self.work.extend(range(first, end))
                case SendComplete():
                    self.work.append(CompleteArrived())
                case StopWriting():
                    # A piece that is in the writer's hand is still written.
                    self.work.clear()
                    self.is_stopping = True
                case GiveUp(reason, cancelled) if not cancelled:
                    self.work.append(Failed(reason))
                case Unpin():
                    assert self.in_hand is None, "unpinned while the writer reads"
                    self.is_unpinned = True
                    self.up.append(SenderStopped())


@settings(max_examples=300, deadline=None)
@given(
    in_place=st.booleans(),
    choices=st.lists(st.integers(0, 5), max_size=40),
    mischief=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=3),
)
def test_two_sides_end_together_and_no_write_comes_after_release(
    in_place: bool, choices: list[int], mischief: list[tuple[int, int]]
) -> None:
    pair = Pair(in_place=in_place)
    step = 0
    while True:
        for when, what in mischief:
            if when == step:
                pair.mischief()[what]()
        if step > 40 and pair.is_over:
            break
        # With the list used up every step gets its turn.
        if steps := pair.steps():
            steps[(choices[step] if step < len(choices) else step) % len(steps)]()
        step += 1
        assert step < 400, "the two sides never end"
    assert len(pair.was_told) == 1, "whoever waits is told exactly once"
    assert set(pair.owner.values()) == {"sequence" if pair.decode.state is HandoffState.COMMITTED else "pool"}
    if not mischief:
        assert pair.decode.state is pair.prefill.state is HandoffState.COMMITTED
    if pair.prefill.state is HandoffState.COMMITTED:
        assert pair.decode.state is HandoffState.COMMITTED, "prefill believes only what decode did"
