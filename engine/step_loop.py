"""The loop every node runs: decide, run, commit. Knows no model, no requests and no network.

*Decide* and *commit* run on the event loop and own all state; *run* runs in one worker thread and touches only what the
decision holds. So the state needs no lock, and gRPC is served while the device computes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

DecisionT = TypeVar("DecisionT")
ResultT = TypeVar("ResultT")


class StepLoop(Generic[DecisionT, ResultT]):
    """Drives one node's engine.

    Args:
        decide: what to compute next, or None when there is nothing; must not block or await.
        run: computes it; called in the worker thread.
        commit: takes the result into the state; must not block or await.
        fail: called when `run` or `commit` raised; ends the requests of that decision, not the node. After a `commit`
            that raised half-way it must do no harm to what was committed.
    """

    def __init__(
        self,
        *,
        decide: Callable[[], DecisionT | None],
        run: Callable[[DecisionT], ResultT],
        commit: Callable[[DecisionT, ResultT], None],
        fail: Callable[[DecisionT, Exception], None],
    ) -> None:
        self._decide = decide
        self._run = run
        self._commit = commit
        self._fail = fail
        self._work_arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-step")
        self.pieces_done = c_int64()
        self._seen_pieces = 0
        self._last_progress_s = time.monotonic()
        self._is_busy = False
        self.steps = 0

    def wake(self) -> None:
        """There may be something to decide. Call on the event loop."""
        self._work_arrived.set()

    @property
    def last_step_age_s(self) -> float:
        """Seconds since progress was last seen: at the start of a step, or here; an idle loop is never late."""
        if self._seen_pieces != (pieces := self.pieces_done.value):
            self._seen_pieces = pieces
            self._last_progress_s = time.monotonic()
        return time.monotonic() - self._last_progress_s if self._is_busy else 0.0

    async def run(self) -> None:
        """Run until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._work_arrived.clear()
                decision = self._decide()
                if decision is None:
                    self._is_busy = False
                    await self._work_arrived.wait()
                    continue
                self._last_progress_s = time.monotonic()
                self._is_busy = True
                try:
                    result = await loop.run_in_executor(self._thread, self._run, decision)
                    self._commit(decision, result)
                except Exception as error:
                    logger.exception("step_failed step=%d", self.steps)
                    self._fail(decision, error)
                self.steps += 1
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)
