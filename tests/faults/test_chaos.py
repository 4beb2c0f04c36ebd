"""Many clients, some of which leave; nodes killed and stopped at random: every answer is right, and nothing is left."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter

import httpx
import pytest

from tests.e2e.cluster_processes import MODEL_NAME, ClusterProcesses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

CLIENTS = 8
SECONDS = 14.0
PROMPT_LENGTHS = (5, 16, 33, 60, 100)
MAX_TOKENS = (1, 4, 20, 60)


class Client(threading.Thread):
    """Sends one request after another; compares every whole answer with the one from before the chaos."""

    def __init__(self, url: str, expected: dict[tuple[int, int], list[int]], seed: int, until_s: float) -> None:
        super().__init__(daemon=True)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._url = url
        self._expected = expected
        self._dice = random.Random(seed)
        self._until_s = until_s

    def run(self) -> None:
        with httpx.Client(timeout=60.0) as http:
            while time.monotonic() < self._until_s:
                try:
                    self._one(http)
                except httpx.ReadTimeout:
                    self.wrong.append("a request hung")

    def _one(self, http: httpx.Client) -> None:
        length, max_tokens = self._dice.choice(PROMPT_LENGTHS), self._dice.choice(MAX_TOKENS)
        body = request_body(length, max_tokens)
        if self._dice.random() < 0.4:
            self._leave_early(http, body)
            return
        reply = http.post(f"{self._url}/v1/completions", json=body)
        if reply.status_code == 200:
            self.outcomes["finished"] += 1
            if reply.json()["choices"][0]["token_ids"] != self._expected[length, max_tokens]:
                self.wrong.append(f"other tokens for length {length}, max_tokens {max_tokens}")
        elif reply.status_code in (429, 503):
            self.outcomes[f"refused_{reply.status_code}"] += 1
            time.sleep(0.2)
        else:
            self.wrong.append(f"{reply.status_code}: {reply.text[:200]}")

    def _leave_early(self, http: httpx.Client, body: dict[str, object]) -> None:
        self.outcomes["left"] += 1
        patience_s = self._dice.uniform(0.0, 0.3)
        started_s = time.monotonic()
        with http.stream("POST", f"{self._url}/v1/completions", json={**body, "stream": True}) as response:
            for _ in response.iter_bytes():
                if time.monotonic() - started_s > patience_s:
                    return


def request_body(length: int, max_tokens: int) -> dict[str, object]:
    prompt = [random.Random(f"chaos/{length}/{place}").randrange(3, 300) for place in range(length)]
    return {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.9,
        "seed": length,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def hurt(cluster: ClusterProcesses, dice: random.Random) -> None:
    """Kill or stop one node; at least one of each kind stays."""
    victim = cluster[dice.choice(["prefill-0", "decode-0"])]
    if dice.random() < 0.7:
        victim.kill()
        victim.start()
    else:
        victim.signal(signal.SIGSTOP)
        time.sleep(3.0)
        victim.signal(signal.SIGCONT)


def test_chaos(cluster: ClusterProcesses) -> None:
    expected = {
        (length, max_tokens): cluster.post("/v1/completions", request_body(length, max_tokens)).json()["choices"][0][
            "token_ids"
        ]
        for length in PROMPT_LENGTHS
        for max_tokens in MAX_TOKENS
    }
    until_s = time.monotonic() + SECONDS
    clients = [Client(cluster.url(), expected, seed, until_s) for seed in range(CLIENTS)]
    for client in clients:
        client.start()
    dice = random.Random(1)
    while time.monotonic() < until_s - 5.0:
        time.sleep(2.0)
        hurt(cluster, dice)
    for client in clients:
        client.join(timeout=60.0)
    assert not any(client.is_alive() for client in clients), "a client hangs"
    assert [wrong for client in clients for wrong in client.wrong] == []
    outcomes = sum((client.outcomes for client in clients), Counter[str]())
    assert outcomes["finished"] > CLIENTS, outcomes
