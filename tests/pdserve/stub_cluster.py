"""Runs the real launcher over a real Redis and stub roles. `stub_cluster.py JOURNAL PORT [ROLE=FLAG,FLAG ...]`"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from pdserve import private_redis, tether
from pdserve.launcher import Launcher, Plan

STUB = str(Path(__file__).with_name("stub_role.py"))


def main(journal: str, port: str, *extra: str) -> int:
    logging.basicConfig(level=logging.INFO)
    flags = {name: value.split(",") for name, _, value in (one.partition("=") for one in extra)}
    environment = os.environ | {tether.PARENT_PID: str(os.getpid())}

    def role(name: str, *arguments: str) -> tuple[str, list[str]]:
        return name, [sys.executable, STUB, name, journal, *arguments, *flags.get(name, [])]

    runtime = private_redis.RuntimeDirectory()
    print(f"runtime: {runtime.path}", flush=True)
    plan = Plan(
        redis=private_redis.redis_command(runtime.path),
        prefill=[role("prefill-0")],
        decode=[role("decode-0"), role("decode-1")],
        router=role("router", "--port", port),
        node_environment=environment,
        router_environment=environment,
        url=f"http://127.0.0.1:{port}",
        model_name="stub",
        api_key=None,
    )
    try:
        return asyncio.run(Launcher(plan, 60.0, runtime.path).run())
    finally:
        runtime.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
