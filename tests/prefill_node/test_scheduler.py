"""Which prompts a prefill step computes: each rule alone, then all at once at random."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_hash import hash_chain
from engine.block_pool import BlockPool
from engine.ids import AttemptId, BlockHash, BlockId
from engine.kv_layout import KvLayout
from engine.sampling_params import SamplingParams
from prefill_node.scheduler import PrefillDecision, PrefillJob, PrefillScheduler

LAYOUT = KvLayout(num_layers=1, kv_heads=1, head_dim=2, block_size=4, dtype="float32")
ROOT = BlockHash(bytes(16))
_names = itertools.count()


def scheduler(
    num_blocks: int, *, budget: int = 64, places: int = 8, ungranted: int = 8
) -> tuple[PrefillScheduler, BlockPool]:
    pool = BlockPool(num_blocks)
    queue = PrefillScheduler(pool, LAYOUT, max_num_batched_tokens=budget, max_num_seqs=places, max_ungranted=ungranted)
    return queue, pool


def job(length: int, *, first: int = 0, **sampling: Any) -> PrefillJob:
    tokens = list(range(first, first + length))
    return PrefillJob(
        attempt_id=AttemptId(str(next(_names))),
        token_ids=tokens,
        prompt_length=length,
        sampling=SamplingParams(**sampling),
        sequence_indices=(0,),
        block_hashes=hash_chain(ROOT, tokens, LAYOUT.block_size),
    )


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


def test_a_budget_is_shared_oldest_first() -> None:
    queue, pool = scheduler(16, budget=10)
    first, second = job(12), job(6, first=50)
    queue.add(first)
    queue.add(second)
    assert step(queue) == [(first, 0, 10)]
    assert step(queue) == [(first, 10, 2), (second, 0, 6)]
    assert step(queue) == []
    assert queue.num_leases == 2, "computed prompts stay pinned"
    queue.finish(first)
    queue.finish(second)
    assert_idle(queue, pool)


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


def test_a_full_pool_holds_the_head_and_all_behind_it() -> None:
    queue, pool = scheduler(24, budget=48)
    jobs = [job(12 * 4, first=100 * i) for i in range(3)] + [job(2, first=900)]
    for entry in jobs:
        entry.is_ungranted = False
        queue.add(entry)
    assert [entry for entry, _, _ in step(queue)] == jobs[:1]
    assert [entry for entry, _, _ in step(queue)] == jobs[1:2]
    assert step(queue) == []
    # The first hand-off commits: its blocks are evictable at once.
    queue.finish(jobs[0])
    assert [entry for entry, _, _ in step(queue)] == jobs[2:3]
    for entry in jobs:
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


class RandomPrefill(RuleBasedStateMachine):
    """A tiny pool under everything that can happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.pool = scheduler(10, budget=7, places=3, ungranted=3)
        self.alive: list[PrefillJob] = []
        self.on_device: PrefillDecision | None = None

    @invariant()
    def the_books_balance(self) -> None:
        self.queue.check_invariants()

    @rule(length=st.integers(1, 40), first=st.integers(0, 2))
    def arrives(self, length: int, first: int) -> None:
        self.alive.append(job(length, first=100 * first))
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


def test_a_prompt_larger_than_that_half_starts_when_it_is_alone() -> None:
    queue, _ = scheduler(8)
    queue.add(job(28))
    assert len(step(queue)) == 1
