"""The launcher over stub roles and a real Redis: order, restarts, and what is left behind (nothing)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.addresses import choose_free_ports

ROOT = Path(__file__).resolve().parents[2]


class StubCluster:
    """A launcher process under test."""

    def __init__(self, folder: Path, runtimes: Path, *flags: str) -> None:
        self.journal = folder / "journal"
        self.port = choose_free_ports(1)[0]
        self.errors = folder / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("stub_cluster.py")),
                    self.journal,
                    str(self.port),
                    *flags,
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(runtimes)},
            )
        self.runtime = Path(self.read_line().removeprefix("runtime: "))
        self.seen: dict[int, psutil.Process] = {}

    def wait_ended(self) -> int:
        """Its exit code; fails with what it said when it does not end."""
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            journal = self.journal.read_text() if self.journal.exists() else ""
            raise AssertionError(f"it does not end\n{self.errors.read_text()}\n{journal}") from None

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def wait_ready(self) -> None:
        assert self.read_line() == f"ready: http://127.0.0.1:{self.port}/v1"
        self.remember_children()

    def remember_children(self) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.seen[child.pid] = child

    def events(self, kind: str) -> list[str]:
        lines = self.journal.read_text(encoding="utf-8").splitlines() if self.journal.exists() else []
        return [line.split()[1] for line in lines if line.split()[0] == kind]

    def pid_of(self, name: str) -> int:
        lines = [line.split() for line in self.journal.read_text(encoding="utf-8").splitlines()]
        return int([pid for event, who, pid in lines if event == "start" and who == name][-1])

    def assert_nothing_left(self) -> None:
        wait_for(lambda: not any(child.is_running() for child in self.seen.values()), "children gone")
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", self.port)) != 0


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., StubCluster]]:
    clusters: list[StubCluster] = []
    # A short path of its own: launchers of other tests would sweep what a killed one leaves in a common one.
    with tempfile.TemporaryDirectory(prefix="stubs-", dir="/tmp") as runtimes:

        def start_one(*flags: str) -> StubCluster:
            clusters.append(StubCluster(tmp_path, Path(runtimes), *flags))
            return clusters[-1]

        yield start_one
        for cluster in clusters:
            if cluster.process.poll() is None:
                cluster.process.kill()
            cluster.process.communicate()


@pytest.mark.e2e
def test_sigterm_stops_router_then_decode_then_prefill_and_leaves_nothing(start: Callable[..., StubCluster]) -> None:
    cluster = start()
    cluster.wait_ready()
    assert len(cluster.seen) == 5
    cluster.process.terminate()
    assert cluster.wait_ended() == 0
    stops = cluster.events("stop")
    assert stops[0] == "router"
    assert sorted(stops[1:3]) == ["decode-0", "decode-1"]
    assert stops[3] == "prefill-0"
    cluster.assert_nothing_left()
    assert not cluster.runtime.exists()


@pytest.mark.e2e
def test_children_do_not_share_the_terminals_process_group(start: Callable[..., StubCluster]) -> None:
    cluster = start()
    cluster.wait_ready()
    groups = [os.getpgid(pid) for pid in cluster.seen]
    assert os.getpgid(cluster.process.pid) not in groups
    assert len(set(groups)) == 5


@pytest.mark.e2e
def test_killed_launcher_takes_its_children_along_and_the_next_start_sweeps(start: Callable[..., StubCluster]) -> None:
    cluster = start()
    cluster.wait_ready()
    cluster.process.kill()
    cluster.wait_ended()
    cluster.assert_nothing_left()
    assert cluster.runtime.exists()  # nobody was there to remove it
    second = start()
    second.wait_ready()
    assert not cluster.runtime.exists()
    assert second.runtime.exists()


@pytest.mark.e2e
def test_dead_node_and_dead_redis_come_back(start: Callable[..., StubCluster]) -> None:
    cluster = start()
    cluster.wait_ready()
    first = cluster.pid_of("decode-1")
    redis = next(child for child in cluster.seen.values() if "redis" in child.name())
    os.kill(first, signal.SIGKILL)
    redis.kill()
    wait_for(lambda: cluster.events("start").count("decode-1") == 2, "decode-1 restarted")
    cluster.remember_children()

    def redis_answers() -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(cluster.runtime / "redis.sock"))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"+PONG")
            except OSError:
                return False

    wait_for(redis_answers, "redis restarted")
    assert cluster.pid_of("decode-1") != first
    assert cluster.events("start").count("decode-0") == 1
    cluster.remember_children()
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.wait_ended() == 0
    cluster.assert_nothing_left()


@pytest.mark.e2e
def test_setting_that_cannot_work_ends_the_start_with_the_childs_sentence(start: Callable[..., StubCluster]) -> None:
    cluster = start("decode-0=--fail,2")
    assert cluster.wait_ended() == 1
    assert "\npdserve: decode-0 cannot work.\n" in cluster.errors.read_text()
    assert "[decode-0] decode-0 cannot work." in cluster.errors.read_text()
    assert cluster.events("start").count("decode-0") == 1
    assert not cluster.runtime.exists()


@pytest.mark.e2e
def test_second_signal_kills_what_does_not_stop(start: Callable[..., StubCluster]) -> None:
    cluster = start("router=--deaf")
    cluster.wait_ready()
    cluster.process.send_signal(signal.SIGINT)
    cluster.process.send_signal(signal.SIGTERM)  # an echo of the first
    time.sleep(1.2)
    assert cluster.process.poll() is None
    assert cluster.events("stop") == []  # the others wait for the router
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(20) == 0  # where the drain alone would take 60 s
    cluster.assert_nothing_left()
    assert not cluster.runtime.exists()


def test_a_redis_that_cannot_be_used_ends_the_start_with_a_sentence_and_without_the_password(tmp_path: Path) -> None:
    port = choose_free_ports(1)[0]
    command = [sys.executable, "-m", "pdserve", "serve", str(tmp_path), "--port", "0", "--grpc-port", "off"]
    ended = subprocess.run(
        [*command, "--redis-url", f"redis://:canary@127.0.0.1:{port}/0", "--kv-memory", "1MiB"],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
    )
    assert ended.returncode == 2
    assert "The Redis at" in ended.stderr
    assert "canary" not in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr
