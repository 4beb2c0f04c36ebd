"""`pdserve serve` with real roles, a real Redis and a tiny model: ready means ready, and the end leaves nothing."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.tiny_model import build_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
KEY = "canary-of-the-serve-test"


class Serve:
    """A `pdserve serve` process."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.errors = folder / "stderr"
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "PDSERVE_API_KEY": KEY}
        environment |= {"PDSERVE_DTYPE": "float32", "PDSERVE_PORT": "0"}
        flags = [
            "--kv-memory",
            "4MiB",
            "--threads-per-node",
            "1",
            "--served-model-name",
            "tiny",
            "--drain-timeout",
            "5",
        ]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pdserve", "serve", str(model), *flags],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready: http://127.0.0.1:"), self.errors.read_text()
        assert line.endswith("/v1\n")
        self.url = line.removeprefix("ready: ").strip()
        self.client = httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def complete(self) -> httpx.Response:
        body = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        return self.client.post(f"{self.url}/completions", json=body)

    def node(self, node_id: str) -> dict[str, Any]:
        response = self.client.get(self.url.removesuffix("/v1") + "/debug/cluster")
        found: list[dict[str, Any]] = [node for node in response.json()["nodes"] if node["id"] == node_id]
        return found[-1] if found else {}

    def assert_nothing_left(self, *, runtime_removed: bool) -> None:
        wait_for(lambda: not any(child.is_running() for child in self.children))
        port = int(self.url.removesuffix("/v1").rsplit(":", 1)[1])
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
        assert bool(list(self.folder.glob("pdserve-*"))) != runtime_removed


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    model = build_tiny_model(tmp_path / "model")
    shared_memory = set(Path("/dev/shm").iterdir())
    folder = Path(tempfile.mkdtemp(prefix="serve-"))  # shorter than tmp_path: it holds the path of a Unix socket
    running = Serve(folder, model)
    yield running
    running.client.close()
    if running.process.poll() is None:
        running.process.kill()
    running.process.communicate()
    shutil.rmtree(folder)
    assert set(Path("/dev/shm").iterdir()) <= shared_memory


def test_ready_serves_survives_a_killed_node_and_drains(serve: Serve) -> None:
    first = serve.complete()
    assert first.status_code == 200, first.text
    assert httpx.get(f"{serve.url}/models", timeout=10).status_code == 401

    before = serve.node("decode-0")
    os.kill(before["pid"], signal.SIGKILL)
    wait_for(lambda: serve.node("decode-0").get("pid") not in (None, before["pid"]))
    wait_for(lambda: serve.node("decode-0").get("state") == "ready")
    after = serve.node("decode-0")
    assert after["address"] == before["address"]
    assert after["epoch"] > before["epoch"]
    second = serve.complete()
    assert second.json()["choices"] == first.json()["choices"]

    serve.children = psutil.Process(serve.process.pid).children(recursive=True)
    for child in serve.children:
        assert KEY not in " ".join(child.cmdline())
    serve.process.terminate()
    assert serve.process.wait(30) == 0
    serve.assert_nothing_left(runtime_removed=True)
    assert KEY not in serve.errors.read_text()


def test_killed_launcher_leaves_no_process(serve: Serve) -> None:
    assert serve.complete().status_code == 200
    serve.process.kill()
    serve.process.wait(10)
    serve.assert_nothing_left(runtime_removed=False)
