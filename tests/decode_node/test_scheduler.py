"""What a decode step computes and who gets blocks: each rule alone, then all at once at random."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_node.costs import Costs
from decode_node.growth import OutputLengths
from decode_node.host_copies import RestoreBlocks, SaveBlocks
from decode_node.scheduler import BlockMove, CopyBlock, DecodeDecision, DecodeScheduler
from decode_node.sequence import DecodeSequence, Reservation, next_place
from engine.block_pool import BlockPool
from engine.ids import BlockHash, BlockId
from engine.kv_layout import KvLayout
from engine.sampling_params import SamplingParams

LAYOUT = KvLayout(num_layers=1, kv_heads=1, head_dim=2, block_size=4, dtype="float32")
ROOT = BlockHash(bytes(16))


class Contents:
    """What lies in each slot: the tokens from the first up to the one whose K/V it is, or None."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks: list[list[tuple[int, ...] | None]] = [[None] * 4 for _ in range(num_blocks)]

    def make_moves(self, moves: Sequence[BlockMove]) -> None:
        for move in moves:
            match move:
                case CopyBlock(source, destination):
                    self.blocks[destination] = list(self.blocks[source])
                case SaveBlocks():
                    data: Any = move.copy.data or [None] * move.copy.num_blocks
                    for index, block_id in enumerate(move.block_ids, move.first_block):
                        data[index] = list(self.blocks[block_id])
                    move.copy.data = data
                case RestoreBlocks():
                    data = move.copy.data
                    for index, block_id in enumerate(move.block_ids, move.first_block):
                        self.blocks[block_id] = list(data[index])

    def write(self, sequence: DecodeSequence, start: int, end: int) -> None:
        for position in range(start, end):
            block = self.blocks[sequence.block_ids[position // 4]]
            block[position % 4] = tuple(sequence.tokens(0, position + 1))

    def check(self, sequence: DecodeSequence, end: int) -> None:
        """All that a step reads of a sequence is its own."""
        for position in range(end):
            found = self.blocks[sequence.block_ids[position // 4]][position % 4]
            assert found == tuple(sequence.tokens(0, position + 1)), f"slot {position} holds {found}"


class Harness(DecodeScheduler):
    """A scheduler whose steps have the contents that real blocks would have, made when a step is over."""

    def __init__(self, pool: BlockPool, **more: Any) -> None:
        super().__init__(pool, LAYOUT, **more)
        self.contents = Contents(pool.counts.total)

    def admit(self) -> list[Reservation]:
        answered = super().admit()
        for reservation in answered:
            # A prefill node may write at once, and it may take long until its blocks make sense.
            for block_id in reservation.block_ids:
                self.contents.blocks[block_id] = [None] * 4
        return answered

    def commit(self, decision: DecodeDecision, failed: Sequence[BlockMove] = ()) -> None:
        self.contents.make_moves([move for move in decision.moves if move not in failed])
        for piece in decision.slices:
            self.contents.check(piece.sequence, piece.start)
        for piece in decision.slices:
            self.contents.write(piece.sequence, piece.start, piece.start + piece.length)
        super().commit(decision, failed)

    def abandon(self, decision: DecodeDecision) -> None:
        """The moves were made; what fails is the computing."""
        self.contents.make_moves(decision.moves)
        super().abandon(decision)

    def join(self, reservation: Reservation) -> None:
        leader = reservation.leader
        leader.block_ids = [*reservation.held_ids, *reservation.block_ids]
        self.contents.check(leader, 4 * reservation.blocks_held)
        self.contents.write(leader, 4 * reservation.blocks_held, reservation.num_tokens)
        super().join(reservation)


def scheduler(
    num_blocks: int, *, budget: int = 64, places: int = 8, expected: int = 1, **more: Any
) -> tuple[Harness, BlockPool]:
    """`expected`: output tokens that the first sequences are thought to have."""
    pool = BlockPool(num_blocks)
    queue = Harness(pool, max_num_batched_tokens=budget, max_num_seqs=places, **more)
    queue.lengths = OutputLengths(prior=expected)
    return queue, pool


def sequence(length: int, *, first: int = 0, index: int = 0, **sampling: Any) -> DecodeSequence:
    """A prompt of `length` tokens; other `first`, other tokens."""
    return DecodeSequence(index, range(first, first + length), SamplingParams(**sampling), ROOT)


def family(length: int, count: int, *, first: int = 0) -> list[DecodeSequence]:
    """A leader and its siblings."""
    sequences = [sequence(length, first=first, index=index) for index in range(count)]
    sequences[0].siblings = sequences[1:]
    return sequences


def say(sequence: DecodeSequence) -> None:
    """Its next token, other than its siblings'."""
    sequence.output_token_ids.append(900 + 100 * sequence.index + len(sequence.output_token_ids))


def step(scheduler: DecodeScheduler) -> dict[DecodeSequence, tuple[int, int]]:
    """One step with a token for everybody that is due one; returns what it computed as (start, length)."""
    decision = scheduler.decide()
    return {} if decision is None else finish(scheduler, decision)


def finish(
    scheduler: DecodeScheduler, decision: DecodeDecision, failed: Sequence[BlockMove] = ()
) -> dict[DecodeSequence, tuple[int, int]]:
    scheduler.commit(decision, failed)
    for piece in decision.slices:
        if piece.is_last:
            receivers = [piece.sequence, *piece.sequence.siblings]
            if piece.sequence.siblings:
                scheduler.fork(piece.sequence)
            for receiver in receivers:
                if not receiver.is_ended:
                    say(receiver)
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


def arrives_with_first_tokens(scheduler: DecodeScheduler, reservation: Reservation) -> None:
    for member in (reservation.leader, *reservation.leader.siblings):
        if not member.is_ended:
            say(member)
    scheduler.join(reservation)


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

    def test_a_short_prompt_passes_a_long_one_which_holds_it_up_by_a_quarter_of_a_step(self) -> None:
        queue, _ = scheduler(64, budget=40)
        start(queue, long := sequence(100))
        assert step(queue) == {long: (0, 40)}
        start(queue, short := sequence(6, first=500))
        assert step(queue) == {long: (40, 10), short: (0, 6)}
        assert step(queue) == {short: (6, 1), long: (50, 39)}

    def test_a_short_prompt_does_not_pass_a_more_urgent_one(self) -> None:
        queue, _ = scheduler(64, budget=40)
        usual, urgent, late = sequence(20), sequence(50, first=500), sequence(2, first=900)
        usual.priority, urgent.priority, late.priority = 0, -1, 7
        start(queue, usual, urgent, late)
        assert step(queue) == {usual: (0, 10), urgent: (0, 30)}
        assert step(queue) == {usual: (10, 10), urgent: (30, 20)}
        assert step(queue)[late] == (0, 2)

    def test_in_order_of_arrival_each_step_is_filled(self) -> None:
        queue, _ = scheduler(64, budget=40, shortest_first=False)
        long, short = sequence(50), sequence(2, first=500)
        start(queue, long, short)
        assert step(queue) == {long: (0, 40)}
        assert step(queue) == {long: (40, 10), short: (0, 2)}

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
        arrives_with_first_tokens(queue, reservation)
        assert reservation.leader.num_computed == 9


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
        arrives_with_first_tokens(queue, parked)
        assert step(queue) == {parked.leader: (56, 1)}
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
                arrives_with_first_tokens(queue, reservation)
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

    def first_in_need(self) -> tuple[Harness, BlockPool, DecodeSequence, Reservation]:
        """The first in line has outlived what was expected, and all the rest is promised to a hand-off behind it."""
        queue, pool = scheduler(8)
        first, later = sequence(6), sequence(23, first=50)
        start(queue, first)
        step(queue)
        reservation = hand_off(queue, later)
        assert queue.admit() == [reservation] and not pool.num_allocatable
        assert [step(queue), step(queue)] == [{first: (6, 1)}, {first: (7, 1)}]
        assert step(queue) == {}, "it waits with its blocks"
        assert (first.is_running, first.num_preemptions, queue.preemptions) == (True, 0, 0)
        return queue, pool, first, reservation

    def test_the_first_takes_back_what_was_promised_to_one_behind_it_when_that_one_joins(self) -> None:
        queue, pool, first, reservation = self.first_in_need()
        arrives_with_first_tokens(queue, reservation)
        assert step(queue) == {first: (8, 1)}
        assert queue.take_preempted() == [reservation.leader]
        queue.end(first)
        queue.admit()
        assert step(queue)[reservation.leader] == (20, 4)
        queue.end(reservation.leader)
        assert_idle(queue, pool)

    def test_the_first_goes_on_when_the_hand_off_behind_it_is_given_up(self) -> None:
        queue, pool, first, reservation = self.first_in_need()
        promised = reservation.block_ids
        pool.quarantine(promised)
        queue.give_up(reservation)
        # Nobody may have the blocks while somebody may still write there.
        assert step(queue) == {} and first.is_running
        pool.end_quarantine(promised)
        assert step(queue) == {first: (8, 1)}
        queue.end(first)
        assert_idle(queue, pool)

    def test_one_that_cannot_go_on_does_not_keep_its_blocks_from_who_waits_before_it(self) -> None:
        queue, pool = scheduler(8)
        early, late = sequence(12, first=90), sequence(16, first=50)
        start(queue, late)
        step(queue)
        stuck = pool.allocate(4)
        pool.quarantine(stuck)  # Nobody knows for how long.
        queue.add(early)
        queue.admit()
        assert not early.is_running
        step(queue)
        assert not late.is_running
        queue.admit()
        assert step(queue)[early] == (0, 12)
        for each in (early, late):
            queue.end(each)
        pool.end_quarantine(stuck)
        assert_idle(queue, pool)

    def test_one_that_cannot_go_on_makes_way_for_a_hand_off_before_it(self) -> None:
        queue, pool = scheduler(8)
        early, late = sequence(23), sequence(6, first=50)
        start(queue, late)
        step(queue)
        reservation = hand_off(queue, early)
        assert queue.admit() == [reservation]
        assert [step(queue) for _ in range(3)] == [{late: (6, 1)}, {late: (7, 1)}, {}]
        assert late.num_preemptions == 1
        arrives_with_first_tokens(queue, reservation)
        assert step(queue) == {early: (23, 1)}
        queue.end(early)
        queue.admit()
        assert late in step(queue)
        queue.end(late)
        assert_idle(queue, pool)


class TestHostCopies:
    BLOCK_BYTES = LAYOUT.block_bytes

    def preempted(self, **more: Any) -> tuple[Harness, BlockPool, DecodeSequence, DecodeSequence]:
        """Two sequences of 10 tokens in 6 blocks; the younger one just lost its three."""
        queue, pool = scheduler(6, **more)
        old, young = sequence(10), sequence(10, first=50)
        start(queue, old, young)
        while not queue.preemptions:
            step(queue)
        assert (old.num_tokens, young.num_tokens) == (14, 13)
        return queue, pool, old, young

    def finish_old_then_young(self, queue: Harness, pool: BlockPool, old: DecodeSequence, young: DecodeSequence) -> int:
        """Returns how many tokens the young one computed to get back."""
        queue.end(old)
        queue.admit()
        while young not in (computed := step(queue)):
            pass
        (_, length) = computed[young]
        queue.end(young)
        assert_idle(queue, pool)
        assert queue.host_copies.num_bytes == 0
        return length

    def test_it_goes_on_where_it_was(self) -> None:
        queue, pool, old, young = self.preempted(swap_bytes=3 * self.BLOCK_BYTES)
        assert (queue.host_copies.count, queue.host_copies.num_bytes) == (1, 3 * self.BLOCK_BYTES)
        assert not queue.take_preempted()
        assert self.finish_old_then_young(queue, pool, old, young) == 1

    def test_only_what_the_cache_has_lost_is_copied_back(self) -> None:
        queue, pool, old, young = self.preempted(swap_bytes=3 * self.BLOCK_BYTES)
        queue.end(old)
        # Of its three blocks the last is gone, and the first two are findable.
        assert pool.peek(young.full_block_hashes(4, 3)) == 2
        queue.admit()
        decision = queue.decide()
        assert decision is not None
        (move,) = decision.moves
        assert isinstance(move, RestoreBlocks) and move.first_block == 2 and len(move.block_ids) == 1
        assert finish(queue, decision) == {}
        assert step(queue) == {young: (12, 1)}
        queue.end(young)
        assert_idle(queue, pool)

    def test_nothing_is_copied_back_that_the_cache_has(self) -> None:
        queue, pool = scheduler(6, swap_bytes=9 * self.BLOCK_BYTES)
        start(queue, prompt := sequence(8))
        step(queue)
        queue._preempt(prompt)
        step(queue)
        assert queue.host_copies.num_bytes == 2 * self.BLOCK_BYTES
        queue.admit()
        assert step(queue) == {prompt: (8, 1)}
        queue.end(prompt)
        assert_idle(queue, pool)

    def test_without_room_it_is_computed_again(self) -> None:
        queue, pool, old, young = self.preempted(swap_bytes=3 * self.BLOCK_BYTES - 1)
        assert (queue.host_copies.count, queue.host_copies.num_bytes) == (0, 0)
        assert queue.take_preempted() == [young]
        assert self.finish_old_then_young(queue, pool, old, young) == 13 - 8

    def test_where_computing_is_quicker_it_is_computed_again(self) -> None:
        costs = Costs()
        costs.copied.record(self.BLOCK_BYTES, 1.0)
        costs.prompt.record(1000, 1.0)
        queue, *_ = self.preempted(swap_bytes=9 * self.BLOCK_BYTES, costs=costs)
        assert queue.host_copies.count == 0
        costs.prompt.record(1, 1000.0)
        queue, *_ = self.preempted(swap_bytes=9 * self.BLOCK_BYTES, costs=costs)
        assert queue.host_copies.count == 1

    def in_the_middle(self) -> tuple[Harness, BlockPool, DecodeSequence, DecodeSequence]:
        """An old one that decodes, and a young one that lost six blocks; of these a step may copy one."""
        costs = Costs()
        costs.copied.record(self.BLOCK_BYTES, 1.0)
        queue, pool = scheduler(16, swap_bytes=9 * self.BLOCK_BYTES, costs=costs, itl_bound_s=1.5)
        old, young = sequence(10), sequence(21, first=50)
        start(queue, old, young)
        while not young.output_token_ids:
            step(queue)
        queue._preempt(young)
        return queue, pool, old, young

    def copied(self, queue: Harness, old: DecodeSequence) -> int:
        """Blocks that a step copies, in which the old one must get on."""
        decision = queue.decide()
        assert decision is not None
        assert old in finish(queue, decision)
        return sum(len(move.block_ids) for move in decision.moves if not isinstance(move, CopyBlock))

    def test_a_step_copies_no_more_than_its_bound_allows(self) -> None:
        queue, pool, old, young = self.in_the_middle()
        while young.host_copy is None or young.host_copy.unsaved:
            queue.admit()
            assert not young.is_running, "its copy is not complete"
            assert self.copied(queue, old) == 1
        # The cache has lost all of it.
        pool.release(pool.allocate(pool.num_allocatable))
        assert not pool.peek(young.full_block_hashes(4, 1))
        queue.admit()
        for _ in range(6):
            assert young.is_restoring
            assert self.copied(queue, old) == 1
        assert pool.peek(young.full_block_hashes(4, 5)) == 5, "what was copied back is findable again"
        assert step(queue)[young] == (21, 1)
        for each in (old, young):
            queue.end(each)
        assert_idle(queue, pool)

    def test_without_anybody_who_decodes_all_is_copied_at_once(self) -> None:
        queue, pool, old, young = self.in_the_middle()
        queue.end(old)
        decision = queue.decide()
        assert decision is not None and not decision.slices
        assert not queue.admit() and not young.is_running, "a step copies"
        finish(queue, decision)
        queue.admit()
        assert [step(queue), step(queue)] == [{}, {young: (21, 1)}]
        queue.end(young)
        assert_idle(queue, pool)

    def test_its_end_in_the_middle_of_a_copy_frees_everything(self) -> None:
        for steps in range(12):
            queue, pool, old, young = self.in_the_middle()
            for _ in range(steps):
                step(queue)
                pool.release(pool.allocate(pool.num_allocatable))
                queue.admit()
            decision = queue.decide()
            queue.end(young)
            assert decision is not None
            finish(queue, decision)
            assert queue.host_copies.num_bytes == 0
            queue.end(old)
            assert_idle(queue, pool)

    def test_a_copy_that_could_not_be_made_is_not_believed(self) -> None:
        for good_steps in (0, 2, 5):
            queue, pool, old, young = self.in_the_middle()
            for _ in range(good_steps):
                step(queue)
            decision = queue.decide()
            assert decision is not None and isinstance(decision.moves[-1], SaveBlocks)
            queue.commit(decision, [decision.moves[-1]])
            queue.check_invariants()
            assert (young.host_copy, queue.host_copies.num_bytes) == (None, 0)
            pool.release(pool.allocate(pool.num_allocatable))
            assert self.finish_old_then_young(queue, pool, old, young) == 22

    def test_who_could_not_be_restored_does_not_go_on(self) -> None:
        queue, pool, old, young = self.in_the_middle()
        while not young.is_running:
            step(queue)
            pool.release(pool.allocate(pool.num_allocatable))
            queue.admit()
        step(queue)
        decision = queue.decide()
        assert decision is not None and isinstance(decision.moves[-1], RestoreBlocks)
        queue.commit(decision, [decision.moves[-1]])
        queue.check_invariants()
        assert young.num_computed == 4, "nothing is believed to be there"
        for each in (young, old):
            queue.end(each)
        assert_idle(queue, pool)

    def test_its_end_frees_the_copy(self) -> None:
        queue, pool, old, young = self.preempted(swap_bytes=3 * self.BLOCK_BYTES)
        queue.end(young)
        assert queue.host_copies.num_bytes == 0
        queue.end(old)
        assert_idle(queue, pool)


class TestPromptsBesideDecoding:
    """The node's time is a constant per step and so much per token; the scheduler must find out."""

    STEP_S, TOKEN_S = 0.02, 0.001

    def times(self, queue: DecodeScheduler, prompt: DecodeSequence) -> list[float]:
        """Seconds of each step until the prompt is computed."""
        times: list[float] = []
        while not prompt.output_token_ids:
            decision = queue.decide()
            assert decision is not None
            lengths = [piece.length for piece in decision.slices if piece.length > 1]
            assert any(piece.sequence is prompt for piece in decision.slices), "the prompt must get on"
            times.append(self.STEP_S + self.TOKEN_S * sum(lengths))
            queue.costs.record_step(
                seconds=times[-1], decode_tokens=len(decision.slices) - len(lengths), prompt_tokens=sum(lengths)
            )
            finish(queue, decision)
        return times

    def run(self, *, bound_s: float | None, streams: int = 2) -> list[float]:
        queue = DecodeScheduler(
            BlockPool(1500), LAYOUT, max_num_batched_tokens=512, max_num_seqs=8, itl_bound_s=bound_s
        )
        for number in range(streams):
            start(queue, stream := sequence(4, first=10 * number, max_tokens=500))
            self.times(queue, stream)
        for _ in range(3 if streams else 0):
            decision = queue.decide()
            assert decision is not None
            queue.costs.record_step(seconds=self.STEP_S, decode_tokens=streams, prompt_tokens=0)
            finish(queue, decision)
        start(queue, prompt := sequence(2048, first=1000))
        return self.times(queue, prompt)

    def test_running_streams_wait_no_longer_than_the_bound(self) -> None:
        bounded, unbounded = self.run(bound_s=0.1), self.run(bound_s=None)
        assert max(unbounded) > 0.5
        assert max(bounded) <= 0.101
        # And the prompt is not starved: it gets what the bound leaves.
        assert len(bounded) <= 2048 / 70

    def test_a_prompt_alone_takes_the_whole_budget(self) -> None:
        assert len(self.run(bound_s=0.1, streams=0)) == 4

    def test_a_bound_that_cannot_be_held_still_lets_the_prompt_get_on(self) -> None:
        assert len(self.run(bound_s=0.001)) <= 2048 / 8


class TestTwinPrompts:
    def test_a_prompt_that_comes_twice_at_once_is_computed_once(self) -> None:
        queue, pool = scheduler(16)
        one, two = sequence(10), sequence(10)
        start(queue, one, two)
        assert step(queue) == {one: (0, 10)}
        # Two of its three blocks are full.
        assert step(queue) == {one: (10, 1), two: (8, 2)}
        assert one.block_ids[:2] == two.block_ids[:2] and one.block_ids[2] != two.block_ids[2]
        assert pool.counts.in_use == 4
        queue.end(one)
        queue.end(two)
        assert_idle(queue, pool)

    def test_who_waits_for_a_prefix_goes_on_as_soon_as_it_is_there(self) -> None:
        queue, _ = scheduler(64, budget=16)
        long, short = sequence(60), sequence(13)
        start(queue, long, short)
        # Three of its blocks, and the first of what is long's alone; then all but its last token is there.
        assert step(queue) == {long: (0, 16)}
        assert step(queue) == {short: (12, 1), long: (16, 15)}

    def test_a_prefix_is_as_pressing_as_those_who_wait_for_it(self) -> None:
        queue, _ = scheduler(100, budget=16)
        first, long, middling, short = sequence(60, first=500), sequence(60), sequence(40, first=900), sequence(13)
        start(queue, first, long, middling, short)
        # Without the short one it would be the middling one's turn, which has less to do than the long one.
        assert step(queue) == {first: (0, 4), long: (0, 12)}
        assert step(queue)[short] == (12, 1)

    def test_one_that_needs_every_token_does_not_wait(self) -> None:
        queue, pool = scheduler(16)
        usual, scored = sequence(10), sequence(10, prompt_logprobs=0)
        start(queue, usual, scored)
        assert step(queue) == {usual: (0, 10), scored: (0, 10)}
        # What was computed twice is kept once.
        assert usual.block_ids[:2] == scored.block_ids[:2] and usual.block_ids[2] != scored.block_ids[2]
        assert pool.counts.in_use == 4
        for each in (usual, scored):
            queue.end(each)
        assert_idle(queue, pool)

    @pytest.mark.parametrize("how", ["ended", "ended in a step", "preempted", "step failed"])
    def test_who_waits_for_a_prefix_takes_over_when_its_computer_is_gone(self, how: str) -> None:
        queue, pool = scheduler(32, budget=10)
        first, second = sequence(30), sequence(30)
        start(queue, first, second)
        assert step(queue) == {first: (0, 10)}
        decision = queue.decide()
        assert decision is not None and [piece.sequence for piece in decision.slices] == [first]
        if how == "ended in a step":
            queue.end(first)
        if how == "step failed":
            queue.abandon(decision)
        else:
            finish(queue, decision)
        if how == "preempted":
            queue._preempt(first)
        else:
            queue.end(first)
        there = 8 if how == "step failed" else 20
        assert step(queue) == {second: (there, 10)}
        for each in (first, second):
            queue.end(each)
        assert_idle(queue, pool)

    @settings(max_examples=30, deadline=None)
    @given(
        prompts=st.lists(
            st.tuples(st.lists(st.integers(0, 1), max_size=6), st.integers(1, 9), st.integers(0, 8)),
            min_size=1,
            max_size=8,
        ),
        budget=st.integers(1, 30),
    )
    def test_no_block_of_any_prefix_is_computed_twice(
        self, prompts: list[tuple[list[int], int, int]], budget: int
    ) -> None:
        queue, pool = scheduler(200, budget=budget)
        arrives: dict[DecodeSequence, int] = {}
        for number, (parts, rest, at) in enumerate(prompts):
            # Parts of five tokens, in one of two kinds each, so that prefixes of any length are shared.
            tokens = [part for part in parts for _ in range(5)] + [1000 + number] * rest
            arrives[DecodeSequence(0, tokens, SamplingParams(), ROOT)] = at
        alive = set(arrives)
        computed: Counter[BlockHash] = Counter()
        for number in range(400):
            if not alive:
                break
            # Place in line is decided by when it comes.
            for each in [each for each, at in arrives.items() if at == number]:
                each.arrival = next_place()
                queue.add(each)
            queue.admit()
            for each, (begin, length) in step(queue).items():
                reusable = range(begin // 4, min((begin + length) // 4, (len(each.prompt_token_ids) - 1) // 4))
                computed.update(each.block_hashes[index] for index in reusable)
                if len(each.output_token_ids) == 2:
                    queue.end(each)
                    alive.remove(each)
        assert not alive, "somebody waits for ever"
        assert set(computed.values()) <= {1}
        assert_idle(queue, pool)

    def test_no_hole_when_the_first_of_two_ends_and_is_evicted(self) -> None:
        queue, pool = scheduler(12)
        one, two = sequence(10), sequence(10, prompt_logprobs=0)
        two.index = 1
        start(queue, one, two)
        step(queue)
        queue.end(one)
        for _ in range(4):
            step(queue)
        # Everything that can be evicted is.
        pool.release(pool.allocate(pool.num_allocatable))
        assert two.num_computed == 14
        assert pool.peek(two.full_block_hashes(4, 3)) == 3
        queue.end(two)
        assert_idle(queue, pool)


class TestSiblings:
    def test_one_that_ends_lets_in_who_was_refused_before_they_were_there(self) -> None:
        queue, _ = scheduler(200, places=8)
        members = family(40, 8)
        start(queue, members[0])
        stranger = sequence(40, first=100)
        start(queue, stranger)
        assert not stranger.is_running, "the siblings' places are taken"
        step(queue)
        queue.end(members[7])
        queue.admit()
        assert stranger.is_running

    def test_a_partial_block_is_shared_until_somebody_writes_into_it(self) -> None:
        queue, pool = scheduler(16)
        leader, *siblings = family(6, 3)
        start(queue, leader)
        step(queue)
        assert [member.block_ids for member in siblings] == [leader.block_ids] * 2
        assert pool.counts.in_use == 2
        step(queue)
        assert {member.block_ids[0] for member in siblings} == {leader.block_ids[0]}
        assert len({member.block_ids[1] for member in (leader, *siblings)}) == 3
        # Three copies of one block, one of which is the original.
        assert pool.counts.in_use == 4
        for member in (leader, *siblings):
            queue.end(member)
        assert_idle(queue, pool)

    def test_the_last_one_left_writes_into_the_original(self) -> None:
        queue, pool = scheduler(16)
        leader, sibling = family(6, 2)
        start(queue, leader)
        step(queue)
        original = sibling.block_ids[1]
        queue.end(leader)
        step(queue)
        assert sibling.block_ids[1] == original
        queue.end(sibling)
        assert_idle(queue, pool)

    def test_a_prompt_that_ends_with_its_block_needs_no_copy(self) -> None:
        queue, pool = scheduler(16)
        members = family(8, 3)
        start(queue, members[0])
        step(queue)
        step(queue)
        assert len({tuple(member.block_ids[:2]) for member in members}) == 1
        assert len({member.block_ids[2] for member in members}) == 3
        for member in members:
            queue.end(member)
        assert_idle(queue, pool)

    def test_siblings_without_blocks_to_write_into_compute_later(self) -> None:
        queue, pool = scheduler(3)
        members = family(6, 3)
        start(queue, members[0])
        step(queue)
        assert queue.num_running == 3
        # One copies, the last but one takes what the last gives up.
        assert set(step(queue)) == set(members[:2])
        assert (queue.num_running, queue.num_waiting) == (2, 1)
        queue.end(members[0])
        queue.end(members[1])
        queue.admit()
        # Prompt and first token, the full block from the cache.
        assert step(queue)[members[2]] == (4, 3)
        queue.end(members[2])
        assert_idle(queue, pool)

    def test_branches_of_a_branch_share_all_but_the_end(self) -> None:
        # As beam search does it: the best two of each step go on, each from whichever parent.
        queue, pool = scheduler(32)
        beams = [sequence(6)]
        start(queue, beams[0])
        for number in range(1, 9):
            decision = queue.decide()
            assert decision is not None
            queue.commit(decision)
            parent = beams[number % len(beams)]
            children = [
                DecodeSequence(index, parent.prompt_token_ids, parent.sampling, ROOT, list(parent.output_token_ids))
                for index in (2 * number, 2 * number + 1)
            ]
            for child in children:
                queue.branch(parent, child)
                say(child)
            for beam in beams:
                queue.end(beam)
            beams = children
            queue.check_invariants()
            shared = set(beams[0].block_ids) & set(beams[1].block_ids)
            assert len(shared) == len(beams[0].block_ids)
            # Nothing is held for parents that are gone.
            assert pool.counts.in_use == LAYOUT.blocks_for(6 + number - 1)
        for beam in beams:
            queue.end(beam)
        assert_idle(queue, pool)

    def test_one_that_goes_on_from_another_shares_all_that_is_the_same(self) -> None:
        # Beams again, of which the worst gives up its end for that of the best.
        queue, pool = scheduler(32)
        beams = family(6, 3)
        start(queue, beams[0])
        chance = Random(5)
        step(queue)
        while beams[0].num_tokens < 40:
            decision = queue.decide()
            assert decision is not None
            queue.commit(decision)  # The harness checks that each finds its own text.
            best, worst, other = chance.sample(beams, 3)
            # Before the next tokens, as a search does it, or after: then the last tokens have no K/V yet.
            for speakers in (beams, [best]):
                if queue.can_rebase(worst, best) and chance.random() < 0.7:
                    queue.rebase(worst, best)
                    assert worst.output_token_ids == best.output_token_ids
                    assert worst.block_ids == best.block_ids
                    count = worst.num_tokens // 4
                    copy = DecodeSequence(0, worst.prompt_token_ids, worst.sampling, ROOT, best.output_token_ids)
                    assert worst.full_block_hashes(4, count) == copy.full_block_hashes(4, count)
                queue.check_invariants()
                for beam in speakers:
                    if not beam.num_uncomputed:
                        say(beam)
            if chance.random() < 0.1:
                queue._preempt(other)
                assert not queue.can_rebase(other, best) and not queue.can_rebase(best, other)
                queue.admit()
        for beam in beams:
            queue.end(beam)
        assert_idle(queue, pool)

    def test_a_branch_of_a_preempted_parent_is_computed_in_its_turn(self) -> None:
        queue, pool = scheduler(8)
        parent, child = sequence(6), sequence(6, index=1)
        start(queue, parent)
        step(queue)
        queue._preempt(parent)
        child.output_token_ids = list(parent.output_token_ids)
        queue.branch(parent, child)
        queue.admit()
        step(queue)
        assert (parent.num_computed, child.num_computed) == (7, 7)
        queue.end(parent)
        queue.end(child)
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
        arrives_with_first_tokens(queue, reservation)
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


class TestUnusedSlots:
    def test_less_than_a_block_for_each_sequence(self) -> None:
        queue, _ = scheduler(16, budget=7)
        # A long prompt takes its blocks as it is computed.
        start(queue, prompt := sequence(18))
        for computed, unused in ((7, 1), (14, 2), (18, 2), (19, 1), (20, 0), (21, 3)):
            step(queue)
            assert (prompt.num_computed, queue.unused_slots) == (computed, unused)
            assert queue.allocated_slots == computed + unused

    def test_a_shared_block_counts_once_and_a_promised_one_not(self) -> None:
        queue, _ = scheduler(16)
        start(queue, family(6, 3)[0])
        step(queue)
        assert (queue.unused_slots, queue.allocated_slots) == (2, 8)
        step(queue)
        assert (queue.unused_slots, queue.allocated_slots) == (3 * 1, 4 + 3 * 4)
        hand_off(queue, sequence(12, first=50))
        queue.admit()
        assert (queue.unused_slots, queue.allocated_slots, queue.num_reserved_blocks) == (3, 16, 3)


class RandomDecode(RuleBasedStateMachine):
    """A tiny pool under everything that can happen, in any order."""

    swap_blocks = 0
    itl_bound_s: float | None = None

    def __init__(self) -> None:
        super().__init__()
        swap_bytes = self.swap_blocks * LAYOUT.block_bytes
        self.queue, self.pool = scheduler(
            10, budget=7, places=4, expected=6, swap_bytes=swap_bytes, itl_bound_s=self.itl_bound_s
        )
        self.alive: list[DecodeSequence] = []
        self.asked: list[Reservation] = []
        self.granted: list[Reservation] = []
        self.on_device: DecodeDecision | None = None
        self.names = NamesOfPrefixes(self.pool)

    @invariant()
    def the_books_balance(self) -> None:
        self.queue.check_invariants()
        running = self.queue._running
        assert len(running) <= 4
        assert running == sorted(running, key=lambda entry: entry.arrival)

    @invariant()
    def no_cached_chain_has_a_hole(self) -> None:
        self.names.check(self.alive)

    @rule(
        length=st.integers(1, 24),
        first=st.integers(0, 2),
        count=st.integers(1, 3),
        elsewhere=st.booleans(),
        priority=st.integers(-2, 2),
    )
    def arrives(self, length: int, first: int, count: int, elsewhere: bool, priority: int) -> None:
        members = family(length, count, first=100 * first)
        for member in members:
            member.arrival = next_place(priority)
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
        arrives_with_first_tokens(self.queue, reservation)

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
    @rule(moves=st.integers(0, 2))
    def decide(self, moves: int) -> None:
        self.on_device = self.queue.decide()
        if self.on_device is not None:
            assert sum(piece.length for piece in self.on_device.slices) <= 7
            for piece in self.on_device.slices:
                assert len(piece.sequence.block_ids) * 4 >= piece.start + piece.length
                assert not piece.sequence.is_ended
        for preempted in self.queue.take_preempted()[:moves]:
            if not preempted.siblings:
                self.queue.withdraw(preempted)
                self.asked.append(hand_off(self.queue, preempted))

    @precondition(lambda self: self.on_device is not None)
    @rule(succeeds=st.integers(0, 4), moves_fail=st.integers(0, 4))
    def step_returns(self, succeeds: int, moves_fail: int) -> None:
        assert self.on_device is not None
        if succeeds:
            copies = [move for move in self.on_device.moves if not isinstance(move, CopyBlock)]
            failed = copies[:1] if not moves_fail else []
            finish(self.queue, self.on_device, failed)
            for move in failed:
                if isinstance(move, RestoreBlocks) and not move.sequence.is_ended:
                    self.queue.end(move.sequence)
                    self.alive.remove(move.sequence)
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
                    arrives_with_first_tokens(self.queue, reservation)
            step(self.queue)
            for member in list(self.alive):
                if member.num_tokens >= len(member.prompt_token_ids) + 3:
                    self.queue.end(member)
                    self.alive.remove(member)
        assert not self.alive, "some sequence never got its turn"
        for reservation in (*self.asked, *self.granted):
            fail_hand_off(self.queue, self.pool, reservation)
        assert_idle(self.queue, self.pool)
        assert self.queue.host_copies.num_bytes == 0


class NamesOfPrefixes:
    """Knows which hash comes before which."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._before: dict[BlockHash, BlockHash] = {}

    def check(self, sequences: list[DecodeSequence]) -> None:
        for each in sequences:
            self._before.update(zip(each.block_hashes[1:], each.block_hashes, strict=False))
        findable = set(self._pool.cached_hashes())
        for block_hash in findable:
            assert self._before.get(block_hash, block_hash) in findable, "a block cannot be reached from its start"


class RandomDecodeWithSwap(RandomDecode):
    """The same with room for two or three preempted sequences in host memory, and one block copied beside decoding."""

    swap_blocks = 12
    itl_bound_s = 0.0


for _machine in (RandomDecode, RandomDecodeWithSwap):
    _machine.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestRandomDecode = RandomDecode.TestCase
TestRandomDecodeWithSwap = RandomDecodeWithSwap.TestCase
