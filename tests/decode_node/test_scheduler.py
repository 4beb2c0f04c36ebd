"""What a decode step computes and who gets blocks: each rule alone, then all at once at random."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_node.scheduler import DecodeDecision, DecodeScheduler, DecodeSequence, Reservation
from engine.block_pool import BlockPool
from engine.ids import BlockHash, BlockId
from engine.kv_layout import KvLayout
from engine.sampling_params import SamplingParams

LAYOUT = KvLayout(num_layers=1, kv_heads=1, head_dim=2, block_size=4, dtype="float32")
ROOT = BlockHash(bytes(16))


def scheduler(num_blocks: int, *, budget: int = 64, places: int = 8) -> tuple[DecodeScheduler, BlockPool]:
    pool = BlockPool(num_blocks)
    return DecodeScheduler(pool, LAYOUT, max_num_batched_tokens=budget, max_num_seqs=places), pool


def sequence(length: int, *, first: int = 0, index: int = 0, **sampling: Any) -> DecodeSequence:
    """A prompt of `length` tokens; other `first`, other tokens."""
    return DecodeSequence(index, range(first, first + length), SamplingParams(**sampling), ROOT)


def family(length: int, count: int, *, first: int = 0) -> list[DecodeSequence]:
    """A leader and its siblings."""
    sequences = [sequence(length, first=first, index=index) for index in range(count)]
    sequences[0].siblings = sequences[1:]
    return sequences


def step(scheduler: DecodeScheduler) -> dict[DecodeSequence, tuple[int, int]]:
    """One step with a token for everybody that is due one; returns what it computed as (start, length)."""
    decision = scheduler.decide()
    return {} if decision is None else finish(scheduler, decision)


def finish(scheduler: DecodeScheduler, decision: DecodeDecision) -> dict[DecodeSequence, tuple[int, int]]:
    scheduler.commit(decision)
    for piece in decision.slices:
        if piece.is_last:
            receivers = [piece.sequence, *piece.sequence.siblings]
            if piece.sequence.siblings:
                scheduler.fork(piece.sequence)
            for receiver in receivers:
                if not receiver.is_ended:
                    receiver.output_token_ids.append(900 + len(receiver.output_token_ids))
    scheduler.check_invariants()
    return {piece.sequence: (piece.start, piece.length) for piece in decision.slices}


def start(scheduler: DecodeScheduler, *sequences: DecodeSequence) -> None:
    for entry in sequences:
        scheduler.add(entry)
    scheduler.admit()


def hand_off(scheduler: DecodeScheduler, leader: DecodeSequence, *, held: int = 0) -> Reservation:
    reservation = Reservation(leader, held, LAYOUT.blocks_for(leader.num_tokens) - held)
    scheduler.ask(reservation)
    return reservation


def fail_hand_off(scheduler: DecodeScheduler, pool: BlockPool, reservation: Reservation) -> None:
    """As the hand-off's state machine does it."""
    if reservation.block_ids:
        pool.quarantine(reservation.block_ids)
    scheduler.give_up(reservation)
    pool.end_quarantine(reservation.block_ids)
    reservation.block_ids = []


def assert_idle(scheduler: DecodeScheduler, pool: BlockPool) -> None:
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_reserved) == (0, 0, 0)
    assert pool.counts.free + pool.counts.cached == pool.counts.total
    assert all(pool.ref_count(BlockId(block_id)) == 0 for block_id in range(pool.counts.total))


