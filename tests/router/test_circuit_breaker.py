"""When a failing node is left alone and how it comes back."""

from __future__ import annotations

from router.circuit_breaker import CircuitBreaker


def opened(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(threshold=3, first_pause_s=1.0, longest_pause_s=3.0)
    for _ in range(3):
        breaker.fault(now)
    return breaker


def test_faults_in_a_row_open_it() -> None:
    breaker = CircuitBreaker(threshold=3)
    breaker.fault(0.0)
    breaker.fault(0.0)
    breaker.success()
    breaker.fault(0.0)
    breaker.fault(0.0)
    assert breaker.allows(0.0)
    breaker.fault(0.0)
    assert not breaker.allows(0.0) and breaker.is_open()


def test_one_probe_at_a_time_and_success_closes() -> None:
    breaker = opened()
    assert not breaker.start(0.5)
    assert breaker.allows(1.0)
    assert breaker.start(1.0)
    assert not breaker.allows(1.1)
    breaker.success()
    assert breaker.allows(1.1) and not breaker.is_open()


def test_a_failed_probe_opens_it_for_longer_up_to_a_limit() -> None:
    breaker = opened()
    now = 1.0
    for pause_s in (2.0, 3.0, 3.0):
        assert breaker.start(now)
        breaker.fault(now)
        assert not breaker.allows(now + pause_s - 0.01)
        now += pause_s
        assert breaker.allows(now)


def test_a_probe_whose_client_left_makes_room_for_the_next() -> None:
    breaker = opened()
    assert breaker.start(1.0)
    breaker.end_probe()
    assert breaker.allows(1.0)
    assert breaker.start(1.0)


def test_faults_of_older_work_do_not_prolong_the_pause() -> None:
    breaker = opened()
    breaker.fault(0.9)
    assert breaker.allows(1.0)
