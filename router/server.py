"""The router's process: both doors and the cluster behind them, from start to drained."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable

import uvloop
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, disable_created_metrics

from engine.chat_template import ChatTemplate
from engine.errors import ConfigError
from engine.model_store import resolve_model
from engine.tokenizer import Tokenizer
from kv_transfer.redis_directory import RedisDirectory
from router.config import RouterConfig
from router.dispatch import RouterCluster
from router.grpc_server import start_grpc_server
from router.http_server import HttpServer, StartFailed, listen
from router.inference_api import InferenceApi
from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

_ERROR_FRAMES_S = 2.0
_EXIT_START_FAILED = 1
_EXIT_CONFIG = 2


def run(config: RouterConfig, *, on_ready: Callable[[int], None] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit code.

    Blocks. What keeps it from starting is one sentence on stderr.

    Args:
        config: read once.
        on_ready: called with the HTTP port once it listens; nodes may still be missing then.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, on_ready))
    except ConfigError as error:
        print(f"pdserve router: {error}", file=sys.stderr)
        return _EXIT_CONFIG
    except StartFailed as error:
        print(f"pdserve router: {error}", file=sys.stderr)
        return _EXIT_START_FAILED
    return 0


async def _serve(config: RouterConfig, on_ready: Callable[[int], None] | None) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    listener = listen(config.host, config.port)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(listener.close)
        files = await asyncio.to_thread(resolve_model, config.model, weights=False)
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, files.folder)
        registry = _registry()
        cluster = RouterCluster(config, RedisDirectory(config.redis_url, config.cluster))
        register = getattr(cluster, "register_metrics", None)
        if register is not None:
            register(registry)
        stack.push_async_callback(cluster.close)
        api = InferenceApi(
            config,
            tokenizer,
            ChatTemplate.from_folder(files.folder),
            cluster,
            RouterMetrics(registry, model_name=config.model_names[0]),
        )
        stack.callback(api.close)
        await cluster.start()
        http = HttpServer(api, listener)
        await http.start()
        stack.push_async_callback(http.stop)
        grpc_port = 0
        if config.grpc_port is not None:
            grpc = await start_grpc_server(config, api)
            stack.push_async_callback(grpc.stop, 1.0)
            grpc_port = grpc.port
        logger.info("router_started http_port=%d grpc_port=%d model=%s", http.port, grpc_port, config.model_names[0])
        if on_ready is not None:
            on_ready(http.port)
        await stop.wait()
        await _drain(config, api, cluster, hurry)
    logger.info("router_stopped")


async def _drain(config: RouterConfig, api: InferenceApi, cluster: RouterCluster, hurry: asyncio.Event) -> None:
    """Refuse what is new, finish what runs, and tell the rest. The doors stay open, so that refusals are answers.

    A second signal (`hurry`) ends the waiting.
    """
    logger.info("router_draining open_requests=%d timeout_s=%g", api.num_running, config.drain_timeout_s)
    hurrying = asyncio.create_task(hurry.wait())
    draining = asyncio.create_task(api.drain(config.drain_timeout_s))
    await asyncio.wait((hurrying, draining), return_when=asyncio.FIRST_COMPLETED)
    for task in (hurrying, draining):
        task.cancel()
    await asyncio.gather(hurrying, draining, return_exceptions=True)
    cut_short = api.fail_running()
    if cut_short:
        logger.warning("router_drain_cut_short requests=%d", cut_short)
        await api.wait_idle(_ERROR_FRAMES_S)
    await cluster.drain(_ERROR_FRAMES_S)


def _registry() -> CollectorRegistry:
    # They are one more series for each counter and histogram, which nobody asks for.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry
