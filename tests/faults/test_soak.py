"""After many requests every process has the threads, files and memory that it had after the first ones."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.cluster_processes import ClusterProcesses, footprint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

WARM_UP = 80
REQUESTS = 200
GROWTH_BYTES = 12 * 1024 * 1024
"""What the allocator may keep; a leak of one request's blocks or messages would be many times that."""


def anonymous_bytes(pid: int) -> int:
    """RssAnon and VmSwap: memory of the process's own, wherever it lies."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * sum(int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("RssAnon", "VmSwap"))  # type: ignore[index]


def serve(cluster: ClusterProcesses, count: int, seed: int) -> None:
    def one(number: int) -> None:
        dice = random.Random(seed * 100_000 + number)
        prompt = [dice.randrange(3, 300) for _ in range(dice.randrange(1, 80))]
        cluster.tokens(prompt, max_tokens=dice.randrange(1, 8))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(count)))
    cluster.assert_idle()


def test_nothing_grows(cluster: ClusterProcesses) -> None:
    serve(cluster, WARM_UP, seed=1)
    before = {name: (footprint(member.pid), anonymous_bytes(member.pid)) for name, member in cluster.members.items()}
    serve(cluster, REQUESTS, seed=2)
    for name, member in cluster.members.items():
        (files, threads), memory = before[name]
        files_now, threads_now = footprint(member.pid)
        assert files_now <= files + 4, f"{name} has {files_now} files open, {files} before"
        assert threads_now <= threads + 2, f"{name} has {threads_now} threads, {threads} before"
        grown = anonymous_bytes(member.pid) - memory
        assert grown < GROWTH_BYTES, f"{name} grew by {grown / 2**20:.1f} MiB in {REQUESTS} requests"
