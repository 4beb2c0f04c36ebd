"""Which ports are free, and under which address others reach this host. Starts nothing."""

from __future__ import annotations

import errno
import os
import random
import socket
from pathlib import Path
from urllib.parse import urlsplit

from engine.errors import ConfigError

WILDCARDS = ("", "0.0.0.0", "::", "[::]")
LOOPBACK = "127.0.0.1"


def check_port_is_free(host: str, port: int) -> None:
    """Raise ConfigError when nothing could listen on `host:port` now."""
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"Cannot listen on {host}: {error.strerror}.") from error
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"Port {port} on {host} is taken by another process; stop it or choose another port.",
                    reason="port_taken",
                ) from error
            reason = os.strerror(error.errno or 0)
            raise ConfigError(f"Cannot listen on {host}:{port}: {reason}.", reason="port_taken") from error


def choose_free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, from below the range that the kernel gives to outgoing connections.

    From there, so that a port is still free when the node that it was chosen for is restarted.
    """
    ports: list[int] = []
    for port in random.sample(range(20000, 30000), 10000):
        if len(ports) == count:
            break
        try:
            check_port_is_free(LOOPBACK, port)
        except ConfigError:
            continue
        ports.append(port)
    if len(ports) < count:
        raise ConfigError(f"Only {len(ports)} ports between 20000 and 30000 are free, and {count} are needed.")
    return ports


def advertise_host_for(redis_url: str) -> str:
    """This host's address on the network on which it reaches Redis, which is the one that other nodes share."""
    url = urlsplit(redis_url)
    if url.scheme == "unix" or not url.hostname:
        return LOOPBACK
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(url.hostname, url.port or 6379, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: chooses a route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"Cannot tell which address to advertise, because {url.hostname} has no route: {error}; "
            "pass --advertise-host."
        ) from error


def usable_cores() -> int:
    """Cores that this process may use: its affinity, cut by the cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores  # no cgroup v2 here
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
