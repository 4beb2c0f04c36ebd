"""What happens when a part of the cluster is killed, stopped, cut or restarted: every request ends, and well."""

from __future__ import annotations

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.cluster_processes import MODEL_NAME, ClusterProcesses, wait_until
from tests.faults.conftest import PROGRESS_DEADLINE_S
from tests.faults.streams import Stream

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

LONG = 200


def prompt_of(length: int, seed: int) -> list[int]:
    return [random.Random(f"{seed}/{length}/{place}").randrange(3, 300) for place in range(length)]


def decode_node_of(cluster: ClusterProcesses, router: int = 0) -> str:
    """The decode node that has work."""
    busy = [node["id"] for node in cluster.describe(router)["nodes"] if node["role"] == "decode" and node["in_flight"]]
    assert busy, "no decode node has work"
    return str(busy[0])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("patience_s", [0.0, 0.02, 0.05, 0.2, 0.6])
def test_a_client_that_leaves_frees_everything_within_a_second(
    cluster: ClusterProcesses, patience_s: float, stream: bool
) -> None:
    body = {"model": MODEL_NAME, "prompt": prompt_of(200, seed=1), "max_tokens": 1500, "ignore_eos": True}
    with httpx.Client() as client, pytest.raises(httpx.TimeoutException):
        timeout = httpx.Timeout(10.0, read=patience_s + 0.001)
        if stream:
            with client.stream("POST", f"{cluster.url()}/v1/completions", json={**body, "stream": True}) as response:
                started_s = time.monotonic()
                for _ in response.iter_bytes():
                    if time.monotonic() - started_s > patience_s:
                        raise httpx.ReadTimeout("this client has no patience")
        else:
            client.post(f"{cluster.url()}/v1/completions", json=body, timeout=timeout)
    cluster.assert_idle(timeout_s=1.0)


def test_a_dead_prefill_node_costs_no_request(cluster: ClusterProcesses) -> None:
    prompts = [prompt_of(300, seed=seed) for seed in range(10, 22)]
    expected = [cluster.tokens(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts[:2]]
    streams = [Stream(cluster, prompt, max_tokens=8) for prompt in prompts]
    time.sleep(0.1)
    cluster["prefill-0"].kill()
    answers = [stream.join() for stream in streams]
    assert all(len(tokens) == 8 for tokens in answers)
    assert answers[:2] == expected


def test_nodes_that_die_while_sending_and_before_the_commit(cluster: ClusterProcesses) -> None:
    prompts = [prompt_of(90, seed=seed) for seed in range(50, 56)]
    expected = [cluster.tokens(prompt, max_tokens=12, ignore_eos=True) for prompt in prompts]
    for name, faults in (("prefill-0", "before_send=exit@2"), ("decode-0", "before_commit=exit")):
        usual = cluster[name].environment["PDSERVE_FAULTS"]
        cluster[name].kill()
        cluster[name].environment["PDSERVE_FAULTS"] = faults
        cluster[name].start()
        cluster[name].environment["PDSERVE_FAULTS"] = usual
    cluster.wait_for_nodes(4)
    # Both decode nodes and both prefill nodes get work, so both faults strike.
    streams = [Stream(cluster, prompt, max_tokens=12) for prompt in prompts]
    assert [stream.join() for stream in streams] == expected
    process = cluster["decode-0"].process
    assert process is not None
    assert process.wait(5.0) == 9, "decode-0 did not reach its fault"


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 11}], ids=["greedy", "seeded"])
def test_a_dead_decode_node_is_invisible_to_its_streams(cluster: ClusterProcesses, fields: dict[str, float]) -> None:
    prompt = prompt_of(40, seed=2)
    expected = cluster.tokens(prompt, max_tokens=LONG, ignore_eos=True, **fields)
    stream = Stream(cluster, prompt, max_tokens=LONG, **fields)
    stream.wait_for_tokens(20)
    cluster[decode_node_of(cluster)].kill()
    assert stream.join() == expected
    assert stream.finish_reasons == {0: "length"}


