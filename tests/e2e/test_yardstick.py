"""Tokens through router, prefill, transfer and decode equal transformers' `generate`, whatever way they take."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.cluster_processes import ClusterProcesses, slow_steps, wait_until
from tests.e2e.conftest import ClusterFactory
from tests.e2e.reference import Reference

pytestmark = pytest.mark.e2e

BLOCK_SIZE = 16
BOUNDARY_LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 100]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


def prompt_of(length: int, seed: int) -> list[int]:
    return [random.Random(f"{seed}/{length}/{place}").randrange(3, 300) for place in range(length)]


@pytest.fixture(scope="module")
def cluster(make_cluster: ClusterFactory) -> ClusterProcesses:
    return make_cluster(node_flags=["--max-num-batched-tokens", "40"])


@pytest.mark.parametrize("length", BOUNDARY_LENGTHS)
def test_cold_and_prefix_hit(cluster: ClusterProcesses, reference: Reference, length: int) -> None:
    prompt = prompt_of(length, seed=1)
    expected = reference.tokens(prompt, 20)
    cold = cluster.complete(prompt, max_tokens=20, ignore_eos=True)
    again = cluster.complete(prompt, max_tokens=20, ignore_eos=True)
    assert cold["choices"][0]["token_ids"] == expected
    assert again["choices"][0]["token_ids"] == expected
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_batched_with_strangers(cluster: ClusterProcesses, reference: Reference) -> None:
    prompts = [prompt_of(length, seed=2) for length in BOUNDARY_LENGTHS]
    expected = [reference.tokens(prompt, 16) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: cluster.tokens(prompt, max_tokens=16, ignore_eos=True), prompts))
    assert answers == expected


def test_every_hand_off_used_shared_memory_and_committed(cluster: ClusterProcesses) -> None:
    cluster.assert_idle()
    decode = cluster.node("decode-0")
    assert decode["transfers"]["committed"] > 0
    assert decode["transfers"]["failed"] == 0
    assert decode["local_prefills"] == 0
    assert any("peer_pool_opened" in line for line in cluster["prefill-0"].log)


def test_seeded_sampling_is_the_same_alone_and_in_company(cluster: ClusterProcesses) -> None:
    prompt = prompt_of(30, seed=3)

    def sampled(seed: int | None) -> list[int]:
        return cluster.tokens(prompt, max_tokens=16, temperature=1.0, seed=seed, ignore_eos=True)

    alone = sampled(42)
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(sampled, [42, None, None, 42, None, 7]))
    assert together[0] == together[3] == alone
    assert len({tuple(tokens) for tokens in together}) > 2


def test_n_sequences_equal_lone_ones(cluster: ClusterProcesses) -> None:
    prompt = prompt_of(BLOCK_SIZE * 2 + 3, seed=4)
    both = cluster.complete(prompt, max_tokens=12, temperature=1.0, seed=5, n=3, ignore_eos=True)
    choices = [choice["token_ids"] for choice in both["choices"]]
    first = cluster.tokens(prompt, max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    assert choices[0] == first
    assert len({tuple(tokens) for tokens in choices}) == 3
    assert both["usage"]["completion_tokens"] == 36


@pytest.fixture(scope="module")
def small_cluster(make_cluster: ClusterFactory) -> ClusterProcesses:
    """Pools of 24 blocks, so that sequences are preempted, and no shared memory, so that KV travels over gRPC."""
    flags = ["--num-blocks", "24", "--max-num-batched-tokens", "40"]
    # Slow enough that requests meet there.
    faults = {"decode-0": slow_steps(0.02)}
    return make_cluster(node_flags=flags, decode_flags=["--no-shared-memory"], faults=faults)


def test_grpc_transport(small_cluster: ClusterProcesses, reference: Reference) -> None:
    for length in (17, 100):
        prompt = prompt_of(length, seed=7)
        assert small_cluster.tokens(prompt, max_tokens=20, ignore_eos=True) == reference.tokens(prompt, 20)
    decode = small_cluster.node("decode-0")
    assert decode["transfers"]["committed"] == 2
    assert decode["kv_bytes"] > 0
    sent, received = (small_cluster.node(name)["transports"] for name in ("prefill-0", "decode-0"))
    assert set(sent) == set(received) == {"grpc"}
    assert (sent["grpc"]["transfers"], sent["grpc"]["bytes"]) == (2, decode["kv_bytes"])
    assert (received["grpc"]["transfers"], received["grpc"]["bytes"]) == (2, decode["kv_bytes"])
    assert sent["grpc"]["seconds"] > 0 and received["grpc"]["seconds"] > 0
    assert not any("peer_pool_opened" in line for line in small_cluster["prefill-0"].log)
    small_cluster.assert_idle()


def test_preempted(small_cluster: ClusterProcesses, reference: Reference) -> None:
    prompts = [prompt_of(length, seed=6) for length in (60, 70, 80, 90)]
    expected = [reference.tokens(prompt, 150) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: small_cluster.tokens(prompt, max_tokens=150, ignore_eos=True), prompts))
    assert answers == expected
    assert small_cluster.node("decode-0")["preemptions"] > 0
    small_cluster.assert_idle()


def test_what_can_never_fit_is_refused_at_once(small_cluster: ClusterProcesses) -> None:
    for body in ({"prompt": prompt_of(50, seed=9), "max_tokens": 24 * BLOCK_SIZE}, {"prompt": [5] * 24 * BLOCK_SIZE}):
        reply = small_cluster.post("/v1/completions", body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] in ("max_tokens", "prompt")
    small_cluster.assert_idle()


def test_without_a_prefill_node(small_cluster: ClusterProcesses, reference: Reference) -> None:
    assert small_cluster["prefill-0"].stop() == 0
    wait_until(lambda: small_cluster.ready_nodes() == ["decode-0"], 5.0, "the router knows that prefill is gone")
    before = small_cluster.node("decode-0")["local_prefills"]
    prompt = prompt_of(50, seed=8)
    assert small_cluster.tokens(prompt, max_tokens=20, ignore_eos=True) == reference.tokens(prompt, 20)
    assert small_cluster.node("decode-0")["local_prefills"] == before + 1
    small_cluster.assert_idle()
