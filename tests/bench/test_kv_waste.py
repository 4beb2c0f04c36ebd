"""KV memory over a trace: a case counted by hand, the scheduler's own measure against the sequences, and bad memory."""

from __future__ import annotations

import random

import pytest

from bench.kv_waste import PAGED_LIMIT, KvUse, Replay, VirtualNode, replay, summarise
from bench.traces import TraceRow


def conversation(count: int, *, seconds: float = 60.0) -> list[TraceRow]:
    """Lengths like those of conversations, at even times."""
    draw = random.Random(7)
    return [
        TraceRow(number * seconds / count, draw.randint(200, 1200), max(1, round(draw.expovariate(1 / 150))))
        for number in range(count)
    ]


def test_one_request_counted_by_hand() -> None:
    settings = Replay(num_blocks=8, block_size=4, max_num_seqs=2, max_model_len=32, step_s=2.0, step_sequence_s=0.5)
    # Prefill says the first of 3 tokens: 5 tokens are in the cache at the first step, in 2 blocks, 6 at the second.
    waste = replay([TraceRow(0.0, 5, 3)], settings)
    assert (waste.requests, waste.steps, waste.mean_sequences, waste.preemptions) == (1, 2, 1.0, 0)
    assert waste.paged_max == pytest.approx(3 / 8)
    assert waste.paged_mean == pytest.approx(1 - 11 / 16)
    assert waste.pool_max == pytest.approx(3 / 32)
    assert waste.contiguous_mean == pytest.approx(1 - 11 / 64)
    assert waste.contiguous_min == pytest.approx(1 - 6 / 32)
    assert waste.paged_over == 1.0
    assert (waste.over_sequences, waste.over_pool, waste.promised_mean) == (1, pytest.approx(8 / 32), 0.0)


def test_promised_blocks_fill_while_their_prompt_is_computed() -> None:
    settings = Replay(
        num_blocks=16, block_size=4, max_model_len=32, step_s=1.0, step_sequence_s=0.0, prefill_tokens_per_s=1.0
    )
    # The second prompt begins with the first step, and its 7 tokens take as many steps.
    uses = list(VirtualNode(settings).steps([TraceRow(0.0, 5, 12), TraceRow(5.0, 7, 4)]))
    assert [(use.promised, use.coming) for use in uses[:8]] == [*((8, 8 - done) for done in range(7)), (0, 0)]
    assert uses[0].empty == 3 + 8


def test_time_weighs() -> None:
    uses = [KvUse(1.0, 10, 16, 0, 0, 32), KvUse(3.0, 16, 16, 16, 12, 32)]
    waste = summarise(uses, Replay(num_blocks=4, max_model_len=32), requests=1, preemptions=0)
    assert waste.paged_mean == pytest.approx(1 - (10 + 3 * 16) / 64)
    assert waste.promised_mean == pytest.approx(48 / (48 + 64))
    assert waste.empty_mean == pytest.approx((6 + 3 * 12) / (48 + 64))
    assert (waste.pool_max, waste.empty_pool_max) == (pytest.approx(6 / 64), pytest.approx(12 / 64))
    assert waste.paged_over == 0.5  # of the steps, however long they are
    with pytest.raises(ValueError, match="no decode step"):
        summarise([], Replay(), requests=1, preemptions=0)


def test_paging_wastes_little_and_contiguous_reservation_most() -> None:
    waste = replay(conversation(60), Replay(num_blocks=2048))
    assert waste.requests == 60 and waste.mean_sequences > 1
    assert waste.paged_mean < PAGED_LIMIT and waste.pool_max < PAGED_LIMIT
    assert waste.contiguous_mean > 0.6
    assert 0 < waste.promised_mean < 0.5


def test_blocks_of_the_longest_sequence_waste_as_much_as_contiguous_reservation() -> None:
    waste = replay(conversation(30), Replay(num_blocks=32, block_size=2048, max_model_len=2048))
    assert waste.paged_mean == pytest.approx(waste.contiguous_mean)
    assert waste.paged_mean > PAGED_LIMIT


class CheckedNode(VirtualNode):
    """Compares what the scheduler says with the sequences themselves, at every step."""

    checked = 0

    def _use(self, seconds: float) -> KvUse:
        use = super()._use(seconds)
        running = self._scheduler._running
        block_size = self._settings.block_size
        # No two of them share a block here.
        assert use.used == sum(sequence.num_computed for sequence in running)
        assert use.allocated == sum(len(sequence.block_ids) for sequence in running) * block_size
        assert use.contiguous == len(running) * self._settings.max_model_len
        assert 0 <= use.coming <= use.promised
        self._scheduler.check_invariants()
        self.checked += 1
        return use


def test_what_the_scheduler_says_is_what_sequences_hold() -> None:
    node = CheckedNode(Replay(num_blocks=512, max_model_len=2048))
    uses = list(node.steps(conversation(20, seconds=10.0)))
    assert node.checked == len(uses) > 100
    assert node._pool.counts.in_use == 0


def test_a_pool_that_is_too_small_serves_everybody_in_the_end() -> None:
    rows = [TraceRow(0.0, 100, 200) for _ in range(6)]
    node = CheckedNode(Replay(num_blocks=40, max_model_len=512))
    # The node has seen short answers only, and learns.
    for _ in range(600):
        node._scheduler.lengths.record(4)
    uses = list(node.steps(rows))
    assert node.preemptions > 0
    assert max(use.allocated for use in uses) <= 40 * 16
    assert node._pool.counts.in_use == 0 and node._scheduler.num_running == node._scheduler.num_waiting == 0


def test_what_does_not_fit_the_model_is_cut() -> None:
    waste = replay([TraceRow(0.0, 900, 50), TraceRow(1.0, 2, 900)], Replay(num_blocks=64, max_model_len=256))
    assert waste.steps == 49 + 254  # the prefill node says one token of each
    assert waste.contiguous_min >= 0
