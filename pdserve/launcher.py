"""The whole cluster on one machine: Redis, nodes and router as child processes, kept alive until told to stop.

Order of a start: what can be checked at once, the model, Redis, then nodes and router together, then one completion
through all of them. Order of a stop: router (it drains), decode nodes, prefill nodes, Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx
import psutil

from engine.errors import ConfigError
from engine.model_store import ModelFiles, resolve_model
from kv_transfer.redis_directory import masked_url
from pdserve import private_redis, tether
from pdserve.addresses import LOOPBACK, WILDCARDS, check_port_is_free, choose_free_ports, usable_cores
from pdserve.child import Backoff, Child, ChildFailed, LineWriter
from pdserve.options import (
    DecodeOptions,
    PrefillOptions,
    RouterOptions,
    ServeOptions,
    environment_names,
    refuse_foreign_kernels,
)
from pdserve.progress import showing_progress
from router.config import RouterConfig

logger = logging.getLogger(__name__)

STOP_SLACK_S = 5.0
"""What a child gets beyond its drain timeout before it is killed."""

WARM_UP_TIMEOUT_S = 120.0
ECHO_S = 1.0

_REDIS_TIMEOUT_S = 3.0
_NODE_FLAGS = (
    "dtype",
    "device",
    "block_size",
    "num_blocks",
    "kv_memory",
    "max_num_batched_tokens",
    "max_num_seqs",
    "scheduling_policy",
)
_FLAGS_OF_ROLE = {"prefill": (), "decode": ("swap_space", "itl_bound_ms")}
_EVERY_ROLE_FLAGS = ("log_level", "max_model_len", "progress_deadline", "drain_timeout", "seed")
_ROUTER_FLAGS = ("host", "local_prefill_threshold", "max_waiting_requests", "max_waiting_tokens", "max_priority_boost")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start, all decided.

    Attributes:
        redis: command of the private server; None with a Redis of the user's.
        prefill: (name, command) of each prefill node.
        decode: (name, command) of each decode node.
        router: (name, command) of the router.
        node_environment: environment of the nodes.
        router_environment: environment of the router; the only one that has the API keys.
        url: where clients reach the router, without /v1.
        model_name: the name that the router serves first.
        api_key: a key that the router accepts.
    """

    redis: list[str] | None
    prefill: list[tuple[str, list[str]]]
    decode: list[tuple[str, list[str]]]
    router: tuple[str, list[str]]
    node_environment: dict[str, str]
    router_environment: dict[str, str]
    url: str
    model_name: str
    api_key: str | None