class TestBudget:
    def test_a_prompt_is_computed_in_chunks_of_the_budget(self) -> None:
        queue, _ = scheduler(8, budget=5)
        prompt = sequence(12)
        start(queue, prompt)
        assert [step(queue)[prompt] for _ in range(4)] == [(0, 5), (5, 5), (10, 2), (12, 1)]

    def test_decoding_goes_before_chunks(self) -> None:
        queue, _ = scheduler(16, budget=5)
        old, new = sequence(4), sequence(12, first=50)
        start(queue, old)
        step(queue)
        start(queue, new)
        # The stream that runs already is never held up by a long prompt; the prompt takes what is left.
        assert [step(queue) for _ in range(3)] == [
            {old: (4, 1), new: (0, 4)},
            {old: (5, 1), new: (4, 4)},
            {old: (6, 1), new: (8, 4)},
        ]

    def test_prompts_around_a_block_boundary(self) -> None:
        for length in (1, 3, 4, 5, 7, 8, 9):
            queue, pool = scheduler(4, budget=64)
            prompt = sequence(length)
            start(queue, prompt)
            assert step(queue)[prompt] == (0, length)
            assert step(queue)[prompt] == (length, 1)
            assert len(prompt.block_ids) == length // 4 + 1
            assert len(pool.cached_hashes()) == (length + 1) // 4
            queue.end(prompt)
            assert_idle(queue, pool)


class TestPrefixCache:
    def test_a_hit_never_covers_the_last_token(self) -> None:
        for length, reused in ((8, 4), (9, 8), (4, 0)):
            queue, _ = scheduler(8)
            first, second = sequence(length), sequence(length)
            start(queue, first)
            step(queue)
            start(queue, second)
            assert step(queue)[second] == (reused, length - reused)

    def test_prompt_log_probabilities_need_every_token(self) -> None:
        queue, _ = scheduler(8)
        start(queue, sequence(9))
        step(queue)
        scored = sequence(9, prompt_logprobs=0)
        assert queue.reusable_blocks(scored) == 0
        start(queue, scored)
        assert step(queue)[scored] == (0, 9)

    def test_prefix_evicted_between_opening_and_grant(self) -> None:
        queue, pool = scheduler(6)
        start(queue, cached := sequence(9))
        step(queue)
        queue.end(cached)
        wanted = sequence(9)
        reservation = hand_off(queue, wanted, held=queue.reusable_blocks(wanted))
        # Prefill was told that two blocks need not be sent; then all were evicted.
        pool.release(pool.allocate(6))
        assert queue.admit() == [reservation]
        assert reservation.lost_prefix and not reservation.block_ids and not reservation.held_ids
        queue.give_up(reservation)
        assert_idle(queue, pool)

    def test_held_blocks_cannot_be_evicted_after_the_grant(self) -> None:
        queue, pool = scheduler(4)
        start(queue, cached := sequence(9))
        step(queue)
        queue.end(cached)
        reservation = hand_off(queue, sequence(9), held=2)
        assert queue.admit() == [reservation]
        assert pool.num_allocatable == 1
        queue.join(reservation)
        assert reservation.leader.num_computed == 8


class TestAdmission:
    def test_nothing_overtakes_the_head(self) -> None:
        queue, _ = scheduler(6)
        running, big, small = sequence(8), sequence(16, first=100), sequence(2, first=200)
        start(queue, running, big, small)
        assert (queue.num_running, queue.num_waiting) == (1, 2)
        queue.end(running)
        queue.admit()
        assert (queue.num_running, queue.num_waiting) == (2, 0)

    def test_places_are_counted_for_siblings_before_they_have_blocks(self) -> None:
        queue, _ = scheduler(32, budget=2, places=4)
        start(queue, *family(8, 3)[:1], sequence(4, first=50), sequence(4, first=90))
        # Three of the family and one other: the fifth waits, though only two have blocks yet.
        assert (queue.num_running, queue.num_waiting) == (2, 1)

    def test_never_more_than_max_num_seqs(self) -> None:
        queue, _ = scheduler(64, places=3)
        start(queue, *(sequence(4, first=10 * i) for i in range(5)))
        assert queue.num_running == 3
        assert len(step(queue)) == 3

    def test_parked_hand_off_joins_though_a_big_request_waits(self) -> None:
        queue, _ = scheduler(24)
        parked = hand_off(queue, sequence(14 * 4))
        assert queue.admit() == [parked]
        start(queue, big := sequence(16 * 4, first=300))
        assert queue.num_waiting == 1
        # Completions do not stand in the queue.
        queue.join(parked)
        assert step(queue) == {parked.leader: (55, 1)}
        queue.end(parked.leader)
        queue.admit()
        assert step(queue) == {big: (0, 64)}

    def test_ten_hand_offs_of_half_a_pool_each_all_get_their_turn(self) -> None:
        queue, pool = scheduler(24)
        waiting = [hand_off(queue, sequence(12 * 4 - 2, first=100 * i)) for i in range(10)]
        done = 0
        while waiting:
            granted = queue.admit()
            assert granted, "everybody waits for somebody"
            for reservation in granted:
                waiting.remove(reservation)
                queue.join(reservation)
                for _ in range(5):
                    step(queue)
                queue.end(reservation.leader)
                done += 1
        assert done == 10
        assert_idle(queue, pool)