def test_a_dead_decode_node_with_several_sequences(cluster: ClusterProcesses) -> None:
    prompt = prompt_of(35, seed=3)
    fields = {"n": 3, "temperature": 1.0, "seed": 21, "max_tokens": 200}
    whole = cluster.complete(prompt, ignore_eos=True, **fields)
    expected = {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
    stream = Stream(cluster, prompt, **fields)
    stream.wait_for_tokens(30)
    cluster[decode_node_of(cluster)].kill()
    stream.join()
    assert stream.token_ids == expected


def test_a_dead_decode_node_costs_a_beam_search_only_time(cluster: ClusterProcesses) -> None:
    def search() -> list[list[int]]:
        fields = {"n": 3, "use_beam_search": True, "max_tokens": 100, "ignore_eos": True}
        return [choice["token_ids"] for choice in cluster.complete(prompt_of(38, seed=12), **fields)["choices"]]

    expected = search()
    with ThreadPoolExecutor(1) as thread:
        again = thread.submit(search)
        busy: list[str] = []

        def is_searching() -> bool:
            assert not again.done(), again.result()
            busy[:] = [name for name in ("decode-0", "decode-1") if cluster.node(name)["running_sequences"] == 3]
            return bool(busy)

        wait_until(is_searching, 10.0, "three beams run")
        cluster[busy[0]].kill()
        # It has begun anew elsewhere: nothing of a search is told before its end.
        assert again.result(60.0) == expected


def test_a_stopped_decode_node_loses_its_requests_to_another(cluster: ClusterProcesses) -> None:
    prompt = prompt_of(45, seed=4)
    expected = cluster.tokens(prompt, max_tokens=LONG, ignore_eos=True)
    stream = Stream(cluster, prompt, max_tokens=LONG)
    stream.wait_for_tokens(10)
    victim = cluster[decode_node_of(cluster)]
    victim.signal(signal.SIGSTOP)
    try:
        wait_until(
            lambda: victim.name not in cluster.ready_nodes(),
            PROGRESS_DEADLINE_S + 1.5,
            "the stopped node is out of rotation",
        )
        assert stream.join() == expected
    finally:
        victim.signal(signal.SIGCONT)
    cluster.wait_for_nodes(4, timeout_s=10.0)


def test_a_stopped_prefill_node_loses_its_requests_to_another(cluster: ClusterProcesses) -> None:
    prompts = [prompt_of(120, seed=seed) for seed in range(30, 38)]
    victim = cluster["prefill-1"]
    victim.signal(signal.SIGSTOP)
    try:
        streams = [Stream(cluster, prompt, max_tokens=8) for prompt in prompts]
        assert all(len(stream.join(timeout_s=30.0)) == 8 for stream in streams)
    finally:
        victim.signal(signal.SIGCONT)
    cluster.wait_for_nodes(4, timeout_s=10.0)


def test_a_restarted_node_is_used_again_and_nothing_stale_is_believed(cluster: ClusterProcesses) -> None:
    prompt = prompt_of(64, seed=5)
    expected = cluster.tokens(prompt, max_tokens=8, ignore_eos=True)
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        cluster[name].kill()
        cluster[name].start()
    wait_until(lambda: len(cluster.ready_nodes()) == 4, 60.0, "all are back")
    answer = cluster.complete(prompt, max_tokens=8, ignore_eos=True)
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cluster.describe()["router"]["failed"] == 0


def test_a_node_that_drains_finishes_what_it_has(cluster: ClusterProcesses) -> None:
    prompt = prompt_of(40, seed=6)
    expected = cluster.tokens(prompt, max_tokens=LONG, ignore_eos=True)
    stream = Stream(cluster, prompt, max_tokens=LONG)
    stream.wait_for_tokens(5)
    victim = cluster[decode_node_of(cluster)]
    assert victim.stop(timeout_s=30.0) == 0
    assert stream.join() == expected


def test_redis_away_under_load_fails_no_request(cluster: ClusterProcesses) -> None:
    cluster.redis.kill()
    try:
        deadline_s = time.monotonic() + 30.0
        served = 0
        while time.monotonic() < deadline_s:
            streams = [Stream(cluster, prompt_of(50, seed=100 + served + i), max_tokens=10) for i in range(4)]
            assert all(len(stream.join()) == 10 for stream in streams)
            served += 4
    finally:
        cluster.redis.start()
    assert served >= 8
    assert sorted(cluster.ready_nodes()) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    prompt = prompt_of(80, seed=7)
    cluster.tokens(prompt, max_tokens=2)

    def is_published() -> bool:
        return cluster.complete(prompt, max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"] == 64

    wait_until(is_published, 5.0, "prefixes are found again")


def test_two_routers_side_by_side(cluster: ClusterProcesses) -> None:
    prompts = [prompt_of(60, seed=seed) for seed in range(40, 46)]
    first = [Stream(cluster, prompt, router=0, max_tokens=60) for prompt in prompts]
    second = [Stream(cluster, prompt, router=1, max_tokens=60) for prompt in prompts]
    assert [stream.join() for stream in first] == [stream.join() for stream in second]


def test_a_dead_router_frees_everything_on_the_nodes(cluster: ClusterProcesses) -> None:
    Stream(cluster, prompt_of(60, seed=8), router=1, max_tokens=1500)
    wait_until(lambda: any(node["in_flight"] for node in cluster.describe()["nodes"]), 10.0, "a node has work")
    cluster["router-1"].kill()
    cluster.assert_idle(timeout_s=1.5)


def test_a_router_that_drains_finishes_streams_and_refuses_new_requests(cluster: ClusterProcesses) -> None:
    prompt = prompt_of(40, seed=9)
    expected = cluster.tokens(prompt, max_tokens=LONG, ignore_eos=True)
    stream = Stream(cluster, prompt, router=1, max_tokens=LONG)
    stream.wait_for_tokens(5)
    cluster["router-1"].signal(signal.SIGTERM)
    wait_until(lambda: httpx.get(f"{cluster.url(1)}/ready").status_code == 503, 2.0, "the router says that it drains")
    refused = cluster.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, router=1)
    assert refused.status_code == 503
    assert refused.json()["error"]["message"]
    assert stream.join() == expected
    assert cluster["router-1"].stop() == 0
