"""Under a load that never ends everybody gets on; and the pool is neither idle nor thrashed. Time is virtual."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.growth import OutputLengths
from decode_node.scheduler import DecodeScheduler
from decode_node.sequence import DecodeSequence, Reservation, next_place
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
    """`transfer`: steps between the grant of its hand-off and the end of that; None has it computed here."""

    prompt: int
    output: int
    priority: int = 0
    transfer: int | None = None
    commits: bool = True


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
        self.had_blocks_when_it_was_queued: dict[DecodeSequence, set[DecodeSequence]] = {}
        self.granted: dict[Reservation, int] = {}  # and when each ends
        self.quarantined: dict[Reservation, int] = {}
        self._tokens = 0

    def arrive(self, arrival: Arrival) -> DecodeSequence:
        self._tokens += arrival.prompt
        prompt = range(self._tokens, self._tokens + arrival.prompt)
        sampling = SamplingParams(max_tokens=60)
        place = next_place(self.now + AGEING_STEPS * arrival.priority)
        sequence = DecodeSequence(0, prompt, sampling, ROOT, arrival=place)
        self.alive[sequence] = arrival
        self._note_holders(sequence)
        self._begin(sequence)
        return sequence

    def _note_holders(self, sequence: DecodeSequence) -> None:
        holders = {other for other in self.alive if other.is_running} | {granted.leader for granted in self.granted}
        self.had_blocks_when_it_was_queued[sequence] = holders

    def _begin(self, sequence: DecodeSequence) -> None:
        if self.alive[sequence].transfer is None:
            self.scheduler.add(sequence)
        else:
            self.scheduler.ask(Reservation(sequence, 0, LAYOUT.blocks_for(sequence.num_tokens)))

    def _end_hand_offs(self) -> None:
        for reservation in [each for each, end in self.granted.items() if end <= self.now]:
            del self.granted[reservation]
            sequence = reservation.leader
            if self.alive[sequence].commits:
                self.scheduler.join(reservation)
                self._say(sequence)
                continue
            self.pool.quarantine(reservation.block_ids)
            self.scheduler.give_up(reservation)
            self.quarantined[reservation] = self.now + 2
            # Its blocks are lost, and others may have been let in behind it.
            self.alive[sequence] = replace(self.alive[sequence], transfer=None)
            self._note_holders(sequence)
            self._begin(sequence)
        for reservation in [each for each, end in self.quarantined.items() if end <= self.now]:
            del self.quarantined[reservation]
            self.pool.end_quarantine(reservation.block_ids)

    def _say(self, sequence: DecodeSequence) -> None:
        sequence.output_token_ids.append(0)
        if len(sequence.output_token_ids) == self.alive[sequence].output:
            self.scheduler.end(sequence)
            self.ended_at[sequence] = self.now
            del self.alive[sequence]

    def step(self) -> set[DecodeSequence]:
        """Who got on: by computing, or by being copied back."""
        self.now += 1
        scheduler = self.scheduler
        self._end_hand_offs()
        for reservation in scheduler.admit():
            self.granted[reservation] = self.now + (self.alive[reservation.leader].transfer or 0)
        ran = [sequence for sequence in self.alive if sequence.is_running]
        decision = scheduler.decide()
        for sequence in ran:
            if not sequence.is_running:
                # It made way for those before it; what is behind it may have been promised blocks, and keeps them.
                self._note_holders(sequence)
        for sequence in scheduler.take_preempted():
            if self.alive[sequence].transfer is not None:
                scheduler.withdraw(sequence)
                self._begin(sequence)
        if decision is None:
            return set()
        scheduler.commit(decision)
        for piece in decision.slices:
            if piece.is_last:
                self._say(piece.sequence)
        scheduler.check_invariants()
        # A step that only frees blocks keeps nobody waiting for long.
        return set(decision.sequences) or self.step()


ARRIVALS = st.builds(
    Arrival,
    prompt=st.integers(1, 70),
    output=st.integers(1, 40),
    priority=st.integers(-3, 3),
    transfer=st.none() | st.integers(0, 40) | st.integers(0, 40),
    commits=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(ARRIVALS, max_size=2), min_size=1, max_size=60),
    st.sampled_from([0, 15, 40]),
    st.integers(1, 6),
    st.booleans(),
)
def test_the_first_in_line_gets_on_in_every_step(
    waves: list[list[Arrival]], swap_blocks: int, places: int, is_hopeful: bool
) -> None:
    # A pool that just holds the longest one.
    node = Node(28, places=places, budget=16, swap_blocks=swap_blocks)
    if is_hopeful:
        # Everybody is thought to end soon, so that more are let in than there is room for.
        node.scheduler.lengths = OutputLengths(prior=1, window=1)
    for number in range(20_000):
        for arrival in waves[number] if number < len(waves) else ():
            node.arrive(arrival)
        if number >= len(waves) and not node.alive and not node.quarantined:
            break
        first = min(node.alive, key=lambda sequence: sequence.arrival, default=None)
        num_preemptions = first.num_preemptions if first else 0
        progressed = node.step()
        if first is None:
            continue
        assert first.num_preemptions == num_preemptions, "the first is never preempted"
        promised = {reservation.leader for reservation in node.granted}
        if first in progressed | promised or first not in node.alive:
            continue
        if first.is_running:
            # What it needs is promised to hand-offs that have not ended yet.
            assert promised or node.quarantined
        else:
            # It waits for those that had blocks already when it came, and for nobody else.
            assert progressed | promised <= node.had_blocks_when_it_was_queued[first]
            assert progressed or promised or node.quarantined
    assert not node.alive, "somebody never ended"
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