class TestPreemption:
    def test_the_youngest_goes_back_and_resumes(self) -> None:
        queue, pool = scheduler(5)
        old, young = sequence(7), sequence(7, first=50)
        start(queue, old, young)
        tokens = 0
        while not queue.preemptions:
            tokens += 1
            step(queue)
            assert tokens < 10
        assert young.num_preemptions == 1 and old.num_preemptions == 0
        assert not young.block_ids and queue.num_waiting == 1
        output = list(young.output_token_ids)
        queue.end(old)
        queue.admit()
        start_at, length = step(queue)[young]
        assert start_at + length == 7 + len(output), "it computes its own output again"
        assert young.output_token_ids[: len(output)] == output
        queue.end(young)
        assert_idle(queue, pool)

    def test_a_preempted_sequence_keeps_its_place_in_line(self) -> None:
        queue, _ = scheduler(8)
        first, second = sequence(4), sequence(4, first=50)
        start(queue, first)
        step(queue)
        queue.add(second)
        queue._preempt(first)
        queue.admit()
        assert next(iter(step(queue))) is first


class TestSiblings:
    def test_full_blocks_are_shared_and_the_partial_one_copied(self) -> None:
        queue, pool = scheduler(16)
        leader, *siblings = family(6, 3)
        start(queue, leader)
        decision = queue.decide()
        assert decision is not None
        queue.commit(decision)
        copies = queue.fork(leader)
        assert [source for source, _ in copies] == [leader.block_ids[1]] * 2
        assert [destination for _, destination in copies] == [sibling.block_ids[1] for sibling in siblings]
        assert {sibling.block_ids[0] for sibling in siblings} == {leader.block_ids[0]}
        assert pool.ref_count(leader.block_ids[0]) == 3
        for member in (leader, *siblings):
            queue.end(member)
        assert_idle(queue, pool)

    def test_a_prompt_that_ends_with_its_block_needs_no_copy(self) -> None:
        queue, pool = scheduler(16)
        members = family(8, 3)
        start(queue, members[0])
        decision = queue.decide()
        assert decision is not None
        queue.commit(decision)
        assert queue.fork(members[0]) == []
        for member in members:
            member.output_token_ids.append(1)
        step(queue)
        assert len({member.block_ids[2] for member in members}) == 3
        for member in members:
            queue.end(member)
        assert_idle(queue, pool)

    def test_a_sibling_without_a_block_computes_later(self) -> None:
        queue, pool = scheduler(3)
        members = family(6, 3)
        start(queue, members[0])
        step(queue)
        assert (queue.num_running, queue.num_waiting) == (2, 1)
        queue.end(members[0])
        queue.end(members[1])
        queue.admit()
        # Prompt and first token, the full block from the cache.
        assert step(queue)[members[2]] == (4, 3)
        queue.end(members[2])
        assert_idle(queue, pool)

    def test_leader_ends_while_waiting(self) -> None:
        queue, pool = scheduler(8)
        leader, sibling, other = family(6, 3)
        queue.add(leader)
        queue.end(leader)
        queue.admit()
        assert step(queue) == {sibling: (0, 6)}
        assert other.block_ids and other.output_token_ids
        queue.end(sibling)
        queue.end(other)
        assert_idle(queue, pool)

    def test_leader_ends_in_the_middle_of_its_prompt(self) -> None:
        queue, pool = scheduler(8, budget=4)
        leader, sibling = family(10, 2)
        start(queue, leader)
        decision = queue.decide()
        assert decision is not None
        # The client drops the first choice while the first chunk is on the device.
        queue.end(leader)
        assert leader.block_ids, "the step still writes there"
        finish(queue, decision)
        assert not leader.block_ids
        queue.admit()
        assert step(queue)[sibling] == (4, 4)
        queue.end(sibling)
        assert_idle(queue, pool)

    def test_leader_ends_during_its_last_chunk(self) -> None:
        queue, pool = scheduler(8)
        leader, sibling = family(6, 2)
        start(queue, leader)
        decision = queue.decide()
        assert decision is not None
        queue.end(leader)
        finish(queue, decision)
        # The prompt is not computed twice.
        assert not leader.block_ids and sibling.num_computed == 6
        assert step(queue) == {sibling: (6, 1)}
        queue.end(sibling)
        assert_idle(queue, pool)

    def test_leader_ends_while_its_blocks_arrive(self) -> None:
        queue, pool = scheduler(8)
        leader, sibling = family(6, 2)
        reservation = hand_off(queue, leader)
        queue.admit()
        queue.end(leader)
        sibling.output_token_ids.append(5)
        queue.join(reservation)
        assert not leader.block_ids
        assert step(queue) == {sibling: (6, 1)}
        queue.end(sibling)
        assert_idle(queue, pool)

    def test_every_sibling_ends_before_the_prompt_is_computed(self) -> None:
        queue, pool = scheduler(8)
        members = family(6, 3)
        start(queue, members[0])
        decision = queue.decide()
        assert decision is not None
        for member in members:
            queue.end(member)
        finish(queue, decision)
        assert_idle(queue, pool)


