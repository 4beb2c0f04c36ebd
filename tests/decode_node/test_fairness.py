"""Under a load that never ends everybody gets on; and the pool is neither idle nor thrashed. Time is virtual."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.scheduler import DecodeScheduler
from decode_node.sequence import DecodeSequence, next_place
from engine.block_pool import BlockPool
from engine.ids import BlockHash
from engine.kv_layout import KvLayout
from engine.sampling_params import SamplingParams

LAYOUT = KvLayout(num_layers=1, kv_heads=1, head_dim=2, block_size=4, dtype="float32")
ROOT = BlockHash(bytes(16))
AGEING_STEPS = 20
"""Steps of waiting that outweigh a level of priority."""


@dataclass(frozen=True)
class Arrival:
    prompt: int
    output: int
    priority: int = 0


class Node:
    """A scheduler whose every step takes one unit of time."""

    def __init__(self, num_blocks: int, *, places: int, budget: int, swap_blocks: int = 0) -> None:
        self.pool = BlockPool(num_blocks)
        self.scheduler = DecodeScheduler(
            self.pool,
            LAYOUT,
            max_num_batched_tokens=budget,
            max_num_seqs=places,
            swap_bytes=swap_blocks * LAYOUT.block_bytes,
        )
        self.now = 0
        self.alive: dict[DecodeSequence, Arrival] = {}
        self.ended_at: dict[DecodeSequence, int] = {}
        self.ran_when_it_came: dict[DecodeSequence, set[DecodeSequence]] = {}
        self._tokens = 0

    def arrive(self, arrival: Arrival) -> DecodeSequence:
        self._tokens += arrival.prompt
        prompt = range(self._tokens, self._tokens + arrival.prompt)
        sampling = SamplingParams(max_tokens=60)
        place = next_place(self.now + AGEING_STEPS * arrival.priority)
        sequence = DecodeSequence(0, prompt, sampling, ROOT, arrival=place)
        self.alive[sequence] = arrival
        self.ran_when_it_came[sequence] = {other for other in self.alive if other.is_running}
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> set[DecodeSequence]:
        """Who got on: by computing, or by being copied back."""
        self.now += 1
        scheduler = self.scheduler
        scheduler.admit()
        decision = scheduler.decide()
        if decision is None:
            return set()
        scheduler.commit(decision)
        for piece in decision.slices:
            sequence = piece.sequence
            if piece.is_last:
                sequence.output_token_ids.append(0)
                if len(sequence.output_token_ids) == self.alive[sequence].output:
                    scheduler.end(sequence)
                    self.ended_at[sequence] = self.now
                    del self.alive[sequence]
        scheduler.check_invariants()
        # A step that only frees blocks keeps nobody waiting for long.
        return set(decision.sequences) or self.step()


ARRIVALS = st.builds(Arrival, st.integers(1, 50), st.integers(1, 60), st.integers(-3, 3))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(ARRIVALS, max_size=2), min_size=1, max_size=60),
    st.sampled_from([0, 15, 40]),
    st.integers(1, 6),
)
def test_the_first_in_line_gets_on_in_every_step(waves: list[list[Arrival]], swap_blocks: int, places: int) -> None:
    # A pool that just holds the longest one.
    node = Node(28, places=places, budget=16, swap_blocks=swap_blocks)
    for wave in waves:
        for arrival in wave:
            node.arrive(arrival)
        first = min(node.alive, key=lambda sequence: sequence.arrival, default=None)
        progressed = node.step()
        if first is not None and first not in progressed:
            # It waits for those that ran already when it came, and for nobody else.
            assert not first.is_running
            assert progressed and progressed <= node.ran_when_it_came[first]
    for _ in range(20_000):
        if not node.alive:
            break
        assert node.step()
    assert not node.alive
    assert node.pool.counts.in_use == 0


def test_low_priority_is_served_though_high_priority_never_stops_coming() -> None:
    node = Node(64, places=4, budget=32)
    for _ in range(8):
        node.arrive(Arrival(8, 8))
    humble = node.arrive(Arrival(8, 10, priority=3))
    for _ in range(400):
        # Twice as much as the node can do.
        node.arrive(Arrival(8, 8))
        node.step()
        if humble in node.ended_at:
            break
    # It waits for its 60 steps, and for what came before their end.
    assert 3 * AGEING_STEPS < node.ended_at[humble] < 400
    assert len(node.ended_at) > 20


def test_within_a_crowd_the_higher_priority_is_served_first() -> None:
    node = Node(64, places=2, budget=32)
    crowd = [node.arrive(Arrival(8, 8, priority=priority)) for priority in (2, 1, 0, 2, 1, 0)]
    while node.alive:
        node.step()
    served = sorted(crowd, key=lambda sequence: node.ended_at[sequence])
    assert [served.index(crowd[place]) // 2 for place in range(6)] == [2, 1, 0, 2, 1, 0]


def test_the_last_in_line_makes_way() -> None:
    node = Node(28, places=4, budget=64)
    for _ in range(600):
        node.scheduler.lengths.record(1)  # so that all three are admitted
    important, early, late = (node.arrive(Arrival(30, 40, priority)) for priority in (-1, 0, 0))
    while not late.num_preemptions:
        node.step()
    assert important.num_preemptions == early.num_preemptions == 0
    while not early.num_preemptions:
        node.step()
    assert important.num_preemptions == 0
    while node.alive:
        node.step()


@pytest.mark.parametrize("spread", [1, 20, 200])
def test_preemption_is_rare_and_the_pool_is_not_idle(spread: int) -> None:
    """Always more work than room, output lengths between nearly equal and wild."""
    node = Node(600, places=64, budget=256)
    chance = random.Random(spread)

    def lengths() -> Iterator[int]:
        while True:
            yield max(1, min(60, round(chance.lognormvariate(3, 0.1 + spread / 200))))

    output = lengths()
    usage: list[float] = []
    while len(node.ended_at) < 600:
        while node.scheduler.num_waiting < 3:
            node.arrive(Arrival(chance.randint(4, 80), next(output)))
        node.step()
        if len(node.ended_at) > 100:
            counts = node.pool.counts
            usage.append(counts.in_use / counts.total)
    assert node.scheduler.preemptions < 0.03 * len(node.ended_at)
    assert sum(usage) / len(usage) > 0.78
