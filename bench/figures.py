"""Measures servers with an OpenAI API on one machine, in alternating rounds with one client, and prints medians.

Of each server: time from its start to its first answer, time to first token (TTFT) and time per output token (TPOT) of
one stream, TTFT of a long prompt, output tokens per second of 16 streams at once, and the memory of its processes. Of
pdserve also what the router costs per request and per token. Prompts are random token ids, so none is found in a cache.

    python -m bench.figures                                       # pdserve as `pdserve serve` starts it
    python -m bench.figures --url http://127.0.0.1:8000/v1        # whatever runs there, without memory and start
    python -m bench.figures --server 'pdserve=pdserve serve --port {port}' --server 'other=... --port {port}'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.server import RunningServer, find_server, pdserve_command, started_server

TOKEN_IDS = range(1000, 30000)
"""Ordinary tokens of every vocabulary from 30,000 on."""

REQUEST_TIMEOUT_S = 600.0
IDLE_S = 3.0
SINGLE_REQUESTS = 20


@dataclass(frozen=True, slots=True)
class Stream:
    """One streamed completion as its client saw it, in seconds."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    first_s: float
    last_s: float
    total_s: float
    node_s: float | None

    @property
    def per_token_s(self) -> float:
        """TPOT: mean time between tokens after the first."""
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


