"""What is learned from steps and copies, and what follows from it."""

from __future__ import annotations

import pytest

from decode_node.costs import Costs
from engine.rate import Rate


def learned(*, decode_s: float = 0.02, token_s: float = 0.001) -> Costs:
    """Steps of 20 ms that only decode, and prompts of a thousand tokens per second beside them."""
    costs = Costs()
    for _ in range(30):
        costs.record_step(seconds=decode_s, decode_tokens=4, prompt_tokens=0)
        costs.record_step(seconds=decode_s + 50 * token_s, decode_tokens=4, prompt_tokens=50)
    return costs


class TestRate:
    def test_nothing_known(self) -> None:
        assert not Rate().is_known and Rate().time_s(7) == 0

    def test_small_measurements_count_less_than_large_ones(self) -> None:
        rate = Rate()
        rate.record(1000, 1.0)
        rate.record(2, 1.0)  # a hiccup
        assert 1 < rate.time_s(1000) < 2.5

    def test_what_took_no_time_says_nothing(self) -> None:
        rate = Rate()
        rate.record(5, 0.0)
        rate.record(0, 5.0)
        assert not rate.is_known


class TestPromptsBesideDecoding:
    def test_the_bound_less_what_decoding_takes(self) -> None:
        assert learned().prompt_tokens_within(0.1, least=16) == pytest.approx(80, abs=2)

    def test_little_while_nothing_is_known(self) -> None:
        assert Costs().prompt_tokens_within(0.1, least=16) == 16

    def test_prompts_get_on_though_decoding_takes_the_whole_bound(self) -> None:
        costs = learned(decode_s=0.2)
        assert costs.prompt_tokens_within(0.1, least=16) == pytest.approx(100, abs=3)
        assert learned(token_s=1.0).prompt_tokens_within(0.1, least=16) == 16

    def test_more_running_sequences_leave_less_to_prompts(self) -> None:
        costs = learned()
        before = costs.prompt_tokens_within(0.1, least=16)
        for _ in range(30):
            costs.record_step(seconds=0.05, decode_tokens=32, prompt_tokens=0)
        assert costs.prompt_tokens_within(0.1, least=16) < before * 0.8

    def test_a_step_with_a_prompt_that_was_quick_is_no_proof_of_free_prompts(self) -> None:
        costs = learned()
        for _ in range(50):
            costs.record_step(seconds=0.001, decode_tokens=4, prompt_tokens=50)
        assert costs.prompt.seconds > 0


class TestWayBack:
    def test_copying_while_nothing_is_known(self) -> None:
        assert Costs().copy_is_quicker(10**9, 10)

    def test_whatever_takes_less_time(self) -> None:
        costs = learned()
        costs.copied.record(10**9, 1.0)
        # 1 GB/s there and back, against 1,000 tokens per second.
        assert costs.copy_is_quicker(400 * 10**6, 1000)
        assert not costs.copy_is_quicker(600 * 10**6, 1000)
        # Unless a prefill node has them in half the time.
        costs.handed_off.record(2000, 1.0)
        assert not costs.copy_is_quicker(400 * 10**6, 1000)

    def test_a_prefill_node_where_it_is_quicker_or_nothing_is_known(self) -> None:
        assert Costs().hand_off_is_quicker(100)
        costs = learned()
        assert costs.hand_off_is_quicker(100)
        costs.handed_off.record(100, 1.0)
        assert not costs.hand_off_is_quicker(100)
