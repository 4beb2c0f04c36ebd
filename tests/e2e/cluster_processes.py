"""A whole cluster as real processes on loopback: Redis, routers and nodes, each of which can be hurt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from pdserve.addresses import choose_free_ports
from tests.redis_process import RedisProcess

MODEL_NAME = "tiny"
START_TIMEOUT_S = 60.0


def slow_steps(seconds: float) -> str:
    """PDSERVE_FAULTS of a decode node whose streams last until they are hurt, however fast the machine is."""
    return f"after_decode_step=sleep:{seconds}@*"


def footprint(pid: int) -> tuple[int, int]:
    """(open files, threads) of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), len(list(Path(f"/proc/{pid}/task").iterdir()))


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until `condition` held; fails the test naming `what` when it never did."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, f"after {timeout_s} s still not: {what}"
        time.sleep(0.02)
    return time.monotonic() - started_s


@dataclass
class Member:
    """One process of the cluster, and how to start it again at its address."""

    name: str
    command: list[str]
    environment: dict[str, str]
    port: int
    process: subprocess.Popen[str] | None = None
    log: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.log.append(line)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As a crash: no goodbye, no clean-up."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        """SIGTERM, even if it was stopped."""
        assert self.process is not None
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.terminate()

    def stop(self, timeout_s: float = 15.0) -> int:
        """SIGTERM, and the exit code."""
        self.terminate()
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self.name} did not end within {timeout_s} s of SIGTERM") from None


class ClusterProcesses:
    """Started whole by `start`; ended whole by `stop`, whatever was done to it between.

    Args:
        folder: scratch space.
        model: folder of the model.
        node_flags: further flags of every node, for instance a tiny pool.
        decode_flags: further flags of decode nodes.
        router_flags: further flags of every router.
        faults: PDSERVE_FAULTS by node name.
        api_key: sent with calls, for routers whose flags ask for one.
    """

    api_key: str | None = None

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        prefill_nodes: int = 1,
        decode_nodes: int = 1,
        routers: int = 1,
        node_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        router_flags: Sequence[str] = (),
        faults: Mapping[str, str] | None = None,
        api_key: str | None = None,
    ) -> None:
        self.api_key = api_key
        self.redis = RedisProcess(folder)
        self.members: dict[str, Member] = {}
        common = ["--redis-url", self.redis.url, "--heartbeat", "0.5"]
        node = [*common, "--dtype", "float32", "--threads", "1", *node_flags]
        if not any(flag.startswith(("--num-blocks", "--kv-memory")) for flag in node_flags):
            node += ["--num-blocks", "256"]
        for role, count in (("prefill", prefill_nodes), ("decode", decode_nodes)):
            for number in range(count):
                name = f"{role}-{number}"
                flags = [*node, *(decode_flags if role == "decode" else ())]
                self._add(name, [role, str(model), "--node-id", name, *flags], (faults or {}).get(name, ""))
        for number in range(routers):
            flags = ["--redis-url", self.redis.url, "--served-model-name", MODEL_NAME, *router_flags]
            if not any(flag.startswith("--grpc-port") for flag in router_flags):
                flags += ["--grpc-port", "off"]
            self._add(f"router-{number}", ["router", str(model), *flags], "")

    def _add(self, name: str, arguments: list[str], faults: str) -> None:
        [port] = choose_free_ports(1)
        environment = {**os.environ, "PDSERVE_FAULTS": faults, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "pdserve", *arguments, "--port", str(port)]
        self.members[name] = Member(name, command, environment, port)

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    @property
    def headers(self) -> dict[str, str]:
        """Of every call."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def url(self, router: int = 0) -> str:
        """Base URL of a router."""
        return f"http://127.0.0.1:{self.members[f'router-{router}'].port}"

    def start(self) -> ClusterProcesses:
        for member in self.members.values():
            member.start()
        num_nodes = sum(not name.startswith("router") for name in self.members)
        for number in range(sum(name.startswith("router") for name in self.members)):
            self.wait_for_nodes(num_nodes, router=number)
        return self

    def wait_for_nodes(self, count: int, router: int = 0, timeout_s: float = START_TIMEOUT_S) -> float:
        """Seconds until a router sees `count` nodes ready."""
        try:
            return wait_until(lambda: len(self.ready_nodes(router)) >= count, timeout_s, f"{count} nodes are ready")
        except AssertionError as error:
            raise AssertionError(f"{error}; ready: {self.ready_nodes(router)}\n{self.dump_logs()}") from None

    def ready_nodes(self, router: int = 0) -> list[str]:
        """Names of the nodes in rotation."""
        try:
            return [node["id"] for node in self.describe(router)["nodes"] if node["state"] == "ready"]
        except httpx.HTTPError:
            return []

    def describe(self, router: int = 0) -> dict[str, Any]:
        """GET /debug/cluster."""
        # Certificates, which nobody here has, would take longer to load than the answer.
        reply = httpx.get(f"{self.url(router)}/debug/cluster", headers=self.headers, timeout=5.0, verify=False)
        reply.raise_for_status()
        answer: dict[str, Any] = reply.json()
        return answer

    def node(self, name: str, router: int = 0) -> dict[str, Any]:
        """One node as a router describes it."""
        nodes: list[dict[str, Any]] = self.describe(router)["nodes"]
        return next(node for node in nodes if node["id"] == name)

    def post(self, path: str, body: dict[str, Any], router: int = 0, timeout_s: float = 60.0) -> httpx.Response:
        """POST a JSON body."""
        return httpx.post(
            f"{self.url(router)}{path}", json={"model": MODEL_NAME, **body}, headers=self.headers, timeout=timeout_s
        )

    def complete(self, prompt: list[int] | str, router: int = 0, **fields: Any) -> dict[str, Any]:
        """A greedy completion, unless `fields` say otherwise."""
        body = {"prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
        reply = self.post("/v1/completions", body, router)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def tokens(self, prompt: list[int] | str, router: int = 0, **fields: Any) -> list[int]:
        """Token ids of the first choice."""
        token_ids: list[int] = self.complete(prompt, router, **fields)["choices"][0]["token_ids"]
        return token_ids

    def violated_invariants(self, router: int = 0) -> list[str]:
        """What of I1, I2, I3 and I5 does not hold now (they need only hold when idle)."""
        wrong: list[str] = []
        description = self.describe(router)
        for node in description["nodes"]:
            if node["state"] != "ready":
                continue
            blocks, transfers = node["blocks"], node["transfers"]
            if node["stale"]:
                wrong.append(f"{node['id']} does not answer")
            if blocks["free"] + blocks["cached"] != blocks["total"]:
                wrong.append(f"{node['id']} holds blocks: {blocks}")
            if node["leases"] or node["in_flight"]:
                wrong.append(f"{node['id']} has {node['leases']} leases and {node['in_flight']} in flight")
            if transfers["started"] != transfers["committed"] + transfers["failed"] + transfers["aborted"]:
                wrong.append(f"{node['id']} has unfinished transfers: {transfers}")
        counts = description["router"]
        if counts["in_flight_requests"] or any(counts["in_flight"].values()):
            wrong.append(f"the router has work in flight: {counts}")
        if counts["admitted"] != counts["finished"] + counts["failed"] + counts["cancelled"]:
            wrong.append(f"requests without an end: {counts}")
        return wrong

    def dead_directory_entries(self, router: int = 0) -> list[str]:
        """I6: entries in Redis of an incarnation of a node that is not the one the router works with."""
        live = {node["id"]: node["epoch"] for node in self.describe(router)["nodes"] if node["state"] == "ready"}
        wrong: list[str] = []
        for key in self.redis.client().scan_iter("pdserve:{*}:blocks:*", count=1000):
            *_, name, epoch = key.decode().split(":")
            if live.get(name, int(epoch)) != int(epoch):
                wrong.append(key.decode())
        return wrong

    def footprints(self) -> dict[int, tuple[str, int, int]]:
        """I7: (name, open files, threads) of each living process, by pid."""
        living = [member for member in self.members.values() if member.process and member.process.poll() is None]
        return {member.pid: (member.name, *footprint(member.pid)) for member in living}

    def assert_idle(self, timeout_s: float = 5.0) -> None:
        """The invariants hold, at the latest after `timeout_s`."""
        wrong: list[str] = []

        def is_idle() -> bool:
            wrong[:] = self.violated_invariants()
            return not wrong

        try:
            wait_until(is_idle, timeout_s, "idle")
        except AssertionError:
            raise AssertionError(f"not idle after {timeout_s} s: {wrong}") from None

    def stop(self) -> None:
        """SIGTERM to all, routers first; fails when one hangs or leaves with an error of its own."""
        try:
            started = [member for member in self.members.values() if member.process is not None]
            for is_router in (True, False):
                members = [member for member in started if member.name.startswith("router") == is_router]
                for member in members:
                    member.terminate()
                for member in members:
                    member.stop()
        finally:
            for member in self.members.values():
                if member.process is not None and member.process.poll() is None:
                    member.process.kill()
            self.redis.kill()

    def dump_logs(self) -> str:
        """What every process said last, for a failed test."""
        return "\n".join(f"== {member.name}\n" + "".join(member.log[-30:]) for member in self.members.values())


def read_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Every event of an SSE stream but the closing [DONE]."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