class Client:
    """Streams completions of random prompts; every request has a connection of its own."""

    def __init__(self, server: RunningServer, random_source: random.Random) -> None:
        self._server = server
        self._random = random_source
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False, limits=limits)

    async def stream(self, prompt_tokens: int, output_tokens: int) -> Stream:
        """One completion of exactly so many tokens."""
        body = {
            "model": self._server.model,
            "prompt": self._random.choices(TOKEN_IDS, k=prompt_tokens),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "include_timings": True,
        }
        times: list[float] = []
        usage: dict[str, Any] = {}
        timings: dict[str, float | None] = {}
        started_s = time.perf_counter()
        async with self._http.stream("POST", f"{self._server.url}/completions", json=body) as reply:
            if reply.status_code != httpx.codes.OK:
                raise ConnectionError(f"{reply.status_code}: {(await reply.aread())[:500]!r}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ConnectionError(str(event["error"])[:500])
                if any(choice.get("token_ids") for choice in event["choices"]):
                    times.append(time.perf_counter() - started_s)
                usage = event.get("usage") or usage
                timings = event.get("timings") or timings
        total_s = time.perf_counter() - started_s
        if (usage["prompt_tokens"], usage["completion_tokens"]) != (prompt_tokens, output_tokens):
            raise ValueError(f"Asked for {prompt_tokens}+{output_tokens} tokens, but the usage is {usage}.")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        node_ms = [value for name, value in timings.items() if name != "decode_ms" and value is not None]
        node_s = sum(node_ms) / 1000 if node_ms else None
        return Stream(prompt_tokens, output_tokens, cached, times[0], times[-1], total_s, node_s)

    async def close(self) -> None:
        """Close connections."""
        await self._http.aclose()


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


class Round:
    """Measures one server once, and keeps each figure with its unit in its name."""

    def __init__(self, server: RunningServer, arguments: argparse.Namespace, random_source: random.Random) -> None:
        self._server = server
        self._arguments = arguments
        self._client = Client(server, random_source)
        self.figures: dict[str, list[float]] = defaultdict(list)

    async def run(self) -> None:
        """One warm-up of each shape, then everything."""
        try:
            for prompt_tokens, output_tokens in ((128, 16), (2048, 1)):
                await self._client.stream(prompt_tokens, output_tokens)
            for _ in range(self._arguments.repeats):
                await self._one_stream()
                await self._many_streams()
            if self._server.ready_s is not None:
                self.figures["time_to_ready_s"].append(self._server.ready_s)
            if self._server.pid is not None:
                processes = processes_of(self._server.pid)
                for name, process in processes.items():
                    for kind, mib in memory_mib(process).items():
                        self.figures[f"memory_{name}_{kind}_mib"].append(mib)
                if "router" in processes:
                    await self._router_cost(processes["router"])
        finally:
            await self._client.close()

    async def _one_stream(self) -> None:
        stream = await self._client.stream(128, 128)
        self.figures["one_stream_ttft_ms"].append(stream.first_s * 1000)
        self.figures["one_stream_tpot_ms"].append(stream.per_token_s * 1000)
        self.figures["ttft_2048_ms"].append((await self._client.stream(2048, 1)).first_s * 1000)

    async def _many_streams(self) -> None:
        count = self._arguments.concurrency
        started_s = time.perf_counter()
        streams = await asyncio.gather(*(self._client.stream(256, 64) for _ in range(count)))
        tokens = sum(stream.output_tokens for stream in streams)
        self.figures[f"output_tokens_per_s_at_{count}"].append(tokens / (time.perf_counter() - started_s))
        if any(stream.cached_tokens > stream.prompt_tokens // 8 for stream in streams):
            raise ValueError("Random prompts came from the prefix cache.")

    async def _router_cost(self, router: psutil.Process) -> None:
        """CPU time beyond that of an idle router: of requests with one token, and of what more tokens add to it."""
        before_s = cpu_seconds(router)
        await asyncio.sleep(IDLE_S)
        idle_rate = (cpu_seconds(router) - before_s) / IDLE_S

        async def busy_s(output_tokens: int, times: int, at_once: int) -> float:
            before_s, started_s = cpu_seconds(router), time.perf_counter()
            for _ in range(times):
                streams = await asyncio.gather(*(self._client.stream(32, output_tokens) for _ in range(at_once)))
                for stream in streams if output_tokens == 1 else ():
                    if stream.node_s is not None:
                        self.figures["request_outside_nodes_ms"].append((stream.total_s - stream.node_s) * 1000)
            return cpu_seconds(router) - before_s - idle_rate * (time.perf_counter() - started_s)

        request_s = await busy_s(1, SINGLE_REQUESTS, 1) / SINGLE_REQUESTS
        alone_s = (await busy_s(128, 1, 1) - request_s) / 127
        count = self._arguments.concurrency
        crowd_s = (await busy_s(64, 1, count) - count * request_s) / (count * 63)
        self.figures["router_cpu_idle_percent"].append(idle_rate * 100)
        self.figures["router_cpu_per_request_ms"].append(request_s * 1000)
        self.figures["router_cpu_per_token_one_stream_us"].append(alone_s * 1e6)
        self.figures[f"router_cpu_per_token_at_{count}_us"].append(crowd_s * 1e6)


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Figures by server; servers take turns, and never run together."""
    servers = dict(server.split("=", 1) for server in arguments.server)
    if not servers:
        servers = {"running": ""} if arguments.url else {"pdserve": pdserve_command()}
    figures: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in servers}
    random_source = random.Random()
    for number in range(arguments.rounds):
        for name, command in servers.items():
            with open_server(arguments.url, command) as server:
                one = Round(server, arguments, random_source)
                asyncio.run(one.run())
            for figure, values in one.figures.items():
                figures[name][figure] += values
            load = os.getloadavg()[0]
            print(f"round {number + 1} {name} load={load:.1f}: {json.dumps(rounded(one.figures))}", file=sys.stderr)
    return figures


def open_server(url: str | None, command: str) -> contextlib.AbstractContextManager[RunningServer]:
    """A running one, or one started for the round."""
    return nullcontext(find_server(url)) if url else started_server(command)


def rounded(figures: dict[str, list[float]]) -> dict[str, float]:
    """Medians."""
    return {name: round(statistics.median(values), 2) for name, values in figures.items()}


def summarise(figures: dict[str, list[float]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Median, extremes and number of each figure."""
    for name, values in figures.items():
        low, high = round(min(values), 2), round(max(values), 2)
        yield name, {"median": round(statistics.median(values), 2), "min": low, "max": high, "values": len(values)}


def parse_arguments() -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--server", action="append", default=[], help="NAME=COMMAND with {port} in it; repeatable")
    parser.add_argument("--url", help="base URL with /v1 of a server that runs already")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each server (3)")
    parser.add_argument("--repeats", type=int, default=2, help="of the streams in each round (2)")
    parser.add_argument("--concurrency", type=int, default=16, help="streams at once (16)")
    return parser.parse_args()


def main() -> None:
    """Print everything as JSON; progress goes to standard error."""
    arguments = parse_arguments()
    figures = measure(arguments)
    facts = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "rounds": arguments.rounds,
        "repeats": arguments.repeats,
        "servers": {name: dict(summarise(values)) for name, values in figures.items()},
    }
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
