"""Completion streams read in threads, so that a test can hurt the cluster while they run."""

from __future__ import annotations

import threading
from typing import Any

import httpx

from tests.e2e.cluster_processes import MODEL_NAME, ClusterProcesses, read_events, wait_until


class Stream:
    """One streamed completion, begun at once. `join` returns its token ids or fails with the error it ended in."""

    def __init__(self, cluster: ClusterProcesses, prompt: list[int] | str, router: int = 0, **fields: Any) -> None:
        self.token_ids: dict[int, list[int]] = {}
        self.finish_reasons: dict[int, str] = {}
        self.error: str | None = None
        self.status: int | None = None
        self._url = f"{cluster.url(router)}/v1/completions"
        self._body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "stream": True,
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": True,
            **fields,
        }
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=90.0) as response:
                self.status = response.status_code
                if response.status_code != 200:
                    self.error = response.read().decode()[:300]
                    return
                self._read(response)
        except httpx.HTTPError as error:
            self.error = f"{type(error).__name__}: {error}"

    def _read(self, response: httpx.Response) -> None:
        for event in read_events(response.iter_lines()):
            if "error" in event:
                self.error = str(event["error"])
            for choice in event.get("choices", ()):
                self.token_ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
                if choice["finish_reason"]:
                    assert choice["index"] not in self.finish_reasons, "a second finish_reason"
                    self.finish_reasons[choice["index"]] = choice["finish_reason"]

    @property
    def num_tokens(self) -> int:
        """Tokens received so far, of all choices."""
        return sum(len(tokens) for tokens in list(self.token_ids.values()))

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait_for_tokens(self, count: int, timeout_s: float = 30.0) -> None:
        """Until `count` tokens have come."""
        wait_until(lambda: self.num_tokens >= count or self.is_over, timeout_s, f"{count} tokens have come")
        assert self.num_tokens >= count, self.error

    def join(self, timeout_s: float = 60.0) -> list[int]:
        """Token ids of choice 0."""
        self._thread.join(timeout_s)
        assert self.is_over, f"the stream hangs after {self.num_tokens} tokens"
        assert self.error is None, self.error
        return self.token_ids[0]
