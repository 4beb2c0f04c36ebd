"""Free ports and advertised addresses."""

from __future__ import annotations

import socket

import pytest

from engine.errors import ConfigError
from pdserve.addresses import advertise_host_for, check_port_is_free, choose_free_ports, usable_cores


def test_chosen_ports_are_free_and_different() -> None:
    ports = choose_free_ports(8)
    assert len(set(ports)) == 8
    for port in ports:
        check_port_is_free("127.0.0.1", port)


def test_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0", "localhost"):
            with pytest.raises(ConfigError, match=f"Port {port} on {host} is taken"):
                check_port_is_free(host, port)


def test_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Cannot listen on 192\.0\.2\.1:8000"):
        check_port_is_free("192.0.2.1", 8000)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:6379/0", "unix:///run/redis.sock?db=0", "redis://:pass@127.0.0.9"])
def test_redis_on_this_host_is_reached_from_loopback(url: str) -> None:
    assert advertise_host_for(url).startswith("127.0.0.")


def test_unknown_redis_host_is_a_sentence_without_the_password() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.invalid has no route") as raised:
        advertise_host_for("redis://:secret@nowhere.invalid:6379/0")
    assert "secret" not in str(raised.value)


def test_cores_are_at_least_one() -> None:
    assert usable_cores() >= 1
