"""Places in flight, what can never fit, and honest times to come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import InvalidRequest, Overloaded
from engine.ids import RequestId
from engine.sampling_params import SamplingParams
from router.admission import UNKNOWN_RETRY_S, WAITING_POOLS, Admission, Capacity, Outcome, check_fits
from router.beam_search import BeamSearch
from router.generation import GenerationRequest, ModelLimits

LIMITS = ModelLimits(vocab_size=100, max_model_len=64, block_size=4, max_request_blocks=10, max_sequences=128)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_request(prompt_tokens: int = 4, max_tokens: int = 4, n: int = 1) -> GenerationRequest:
    return GenerationRequest(
        RequestId("r"), tuple(range(prompt_tokens)), SamplingParams(max_tokens=max_tokens), num_sequences=n
    )


def make_admission(clock: Clock, *, sequences: int = 2, tokens: int | None = 100) -> Admission:
    return Admission(max_waiting_sequences=sequences, max_waiting_tokens=tokens, clock=clock)


@pytest.mark.parametrize(("prompt_tokens", "max_tokens", "fits"), [(20, 20, True), (20, 21, False), (60, 5, False)])
def test_what_no_pool_or_context_holds_is_refused(prompt_tokens: int, max_tokens: int, fits: bool) -> None:
    request = make_request(prompt_tokens, max_tokens)
    if fits:
        check_fits(request, LIMITS)
        return
    with pytest.raises(InvalidRequest) as caught:
        check_fits(request, LIMITS)
    assert caught.value.param == "max_tokens"


def test_sequences_count_and_places_come_back() -> None:
    admission = make_admission(Clock())
    first = admission.admit(make_request(n=2), capacity=Capacity(2))
    second = admission.admit(make_request(n=2), capacity=Capacity(2))
    with pytest.raises(Overloaded) as caught:
        admission.admit(make_request(), capacity=Capacity(2))
    assert caught.value.reason == "queue_full"
    first.close(Outcome.FINISHED)
    first.close(Outcome.FAILED)
    admission.admit(make_request(n=2), capacity=Capacity(2)).close(Outcome.CANCELLED)
    second.close(Outcome.FAILED)
    assert admission.requests == admission.sequences == admission.waiting_tokens == 0
    assert admission.outcomes == {Outcome.FINISHED: 1, Outcome.FAILED: 1, Outcome.CANCELLED: 1}
    assert admission.refused == 1


def test_a_lone_request_is_never_too_many() -> None:
    with make_admission(Clock(), sequences=1).admit(make_request(n=8), capacity=Capacity(1)):
        pass


def test_waiting_tokens_are_bounded_until_the_first_token() -> None:
    admission = make_admission(Clock(), sequences=50, tokens=100)
    first = admission.admit(make_request(80), capacity=Capacity(9))
    with pytest.raises(Overloaded) as caught:
        admission.admit(make_request(30), capacity=Capacity(9))
    assert caught.value.reason == "tokens_full"
    first.first_token()
    first.first_token()
    assert admission.waiting_tokens == 0
    second = admission.admit(make_request(300), capacity=Capacity(9))
    first.close(Outcome.FINISHED)
    second.close(Outcome.FINISHED)
    assert admission.waiting_tokens == 0


def test_waiting_tokens_are_measured_by_what_decode_nodes_hold() -> None:
    admission = make_admission(Clock(), sequences=50, tokens=None)
    capacity = Capacity(9, kv_tokens=20)
    waiting = [admission.admit(make_request(20), capacity=capacity) for _ in range(WAITING_POOLS)]
    with pytest.raises(Overloaded) as caught:
        admission.admit(make_request(1), capacity=capacity)
    assert caught.value.reason == "tokens_full"
    # With another node there is room again, and while no node is ready nothing is known.
    waiting.append(admission.admit(make_request(1), capacity=Capacity(9, kv_tokens=40)))
    waiting.append(admission.admit(make_request(200), capacity=Capacity()))
    for ticket in waiting:
        ticket.close(Outcome.FINISHED)
    assert admission.waiting_tokens == 0


def test_what_lies_in_a_prefix_cache_does_not_wait() -> None:
    admission = make_admission(Clock(), tokens=100)
    first = admission.admit(make_request(80), capacity=Capacity(9))
    first.must_compute(5)
    first.must_compute(80)  # The next node may have lost the prefix, but nobody is refused for that.
    assert admission.waiting_tokens == 5
    second = admission.admit(make_request(80), capacity=Capacity(9))
    for ticket in (first, second):
        ticket.first_token()
        ticket.must_compute(0)
        ticket.close(Outcome.FINISHED)
    assert admission.waiting_tokens == 0


def test_the_beams_of_a_search_count() -> None:
    admission = make_admission(Clock(), sequences=2)
    search = replace(make_request(), beam_search=BeamSearch(width=4))
    with admission.admit(search, capacity=Capacity(2)):
        assert admission.sequences == 4
        with pytest.raises(Overloaded):
            admission.admit(make_request(), capacity=Capacity(2))
    assert admission.sequences == 0


def test_a_time_to_come_back_follows_the_rate_at_which_prompts_are_computed() -> None:
    clock = Clock()
    admission = make_admission(clock, sequences=50)

    def time_to_come_back() -> float:
        with pytest.raises(Overloaded) as caught:
            admission.admit(make_request(1_000), capacity=Capacity(9))
        return caught.value.retry_after_s

    # One prompt a minute says nothing of how fast many would be computed.
    for _ in range(5):
        clock.now += 60.0
        admission.admit(make_request(50), capacity=Capacity(9)).close(Outcome.FINISHED)
    with admission.admit(make_request(50), capacity=Capacity(9)):
        assert time_to_come_back() == UNKNOWN_RETRY_S
        for _ in range(40):
            clock.now += 0.5
            admission.admit(make_request(50), capacity=Capacity(9)).close(Outcome.FINISHED)
        assert time_to_come_back() == pytest.approx(9.5, rel=0.1)


def test_retry_after_follows_the_rate_of_completions() -> None:
    clock = Clock()
    admission = make_admission(clock)
    assert admission.retry_after_s() == UNKNOWN_RETRY_S
    admission.admit(make_request(n=9), capacity=Capacity(9))
    for _ in range(40):
        clock.now += 0.5
        admission.admit(make_request(), capacity=Capacity(9)).close(Outcome.FINISHED)
    assert admission.retry_after_s(20) == pytest.approx(10.0, rel=0.1)
    assert admission.retry_after_s(1) == 1.0
    assert admission.retry_after_s(10_000) == 60.0


def test_a_quiet_time_says_nothing_of_how_fast_places_become_free() -> None:
    clock = Clock()
    admission = make_admission(clock, sequences=10)
    for _ in range(5):
        clock.now += 60.0
        admission.admit(make_request(), capacity=Capacity(9)).close(Outcome.FINISHED)
    running = [admission.admit(make_request(), capacity=Capacity(9)) for _ in range(19)]
    clock.now += 0.1
    with pytest.raises(Overloaded) as caught:
        admission.admit(make_request(), capacity=Capacity(9))
    assert (caught.value.reason, caught.value.retry_after_s) == ("queue_full", UNKNOWN_RETRY_S)
    # While all places are taken, each that becomes free counts.
    for ticket in running[:6]:
        clock.now += 2.0
        ticket.close(Outcome.FINISHED)
        admission.admit(make_request(), capacity=Capacity(9))
    with pytest.raises(Overloaded) as caught:
        admission.admit(make_request(n=5), capacity=Capacity(9))
    assert caught.value.retry_after_s == pytest.approx(10.0, rel=0.2)