class TestFailures:
    def test_a_failed_step_counts_for_nothing(self) -> None:
        queue, pool = scheduler(8)
        prompt = sequence(6)
        start(queue, prompt)
        decision = queue.decide()
        assert decision is not None
        queue.end(prompt)
        queue.abandon(decision)
        assert_idle(queue, pool)
        assert not pool.cached_hashes()

    def test_abandon_after_commit_does_no_harm(self) -> None:
        queue, pool = scheduler(8)
        prompt = sequence(6)
        start(queue, prompt)
        decision = queue.decide()
        assert decision is not None
        queue.commit(decision)
        queue.abandon(decision)
        queue.end(prompt)
        assert_idle(queue, pool)

    def test_give_up_in_each_state(self) -> None:
        queue, pool = scheduler(4)
        reserved, waiting = hand_off(queue, sequence(12)), hand_off(queue, sequence(12, first=50))
        assert queue.admit() == [reserved]
        fail_hand_off(queue, pool, waiting)
        fail_hand_off(queue, pool, reserved)
        fail_hand_off(queue, pool, reserved)
        assert_idle(queue, pool)


class RandomDecode(RuleBasedStateMachine):
    """A tiny pool under everything that can happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.pool = scheduler(10, budget=7, places=4)
        self.alive: list[DecodeSequence] = []
        self.asked: list[Reservation] = []
        self.granted: list[Reservation] = []
        self.on_device: DecodeDecision | None = None

    @invariant()
    def the_books_balance(self) -> None:
        self.queue.check_invariants()
        running = self.queue._running
        assert len(running) <= 4
        assert running == sorted(running, key=lambda entry: entry.arrival)

    @rule(length=st.integers(1, 24), first=st.integers(0, 2), count=st.integers(1, 3), elsewhere=st.booleans())
    def arrives(self, length: int, first: int, count: int, elsewhere: bool) -> None:
        members = family(length, count, first=100 * first)
        self.alive += members
        if elsewhere:
            self.asked.append(hand_off(self.queue, members[0], held=self.queue.reusable_blocks(members[0])))
        else:
            self.queue.add(members[0])

    @rule()
    def admit(self) -> None:
        for reservation in self.queue.admit():
            self.asked.remove(reservation)
            if reservation.lost_prefix:
                self.queue.give_up(reservation)
                self.start_here(reservation)
            else:
                self.granted.append(reservation)

    def start_here(self, reservation: Reservation) -> None:
        members = [member for member in (reservation.leader, *reservation.leader.siblings) if not member.is_ended]
        reservation.leader.siblings = []
        if members:
            members[0].siblings = members[1:]
            self.queue.add(members[0])

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), succeeds=st.booleans())
    def hand_off_ends(self, data: st.DataObject, succeeds: bool) -> None:
        reservation = self.granted.pop(data.draw(st.integers(0, len(self.granted) - 1)))
        members = [reservation.leader, *reservation.leader.siblings]
        if not succeeds or all(member.is_ended for member in members):
            fail_hand_off(self.queue, self.pool, reservation)
            self.start_here(reservation)
            return
        for member in members:
            if not member.is_ended:
                member.output_token_ids.append(900)
        self.queue.join(reservation)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def hand_off_fails_before_the_grant(self, data: st.DataObject) -> None:
        reservation = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        fail_hand_off(self.queue, self.pool, reservation)
        self.start_here(reservation)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def one_ends(self, data: st.DataObject) -> None:
        self.queue.end(self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1))))

    @precondition(lambda self: self.on_device is None)
    @rule()
    def decide(self) -> None:
        self.on_device = self.queue.decide()
        if self.on_device is not None:
            assert sum(piece.length for piece in self.on_device.slices) <= 7
            for piece in self.on_device.slices:
                assert len(piece.sequence.block_ids) * 4 >= piece.start + piece.length
                assert not piece.sequence.is_ended

    @precondition(lambda self: self.on_device is not None)
    @rule(succeeds=st.integers(0, 4))
    def step_returns(self, succeeds: int) -> None:
        assert self.on_device is not None
        if succeeds:
            finish(self.queue, self.on_device)
            for piece in self.on_device.slices:
                if piece.sequence.num_tokens >= 36 and not piece.sequence.is_ended:
                    self.queue.end(piece.sequence)
                    self.alive.remove(piece.sequence)
        else:
            self.queue.abandon(self.on_device)
        self.on_device = None

    def teardown(self) -> None:
        if self.on_device is not None:
            self.queue.abandon(self.on_device)
        # First everybody gets to the end by itself: nobody waits for ever.
        for _ in range(3000):
            if not self.alive:
                break
            self.admit()
            for reservation in list(self.granted):
                self.granted.remove(reservation)
                if all(member.is_ended for member in (reservation.leader, *reservation.leader.siblings)):
                    fail_hand_off(self.queue, self.pool, reservation)
                else:
                    for member in (reservation.leader, *reservation.leader.siblings):
                        if not member.is_ended:
                            member.output_token_ids.append(900)
                    self.queue.join(reservation)
            step(self.queue)
            for member in list(self.alive):
                if member.num_tokens >= len(member.prompt_token_ids) + 3:
                    self.queue.end(member)
                    self.alive.remove(member)
        assert not self.alive, "some sequence never got its turn"
        for reservation in (*self.asked, *self.granted):
            fail_hand_off(self.queue, self.pool, reservation)
        assert_idle(self.queue, self.pool)


RandomDecode.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestRandomDecode = RandomDecode.TestCase
