"""A Redis server for this folder's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.redis_process import RedisProcess


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_server(shared_redis: RedisProcess) -> Iterator[RedisProcess]:
    """An empty server in good health; a test that harmed it need not repair it."""
    shared_redis.resume()
    try:
        shared_redis.client().ping()
    except OSError:
        shared_redis.start()
    client = shared_redis.client()
    client.replicaof("NO", "ONE")
    client.config_set("maxmemory", "0")
    client.flushall()
    yield shared_redis
