"""uvicorn over the app on a socket of ours, in an event loop of ours. Knows no cluster."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from router.app import build_app
from router.http_protocol import RouterHttpProtocol
from router.inference_api import InferenceApi

KEEP_ALIVE_S = 120
"""Longer than the pools of clients and proxies keep idle connections, so that it is they who close them."""

_BACKLOG = 2048
_CLOSE_S = 2


class StartFailed(Exception):
    """The process cannot start; the message is the one sentence that says why."""


class HttpServer:
    """uvicorn over one app on one socket, stopped when we say so: signals are ours."""

    def __init__(self, api: InferenceApi, listener: socket.socket) -> None:
        self._listener = listener
        self._server = _SignalFreeServer(
            uvicorn.Config(
                build_app(api),
                http=RouterHttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=_CLOSE_S,
                backlog=_BACKLOG,
            )
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def connections(self) -> set[RouterHttpProtocol]:
        """The open connections."""
        return {item for item in self._server.server_state.connections if isinstance(item, RouterHttpProtocol)}

    async def start(self) -> None:
        """Return once requests are answered."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise StartFailed("the HTTP server stopped while starting.")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Close the port, and what connections remain after a moment. Idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class _SignalFreeServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises StartFailed with the sentence for the operator."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartFailed(f"{host} is no address to listen on: {error.strerror or error}.") from error
    try:
        # Bind at once after a restart, though connections of the last run may still be closing.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise StartFailed(f"cannot listen on {host}:{port}: {error.strerror or error}.") from error
    return listener
