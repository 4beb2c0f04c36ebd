"""Which prompts a prefill step computes: each rule alone, then all at once at random."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_hash import hash_chain
from engine.block_pool import BlockPool
from engine.ids import AttemptId, BlockHash, BlockId
from engine.kv_layout import KvLayout
from engine.sampling_params import SamplingParams
from prefill_node.scheduler import PrefillDecision, PrefillJob, PrefillScheduler, SchedulingPolicy

LAYOUT = KvLayout(num_layers=1, kv_heads=1, head_dim=2, block_size=4, dtype="float32")
ROOT = BlockHash(bytes(16))
_names = itertools.count()


def scheduler(
    num_blocks: int, *, budget: int = 64, places: int = 8, ungranted: int = 8, policy: SchedulingPolicy = "priority"
) -> tuple[PrefillScheduler, BlockPool]:
    pool = BlockPool(num_blocks)
    queue = PrefillScheduler(
        pool, LAYOUT, max_num_batched_tokens=budget, max_num_seqs=places, max_ungranted=ungranted, policy=policy
    )
    return queue, pool


def job_of(tokens: Sequence[int], *, priority: int = 0, granted: bool = False, **sampling: Any) -> PrefillJob:
    return PrefillJob(
        attempt_id=AttemptId(str(next(_names))),
        token_ids=tokens,
        prompt_length=len(tokens),
        sampling=SamplingParams(**sampling),
        sequence_indices=(0,),
        block_hashes=hash_chain(ROOT, tokens, LAYOUT.block_size),
        priority=priority,
        is_ungranted=not granted,
    )


def job(length: int, *, first: int = 0, **more: Any) -> PrefillJob:
    return job_of(list(range(first, first + length)), **more)


def chunks(decision: PrefillDecision | None) -> list[tuple[PrefillJob, int, int]]:
    return [(chunk.job, chunk.start, chunk.length) for chunk in decision.chunks] if decision else []


def step(queue: PrefillScheduler) -> list[tuple[PrefillJob, int, int]]:
    decision = queue.decide()
    if decision is not None:
        queue.commit(decision)
    queue.check_invariants()
    return chunks(decision)


def assert_idle(queue: PrefillScheduler, pool: BlockPool) -> None:
    assert (queue.num_waiting, queue.num_computing, queue.num_leases, queue.waiting_tokens) == (0, 0, 0, 0)
    assert pool.counts.free + pool.counts.cached == pool.counts.total
    assert all(pool.ref_count(BlockId(block_id)) == 0 for block_id in range(pool.counts.total))


def test_alone_a_prompt_has_whole_steps() -> None:
    queue, pool = scheduler(16, budget=10)
    queue.add(prompt := job(25))
    assert [step(queue) for _ in range(4)] == [[(prompt, 0, 10)], [(prompt, 10, 10)], [(prompt, 20, 5)], []]
    assert queue.num_leases == 1, "a computed prompt stays pinned"
    queue.finish(prompt)
    assert_idle(queue, pool)


def test_a_short_prompt_passes_a_long_one_which_holds_it_up_by_a_quarter_of_a_step() -> None:
    queue, _ = scheduler(64, budget=40)
    queue.add(long := job(100))
    assert step(queue) == [(long, 0, 40)]
    queue.add(short := job(6, first=500))
    assert step(queue) == [(short, 0, 6), (long, 40, 10)]
    assert step(queue) == [(long, 50, 40)]


def test_the_least_work_comes_first_and_the_oldest_keeps_its_quarter() -> None:
    queue, _ = scheduler(64, budget=40)
    jobs = [job(length, first=1000 * length) for length in (70, 25, 60, 20, 4)]
    for entry in jobs:
        queue.add(entry)
    longest, middling, _, shorter, shortest = jobs
    assert step(queue) == [(shortest, 0, 4), (shorter, 0, 20), (longest, 0, 10)]
    assert step(queue) == [(middling, 0, 25), (longest, 10, 10)]


def test_of_two_long_prompts_one_is_ended_first() -> None:
    queue, _ = scheduler(400, budget=40)
    queue.add(first := job(90))
    queue.add(second := job(90, first=500))
    assert step(queue) == [(first, 0, 40)]
    assert step(queue) == [(first, 40, 40)]
    assert step(queue) == [(first, 80, 10), (second, 0, 10)]
    queue.add(nearer := job(50, first=1000))
    # The oldest one left is not the one nearest to its end.
    assert step(queue) == [(nearer, 0, 30), (second, 10, 10)]


def test_in_order_of_arrival_each_step_is_filled() -> None:
    queue, _ = scheduler(64, budget=40, policy="fcfs")
    jobs = [job(length, first=1000 * length, priority=-length) for length in (50, 2, 45, 1)]
    for entry in jobs:
        queue.add(entry)
    long, two, second_long, one = jobs
    assert step(queue) == [(long, 0, 40)]
    assert step(queue) == [(long, 40, 10), (two, 0, 2), (second_long, 0, 28)]
    assert step(queue) == [(second_long, 28, 17), (one, 0, 1)]


def test_the_most_urgent_class_goes_alone_but_for_the_quarter_of_the_oldest() -> None:
    queue, _ = scheduler(64, budget=40)
    queue.add(usual := job(20))
    queue.add(urgent := job(50, first=500, priority=-1))
    queue.add(late := job(2, first=900, priority=7))
    assert step(queue) == [(urgent, 0, 30), (usual, 0, 10)]
    assert step(queue) == [(urgent, 30, 20), (usual, 10, 10)]
    assert step(queue) == [(late, 0, 2)]


def test_an_urgent_class_without_blocks_lets_others_go_on() -> None:
    queue, _ = scheduler(8, budget=8)
    queue.add(usual := job(28, granted=True))
    assert step(queue) == [(usual, 0, 8)]
    queue.add(urgent := job(20, first=500, priority=-1, granted=True))
    assert step(queue) == [(usual, 8, 8)]
    queue.stop(usual)
    queue.finish(usual)
    assert step(queue) == [(urgent, 0, 8)]


def test_never_more_chunks_than_max_num_seqs() -> None:
    queue, _ = scheduler(16, places=2)
    jobs = [job(4, first=10 * i) for i in range(3)]
    for entry in jobs:
        queue.add(entry)
    assert [entry for entry, _, _ in step(queue)] == jobs[:2]
    assert [entry for entry, _, _ in step(queue)] == jobs[2:]


def test_lengths_around_a_block_boundary() -> None:
    for length in (1, 3, 4, 5, 7, 8, 9):
        queue, pool = scheduler(4)
        prompt = job(length)
        queue.add(prompt)
        assert step(queue) == [(prompt, 0, length)]
        assert len(prompt.block_ids) == -(-length // 4)
        assert len(pool.cached_hashes()) == length // 4
        queue.finish(prompt)
        assert_idle(queue, pool)


def test_a_hit_never_covers_the_last_token() -> None:
    for length, cached in ((3, 0), (4, 0), (5, 4), (8, 4), (9, 8)):
        queue, _ = scheduler(8)
        for expected in (0, cached):
            queue.add(again := job(length))
            assert step(queue) == [(again, expected, length - expected)]
            assert again.cached_tokens == expected
            queue.finish(again)


def test_prompt_log_probabilities_need_every_token() -> None:
    queue, _ = scheduler(8)
    queue.add(first := job(9))
    step(queue)
    first.is_ungranted = False
    queue.add(scored := job(9, prompt_logprobs=0))
    assert step(queue) == [(scored, 0, 9)]


def test_nothing_new_starts_while_too_many_are_ungranted() -> None:
    queue, _ = scheduler(16, ungranted=2)
    jobs = [job(4, first=10 * i) for i in range(3)]
    for entry in jobs:
        queue.add(entry)
    assert [entry for entry, _, _ in step(queue)] == jobs[:2]
    assert step(queue) == []
    jobs[1].is_ungranted = False
    assert [entry for entry, _, _ in step(queue)] == jobs[2:]


def test_a_job_without_blocks_is_overtaken_by_no_more_than_its_own_length() -> None:
    queue, pool = scheduler(8, budget=40)
    queue.add(held := job(16, granted=True))
    assert step(queue) == [(held, 0, 16)]
    queue.add(large := job(20, first=500, granted=True))
    overtaking = [job(4, first=100 * number, granted=True) for number in range(10, 30)]
    for number, entry in enumerate(overtaking, 1):
        queue.add(entry)
        if number <= 5:
            assert step(queue) == [(entry, 0, 4)], "four blocks are free, and large needs five"
            queue.finish(entry)
        else:
            assert step(queue) == [], "from now on free blocks are kept for large"
    queue.finish(held)
    assert [length for _, _, length in step(queue)] == [4, 4, 4, 20]
    for entry in (large, *overtaking):
        queue.finish(entry)
    assert_idle(queue, pool)


def test_a_job_that_ends_in_a_step_keeps_its_blocks_until_the_step_returns() -> None:
    queue, pool = scheduler(8)
    queue.add(prompt := job(8))
    decision = queue.decide()
    assert decision is not None
    queue.finish(prompt)
    assert pool.counts.in_use == 2
    queue.commit(decision)
    assert_idle(queue, pool)
    # What was computed is still worth something.
    assert pool.counts.cached == 2


def test_a_stopped_job_is_not_computed_on_and_keeps_its_blocks_until_finish() -> None:
    queue, pool = scheduler(16, budget=4)
    poisoned, other = job(8), job(4, first=50)
    queue.add(poisoned)
    decision = queue.decide()
    assert decision is not None
    # Its step failed; its writer has not returned yet. The next job must not meet it in a step.
    queue.abandon(decision)
    queue.stop(poisoned)
    queue.add(other)
    assert step(queue) == [(other, 0, 4)]
    assert pool.counts.in_use == 3
    queue.finish(poisoned)
    queue.finish(other)
    assert_idle(queue, pool)


def test_a_stopped_job_that_waits_never_starts() -> None:
    queue, pool = scheduler(8)
    queue.add(prompt := job(8))
    queue.stop(prompt)
    assert step(queue) == []
    queue.finish(prompt)
    assert_idle(queue, pool)


def test_a_failed_step_counts_for_nothing_and_ending_twice_is_harmless() -> None:
    queue, pool = scheduler(8)
    queue.add(prompt := job(8))
    decision = queue.decide()
    assert decision is not None
    queue.finish(prompt)
    queue.finish(prompt)
    queue.abandon(decision)
    queue.abandon(decision)
    assert_idle(queue, pool)
    assert pool.counts.cached == 0


SYSTEM = list(range(900, 922))


def computed_tokens(queue: PrefillScheduler, jobs: Sequence[PrefillJob]) -> int:
    """Tokens that steps compute until nothing is left to do."""
    total = 0
    while pieces := step(queue):
        total += sum(length for _, _, length in pieces)
    assert all(entry.is_computed for entry in jobs)
    return total


def test_a_shared_system_prompt_is_computed_once() -> None:
    for budget in (7, 16, 200):
        queue, _ = scheduler(64, budget=budget)
        jobs = [job_of([*SYSTEM, *range(100 * n, 100 * n + 7)]) for n in range(3)]
        for entry in jobs:
            queue.add(entry)
        # 22 tokens in common are five full blocks of four and two tokens more.
        assert computed_tokens(queue, jobs) == 20 + 3 * 9
        assert sorted(entry.cached_tokens for entry in jobs) == [0, 20, 20]


def test_a_prompt_that_comes_twice_is_computed_once_but_for_its_last_token() -> None:
    queue, _ = scheduler(64)
    jobs = [job(13), job(13), job(12), job(12)]
    for entry in jobs:
        queue.add(entry)
    # A hit never covers the last token, so prompts of three full blocks have their last block computed again.
    assert computed_tokens(queue, jobs) == 13 + 1 + 4 + 4
    assert sorted(entry.cached_tokens for entry in jobs) == [0, 8, 8, 12]


def test_who_waits_for_a_prefix_goes_on_as_soon_as_it_is_there() -> None:
    queue, _ = scheduler(400, budget=20)
    queue.add(long := job_of([*SYSTEM, *range(400)]))
    queue.add(short := job_of([*SYSTEM, 7, 7, 7]))
    assert step(queue) == [(long, 0, 20)]
    assert step(queue)[0] == (short, 20, 5)
    assert short.cached_tokens == 20


def test_a_prefix_is_as_pressing_as_those_who_wait_for_it() -> None:
    queue, _ = scheduler(400, budget=20)
    queue.add(first := job_of(range(500, 600)))
    queue.add(long := job_of([*SYSTEM, *range(400)]))
    assert step(queue) == [(first, 0, 20)]
    queue.finish(first)
    queue.add(other := job_of(range(600, 700)))
    assert step(queue) == [(other, 0, 15), (long, 0, 5)]
    # 422 tokens are more than 85; but somebody waits who needs 17 of them and 3 of its own.
    queue.add(short := job_of([*SYSTEM, 7, 7, 7]))
    assert step(queue) == [(long, 5, 20)]
    assert step(queue)[0] == (short, 20, 5)


@pytest.mark.parametrize("how", ["stopped", "step failed", "finished in a step"])
def test_who_waits_for_a_prefix_takes_over_when_its_claimant_is_gone(how: str) -> None:
    queue, pool = scheduler(64, budget=10)
    first, second, third = (job_of([*SYSTEM, *range(100 * n, 100 * n + 7)]) for n in range(3))
    for entry in (first, second, third):
        queue.add(entry)
    assert step(queue) == [(first, 0, 10)]
    decision = queue.decide()
    assert decision is not None
    if how == "step failed":
        queue.abandon(decision)
        queue.stop(first)
    elif how == "stopped":
        queue.commit(decision)
        queue.stop(first)
    else:
        queue.finish(first)
        queue.commit(decision)
    there = 8 if how == "step failed" else 20
    assert step(queue)[0][:2] == (second, there)
    queue.finish(first)
    assert computed_tokens(queue, [second, third]) >= 0
    assert (second.cached_tokens, third.cached_tokens) == (there, 20)
    for entry in (second, third):
        queue.finish(entry)
    assert_idle(queue, pool)


def test_one_that_needs_every_token_neither_waits_nor_keeps_others_waiting_for_ever() -> None:
    queue, _ = scheduler(64, budget=10)
    usual, scored = job_of([*SYSTEM, 2]), job_of([*SYSTEM, 1], prompt_logprobs=0)
    queue.add(usual)
    queue.add(scored)
    assert computed_tokens(queue, [scored, usual]) == 2 * 23
    queue.add(later := job_of([*SYSTEM, 3]))
    assert step(queue) == [(later, 20, 3)]


def test_what_is_computed_twice_is_kept_once_and_what_follows_it_can_be_reached() -> None:
    queue, pool = scheduler(32)
    queue.add(first := job_of(SYSTEM))
    step(queue)
    queue.add(scored := job_of([*SYSTEM, *range(14)], prompt_logprobs=0))
    assert step(queue) == [(scored, 0, 36)]
    assert scored.block_ids[:5] == first.block_ids[:5] and pool.counts.in_use == 6 + 4
    queue.finish(first)
    # Everything that can be evicted is.
    pool.release(pool.allocate(pool.num_allocatable))
    assert pool.peek(scored.block_hashes) == len(pool.cached_hashes()) == 9
    queue.finish(scored)
    assert_idle(queue, pool)


@settings(max_examples=80, deadline=None)
@given(
    arrivals=st.lists(st.lists(st.tuples(st.integers(1, 40), st.integers(-1, 1)), max_size=4), max_size=10),
    budget=st.integers(1, 40),
    places=st.integers(1, 6),
)
def test_every_prompt_ends_within_its_bound_whatever_comes_after_it(
    arrivals: list[list[tuple[int, int]]], budget: int, places: int
) -> None:
    queue, _ = scheduler(400, budget=budget, places=places)
    quarter = max(1, budget // 4)
    firsts = itertools.count(0, 1000)
    unfinished: dict[PrefillJob, int] = {}  # the last step in which it may still be unfinished
    for number in itertools.count():
        if number >= len(arrivals) and not unfinished:
            break
        for length, priority in arrivals[number] if number < len(arrivals) else []:
            # Each job before it, and then itself, gets a quarter of a step until it ends.
            steps = sum(-(-(entry.num_tokens - entry.num_computed) // quarter) for entry in unfinished)
            entry = job(length, first=next(firsts), priority=priority, granted=True)
            unfinished[entry] = number + steps + -(-length // quarter)
            queue.add(entry)
        decision = queue.decide()
        pieces = chunks(decision)
        if decision is not None:
            queue.commit(decision)
        assert sum(length for _, _, length in pieces) <= budget and len(pieces) <= places
        assert bool(pieces) == bool(unfinished)
        ending = [entry for entry, start, length in pieces if start + length == entry.num_tokens]
        for ended in ending:
            others = [piece for piece in pieces if piece[0] not in ending and piece[0].priority >= ended.priority]
            assert sum(length for _, _, length in others) <= quarter, "a long prompt holds up a first token"
        unfinished = {entry: last for entry, last in unfinished.items() if not entry.is_computed}
        assert all(number + 1 <= last for last in unfinished.values()), "a prompt starves"


@settings(max_examples=80, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=6), st.integers(1, 9), st.integers(0, 8), st.booleans()),
        min_size=1,
        max_size=10,
    ),
    budget=st.integers(1, 30),
)
def test_no_block_of_any_prefix_is_computed_twice(prompts: list[tuple[list[int], int, int, bool]], budget: int) -> None:
    queue, pool = scheduler(200, budget=budget)
    jobs: dict[PrefillJob, int] = {}
    for number, (parts, rest, arrives, is_stopped) in enumerate(prompts):
        # Parts of five tokens, in one of two kinds each, so that prefixes of any length are shared.
        tokens = [part for part in parts for _ in range(5)] + [1000 + number] * rest
        entry = job_of(tokens, granted=True)
        jobs[entry] = arrives
        entry.overtaken_tokens = -1 if is_stopped else 0
    computed: Counter[BlockHash] = Counter()
    excused: set[BlockHash] = set()
    for number in range(400):
        for entry, arrives in jobs.items():
            if arrives == number:
                queue.add(entry)
        decision = queue.decide()
        if decision is None and number > 8:
            break
        for chunk in decision.chunks if decision else ():
            entry = chunk.job
            last_reusable = (entry.num_tokens - 1) // 4
            full = range(chunk.start // 4, min((chunk.start + chunk.length) // 4, last_reusable))
            computed.update(entry.block_hashes[index] for index in full)
        if decision:
            queue.commit(decision)
        for entry in jobs:
            if entry.overtaken_tokens == -1 and entry.is_started and not entry.is_unwanted:
                # Whoever takes over computes the block again that this one has begun.
                excused.update(entry.block_hashes[entry.num_computed // 4 :][:1])
                queue.finish(entry)
    queue.check_invariants()
    assert all(entry.is_computed or entry.is_unwanted for entry in jobs)
    assert all(count == 1 for block_hash, count in computed.items() if block_hash not in excused)
    for entry in jobs:
        queue.finish(entry)
    assert_idle(queue, pool)


class RandomPrefill(RuleBasedStateMachine):
    """A tiny pool under everything that can happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.pool = scheduler(10, budget=7, places=3, ungranted=3)
        self.alive: list[PrefillJob] = []
        self.on_device: PrefillDecision | None = None
        self.before: dict[BlockHash, BlockHash] = {}

    @invariant()
    def the_books_balance(self) -> None:
        self.queue.check_invariants()

    @invariant()
    def no_cached_chain_has_a_hole(self) -> None:
        findable = set(self.pool.cached_hashes())
        assert all(self.before.get(block_hash, block_hash) in findable for block_hash in findable)

    @rule(
        length=st.integers(1, 40),
        first=st.integers(0, 2),
        priority=st.integers(-1, 1),
        scored=st.sampled_from((None, 0)),
    )
    def arrives(self, length: int, first: int, priority: int, scored: int | None) -> None:
        self.alive.append(job(length, first=100 * first, priority=priority, prompt_logprobs=scored))
        hashes = self.alive[-1].block_hashes
        self.before.update(zip(hashes[1:], hashes, strict=False))
        self.queue.add(self.alive[-1])

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), how=st.sampled_from(("grant", "stop", "finish")))
    def hand_off_moves(self, data: st.DataObject, how: str) -> None:
        index = data.draw(st.integers(0, len(self.alive) - 1))
        entry = self.alive[index]
        if how == "grant":
            entry.is_ungranted = False
            return
        self.queue.stop(entry)
        if how == "finish":
            self.queue.finish(entry)
            del self.alive[index]

    @precondition(lambda self: self.on_device is None)
    @rule()
    def decide(self) -> None:
        self.on_device = self.queue.decide()
        if self.on_device is None:
            return
        assert len(self.on_device.chunks) <= 3
        assert sum(chunk.length for chunk in self.on_device.chunks) <= 7
        for chunk in self.on_device.chunks:
            assert chunk.start == chunk.job.num_computed and chunk.length > 0
            assert not chunk.job.is_unwanted

    @precondition(lambda self: self.on_device is not None)
    @rule(succeeds=st.integers(0, 4))
    def step_returns(self, succeeds: int) -> None:
        assert self.on_device is not None
        if succeeds:
            self.queue.commit(self.on_device)
        else:
            self.queue.abandon(self.on_device)
        self.on_device = None

    def teardown(self) -> None:
        if self.on_device is not None:
            self.queue.abandon(self.on_device)
        # Everybody else gets computed once those before it are granted and committed.
        for _ in range(500):
            decision = self.queue.decide()
            if decision is not None:
                self.queue.commit(decision)
            for entry in list(self.alive):
                if entry.is_computed or entry.is_unwanted:
                    self.queue.finish(entry)
                    self.alive.remove(entry)
        assert not self.alive, "some job never got its turn"
        assert_idle(self.queue, self.pool)


RandomPrefill.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRandomPrefill = RandomPrefill.TestCase


def test_a_decode_node_without_room_does_not_hold_up_another() -> None:
    queue, _ = scheduler(32, ungranted=2)
    full = [job(4, first=100 * number) for number in range(3)]
    for entry in full:
        entry.peer = ("decode-0", 1)
    other = job(4, first=900)
    other.peer = ("decode-1", 1)
    for entry in (*full, other):
        queue.add(entry)
    # decode-0 may have two results waiting here; decode-1's job, which came last, starts all the same.
    assert [entry for entry, _, _ in step(queue)] == [full[0], full[1], other]
    assert step(queue) == []
    full[0].is_ungranted = False
    assert [entry for entry, _, _ in step(queue)] == [full[2]]


def test_ungranted_results_of_one_decode_node_leave_half_of_the_pool() -> None:
    queue, _ = scheduler(8)
    jobs = [job(8, first=100 * number) for number in range(3)]
    for entry in jobs:
        queue.add(entry)
    assert [entry for entry, _, _ in step(queue)] == jobs[:2]


def test_of_ungranted_results_what_they_share_counts_once() -> None:
    queue, _ = scheduler(16)
    jobs = [job_of([*SYSTEM, number]) for number in range(4)]
    for entry in jobs:
        queue.add(entry)
    while step(queue):
        pass
    # Five blocks in common, and one each.
    assert [entry.is_computed for entry in jobs] == [True, True, True, False]


def test_a_prompt_larger_than_that_half_starts_when_it_is_alone() -> None:
    queue, _ = scheduler(8)
    queue.add(job(28))
    assert len(step(queue)) == 1
