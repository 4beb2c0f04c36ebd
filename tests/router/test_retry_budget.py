"""The cluster-wide budget of retries."""

from __future__ import annotations

from router.retry_budget import RetryBudget


def count(budget: RetryBudget, now: float, most: int = 1000) -> int:
    return next((number for number in range(most) if not budget.take(now)), most)


def test_it_starts_with_some_and_ends() -> None:
    assert count(RetryBudget(capacity=20.0), 0.0) == 10


def test_requests_and_time_fill_it() -> None:
    budget = RetryBudget(ratio=0.2, least_per_s=2.0, capacity=20.0)
    count(budget, 0.0)
    for _ in range(50):
        budget.deposit()
    assert count(budget, 0.0) in (9, 10)
    assert count(budget, 3.0) in (5, 6)
    assert count(budget, 1000.0) == 20
