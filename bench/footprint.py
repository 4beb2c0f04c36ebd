"""What a cluster costs beside computing: memory of each process, and the router's CPU time per request and per token.

    python -m bench.footprint [flags of pdserve serve]    # starts a cluster, measures, prints JSON

Latency and throughput are `pdserve bench serve` and `pdserve bench peers`.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from bench.datasets import PromptMaker, RandomLengths, random_work
from bench.load import run_load
from bench.server import RunningServer, pdserve_command, started_server
from bench.stream_client import StreamClient, Target
from bench.vocabulary import Vocabulary

IDLE_S = 3.0
SINGLE_REQUESTS = 20
AT_ONCE = 16
REPEATS = 3
ANY_VOCABULARY = Vocabulary()


def processes_of(pid: int) -> dict[str, psutil.Process]:
    """A server's processes by a name that people know; a launcher is `serve`."""
    named: dict[str, psutil.Process] = {}
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        words = process.cmdline()
        name = words[words.index("pdserve") + 1] if "pdserve" in words[:-1] else process.name()
        if "--node-id" in words:
            name = words[words.index("--node-id") + 1]
        while name in named:
            name += "'"
        named[name] = process
    return named


def memory_mib(process: psutil.Process) -> dict[str, float]:
    """Anonymous resident memory, and the share of all resident memory that is its own (PSS)."""
    kib: dict[str, int] = {}
    for file in ("status", "smaps_rollup"):
        for line in Path(f"/proc/{process.pid}/{file}").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name in ("RssAnon", "Pss"):
                kib[name] = int(value.split()[0])
    return {"rss_anon": kib["RssAnon"] / 1024, "pss": kib["Pss"] / 1024}


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of all threads; finer than the ticks of /proc/PID/stat."""
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text(encoding="utf-8").split()[0]) for thread in threads) / 1e9


async def measure(
    server: RunningServer, router: psutil.Process, vocabulary: Vocabulary = ANY_VOCABULARY
) -> dict[str, list[float]]:
    """CPU time of the router beyond that of an idle one: of requests with one token, and of what more tokens add."""
    figures: dict[str, list[float]] = defaultdict(list)
    maker = PromptMaker(vocabulary, np.random.default_rng(), as_text=False)
    target = Target(f"{server.url}/completions", server.model, body={"temperature": 0, "ignore_eos": True})

    async with StreamClient(target) as client:

        async def cpu_of(count: int, output_tokens: int, at_once: int) -> tuple[float, float]:
            before_s = cpu_seconds(router)
            work = random_work(maker, count, RandomLengths(32, output_tokens))
            run = await run_load(client, work, [0.0] * count, max_concurrency=at_once)
            if failed := [record for record in run.records if not record.has_succeeded]:
                raise ConnectionError(f"{failed[0].error_kind}: {failed[0].error}")
            return cpu_seconds(router) - before_s, run.duration_s

        await cpu_of(AT_ONCE, 8, AT_ONCE)
        for _ in range(REPEATS):
            before_s = cpu_seconds(router)
            await asyncio.sleep(IDLE_S)
            idle = (cpu_seconds(router) - before_s) / IDLE_S

            async def busy_s(count: int, output_tokens: int, at_once: int, idle: float = idle) -> float:
                cpu_s, duration_s = await cpu_of(count, output_tokens, at_once)
                return cpu_s - idle * duration_s

            request_s = await busy_s(SINGLE_REQUESTS, 1, 1) / SINGLE_REQUESTS
            alone_s = (await busy_s(1, 128, 1) - request_s) / 127
            crowd_s = (await busy_s(AT_ONCE, 64, AT_ONCE) - AT_ONCE * request_s) / (AT_ONCE * 63)
            figures["router_cpu_idle_percent"].append(idle * 100)
            figures["router_cpu_per_request_ms"].append(request_s * 1000)
            figures["router_cpu_per_token_one_stream_us"].append(alone_s * 1e6)
            figures[f"router_cpu_per_token_at_{AT_ONCE}_us"].append(crowd_s * 1e6)
    return figures


def main() -> None:
    """Print medians, lowest and highest as JSON."""
    with started_server(shlex.join([*shlex.split(pdserve_command()), *sys.argv[1:]])) as server:
        assert server.pid is not None
        assert server.ready_s is not None
        processes = processes_of(server.pid)
        figures = asyncio.run(measure(server, processes["router"]))
        figures["time_to_ready_s"] = [server.ready_s]
        for name, process in processes.items():
            for kind, mib in memory_mib(process).items():
                figures[f"memory_{name}_{kind}_mib"] = [mib]
    medians = {name: [round(median(values), 2), min(values), max(values)] for name, values in figures.items()}
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
