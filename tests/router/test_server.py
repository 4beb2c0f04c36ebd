"""The router's process from start to exit code: what it says when it cannot start, and how it stops."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.router.api_harness import CHATML, tokenizer

NO_REDIS = "redis://127.0.0.1:1/0"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with what the router reads: no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer()._backend.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300, "eos_token_id": 2}))
    return folder


def start(model: str, **settings: object) -> subprocess.Popen[str]:
    given = {"model": model, "port": 0, "redis_url": NO_REDIS, **settings}
    code = (
        "import logging, sys\n"
        "from router.config import RouterConfig\n"
        "from router.server import run\n"
        "logging.basicConfig(level='INFO')\n"
        f"code = run(RouterConfig(**{given!r}), on_ready=lambda port: print(port, flush=True))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "raise SystemExit(code)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


@contextmanager
def running(model: Path, **settings: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = start(str(model), **settings)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, f"http://127.0.0.1:{int(line)}"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_with_code_0_and_no_traceback(model: Path, number: int) -> None:
    with running(model, grpc_port=0) as (process, url):
        with httpx.Client(base_url=url, trust_env=False) as client:
            assert client.get("/health").status_code == 200
            ready = client.get("/ready")
            assert ready.status_code == 503 and ready.json() == {"status": "starting"}
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 503
            assert client.get("/v1/models").json()["data"][0]["id"] == str(model)
            assert "process_resident_memory_bytes" in client.get("/metrics").text
        process.send_signal(number)
        _, errors = process.communicate(timeout=15)
    assert process.returncode == 0, errors
    assert "router_stopped" in errors and "Traceback" not in errors


def test_taken_port_is_one_sentence_and_code_1(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _, errors = (process := start(str(model), port=port)).communicate(timeout=30)
    assert process.returncode == 1
    assert errors.strip().splitlines() == [
        f"pdserve router: cannot listen on 127.0.0.1:{port}: Address already in use."
    ]


def test_missing_model_is_one_sentence_and_code_2(tmp_path: Path) -> None:
    _, errors = (process := start(str(tmp_path / "nowhere"))).communicate(timeout=30)
    assert process.returncode == 2
    lines = errors.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("pdserve router: ") and "nowhere" in lines[0]


def test_port_is_free_again_at_once(model: Path) -> None:
    with running(model) as (process, url):
        port = int(url.rsplit(":", 1)[1])
        with httpx.Client(base_url=url, trust_env=False) as client:
            client.get("/health")
            process.send_signal(signal.SIGTERM)
            process.wait(15)
    started = time.monotonic()
    with running(model, port=port):
        assert time.monotonic() - started < 15