def run(options: ServeOptions) -> int:
    """Serve until SIGINT or SIGTERM; the exit code. Raises ConfigError before anything was started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # until the event loop takes over
    refuse_foreign_kernels()
    options.engine_config(num_threads=options.threads_per_node)
    config = options.router_config(redis_url=options.redis_url or "unix://unused", cluster="unused")
    _check_ports(config)
    _check_memory(options)
    if options.redis_url is not None:
        _check_redis(options.redis_url)
    with showing_progress() as report:
        files = resolve_model(options.model, report=report)
    runtime = private_redis.RuntimeDirectory() if options.redis_url is None else None
    try:
        plan = make_plan(options, config, files, runtime.path if runtime else None)
        return asyncio.run(Launcher(plan, options.drain_timeout, runtime.path if runtime else None).run())
    finally:
        if runtime is not None:
            runtime.close()


def _check_ports(config: RouterConfig) -> None:
    if config.port and config.port == config.grpc_port:
        raise ConfigError(f"--port and --grpc-port are both {config.port}; give them different ones.")
    for port in (config.port, config.grpc_port):
        if port:
            check_port_is_free(config.host, port)


def _check_redis(url: str) -> None:
    """Without Redis nodes and router would never find each other, so say so at once."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    try:
        client = redis.Redis.from_url(
            url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )
        with client:
            client.ping()
    except (redis.RedisError, OSError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise ConfigError(f"The Redis at {masked_url(url)} cannot be used: {reason}.") from None


def _check_memory(options: ServeOptions) -> None:
    if options.num_blocks is not None:
        return
    nodes = options.prefill_nodes + options.decode_nodes
    needed, available = nodes * options.kv_memory, psutil.virtual_memory().available
    if needed > available:
        raise ConfigError(
            f"{nodes} nodes with --kv-memory {options.kv_memory >> 20}MiB need {needed >> 20} MiB, but only "
            f"{available >> 20} MiB of memory are available."
        )


def make_plan(options: ServeOptions, config: RouterConfig, files: ModelFiles, runtime: Path | None) -> Plan:
    """Choose ports and write every command. `runtime` is None with a Redis of the user's."""
    nodes = options.prefill_nodes + options.decode_nodes
    threads = options.threads_per_node or max(1, usable_cores() // nodes)
    ports = choose_free_ports(nodes + 2)
    http_port = config.port or ports[-1]
    grpc_port = "off" if config.grpc_port is None else str(config.grpc_port or ports[-2])
    names = [*config.served_model_names] or list(dict.fromkeys((options.model, files.model_id)))
    redis_url = private_redis.redis_url(runtime) if runtime else options.redis_url
    assert redis_url is not None
    base = _base_environment() | {environment_names("redis_url")[0]: redis_url}
    node_environment = base | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    router_environment = base | ({"PDSERVE_API_KEY": " ".join(config.api_keys)} if config.api_keys else {})
    cluster = ["--cluster", f"box-{secrets.token_hex(6)}"]
    everywhere = cluster + _flags(options, _EVERY_ROLE_FLAGS)

    def node(role: str, index: int, port: int) -> tuple[str, list[str]]:
        name = f"{role}-{index}"
        own = ["--host", LOOPBACK, "--port", str(port), "--node-id", name, "--threads", str(threads)]
        flags = _flags(options, (*_NODE_FLAGS, *_FLAGS_OF_ROLE[role]))
        return name, _pdserve(role, str(files.folder), *own, *everywhere, *flags)

    router_flags = ["--port", str(http_port), "--grpc-port", grpc_port, *_flags(options, _ROUTER_FLAGS)]
    for name in names:
        router_flags += ["--served-model-name", name]
    host = LOOPBACK if config.host in WILDCARDS else config.host
    return Plan(
        redis=private_redis.redis_command(runtime) if runtime else None,
        prefill=[node("prefill", index, ports[index]) for index in range(options.prefill_nodes)],
        decode=[node("decode", index, ports[options.prefill_nodes + index]) for index in range(options.decode_nodes)],
        router=("router", _pdserve("router", str(files.folder), *everywhere, *router_flags)),
        node_environment=node_environment,
        router_environment=router_environment,
        url=f"http://{f'[{host}]' if ':' in host else host}:{http_port}",
        model_name=names[0],
        api_key=config.api_keys[0] if config.api_keys else None,
    )


def _pdserve(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "pdserve", *arguments]


def _flags(options: ServeOptions, names: Sequence[str]) -> list[str]:
    """The flags of those fields that have a value."""
    flags: list[str] = []
    for name in names:
        value = getattr(options, name)
        if value is not None:
            flags += ["--" + name.replace("_", "-"), str(value)]
    return flags


def _base_environment() -> dict[str, str]:
    """This process's environment without the settings of `serve`, which reach the children as flags."""
    classes = (ServeOptions, RouterOptions, PrefillOptions, DecodeOptions)
    settings = {name for one in classes for each in fields(one) for name in environment_names(each.name)}
    environment = {name: value for name, value in os.environ.items() if name not in settings}
    environment[tether.PARENT_PID] = str(os.getpid())
    package_root = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


class Launcher:
    """Runs one plan once."""

    def __init__(self, plan: Plan, drain_timeout_s: float, runtime: Path | None) -> None:
        self._plan = plan
        self._drain_timeout_s = drain_timeout_s
        self._runtime = runtime
        self._lines = LineWriter()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._ready = False
        self._stopped_at: float | None = None
        self._watched: set[asyncio.Task[None]] = set()
        self._redis = [self._child("redis", plan.redis, self._base(plan))] if plan.redis else []
        self._prefill = [self._child(*named, plan.node_environment) for named in plan.prefill]
        self._decode = [self._child(*named, plan.node_environment) for named in plan.decode]
        self._router = [self._child(*plan.router, plan.router_environment)]

    @staticmethod
    def _base(plan: Plan) -> dict[str, str]:
        """Redis must not read our settings."""
        return {name: value for name, value in plan.node_environment.items() if not name.startswith("PDSERVE_")}

    def _child(self, name: str, command: list[str], environment: Mapping[str, str]) -> Child:
        is_redis = name == "redis"  # starts in an instant, and greets at length
        backoff = Backoff(first_s=0.2) if is_redis else Backoff()
        return Child(name, command, environment, self._lines, lambda: not self._ready, backoff, quiet=is_redis)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP, and means it
                loop.add_signal_handler(number, self._on_signal)
        try:
            return await self._serve()
        finally:
            await self._stop_all()
            self._lines.close()

    def _on_signal(self) -> None:
        """The first signal stops, a later one hurries. One right behind the first is its echo: make, timeout and
        terminals signal both a process and its group."""
        now = time.monotonic()
        if self._stopped_at is None:
            self._stopped_at = now
            self._stop.set()
        elif now - self._stopped_at > ECHO_S:
            self._hurry.set()

    async def _serve(self) -> int:
        stopping = asyncio.create_task(self._stop.wait())
        starting = asyncio.create_task(self._start())
        try:
            await self._until(stopping, starting)
            if starting.done():
                await starting
                self._ready = True
                print(f"ready: {self._plan.url}/v1", flush=True)
                await self._until(stopping)
            return 0
        except ChildFailed as failure:
            print(f"pdserve: {failure}", file=sys.stderr, flush=True)
            return 1
        finally:
            for task in (stopping, starting):
                task.cancel()
            await asyncio.gather(stopping, starting, return_exceptions=True)

    async def _until(self, *tasks: asyncio.Task[Any]) -> None:
        """Wait for any of the tasks; raise ChildFailed when a child gives up first."""
        while not any(task.done() for task in tasks):
            await asyncio.wait({*tasks, *self._watched}, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            for child in self._watched:
                if child.done() and not child.cancelled():
                    error = child.exception()
                    if error is not None:
                        raise error

    async def _start(self) -> None:
        with showing_progress() as report:
            if self._runtime is not None:
                report("starting Redis")
                self._watched |= {child.start() for child in self._redis}
                await private_redis.wait_until_answering(self._runtime)
            report(
                f"starting {len(self._prefill)} prefill, {len(self._decode)} decode and the router; loading the model"
            )
            self._watched |= {child.start() for child in (*self._decode, *self._prefill, *self._router)}
            headers = {"Authorization": f"Bearer {self._plan.api_key}"} if self._plan.api_key else {}
            async with httpx.AsyncClient(
                base_url=self._plan.url, headers=headers, trust_env=False, timeout=WARM_UP_TIMEOUT_S
            ) as client:
                await self._wait_until_all_are_ready(client)
                report("asking for a first token")
                await self._warm_up(client)

    async def _wait_until_all_are_ready(self, client: httpx.AsyncClient) -> None:
        wanted = {child.name for child in (*self._prefill, *self._decode)}
        while True:
            with contextlib.suppress(httpx.TransportError, ValueError, TypeError, KeyError):
                if (await client.get("/ready", timeout=5.0)).status_code == httpx.codes.OK:
                    nodes = (await client.get("/debug/cluster", timeout=5.0)).json()["nodes"]
                    if wanted <= {node["id"] for node in nodes if str(node["state"]).lower() == "ready"}:
                        return
            await asyncio.sleep(0.1)

    async def _warm_up(self, client: httpx.AsyncClient) -> None:
        """Return when a completion has come through the whole cluster."""
        body = {"model": self._plan.model_name, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        while True:
            try:
                response = await client.post("/v1/completions", json=body)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
            else:
                if response.status_code == httpx.codes.OK:
                    return
                reason = f"status {response.status_code}"
            logger.warning("warm_up_failed reason=%s", reason)
            await asyncio.sleep(1.0)

    async def _stop_all(self) -> None:
        """In the order in which nobody loses what it still needs. Everything is gone on return."""
        drain_s = self._drain_timeout_s + STOP_SLACK_S if self._ready else STOP_SLACK_S
        for children, timeout_s in (
            (self._router, drain_s),
            (self._decode, STOP_SLACK_S),
            (self._prefill, STOP_SLACK_S),
            (self._redis, STOP_SLACK_S),
        ):
            await asyncio.gather(*(child.stop(timeout_s, self._hurry) for child in children))
