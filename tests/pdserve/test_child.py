"""A child that is kept alive: restarts, giving up, and lines of any kind."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

import pytest

from pdserve.child import Backoff, Child, ChildFailed, LineWriter

QUICK = Backoff(first_s=0.01, longest_s=0.05)


class Lines(LineWriter):
    """Collects lines instead of writing them."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def put(self, line: bytes) -> None:
        self.lines.append(line)


def make_child(code: str, *, may_give_up: bool = True) -> tuple[Child, Lines]:
    lines = Lines()
    command = [sys.executable, "-S", "-c", code]
    return Child("node-0", command, dict(os.environ), lines, lambda: may_give_up, QUICK), lines


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # what is waited for is another process
            await asyncio.sleep(0.01)


async def test_five_deaths_before_ready_end_the_start() -> None:
    child, lines = make_child("import sys; print('no luck'); sys.exit(7)")
    with pytest.raises(ChildFailed, match="node-0 ended 5 times before it was ready, last with exit code 7: no luck"):
        await child.start()
    assert lines.lines == [b"[node-0] no luck"] * 5


async def test_exit_code_2_before_ready_ends_the_start_at_once() -> None:
    child, lines = make_child("import sys; print('pdserve: no such model.'); sys.exit(2)")
    with pytest.raises(ChildFailed, match=r"^no such model\.$"):
        await child.start()
    assert len(lines.lines) == 1


async def test_death_after_ready_never_gives_up() -> None:
    child, _ = make_child("import sys; sys.exit(2)", may_give_up=False)
    task = child.start()
    await eventually(lambda: child.restarts >= 7 or task.done())
    assert not task.done()
    await child.stop(1.0, asyncio.Event())
    assert task.done()


async def test_what_cannot_be_started_is_tried_again() -> None:
    child, lines = make_child("import time; print('here', flush=True); time.sleep(60)", may_give_up=False)
    command, child.command = child.command, ["/nowhere/program"]
    task = child.start()
    await eventually(lambda: child.restarts >= 2 or task.done())
    child.command = command
    await eventually(lambda: b"[node-0] here" in lines.lines or task.done())
    assert not task.done()
    assert lines.lines[0] == b"[node-0] cannot be started: No such file or directory"
    await child.stop(5.0, asyncio.Event())


async def test_stop_during_backoff_returns_at_once() -> None:
    child, _ = make_child("pass", may_give_up=False)
    child.backoff = Backoff(first_s=60.0)
    child.start()
    await eventually(lambda: child._process is not None and child._process.returncode is not None)
    await asyncio.wait_for(child.stop(30.0, asyncio.Event()), 2.0)


async def test_deaf_child_is_killed_after_its_time() -> None:
    child, lines = make_child(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    child.start()
    await eventually(lambda: bool(lines.lines))
    await asyncio.wait_for(child.stop(0.2, asyncio.Event()), 5.0)
    assert child.pid is None


async def test_hurried_child_gets_a_second_signal_and_the_time_to_say_goodbye() -> None:
    child, lines = make_child(
        "import signal, sys, time\n"
        "count = 0\n"
        "def on_term(*_):\n"
        "    global count\n"
        "    count += 1\n"
        "    print('signal', count, flush=True)\n"
        "    if count == 2:\n"
        "        time.sleep(0.2); print('goodbye', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, on_term)\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(60)"
    )
    child.start()
    await eventually(lambda: bool(lines.lines))
    hurry = asyncio.Event()
    stopping = asyncio.create_task(child.stop(30.0, hurry))
    await eventually(lambda: b"[node-0] signal 1" in lines.lines)
    hurry.set()
    await asyncio.wait_for(stopping, 10.0)
    assert lines.lines[-2:] == [b"[node-0] signal 2", b"[node-0] goodbye"]


async def test_lines_are_prefixed_and_an_endless_one_is_cut() -> None:
    child, lines = make_child(
        "import sys, time; sys.stdout.buffer.write(b'one\\n\\xff two\\n' + b'x' * 200_000); sys.stdout.flush(); "
        "time.sleep(60)"
    )
    child.start()
    await eventually(lambda: len(lines.lines) >= 4)
    await child.stop(5.0, asyncio.Event())
    assert lines.lines[:2] == [b"[node-0] one", b"[node-0] \xff two"]
    assert sum(line.count(b"x") for line in lines.lines) == 200_000
    assert max(map(len, lines.lines)) < 140_000
