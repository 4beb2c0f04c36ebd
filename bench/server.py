"""Starts a server with an OpenAI API, waits until it has answered once, and ends it with everything it started."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

START_TIMEOUT_S = 1200.0
STOP_TIMEOUT_S = 60.0
SHOWN_LOG_BYTES = 4000


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers.

    Attributes:
        url: base of the API, with /v1.
        model: the first name that it serves.
        pid: its first process; None when somebody else started it.
        ready_s: from the start to the end of the first completion; None when somebody else started it.
    """

    url: str
    model: str
    pid: int | None = None
    ready_s: float | None = None


def pdserve_command(*flags: str) -> str:
    """Starts a cluster of this repository with the Python that runs now."""
    return shlex.join([sys.executable, "-m", "pdserve", "serve", "--port", "{port}", "--grpc-port", "off", *flags])


def find_server(url: str) -> RunningServer:
    """A server that runs already."""
    model = first_model(url)
    if model is None:
        raise ConnectionError(f"Nothing answers at {url}/models.")
    return RunningServer(url, model)


@contextlib.contextmanager
def started_server(command: str) -> Iterator[RunningServer]:
    """Run `command`, in which {port} becomes a free port, for as long as the context lasts."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server ends then, too
    port = _free_port()
    url = f"http://127.0.0.1:{port}/v1"
    with tempfile.NamedTemporaryFile(prefix="bench-server-", suffix=".log") as log:
        started_s = time.monotonic()
        process = subprocess.Popen(
            shlex.split(command.replace("{port}", str(port))),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            model = _wait_for_model(process, url, started_s)
            _complete_once(url, model)
            yield RunningServer(url, model, process.pid, time.monotonic() - started_s)
        except BaseException:
            sys.stderr.write(Path(log.name).read_text(encoding="utf-8", errors="replace")[-SHOWN_LOG_BYTES:])
            raise
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def first_model(url: str, headers: Mapping[str, str] | None = None) -> str | None:
    """The first model that is served at a base URL with /v1; None while nothing there names one."""
    try:
        # Certificates, which a plain URL does not need, would take longer to load than the answer.
        is_secure = url.startswith("https:")
        reply = httpx.get(f"{url}/models", headers=headers, timeout=5.0, trust_env=False, verify=is_secure)
        return str(reply.json()["data"][0]["id"]) if reply.status_code == httpx.codes.OK else None
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return None


def _wait_for_model(process: subprocess.Popen[bytes], url: str, started_s: float) -> str:
    while time.monotonic() - started_s < START_TIMEOUT_S:
        if process.poll() is not None:
            raise ChildProcessError(f"The server ended with {process.returncode} before it answered.")
        if (model := first_model(url)) is not None:
            return model
        time.sleep(0.1)
    raise TimeoutError(f"The server did not answer within {START_TIMEOUT_S:.0f} s.")


def _complete_once(url: str, model: str) -> None:
    """Nodes may still be loading when the API answers: 503 is asked again."""
    body = {"model": model, "prompt": "Hello", "max_tokens": 1}
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        reply = httpx.post(f"{url}/completions", json=body, timeout=START_TIMEOUT_S, trust_env=False)
        if reply.status_code == httpx.codes.OK:
            return
        if reply.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > deadline_s:
            raise ConnectionError(f"The first completion was answered with {reply.status_code}: {reply.text[:500]}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):  # nothing of its group is left, as it should be
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
