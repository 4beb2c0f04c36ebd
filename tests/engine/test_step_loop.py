"""The loop of every node: decide, run, commit; what happens when one of them raises, and what counts as progress."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from engine.step_loop import StepLoop


@dataclass
class Work:
    """A node with a list of things to do."""

    todo: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    run: Callable[[int], int] = lambda number: number
    commit_error: Exception | None = None
    threads: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.loop: StepLoop[int, int] = StepLoop(
            decide=lambda: self.todo.pop(0) if self.todo else None, run=self._run, commit=self._commit, fail=self._fail
        )

    def _run(self, number: int) -> int:
        self.threads.add(threading.current_thread().name)
        return self.run(number)

    def _commit(self, number: int, result: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        if self.commit_error is not None:
            error, self.commit_error = self.commit_error, None
            raise error
        self.done.append(result)

    def _fail(self, number: int, error: Exception) -> None:
        self.failed.append((number, type(error).__name__))

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(2500):
            if condition():
                return
            await asyncio.sleep(0.002)
        raise AssertionError("it never happened")


@contextlib.asynccontextmanager
async def running(work: Work) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(work.loop.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_steps_run_in_one_worker_thread_until_nothing_is_left() -> None:
    work = Work(todo=[1, 2, 3])
    async with running(work):
        await work.until(lambda: len(work.done) == 3)
        assert work.done == [1, 2, 3] and work.loop.steps == 3
        assert work.threads == {"engine-step_0"}
        # Idle: wakes up for new work, and only then.
        work.todo.append(4)
        await asyncio.sleep(0.02)
        assert work.done == [1, 2, 3]
        work.loop.wake()
        await work.until(lambda: work.done == [1, 2, 3, 4])


async def test_the_loop_serves_others_while_a_step_runs() -> None:
    release = threading.Event()
    work = Work(todo=[1], run=lambda number: number if release.wait(5) else -1)
    async with running(work):
        ticks = 0
        while ticks < 5:
            await asyncio.sleep(0.002)
            ticks += 1
        assert work.done == []
        release.set()
        await work.until(lambda: work.done == [1])


async def test_a_failed_run_ends_its_decision_and_not_the_loop() -> None:
    def run(number: int) -> int:
        if number == 1:
            raise ValueError("no")
        return number

    work = Work(todo=[1, 2], run=run)
    async with running(work) as task:
        await work.until(lambda: work.done == [2])
        assert work.failed == [(1, "ValueError")] and not task.done()


async def test_a_failed_commit_ends_its_decision_and_not_the_loop() -> None:
    work = Work(todo=[1, 2], commit_error=KeyError("no"))
    async with running(work) as task:
        await work.until(lambda: work.done == [2])
        assert work.failed == [(1, "KeyError")] and not task.done()


async def test_age_grows_only_while_a_step_is_stuck() -> None:
    release = threading.Event()
    work = Work(run=lambda number: number if release.wait(5) else -1)
    async with running(work):
        await asyncio.sleep(0.05)
        assert work.loop.last_step_age_s == 0.0, "an idle loop is not late"
        work.todo.append(1)
        work.loop.wake()
        await work.until(lambda: work.loop.last_step_age_s > 0.05)
        # Each layer of a long step is progress.
        work.loop.pieces_done.value += 1
        assert work.loop.last_step_age_s < 0.05
        release.set()
        await work.until(lambda: work.loop.last_step_age_s == 0.0)


async def test_cancelling_in_a_step_returns_at_once() -> None:
    release = threading.Event()
    work = Work(todo=[1], run=lambda number: number if release.wait(5) else -1)
    async with running(work) as task:
        await work.until(lambda: bool(work.threads))
        before = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - before < 1
        release.set()
