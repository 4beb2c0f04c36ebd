"""One child process that is kept alive: started, restarted with backoff, its lines prefixed, stopped within a bound.

Knows nothing of what the child does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

CONFIG_ERROR_EXIT = 2
"""Exit code by which a child says that trying again is of no use."""

NOT_STARTED_EXIT = 127
"""Stands for the exit code of a child that there is no room to start, as in a shell."""

HURRY_S = 3.0
"""Seconds that a hurried child has to tell its clients and end."""


class ChildFailed(Exception):
    """A child cannot be kept alive; the message says which and why, in one sentence."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before a restart, and when to give up.

    Attributes:
        first_s: before the first restart; doubled for each that follows.
        longest_s: bound of it.
        healthy_s: a child that lived this long starts anew at `first_s`.
        deaths: this many within `window_s` end the start, as long as the cluster was never ready.
        window_s: see `deaths`.
    """

    first_s: float = 1.0
    longest_s: float = 10.0
    healthy_s: float = 30.0
    deaths: int = 5
    window_s: float = 60.0


class LineWriter:
    """Writes lines to stderr on a thread of its own, so that a terminal that stands still never stops the launcher.

    What does not fit the bounded queue is dropped and counted.
    """

    def __init__(self) -> None:
        self._lines: queue.Queue[bytes | None] = queue.Queue(maxsize=10_000)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="lines", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Never blocks."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what is left, for at most a second."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=1.0)
        self._thread.join(timeout=1.0)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            if self._dropped:
                line += b"\n[launcher] lines_dropped count=%d" % self._dropped
                self._dropped = 0
            try:
                sys.stderr.buffer.write(line + b"\n")
                sys.stderr.buffer.flush()
            except (OSError, ValueError):
                continue  # nobody reads any more; go on emptying the queue


@dataclass(slots=True)
class Child:
    """A process that is restarted whenever it ends, until `stop`.

    Attributes:
        name: prefix of its lines.
        command: program and arguments; nothing secret, since every user of the host can read them.
        environment: all of its environment.
        lines: where its output goes.
        quiet: whether its lines are kept back; the last one is told when it dies.
        may_give_up: whether the cluster has never been ready, so that a child that cannot start ends the start.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    lines: LineWriter
    may_give_up: Callable[[], bool]
    backoff: Backoff = Backoff()
    quiet: bool = False
    restarts: int = 0
    _process: asyncio.subprocess.Process | None = None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _last_line: str = ""
    _task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def start(self) -> asyncio.Task[None]:
        """Start and keep alive. The task ends after `stop`, or with ChildFailed."""
        self._task = asyncio.create_task(self._keep_alive(), name=self.name)
        return self._task

    async def _keep_alive(self) -> None:
        deaths: list[float] = []
        delay_s = self.backoff.first_s
        while not self._stopping.is_set():
            started = time.monotonic()
            exit_code = await self._run_once()
            if self._stopping.is_set():
                return
            now = time.monotonic()
            deaths = [when for when in deaths if now - when < self.backoff.window_s] + [now]
            if self.may_give_up():
                self._give_up_if_hopeless(exit_code, len(deaths))
            if now - started >= self.backoff.healthy_s:
                delay_s = self.backoff.first_s
            last_line = f" last_line={self._last_line!r}" if self.quiet else ""
            logger.warning("child_died name=%s exit=%s restart_in_s=%g%s", self.name, exit_code, delay_s, last_line)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            delay_s = min(2 * delay_s, self.backoff.longest_s)
            self.restarts += 1

    def _give_up_if_hopeless(self, exit_code: int, deaths: int) -> None:
        if exit_code == CONFIG_ERROR_EXIT:
            raise ChildFailed(self._last_line.removeprefix("pdserve: ") or f"{self.name} refuses to start.")
        if deaths >= self.backoff.deaths:
            ended = f"exit code {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"
            last = f": {self._last_line}" if self._last_line else "."
            raise ChildFailed(f"{self.name} ended {deaths} times before it was ready, last with {ended}{last}")

    async def _run_once(self) -> int:
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command,
                env=dict(self.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is the launcher's to pass on, in order
            )
        except OSError as error:  # No memory, processes or files are left, which may pass.
            self._put(f"cannot be started: {error.strerror}".encode())
            return NOT_STARTED_EXIT
        self._process = process
        if self._stopping.is_set():
            process.terminate()
        logger.debug("child_started name=%s pid=%d", self.name, process.pid)
        assert process.stdout is not None
        reading = asyncio.create_task(self._copy_lines(process.stdout))
        try:
            return await process.wait()
        finally:
            with contextlib.suppress(TimeoutError):  # a grandchild may hold the pipe open
                await asyncio.wait_for(reading, 1.0)

    async def _copy_lines(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._put(line)
            if len(rest) > 65536:
                self._put(rest)
                rest = b""
        if rest:
            self._put(rest)

    def _put(self, line: bytes) -> None:
        text = line.rstrip()
        if text:
            self._last_line = text[:500].decode("utf-8", "replace")
        if not self.quiet:
            self.lines.put(f"[{self.name}] ".encode() + text)

    async def stop(self, timeout_s: float, hurry: asyncio.Event) -> None:
        """SIGTERM, and SIGKILL after `timeout_s`. Returns when the process is gone.

        When `hurry` is set: a second SIGTERM, which ends the child's own waiting but lets it tell its clients; SIGKILL
        after `HURRY_S`.
        """
        self._stopping.set()
        if self._task is None:
            return
        self._signal(signal.SIGTERM)
        hurrying = asyncio.create_task(hurry.wait())
        await asyncio.wait({self._task, hurrying}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if hurrying.done() and not self._task.done():
            self._signal(signal.SIGTERM)
            await asyncio.wait({self._task}, timeout=HURRY_S)
        hurrying.cancel()
        if not self._task.done():
            logger.warning("child_killed name=%s", self.name)
            self._signal(signal.SIGKILL)
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # has been told already, or does not matter any more

    def _signal(self, number: signal.Signals) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
