"""The directory in Redis (6.2 and later, single or cluster).

Keys, all with one hash tag so that they share a cluster slot, all with a time to live:

    pdserve:{CLUSTER}:nodes                    zset   node id -> when its record lapses (ms of Redis' clock)
    pdserve:{CLUSTER}:node:NODE                string record as JSON
    pdserve:{CLUSTER}:epochs:NODE              set    epochs of the node that published
    pdserve:{CLUSTER}:blocks:NODE:EPOCH        hash   block hash (16 bytes) -> tier; "seq" -> last sequence number
    pdserve:{CLUSTER}:new-blocks:NODE:EPOCH:*  hash   a full re-publish that is being written

The epoch is part of the key, so entries of a dead incarnation cannot be read by mistake. A node's entries live in one
key, so that eviction or expiry takes all or none of them. Writes are Lua scripts: whole or not at all.

No command is ever cancelled: it runs in a task of its own, and a caller that leaves or runs out of patience leaves that
task to end by its socket timeout. So no connection returns to the pool with an answer still to come.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from engine.errors import ConfigError
from engine.ids import BlockHash, Epoch, NodeId
from kv_transfer.directory import Directory, DirectoryUnavailable, NodeRecord, StaleEpoch

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIER_DEVICE = b"d"
SEQUENCE_FIELD = b"seq"

COMMAND_TIMEOUT_S = 1.0
LOOKUP_TIMEOUT_S = 0.25
SOCKET_TIMEOUT_S = 0.8
MAX_CONNECTIONS = 16
MAX_COMMANDS = 64
"""Commands under way, waiting for a connection included; more fail at once."""
FIELDS_PER_COMMAND = 1000
HASHES_PER_LOOKUP = 16_384

_STALE, _GAP, _DONE = -1, 0, 1

# Every script begins by comparing epochs. They are 63-bit numbers, which Lua's doubles cannot hold, so they travel and
# are compared as decimal strings of the same length. `claim` drops what somebody else has put under a key of ours.
_PRELUDE = """
local function claim(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
end
local function newer_epoch(record_key, epoch)
  local raw = redis.call('GET', record_key)
  if not raw then return false, false end
  local ok, record = pcall(cjson.decode, raw)
  if not ok or type(record) ~= 'table' or type(record.epoch) ~= 'string' then return false, false end
  if #record.epoch ~= #epoch or not string.match(record.epoch, '^%d+$') then return false, false end
  return record.epoch > epoch, record.epoch == epoch
end
local function clock_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end
local function list_node(nodes_key, node_id, ttl_ms)
  local now = clock_ms()
  redis.call('ZREMRANGEBYSCORE', nodes_key, '-inf', now)
  redis.call('ZADD', nodes_key, now + ttl_ms, node_id)
  if redis.call('PTTL', nodes_key) < tonumber(ttl_ms) then redis.call('PEXPIRE', nodes_key, ttl_ms) end
end
"""

# KEYS: record, nodes, epochs. ARGV: node id, epoch, ttl, record, prefix of the blocks keys.
_REGISTER = (
    _PRELUDE
    + """
claim(KEYS[1], 'string')
claim(KEYS[2], 'zset')
claim(KEYS[3], 'set')
if newer_epoch(KEYS[1], ARGV[2]) then return -1 end
redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[3])
list_node(KEYS[2], ARGV[1], ARGV[3])
for _, epoch in ipairs(redis.call('SMEMBERS', KEYS[3])) do
  if epoch < ARGV[2] then
    redis.call('DEL', ARGV[5] .. epoch)
    redis.call('SREM', KEYS[3], epoch)
  end
end
return 1
"""
)

# KEYS: record, nodes, epochs, blocks. ARGV: node id, epoch.
_UNREGISTER = (
    _PRELUDE
    + """
claim(KEYS[1], 'string')
claim(KEYS[2], 'zset')
claim(KEYS[3], 'set')
redis.call('DEL', KEYS[4])
redis.call('SREM', KEYS[3], ARGV[2])
local _, same = newer_epoch(KEYS[1], ARGV[2])
if same then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
end
return 1
"""
)

# KEYS: record, nodes, epochs, blocks. ARGV: node id, epoch, ttl.
_TOUCH = (
    _PRELUDE
    + """
