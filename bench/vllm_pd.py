"""vLLM's own prefill and decode pair on this CPU, joined behind one port: `python -m bench.vllm_pd --help`.

KV moves over NIXL. Each request goes to the prefill server first, for one token and with its KV held, and then whole
to the decode server, with what the prefill server said about where that KV is: how vLLM wants its NixlConnector used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from bench.peer_engines import vllm_arguments, vllm_environment

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
HOLD_KV = {"do_remote_decode": True, "do_remote_prefill": False}
UNKNOWN_REMOTE = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
SESSION = web.AppKey("session", aiohttp.ClientSession)


class Proxy:
    """Answers for both servers."""

    def __init__(self, prefill_url: str, decode_url: str) -> None:
        self.prefill_url = prefill_url
        self.decode_url = decode_url

    def app(self) -> web.Application:
        """What it serves."""
        app = web.Application(client_max_size=1 << 26)
        app.cleanup_ctx.append(_session)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.generate)
        return app

    async def models(self, request: web.Request) -> web.Response:
        """The decode server's models, once both servers answer."""
        session = request.app[SESSION]
        try:
            for url in (self.prefill_url, self.decode_url):
                async with session.get(f"{url}/v1/models") as reply:
                    content = await reply.read()
        except aiohttp.ClientError:
            return web.Response(status=503)
        return web.Response(body=content, content_type="application/json")

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Prefill, then decode; the decode server's answer as it comes."""
        session, body = request.app[SESSION], await request.json()
        first: dict[str, Any] = {
            **body,
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": HOLD_KV | UNKNOWN_REMOTE,
        }
        first.pop("stream_options", None)
        async with session.post(self.prefill_url + request.path, json=first) as held:
            if held.status != 200:
                return web.Response(status=held.status, body=await held.read(), content_type="application/json")
            body["kv_transfer_params"] = (await held.json())["kv_transfer_params"]
        async with session.post(self.decode_url + request.path, json=body) as reply:
            answer = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.headers["Content-Type"]})
            await answer.prepare(request)
            async for piece in reply.content.iter_any():
                await answer.write(piece)
            return answer


async def _session(app: web.Application) -> AsyncIterator[None]:
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as app[SESSION]:
        yield


def start_server(arguments: argparse.Namespace, port: int, side_port: int, core: int) -> subprocess.Popen[bytes]:
    """One server of the pair, on one core."""
    environment = vllm_environment([core], is_tuned=arguments.tuned, venv=arguments.venv) | {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        "UCX_TLS": "tcp,self,sm,posix,sysv,cma",
    }
    command = vllm_arguments(arguments.venv, arguments.model, arguments.dtype, str(port))
    connector = ["--kv-transfer-config", json.dumps(CONNECTOR)]
    return subprocess.Popen([*command, *connector], env={**os.environ, **environment})


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


async def serve(proxy: Proxy, processes: Sequence[subprocess.Popen[bytes]], port: int) -> None:
    """Until SIGTERM, or until a server has died."""
    runner = web.AppRunner(proxy.app(), shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    try:
        while all(process.poll() is None for process in processes) and not stopped.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), 0.5)
    finally:
        await runner.cleanup()


def main() -> None:
    """Start both and join them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--venv", type=Path, required=True, help="environment that holds vLLM and NIXL")
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tuned", action="store_true", help="Intel's OpenMP without spinning")
    arguments = parser.parse_args()
    ports, cores = free_ports(4), sorted(os.sched_getaffinity(0))
    processes = [start_server(arguments, ports[i], ports[2 + i], cores[i % len(cores)]) for i in range(2)]
    try:
        proxy = Proxy(*(f"http://127.0.0.1:{port}" for port in ports[:2]))
        asyncio.run(serve(proxy, processes, arguments.port))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


if __name__ == "__main__":
    main()
