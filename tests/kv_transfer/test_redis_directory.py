"""Does the directory in Redis survive everything that happens to Redis and to its callers?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.ids import BlockHash, Epoch, NodeId
from kv_transfer import redis_directory
from kv_transfer.directory import DirectoryUnavailable, NodeRecord
from kv_transfer.redis_directory import RedisDirectory, masked_url
from tests.redis_process import RedisProcess

ROOT = Path(__file__).resolve().parents[2]
NODE, EPOCH, TTL_S = NodeId("n"), Epoch(1_764_444_800_123_456_789), 30.0
RECORD = NodeRecord(NODE, EPOCH, "prefill", "127.0.0.1:1")


def chain(length: int, tag: int = 0) -> list[BlockHash]:
    return [BlockHash(b"%08d%08d" % (tag, i)) for i in range(length)]


@pytest.fixture
async def directory(redis_server: RedisProcess) -> AsyncIterator[RedisDirectory]:
    directory = RedisDirectory(redis_server.url, "test")
    yield directory
    await directory.close()


class DelayingProxy:
    """Forwards bytes between a client and a server, each way `delay_s` late."""

    def __init__(self, port: int, delay_s: float) -> None:
        self._port = port
        self.delay_s = delay_s
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> DelayingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._port)
        for source, sink in ((reader, upstream_writer), (upstream_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                loop.call_later(self.delay_s, self._write, sink, data)
        loop.call_later(self.delay_s, sink.close)

    @staticmethod
    def _write(sink: asyncio.StreamWriter, data: bytes) -> None:
        if not sink.is_closing():
            sink.write(data)


async def test_a_thousand_cancelled_callers_never_cross_answers(
    redis_server: RedisProcess, directory: RedisDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_directory, "LOOKUP_TIMEOUT_S", 5.0)
    names = [NodeId(f"n{i}") for i in range(40)]
    for i, name in enumerate(names):
        await directory.republish(name, EPOCH, 1, chain(i + 1, tag=i), TTL_S)
    async with DelayingProxy(redis_server.port, delay_s=0.008) as proxy:
        cancelling = RedisDirectory(proxy.url, "test")

        async def ask(i: int) -> None:
            assert await cancelling.lookup(chain(100, tag=i), [(names[i], EPOCH)]) == {names[i]: i + 1}

        numbers = random.Random(5)
        cancelled = 0
        while cancelled < 1000:
            tasks = [asyncio.create_task(ask(numbers.randrange(40))) for _ in range(16)]
            await asyncio.sleep(numbers.uniform(0.0, 0.018))
            for task in tasks[:10]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            cancelled += sum(isinstance(result, asyncio.CancelledError) for result in results)
            assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
            assert results[10:] == [None] * 6
        # Every connection still answers what it is asked.
        await asyncio.gather(*(ask(i) for i in range(40)))
        assert cancelling.errors == 0
        await cancelling.close()


async def test_a_lookup_is_one_round_trip(
    redis_server: RedisProcess, directory: RedisDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_directory, "LOOKUP_TIMEOUT_S", 5.0)
    names = [NodeId(f"n{i}") for i in range(4)]
    for name in names:
        await directory.republish(name, EPOCH, 1, chain(3000), TTL_S)
    async with DelayingProxy(redis_server.port, delay_s=0.15) as proxy:
        far = RedisDirectory(proxy.url, "test")
        # Connecting is a round trip of its own, once.
        await far.lookup(chain(1), [(names[0], EPOCH)])
        started = time.monotonic()
        found = await far.lookup(chain(3000), [(name, EPOCH) for name in names])
        took_s = time.monotonic() - started
        assert found == dict.fromkeys(names, 3000)
        assert 0.3 <= took_s < 0.6, "one round trip takes 0.3 s, two take 0.6 s"
        await far.close()


async def assert_unavailable(directory: RedisDirectory, *, within_s: float = 1.5) -> set[str]:
    """Every command fails with DirectoryUnavailable in time, also many at once; their reasons."""

    async def reason_of(command: Awaitable[object], limit_s: float) -> str:
        started = time.monotonic()
        with pytest.raises(DirectoryUnavailable) as caught:
            await command
        assert time.monotonic() - started < limit_s
        return caught.value.reason

    commands: list[tuple[Awaitable[object], float]] = [
        (directory.lookup(chain(3), [(NODE, EPOCH)]), min(within_s, 0.6)),
        (directory.nodes(), within_s),
        (directory.register(RECORD, TTL_S), within_s),
        (directory.publish(NODE, EPOCH, 2, chain(1), [], TTL_S), within_s),
        (directory.republish(NODE, EPOCH, 3, chain(1), TTL_S), within_s),
        (directory.touch(NODE, EPOCH, TTL_S), within_s),
        (directory.unregister(NODE, EPOCH), within_s),
    ]
    return set(await asyncio.gather(*(reason_of(*command) for command in commands)))


async def test_redis_killed_and_restarted(redis_server: RedisProcess, directory: RedisDirectory) -> None:
    await directory.register(RECORD, TTL_S)
    await directory.republish(NODE, EPOCH, 1, chain(3), TTL_S)
    # Several connections in the pool, so that several are dead afterwards.
    await asyncio.gather(*(directory.nodes() for _ in range(10)))
    redis_server.kill()
    await assert_unavailable(directory, within_s=0.5)
    redis_server.start()
    for _ in range(20):
        assert await directory.nodes() == []
    assert not await directory.publish(NODE, EPOCH, 2, chain(1), [], TTL_S)
    await directory.republish(NODE, EPOCH, 3, chain(4), TTL_S)
    assert await directory.lookup(chain(4), [(NODE, EPOCH)]) == {NODE: 4}


async def test_redis_restarted_unseen(redis_server: RedisProcess, directory: RedisDirectory) -> None:
    """No command failed in between: the dead connections must be found before use."""
    await asyncio.gather(*(directory.nodes() for _ in range(10)))
    redis_server.kill()
    redis_server.start()
    assert await asyncio.gather(*(directory.nodes() for _ in range(10))) == [[]] * 10
    assert directory.errors == 0


async def test_redis_alive_but_silent(redis_server: RedisProcess, directory: RedisDirectory) -> None:
    await directory.republish(NODE, EPOCH, 1, chain(3), TTL_S)
    redis_server.pause()
    try:
        assert "directory_timeout" in await assert_unavailable(directory)
    finally:
        redis_server.resume()
    await asyncio.sleep(1.0)
    for _ in range(20):
        assert (await directory.lookup(chain(5), [(NodeId("other"), EPOCH)])) == {NodeId("other"): 0}


async def test_commands_pile_up_to_a_bound_only(redis_server: RedisProcess, directory: RedisDirectory) -> None:
    await directory.nodes()
    redis_server.pause()
    try:
        results = await asyncio.gather(
            *(directory.lookup(chain(1), [(NODE, EPOCH)]) for _ in range(500)), return_exceptions=True
        )
        reasons = [result.reason for result in results if isinstance(result, DirectoryUnavailable)]
        assert len(reasons) == 500
        assert reasons.count("directory_busy") == 500 - redis_directory.MAX_COMMANDS
    finally:
        redis_server.resume()
    await asyncio.sleep(1.8)
    assert await directory.nodes() == []


async def test_connections_killed_by_the_server(redis_server: RedisProcess, directory: RedisDirectory) -> None:
    await directory.register(RECORD, TTL_S)
    await asyncio.gather(*(directory.nodes() for _ in range(10)))
    redis_server.client().client_kill_filter(_type="normal", skipme=True)
    for _ in range(20):
        assert await directory.nodes() == [RECORD]


async def test_a_busy_server_is_waited_for_no_longer_than_allowed(
    redis_server: RedisProcess, directory: RedisDirectory
) -> None:
    await directory.nodes()
    sleep = asyncio.create_task(asyncio.to_thread(redis_server.client().execute_command, "DEBUG SLEEP 1.2"))
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            await directory.lookup(chain(1), [(NODE, EPOCH)])
        except DirectoryUnavailable as error:
            assert error.reason == "directory_timeout"
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("the server never slept")
    await sleep
    assert await directory.nodes() == []


async def test_a_full_server_and_a_read_only_one(redis_server: RedisProcess, directory: RedisDirectory) -> None:
    await directory.register(RECORD, TTL_S)
    await directory.republish(NODE, EPOCH, 1, chain(3), TTL_S)
    client = redis_server.client()
    for harm, repair in (
        (lambda: client.config_set("maxmemory", "1"), lambda: client.config_set("maxmemory", "0")),
        (lambda: client.replicaof("127.0.0.1", "1"), lambda: client.replicaof("NO", "ONE")),
    ):
        harm()
        for write in (
            directory.publish(NODE, EPOCH, 2, chain(1, tag=9), [], TTL_S),
            directory.republish(NODE, EPOCH, 3, chain(1), TTL_S),
            directory.register(RECORD, TTL_S),
        ):
            with pytest.raises(DirectoryUnavailable):
                await write
        assert await directory.lookup(chain(3), [(NODE, EPOCH)]) == {NODE: 3}
        assert await directory.nodes() == [RECORD]
        repair()
    assert await directory.publish(NODE, EPOCH, 2, [], chain(1), TTL_S)


KEYS = [f"pdserve:{{test}}:{key}" for key in ("nodes", "node:n", "epochs:n", f"blocks:n:{EPOCH:020d}")]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", ["text", "list", "hash"])
async def test_what_others_put_under_our_keys_is_ignored_and_replaced(
    redis_server: RedisProcess, directory: RedisDirectory, key: str, kind: str
) -> None:
    client = redis_server.client()
    match kind:
        case "text":
            client.set(key, "foreign")
        case "list":
            client.rpush(key, "foreign")
        case "hash":
            client.hset(key, "foreign", "value")
    assert await directory.nodes() == []
    assert await directory.lookup(chain(3), [(NODE, EPOCH)]) == {NODE: 0}
    assert not await directory.touch(NODE, EPOCH, TTL_S)
    assert not await directory.publish(NODE, EPOCH, 1, chain(1), [], TTL_S)
    await directory.register(RECORD, TTL_S)
    await directory.republish(NODE, EPOCH, 1, chain(3), TTL_S)
    assert await directory.nodes() == [RECORD]
    assert await directory.lookup(chain(3), [(NODE, EPOCH)]) == {NODE: 3}
    assert await directory.touch(NODE, EPOCH, TTL_S)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"1",
        b'{"node_id": "n"}',
        b"[" * 100_000,
        *(
            json.dumps({"node_id": "n", "epoch": "5", "role": "prefill", "address": "a"} | change).encode()
            for change in (
                {"node_id": "m"},
                {"node_id": 5},
                {"epoch": 5},
                {"epoch": "zzz"},
                {"epoch": "9" * 5000},
                {"epoch": "-1"},
                {"role": "router"},
                {"address": ""},
                {"address": ["a"]},
            )
        ),
    ],
)
async def test_malformed_records_are_counted_and_do_not_hide_others(
    redis_server: RedisProcess, directory: RedisDirectory, value: bytes
) -> None:
    other = NodeRecord(NodeId("other"), EPOCH, "decode", "a:1")
    await directory.register(other, TTL_S)
    client = redis_server.client()
    client.set("pdserve:{test}:node:n", value)
    client.zadd("pdserve:{test}:nodes", {"n": time.time() * 1000 + 60_000})
    assert await directory.nodes() == [other]
    assert directory.malformed == 1
    await directory.register(RECORD, TTL_S)
    assert await directory.nodes() == [RECORD, other]


async def test_an_unknown_tier_ends_the_prefix(redis_server: RedisProcess, directory: RedisDirectory) -> None:
    await directory.republish(NODE, EPOCH, 1, chain(3), TTL_S)
    redis_server.client().hset(KEYS[3], chain(3)[1], b"moon")
    assert await directory.lookup(chain(3), [(NODE, EPOCH)]) == {NODE: 1}
    assert directory.malformed == 1


async def test_every_key_has_a_time_to_live_and_one_slot(redis_server: RedisProcess, directory: RedisDirectory) -> None:
    await directory.register(RECORD, 5.0)
    await directory.republish(NODE, EPOCH, 1, chain(3), 5.0)
    await directory.publish(NODE, EPOCH, 2, chain(3, tag=1), [], 5.0)
    await directory.touch(NODE, EPOCH, 5.0)
    client = redis_server.client()
    keys = sorted(client.keys("*"))
    assert keys == sorted(key.encode() for key in KEYS)
    assert all(0 < client.pttl(key) <= 5000 for key in keys)
    assert all(key.startswith(b"pdserve:{test}:") for key in keys)


async def test_a_republish_that_dies_half_way_leaves_nothing_behind(
    redis_server: RedisProcess, directory: RedisDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    await directory.republish(NODE, EPOCH, 1, chain(5), TTL_S)
    monkeypatch.setattr(redis_directory, "FIELDS_PER_COMMAND", 1)
    task = asyncio.create_task(directory.republish(NODE, EPOCH, 2, chain(5000, tag=7), 0.2))
    client = redis_server.client()
    for _ in range(1000):
        if client.keys("*new-blocks*"):
            break
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await directory.lookup(chain(5), [(NODE, EPOCH)]) == {NODE: 5}
    (key,) = client.keys("*new-blocks*")
    assert 0 < client.pttl(key) <= 1200


class CuttingProxy(DelayingProxy):
    """Ends every connection before the first time to live that is set."""

    @staticmethod
    def _write(sink: asyncio.StreamWriter, data: bytes) -> None:
        before, expiry, _ = data.partition(b"PEXPIRE")
        DelayingProxy._write(sink, before)
        if expiry:
            sink.close()


async def test_a_republish_cut_in_the_middle_of_a_message_leaves_nothing_for_ever(redis_server: RedisProcess) -> None:
    async with CuttingProxy(redis_server.port, 0.0) as proxy:
        directory = RedisDirectory(proxy.url, "test")
        with pytest.raises(DirectoryUnavailable):
            await directory.republish(NODE, EPOCH, 1, chain(5), TTL_S)
        await directory.close()
    client = redis_server.client()
    assert [key for key in client.keys("*") if client.pttl(key) == -1] == []


async def test_two_clusters_share_a_server(redis_server: RedisProcess, directory: RedisDirectory) -> None:
    other = RedisDirectory(redis_server.url, "other")
    await directory.register(RECORD, TTL_S)
    await directory.republish(NODE, EPOCH, 1, chain(3), TTL_S)
    assert await other.nodes() == []
    assert await other.lookup(chain(3), [(NODE, EPOCH)]) == {NODE: 0}
    await other.close()


async def test_unix_sockets(redis_server: RedisProcess) -> None:
    directory = RedisDirectory(f"unix://{redis_server.socket_path}?db=0", "test")
    await directory.register(RECORD, TTL_S)
    assert await directory.nodes() == [RECORD]
    await directory.close()


async def test_tls_urls_connect_with_tls(redis_server: RedisProcess) -> None:
    """The server speaks none, so the handshake must fail rather than go on in clear."""
    directory = RedisDirectory(redis_server.url.replace("redis://", "rediss://"), "test")
    with pytest.raises(DirectoryUnavailable):
        await directory.nodes()
    await directory.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://user:canary@host",
        "redis://user:canary@host:port",
        "redis://user:can/ary@host",
        "redis://h?canary=1&socket_timeout=x",
        "canary",
    ],
)
def test_bad_urls_are_refused_without_the_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisDirectory(url, "test")
    chained = caught.value.__cause__
    assert chained is None and caught.value.__suppress_context__
    assert "canary" not in str(caught.value) and "can/ary" not in str(caught.value)


def test_urls_are_masked() -> None:
    assert masked_url("redis://user:canary@host:1/2?password=canary") == "redis://host:1/2"
    assert masked_url("unix://:canary@/run/redis.sock?db=1") == "unix:///run/redis.sock"
    assert masked_url("redis://:ca@na/ry@host") == "redis://host"


@pytest.mark.parametrize("cluster", ["", "a{b", "a}b", "a:b"])
def test_cluster_names_that_would_break_the_keys_are_refused(cluster: str) -> None:
    with pytest.raises(ConfigError):
        RedisDirectory("redis://h", cluster)


async def test_passwords_work_and_never_show(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with RedisProcess(tmp_path, "--requirepass", "canary-right") as server:
        good = RedisDirectory(f"redis://:canary-right@127.0.0.1:{server.port}/0", "test")
        assert await good.nodes() == []
        bad = RedisDirectory(f"redis://:canary-wrong@127.0.0.1:{server.port}/0", "test")
        with pytest.raises(DirectoryUnavailable) as caught:
            await bad.nodes()
        assert "canary" not in str(caught.value)
        await good.close()
        await bad.close()
    assert "canary" not in caplog.text


async def test_close_waits_for_commands_under_way_and_leaves_no_task(redis_server: RedisProcess) -> None:
    async with DelayingProxy(redis_server.port, delay_s=0.05) as proxy:
        before = len(asyncio.all_tasks())
        directory = RedisDirectory(proxy.url, "test")
        caller = asyncio.create_task(directory.register(RECORD, TTL_S))
        await asyncio.sleep(0.01)
        caller.cancel()
        await asyncio.wait((caller,))
        await directory.close()
        await directory.close()
        # What its caller gave up was still carried out whole.
        assert redis_server.client().exists("pdserve:{test}:node:n")
        with pytest.raises(DirectoryUnavailable) as caught:
            await directory.nodes()
        assert caught.value.reason == "directory_closed"
        ours = [task for task in asyncio.all_tasks() if "_forward" not in repr(task) and "_serve" not in repr(task)]
        assert len(ours) <= before


SCRIPT = """
import asyncio, sys
from kv_transfer.redis_directory import RedisDirectory
from engine.block_hash import hash_chain, root_hash
from engine.fingerprint import Fingerprint
from engine.kv_layout import KvLayout
layout = KvLayout(num_layers=2, kv_heads=1, head_dim=8, block_size=4, dtype="float32")
root = root_hash(Fingerprint.of(layout, model_id="m", weights_digest="w", rope_digest="r"), tenant_salt=b"t")
hashes = hash_chain(root, list(range(100)), 4)
async def main():
    directory = RedisDirectory(sys.argv[1], "test")
    if sys.argv[2] == "write":
        await directory.republish("n", 5, 1, hashes, 30.0)
    else:
        print((await directory.lookup(hashes, [("n", 5)]))["n"])
    await directory.close()
asyncio.run(main())
"""


def test_processes_with_different_hash_seeds_agree(redis_server: RedisProcess) -> None:
    pytest.importorskip("engine.block_hash")
    found = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT, redis_server.url, mode],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.strip()
        for mode, seed in (("write", "1"), ("read", "2"), ("read", "3"))
    ]
    assert found == ["", "25", "25"]


def test_the_directory_loads_no_torch() -> None:
    code = (
        "import sys, kv_transfer.redis_directory, kv_transfer.directory_publisher, kv_transfer.memory_directory, "
        "kv_transfer.wire, kv_transfer.transports; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