claim(KEYS[1], 'string')
claim(KEYS[2], 'zset')
claim(KEYS[4], 'hash')
local newer, same = newer_epoch(KEYS[1], ARGV[2])
if newer then return -1 end
local blocks = redis.call('PEXPIRE', KEYS[4], ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
if not same then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
list_node(KEYS[2], ARGV[1], ARGV[3])
return blocks
"""
)

# KEYS: record, blocks. ARGV: epoch, ttl, sequence number, how many are removed, the removed, the added.
_PUBLISH = (
    _PRELUDE
    + """
claim(KEYS[1], 'string')
claim(KEYS[2], 'hash')
if newer_epoch(KEYS[1], ARGV[1]) then return -1 end
local last = tonumber(redis.call('HGET', KEYS[2], 'seq') or '')
if not last or last + 1 ~= tonumber(ARGV[3]) then return 0 end
local removed_end = 4 + tonumber(ARGV[4])
for i = 5, removed_end do redis.call('HDEL', KEYS[2], ARGV[i]) end
for i = removed_end + 1, #ARGV do redis.call('HSET', KEYS[2], ARGV[i], 'd') end
redis.call('HSET', KEYS[2], 'seq', ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
"""
)

# KEYS: record, epochs, blocks, the newly written key. ARGV: epoch, ttl, sequence number, how many blocks were written.
_REPLACE = (
    _PRELUDE
    + """
claim(KEYS[1], 'string')
claim(KEYS[2], 'set')
claim(KEYS[3], 'hash')
if newer_epoch(KEYS[1], ARGV[1]) then
  redis.call('DEL', KEYS[4])
  return -1
end
local last = tonumber(redis.call('HGET', KEYS[3], 'seq') or '')
if (last and last >= tonumber(ARGV[3])) or redis.call('HLEN', KEYS[4]) ~= ARGV[4] + 1 then
  redis.call('DEL', KEYS[4])
  return 0
end
redis.call('RENAME', KEYS[4], KEYS[3])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
"""
)


def masked_url(url: str) -> str:
    """The URL for logs: without user, password and query."""
    scheme, _, rest = url.partition("://")
    # The last "@" ends the password, also where it holds characters that no URL may have.
    place = rest.rpartition("@")[2].partition("?")[0]
    return f"{scheme}://{place}" if rest else "(no URL)"


class RedisDirectory(Directory):
    """See Directory. Connects on first use; survives Redis going away and coming back.

    Attributes:
        malformed: values found that no node of ours wrote; they count as absent.
        errors: commands that failed.
    """

    def __init__(self, redis_url: str, cluster: str = "default") -> None:
        if not cluster or set("{}:") & set(cluster):
            raise ConfigError(f"the cluster's name may not hold braces or colons: {cluster!r}")
        try:
            pool = BlockingConnectionPool.from_url(
                redis_url,
                max_connections=MAX_CONNECTIONS,
                timeout=SOCKET_TIMEOUT_S,
                socket_timeout=SOCKET_TIMEOUT_S,
                socket_connect_timeout=SOCKET_TIMEOUT_S,
                health_check_interval=15,
                # Once, at once, and not after a timeout: for connections that Redis closed while they lay idle. All
                # commands bear repeating; a batch that was applied before its answer was lost is seen as a gap.
                retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            )
            pool.connection_kwargs.update(protocol=2, decode_responses=False)
            # Connects nothing yet, but finds options that do not exist.
            pool.connection_class(**pool.connection_kwargs)
        except (ValueError, TypeError):
            # The cause may quote a piece of the password, so it is neither shown nor chained.
            raise ConfigError(
                f"redis URL {masked_url(redis_url)!r} must be redis://, rediss:// or unix:// with a valid port"
            ) from None
        self._redis: Redis = Redis.from_pool(pool)
        self._url = masked_url(redis_url)
        self._prefix = f"pdserve:{{{cluster}}}:"
        self._commands: set[asyncio.Task[Any]] = set()
        self._scripts = {
            source: self._redis.register_script(source)
            for source in (_REGISTER, _UNREGISTER, _TOUCH, _PUBLISH, _REPLACE)
        }
        self._closed = False
        self.malformed = 0
        self.errors = 0

    async def register(self, record: NodeRecord, ttl_s: float) -> None:
        keys = [self._record_key(record.node_id), self._key("nodes"), self._key("epochs", record.node_id)]
        epoch = _epoch_text(record.epoch)
        blocks_prefix = self._key("blocks", record.node_id) + ":"
        await self._script(_REGISTER, keys, [record.node_id, epoch, _ms(ttl_s), _to_json(record), blocks_prefix])

    async def unregister(self, node_id: NodeId, epoch: Epoch) -> None:
        await self._script(_UNREGISTER, self._all_keys(node_id, epoch), [node_id, _epoch_text(epoch)])

    async def nodes(self) -> list[NodeRecord]:
        async def read() -> list[tuple[bytes, bytes | None]]:
            try:
                node_ids: list[Any] = sorted(await self._redis.zrange(self._key("nodes"), 0, -1))
            except ResponseError as error:
                if not _is_wrong_type(error):
                    raise
                self.malformed += 1
                return []
            if not node_ids:
                return []
            prefix = self._record_key(NodeId("")).encode()
            values: list[Any] = await self._redis.mget([prefix + node_id for node_id in node_ids])
            return list(zip(node_ids, values, strict=True))

        found = []
        for node_id, value in await self._run(read, 2 * COMMAND_TIMEOUT_S):  # It makes two commands.
            if value is None:
                continue
            try:
                record = _from_json(value)
                if record.node_id.encode() != node_id:
                    raise ValueError("a record under another node's key")
            except (ValueError, KeyError, TypeError, RecursionError):
                self.malformed += 1
                continue
            found.append(record)
        return found

    async def lookup(self, hashes: Sequence[BlockHash], holders: Sequence[tuple[NodeId, Epoch]]) -> dict[NodeId, int]:
        asked = hashes[:HASHES_PER_LOOKUP]
        if not asked or not holders:
            return {node_id: 0 for node_id, _ in holders}
        chunks = list(_chunks(asked, FIELDS_PER_COMMAND))

        async def read() -> list[Any]:
            pipeline = self._redis.pipeline(transaction=False)
            for node_id, epoch in holders:
                for chunk in chunks:
                    pipeline.hmget(self._blocks_key(node_id, epoch), chunk)
            return await pipeline.execute(raise_on_error=False)

        answers = await self._run(read, LOOKUP_TIMEOUT_S)
        lengths = {}
        for i, (node_id, _) in enumerate(holders):
            lengths[node_id] = self._prefix_length(answers[i * len(chunks) : (i + 1) * len(chunks)])
        return lengths

    async def publish(
        self,
        node_id: NodeId,
        epoch: Epoch,
        sequence_number: int,
        added: Sequence[BlockHash],
        removed: Sequence[BlockHash],
        ttl_s: float,
    ) -> bool:
        keys = [self._record_key(node_id), self._blocks_key(node_id, epoch)]
        head = [_epoch_text(epoch), _ms(ttl_s), sequence_number, len(removed)]
        return await self._script(_PUBLISH, keys, [*head, *removed, *added]) == _DONE

    async def republish(
        self, node_id: NodeId, epoch: Epoch, sequence_number: int, hashes: Sequence[BlockHash], ttl_s: float
    ) -> None:
        distinct = list(dict.fromkeys(hashes))
        new_key = self._key("new-blocks", node_id, _epoch_text(epoch), secrets.token_hex(8))
        # The new key outlives a slow writer, not a dead one.
        lifetime_ms = _ms(ttl_s + COMMAND_TIMEOUT_S)

        async def write(values: Mapping[Any, bytes]) -> None:
            pipeline = self._redis.pipeline(transaction=True)
            pipeline.hset(new_key, mapping=dict(values))
            pipeline.pexpire(new_key, lifetime_ms)
            await pipeline.execute()

        def writer(values: Mapping[Any, bytes]) -> Callable[[], Awaitable[None]]:
            return lambda: write(values)

        await self._run(writer({SEQUENCE_FIELD: b"%d" % sequence_number}), COMMAND_TIMEOUT_S)
        for chunk in _chunks(distinct, FIELDS_PER_COMMAND):
            await self._run(writer(dict.fromkeys(chunk, TIER_DEVICE)), COMMAND_TIMEOUT_S)
        keys = [
            self._record_key(node_id),
            self._key("epochs", node_id),
            self._blocks_key(node_id, epoch),
            new_key,
        ]
        arguments = [_epoch_text(epoch), _ms(ttl_s), sequence_number, len(distinct)]
        if await self._script(_REPLACE, keys, arguments) != _DONE:
            raise DirectoryUnavailable("the re-published blocks were lost on the way", reason="republish_lost")

    async def touch(self, node_id: NodeId, epoch: Epoch, ttl_s: float) -> bool:
        arguments = [node_id, _epoch_text(epoch), _ms(ttl_s)]
        return await self._script(_TOUCH, self._all_keys(node_id, epoch), arguments) == _DONE

    async def close(self) -> None:
        """Wait for commands under way (each ends by its socket timeout), then close all connections. Idempotent."""
        self._closed = True
        if self._commands:
            await asyncio.wait(self._commands, timeout=2 * SOCKET_TIMEOUT_S)
        for command in self._commands:
            command.cancel()
        await self._redis.aclose(close_connection_pool=True)

    async def _script(self, source: str, keys: list[str], arguments: list[Any]) -> int:
        result = await self._run(lambda: self._scripts[source](keys=keys, args=arguments), COMMAND_TIMEOUT_S)
        if result == _STALE:
            raise StaleEpoch("a newer incarnation of this node has registered")
        return int(result)

    async def _run(self, command: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        """Run one command in its own task and wait for it at most `timeout_s`; leaving early does not end it."""
        if self._closed:
            raise DirectoryUnavailable("the directory was closed", reason="directory_closed")
        if len(self._commands) >= MAX_COMMANDS:
            self.errors += 1
            raise DirectoryUnavailable(f"{MAX_COMMANDS} commands wait for {self._url}", reason="directory_busy")

        async def run() -> T:
            return await command()

        task = asyncio.create_task(run())
        self._commands.add(task)
        task.add_done_callback(self._command_done)
        done, _ = await asyncio.wait((task,), timeout=timeout_s)
        if not done:
            self.errors += 1
            raise DirectoryUnavailable(f"no answer from {self._url} within {timeout_s:g} s", reason="directory_timeout")
        try:
            return task.result()
        except (RedisError, OSError, asyncio.CancelledError) as error:
            self.errors += 1
            # Unlike a caller's cancel, which lands in `wait`, a CancelledError here comes from `close`.
            raise DirectoryUnavailable(f"{self._url}: {type(error).__name__}: {error}") from error

    def _command_done(self, task: asyncio.Task[Any]) -> None:
        self._commands.discard(task)
        if not task.cancelled():
            # Tells asyncio that somebody looked at it: the caller may have left.
            task.exception()

    def _prefix_length(self, answers: Iterable[Any]) -> int:
        length = 0
        for answer in answers:
            if _is_wrong_type(answer):
                self.malformed += 1
                return length
            if isinstance(answer, Exception):
                self.errors += 1
                raise DirectoryUnavailable(f"{self._url}: {type(answer).__name__}: {answer}")
            for tier in answer:
                if tier != TIER_DEVICE:
                    self.malformed += tier is not None
                    return length
                length += 1
        return length

    def _key(self, *parts: str) -> str:
        return self._prefix + ":".join(parts)

    def _record_key(self, node_id: NodeId) -> str:
        return self._key("node", node_id)

    def _blocks_key(self, node_id: NodeId, epoch: Epoch) -> str:
        return self._key("blocks", node_id, _epoch_text(epoch))

    def _all_keys(self, node_id: NodeId, epoch: Epoch) -> list[str]:
        return [
            self._record_key(node_id),
            self._key("nodes"),
            self._key("epochs", node_id),
            self._blocks_key(node_id, epoch),
        ]


def _is_wrong_type(answer: object) -> bool:
    return isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE")


def _epoch_text(epoch: Epoch) -> str:
    """Decimal, all of the same length, so that text order is number order."""
    return f"{epoch:020d}"


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _to_json(record: NodeRecord) -> str:
    return json.dumps(
        {
            "node_id": record.node_id,
            "epoch": _epoch_text(record.epoch),
            "role": record.role,
            "address": record.address,
        }
    )


def _from_json(value: bytes) -> NodeRecord:
    """Raises ValueError, KeyError or TypeError for anything that is not a record."""
    raw = json.loads(value)
    texts = [raw[name] for name in ("node_id", "epoch", "role", "address")]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a record's fields are texts")
    node_id, epoch, role, address = texts
    return NodeRecord(NodeId(node_id), Epoch(int(epoch)), role, address)


def _chunks(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
