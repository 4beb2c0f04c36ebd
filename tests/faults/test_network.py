"""What happens between hosts: nodes find each other, and links that are cut, slow or mended cost no request."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster_processes import slow_steps, wait_until
from tests.e2e.reference import Reference
from tests.faults.network_hosts import HostCluster, Network, why_impossible
from tests.faults.streams import Stream

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PROGRESS_DEADLINE_S = 2.0
NODES = ("prefill-0", "decode-0", "decode-1")


def prompt_of(length: int, seed: int) -> list[int]:
    return [random.Random(f"{seed}/{length}/{place}").randrange(3, 300) for place in range(length)]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := why_impossible():
        pytest.skip(reason)
    with Network(["redis", "router-0", *NODES]) as network, network.as_client():
        yield network


@pytest.fixture(scope="module")
def cluster(network: Network, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
    cluster = HostCluster(
        network,
        tmp_path_factory.mktemp("cluster"),
        tiny_model,
        {
            "router-0": [],
            "prefill-0": ["--log-level", "debug"],
            "decode-0": [],
            "decode-1": [],
        },
        flags=["--progress-deadline", str(PROGRESS_DEADLINE_S)],
        node_flags=["--num-blocks", "512"],
        faults={"decode-0": slow_steps(0.01), "decode-1": slow_steps(0.01)},
    )
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(autouse=True)
def whole_again(cluster: HostCluster) -> Iterator[None]:
    """Every test begins and ends with every node in rotation and nothing held."""
    cluster.wait_for_nodes(len(NODES), timeout_s=20.0)
    yield
    cluster.wait_for_nodes(len(NODES), timeout_s=20.0)
    cluster.assert_idle(timeout_s=20.0)


def committed(cluster: HostCluster) -> int:
    return int(cluster.node("prefill-0")["transfers"]["committed"])


def test_hosts_find_each_other_and_send_blocks_over_the_network(
    cluster: HostCluster, network: Network, tiny_model: Path
) -> None:
    addresses = {node["id"]: node["address"].partition(":")[0] for node in cluster.describe()["nodes"]}
    assert addresses == {name: network.addresses[name] for name in NODES}
    reference = Reference(tiny_model)
    before = committed(cluster)
    for length in (1, 16, 33, 200):
        prompt = prompt_of(length, seed=1)
        expected = reference.tokens(prompt, 12)
        for _ in ("cold", "prefix hit"):
            assert cluster.tokens(prompt, max_tokens=12, ignore_eos=True) == expected
    cluster.assert_idle()
    assert committed(cluster) == before + 8
    log = "".join(cluster["prefill-0"].log)
    assert "shared_memory_refused node_id=decode-" in log
    assert "peer_pool_opened" not in log


def test_a_stream_outlives_the_link_between_router_and_decode_node(cluster: HostCluster, network: Network) -> None:
    prompt = prompt_of(40, seed=2)
    fields: dict[str, Any] = {"max_tokens": 300, "temperature": 1.0, "seed": 7}
    expected = cluster.tokens(prompt, ignore_eos=True, **fields)
    stream = Stream(cluster, prompt, **fields)
    stream.wait_for_tokens(20)
    victim = next(node["id"] for node in cluster.describe()["nodes"] if node["role"] == "decode" and node["in_flight"])
    with network.cut("router-0", victim):
        wait_until(lambda: victim not in cluster.ready_nodes(), PROGRESS_DEADLINE_S + 2.0, "it is out of rotation")
        assert stream.join() == expected
    assert stream.finish_reasons == {0: "length"}
    cluster.wait_for_nodes(len(NODES), timeout_s=20.0)
    assert cluster.describe()["router"]["failovers"] >= 1
    assert cluster.node(victim)["blocks"]["in_use"] == 0


@pytest.mark.parametrize("delay_s", [0.0, 0.15])
def test_requests_outlive_the_links_to_their_prefill_node(
    cluster: HostCluster, network: Network, delay_s: float
) -> None:
    prompts = [prompt_of(1000, seed=int(1000 * delay_s) + number) for number in range(4)]
    streams = [Stream(cluster, prompt, max_tokens=4) for prompt in prompts]
    time.sleep(delay_s)
    with network.cut("decode-0", "prefill-0"), network.cut("decode-1", "prefill-0"):
        # The router reaches all three, so none of them is out of rotation: decode nodes compute the prompts themselves.
        answers = [stream.join(timeout_s=PROGRESS_DEADLINE_S + 15.0) for stream in streams]
    cluster.assert_idle(timeout_s=20.0)
    assert answers == [cluster.tokens(prompt, max_tokens=4, ignore_eos=True) for prompt in prompts]
    before = committed(cluster)

    def is_used() -> bool:
        cluster.tokens(prompt_of(20, seed=random.randrange(10**6)), max_tokens=2)
        return committed(cluster) > before

    wait_until(is_used, 15.0, "the prefill node is used again")


def test_without_links_to_redis_requests_are_served(cluster: HostCluster, network: Network) -> None:
    hosts = ("router-0", *NODES)
    for host in hosts:
        network.sever(host, "redis")
    try:
        for number in range(8):
            assert len(cluster.tokens(prompt_of(50, seed=100 + number), max_tokens=4, ignore_eos=True)) == 4
        assert set(cluster.ready_nodes()) == set(NODES)
    finally:
        for host in hosts:
            network.mend(host, "redis")
    prompt = prompt_of(80, seed=3)

    def is_found() -> bool:
        usage = cluster.complete(prompt, max_tokens=2)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"]) == 64

    wait_until(is_found, 10.0, "prefixes are found again")


def test_a_slow_link_to_one_decode_node_does_not_delay_the_other(cluster: HostCluster, network: Network) -> None:
    network.throttle("decode-0", "400kbit")
    try:
        streams = [Stream(cluster, prompt_of(700, seed=200 + number), max_tokens=4) for number in range(6)]
        wait_until(lambda: any(stream.is_over for stream in streams), 10.0, "a stream is over")
        wait_until(lambda: not cluster.node("decode-1")["in_flight"], 10.0, "those on the fast link are over")
        assert cluster.node("decode-0")["in_flight"] > 0, "the slow link slowed nothing"
    finally:
        network.unthrottle("decode-0")
    assert all(len(stream.join()) == 4 for stream in streams)
