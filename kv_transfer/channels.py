"""How gRPC connections between our processes are set up: one place for sizes, keepalive and reconnection."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TypeAlias

import grpc

from kv_transfer.cluster_token import TokenChannel

_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_UNUSED_S = 60.0

# A process that stopped answering pings is noticed within 10 s even when its kernel keeps the connection open.
CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Peers are named by address; a proxy from the environment must never sit between them.
    ("grpc.enable_http_proxy", 0),
    # A channel of its own connection, so that one peer's trouble stays with that peer.
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    # A port in use is an error, never a port shared by accident.
    ("grpc.so_reuseport", 0),
)


Channel: TypeAlias = "grpc.aio.Channel | TokenChannel"


def open_channel(address: str, token: str | None = None) -> Channel:
    """A channel to `host:port`; connects lazily and reconnects by itself. `token`: the cluster's, if it has one."""
    channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return channel if token is None else TokenChannel(channel, token)


class Channels:
    """Connections to peers by address, kept while they are used."""

    def __init__(self, token: str | None = None) -> None:
        self._token = token
        self._channels: dict[str, tuple[Channel, float]] = {}

    def get(self, address: str) -> Channel:
        """The connection to `host:port`, opened at first need."""
        channel = self._channels[address][0] if address in self._channels else open_channel(address, self._token)
        self._channels[address] = (channel, time.monotonic())
        return channel

    async def close_unused(self, in_use: Collection[str]) -> None:
        """Close what nobody uses now nor asked for lately, so that peers which came and went leave nothing."""
        now_s = time.monotonic()
        for address, (channel, asked_s) in list(self._channels.items()):
            if address not in in_use and now_s - asked_s > _UNUSED_S:
                del self._channels[address]
                await channel.close(None)

    async def close(self) -> None:
        """Close all."""
        while self._channels:
            _, (channel, _) = self._channels.popitem()
            await channel.close(None)
