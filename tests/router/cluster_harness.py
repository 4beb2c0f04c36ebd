"""A router's cluster side with fake nodes around it, and what must hold once it is over: nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from engine.ids import RequestId
from engine.sampling_params import SamplingParams
from engine.tokens import FinishReason
from kv_transfer.memory_directory import MemoryDirectory
from router.cluster_timing import ClusterTiming
from router.config import RouterConfig
from router.dispatch import RouterCluster
from router.generation import Generation, GenerationRequest, TokenDelta
from router.node import NodeHealth
from tests.router.fake_nodes import FakeNode, expected_tokens

TIMING = ClusterTiming(
    poll_s=0.03,
    poll_timeout_s=0.3,
    watch_interval_s=0.02,
    monitor_s=0.03,
    describe_timeout_s=0.3,
    status_timeout_s=0.2,
    lookup_timeout_s=0.1,
    lookup_pause_s=0.05,
    reconnect_first_s=0.02,
    reconnect_longest_s=0.1,
    forget_after_s=0.4,
    ready_check_s=0.05,
    retry_first_s=0.005,
    retry_longest_s=0.02,
    deadline_grace_s=0.05,
    flush_s=0.2,
)
PROGRESS_DEADLINE_S = 0.4
_request_numbers = itertools.count()


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Return once the condition holds."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "the condition did not come true in time"
        await asyncio.sleep(0.005)


def make_request(
    *, prompt: tuple[int, ...] = (1, 2, 3, 4, 5, 6), max_tokens: int = 8, n: int = 1, seed: int = 1, **fields: Any
) -> GenerationRequest:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        **{name: fields.pop(name) for name in ("prompt_logprobs", "eos_token_ids") if name in fields},
    )
    number = next(_request_numbers)
    return GenerationRequest(
        request_id=RequestId(fields.pop("request_id", f"request-{number}")),
        prompt_token_ids=prompt,
        sampling=sampling,
        num_sequences=n,
        **fields,
    )


def expected(request: GenerationRequest, index: int = 0) -> list[int]:
    return expected_tokens(request.prompt_token_ids, request.sampling.seed, index, request.sampling.max_tokens)


class Received:
    """What a consumer got, by sequence."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}

    def take(self, delta: TokenDelta) -> None:
        assert delta.sequence_index not in self.reasons, "a delta after the end of its sequence"
        self.tokens.setdefault(delta.sequence_index, []).extend(delta.token_ids)
        if delta.finish_reason is not None:
            self.reasons[delta.sequence_index] = delta.finish_reason


async def collect(generation: Generation) -> Received:
    received = Received()
    async with asyncio.timeout(10.0):
        async for delta in generation:
            received.take(delta)
    return received


class Harness:
    """One router, its directory and its nodes."""

    def __init__(self, cluster: RouterCluster, directory: MemoryDirectory) -> None:
        self.cluster = cluster
        self.directory = directory
        self.nodes: dict[str, FakeNode] = {}

    async def add(self, role: str, name: str, **settings: Any) -> FakeNode:
        node = await FakeNode(role, name, **settings).start(self.directory)
        self.nodes[name] = node
        return node

    async def restart(self, name: str, *, register: bool = True, **changes: Any) -> FakeNode:
        await self.nodes[name].die()
        self.nodes[name] = await self.nodes[name].restart(self.directory if register else None, **changes)
        return self.nodes[name]

    def health(self, name: str) -> NodeHealth | None:
        for node in self.cluster.registry.nodes():
            if node.node_id == name:
                return node.health(time.monotonic())
        return None

    async def ready(self, *names: str) -> None:
        await until(lambda: all(self.health(name) is NodeHealth.READY for name in names or self.nodes))

    async def run(self, request: GenerationRequest) -> Received:
        generation = await self.cluster.generate(request)
        try:
            return await collect(generation)
        finally:
            await generation.aclose()

    def serving(self, generation: Generation) -> FakeNode:
        """The node that has the generation's attempt."""
        name = generation.facts.decode_node_id
        assert name is not None
        return self.nodes[name]

    async def expect_idle(self) -> None:
        """I2, I3 and I4: nothing under way here or on living nodes; every admitted request ended in one way."""
        admission = self.cluster.admission
        assert admission.requests == 0 and admission.sequences == 0 and admission.waiting_tokens == 0
        admission.check_invariants()
        for node in self.cluster.registry.nodes():
            node.check_idle()
        living = [node for node in self.nodes.values() if not node.is_dead]
        for node in living:
            node.thaw()
        await until(lambda: not any(node.live_attempts for node in living if not node.does.ignore_cancels), 1.0)


@contextlib.asynccontextmanager
async def running_cluster(
    *,
    decode: int = 1,
    prefill: int = 0,
    timing: ClusterTiming = TIMING,
    wait: bool = True,
    is_alone: bool = True,
    **config: Any,
) -> AsyncIterator[Harness]:
    """Checks on the way out that nothing is left: no request, no reservation, no task."""
    tasks_before = asyncio.all_tasks()
    directory = MemoryDirectory()
    settings = {"progress_deadline_s": PROGRESS_DEADLINE_S, "failover_wait_s": 2.0} | config
    cluster = RouterCluster(RouterConfig(model="fake", **settings), directory, timing=timing, dice=random.Random(7))
    harness = Harness(cluster, directory)
    try:
        for number in range(decode):
            await harness.add("decode", f"decode-{number}")
        for number in range(prefill):
            await harness.add("prefill", f"prefill-{number}")
        await cluster.start()
        if wait:
            await harness.ready()
        yield harness
        await harness.expect_idle()
    finally:
        await cluster.close()
        for node in harness.nodes.values():
            node.thaw()
            await node.die()
    if is_alone:
        await until(lambda: asyncio.all_tasks() <= tasks_before, 2.0)
