"""A completion stream read in a thread, with the time of each event, which the test may leave at any moment."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from itertools import pairwise
from types import TracebackType
from typing import Any

import httpx

from tests.api.client import COMPLETIONS, Api
from tests.e2e.cluster_processes import MODEL_NAME, read_events, wait_until


class RunningStream:
    """Begun at once. `leave` closes the connection; leaving the context does so too."""

    def __init__(self, api: Api, prompt: object, *, request_id: str = "", **fields: Any) -> None:
        self.arrivals_s: list[float] = []
        self.response_id = ""
        self.has_finished = False
        self.error: object = None
        body = {"model": MODEL_NAME, "prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
        headers = {"X-Request-Id": request_id} if request_id else {}
        self._has_left = False
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, args=(api, body, headers), daemon=True)
        self._thread.start()

    def __enter__(self) -> RunningStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _run(self, api: Api, body: dict[str, Any], headers: dict[str, str]) -> None:
        try:
            with (
                httpx.Client(base_url=api.url, headers=api.http.headers, timeout=60.0, verify=False) as http,
                http.stream("POST", COMPLETIONS, json=body, headers=headers) as reply,
            ):
                if reply.status_code != 200:
                    self.error = reply.read()
                    return
                self._socket = reply.extensions["network_stream"].get_extra_info("socket")
                for event in read_events(reply.iter_lines()):
                    self.arrivals_s.append(time.monotonic())
                    self.error = self.error or event.get("error")
                    self.response_id = event.get("id", self.response_id)
                self.has_finished = not self._has_left
        except httpx.HTTPError as error:
            if not self._has_left:
                self.error = error

    def wait_for_events(self, count: int) -> None:
        """Until `count` events have come."""
        wait_until(lambda: len(self.arrivals_s) >= count or not self._thread.is_alive(), 30.0, f"{count} events")
        assert len(self.arrivals_s) >= count, self.error

    def leave(self) -> None:
        """Close the connection, whether or not anything is about to come."""
        self._has_left = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(30.0)
        assert not self._thread.is_alive()

    def longest_gap_s(self, since_s: float, until_s: float) -> float:
        """Between two events that follow each other, of those in a span of time, the span's ends included."""
        times = [since_s, *(at for at in self.arrivals_s if since_s < at < until_s), until_s]
        return max(later - earlier for earlier, later in pairwise(times))
