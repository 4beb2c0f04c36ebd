"""The cluster side of the router: admits requests, places them on nodes, and keeps them going until they end.

    generate -> admission -> place: candidates -> prefix lookup -> plan -> start an attempt -> tokens
                               ^                                                |
                               +------------- node lost, refused, failed -------+

Replicas share nothing but the directory; every id made here is this router's own.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry

from engine.errors import PdserveError, Unavailable
from engine.fingerprint import Fingerprint
from engine.ids import AttemptId, NodeId
from kv_transfer.directory import Directory
from proto import worker_pb2 as pb
from router.admission import Admission, Capacity, Outcome, check_fits
from router.attempt import Attempt
from router.cluster_counters import ClusterCounters
from router.cluster_metrics import ClusterCollector
from router.cluster_timing import ClusterTiming
from router.cluster_view import describe_node
from router.config import RouterConfig
from router.decay import RunningMean
from router.dispatched_generation import DispatchedGeneration
from router.generation import Cluster, Generation, GenerationRequest, ModelLimits
from router.node import Node
from router.node_registry import NodeRegistry
from router.prefix_lookup import PrefixLookup
from router.retry_budget import RetryBudget
from router.route_choice import DecodeView, PrefillView, RoutePlan, RouteQuestion, plan_route

logger = logging.getLogger(__name__)

MAX_DECISIONS_KEPT = 512
OUTPUT_TOKENS_UNTIL_KNOWN = 256
OUTPUT_MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class Decision:
    """One placement, for `explain`."""

    request_id: str
    attempt_id: str
    at_unix_s: float
    sequences: tuple[int, ...]
    question: RouteQuestion
    plan: RoutePlan


class RouterCluster(Cluster):
    """Implements `router.generation.Cluster`.

    Lives on one event loop: `start`, then `generate` many times, then `drain` and `close`. It owns the directory:
    `close` closes it too.
    """

    def __init__(
        self,
        config: RouterConfig,
        directory: Directory,
        *,
        timing: ClusterTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
        dice: random.Random | None = None,
    ) -> None:
        self._config = config
        self._directory = directory
        self._timing = timing or ClusterTiming()
        self._clock = clock
        self._dice = dice or random.Random()
        self.router_id = uuid.uuid4().hex
        self.counters = ClusterCounters()
        self.admission = Admission(
            max_waiting_sequences=config.max_waiting_requests,
            max_waiting_tokens=config.max_waiting_tokens,
            clock=clock,
        )
        self.registry = NodeRegistry(
            directory,
            router_id=self.router_id,
            progress_deadline_s=config.progress_deadline_s,
            timing=self._timing,
            counters=self.counters,
            clock=clock,
            cluster_token=config.cluster_token,
        )
        self._lookup = PrefixLookup(directory, timing=self._timing, counters=self.counters, clock=clock)
        self._budget = RetryBudget()
        self._output_length = RunningMean(weight=0.05)
        self._decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS_KEPT)
        self._running: set[DispatchedGeneration] = set()
        self._became_idle = asyncio.Event()
        self._limits: ModelLimits | None = None
        self._is_draining = False
        self._is_closed = False

    # Life

    async def start(self) -> None:
        """Find nodes and begin to connect; returns before any is ready."""
        await self.registry.start()
        logger.info("router_cluster_started router_id=%s", self.router_id)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests; return once those in flight have ended, or were cut short after the timeout."""
        self._is_draining = True
        logger.info("router_cluster_draining requests=%d", len(self._running))
        try:
            async with asyncio.timeout(timeout_s):
                while self._running:
                    self._became_idle.clear()
                    await self._became_idle.wait()
        except TimeoutError:
            self._cut_short("the router is shutting down and the request took too long")

    async def close(self) -> None:
        """End everything. Nothing of this router stays: no task, no thread, no connection. Idempotent."""
        self._is_draining = True
        if self._is_closed:
            return
        self._is_closed = True
        self._cut_short("the router is shutting down")
        await self.registry.close()
        await self._lookup.close()
        await self._directory.close()
        self.admission.check_invariants()
        for node in self.registry.nodes():
            node.check_idle()
        logger.info("router_cluster_closed router_id=%s", self.router_id)

    # What the API side calls

    @property
    def limits(self) -> ModelLimits:
        """See Cluster. Stays as last known while no decode node is there."""
        limits = self._known_limits()
        if limits is None:
            raise Unavailable("no decode node has been found yet")
        return limits

    def is_ready(self) -> bool:
        """See Cluster."""
        return not self._is_draining and bool(self.registry.routable("decode", self.registry.served_fingerprint))

    async def generate(self, request: GenerationRequest) -> Generation:
        """See Cluster. Waits up to `failover_wait_s` when no decode node is ready."""
        if self._is_draining:
            raise Unavailable("the router is shutting down", reason="draining")
        limits = self._known_limits()
        if limits is not None:
            check_fits(request, limits)
        ticket = self.admission.admit(request, capacity=self._capacity())
        generation = DispatchedGeneration(
            request,
            ticket,
            self,
            timing=self._timing,
            counters=self.counters,
            clock=self._clock,
            dice=self._dice,
        )
        self._running.add(generation)
        self._budget.deposit()
        try:
            await self.place(generation, range(request.num_sequences))
        except asyncio.CancelledError:
            generation.abandon()
            raise
        except Exception as error:
            generation.fail(error if isinstance(error, PdserveError) else PdserveError("an internal error"))
            raise
        if generation.error is not None:
            raise generation.error
        return generation

    def explain(self, request_id: str) -> dict[str, object] | None:
        """Why a recent request went where it went; None when it is not remembered."""
        decisions = [asdict(decision) for decision in self._decisions if decision.request_id == request_id]
        return {"request_id": request_id, "attempts": decisions} if decisions else None

    async def describe(self) -> dict[str, object]:
        """See Cluster."""
        nodes = self.registry.nodes()
        statuses = await self.registry.fresh_statuses(nodes)
        now = self._clock()
        return {
            "nodes": [describe_node(node, status, now) for node, status in zip(nodes, statuses, strict=True)],
            "router": self._describe_router(),
        }

    def register_metrics(self, registry: CollectorRegistry) -> None:
        """Add the cluster's metrics to the process's registry."""
        registry.register(ClusterCollector(self, model_name=self._config.model_names[0], clock=self._clock))

    # What generations call

    async def place(self, generation: DispatchedGeneration, indices: Sequence[int]) -> None:
        """See Placer."""
        wait_until = self._clock() + min(self._config.failover_wait_s, max(0.0, generation.remaining_s()))
        while True:
            wanted = generation.unplaced(indices)
            if not wanted:
                return
            fingerprint = generation.fingerprint or self.registry.served_fingerprint
            candidates = self._candidates(generation, wanted, fingerprint)
            if fingerprint is None or not candidates:
                left_s = wait_until - self._clock()
                if left_s <= 0.0:
                    raise Unavailable("no decode node is ready", retry_after_s=self.admission.retry_after_s())
                await self.registry.wait_for_change(min(left_s, self._timing.ready_check_s))
                continue
            # A request stays with the model it began on, whatever the cluster serves later.
            generation.fingerprint = fingerprint
            tokens = generation.tokens_so_far(wanted[0])
            holders = [node.key for node in (*candidates, *self.registry.routable("prefill", fingerprint))]
            cached = await self._lookup.cached_tokens(fingerprint, generation.request.tenant_salt, tokens, holders)
            # From here on nothing awaits, so what is chosen is what is true.
            wanted = generation.unplaced(wanted)
            if wanted and self._start_attempt(generation, wanted, tokens, fingerprint, cached):
                return

    def allow_retry(self) -> bool:
        """See Placer."""
        return self._budget.take(self._clock())

    def max_model_len(self) -> int:
        """See Placer."""
        return self.limits.max_model_len

    def retry_after_s(self) -> float:
        """See Placer."""
        return self.admission.retry_after_s()

    def on_over(self, generation: DispatchedGeneration) -> None:
        """See Placer."""
        self._running.discard(generation)
        if generation.outcome is Outcome.FINISHED:
            for length in generation.output_lengths():
                self._output_length.add(length)
        if not self._running:
            self._became_idle.set()

    # Inside

    def _start_attempt(
        self,
        generation: DispatchedGeneration,
        indices: Sequence[int],
        tokens: Sequence[int],
        fingerprint: Fingerprint,
        cached: dict[NodeId, int],
    ) -> bool:
        """Choose and start, in one go; False when no candidate is left."""
        now = self._clock()
        candidates = self._candidates(generation, indices, fingerprint)
        prefill_nodes = self.registry.routable("prefill", fingerprint)
        blocks = self._blocks_of_sequences(generation, indices, len(tokens), fingerprint.block_size)
        question = RouteQuestion(len(tokens), len(indices), sum(blocks.values()))
        plan = plan_route(
            question,
            [_decode_view(node, cached, is_avoided=node in generation.avoided) for node in candidates],
            [_prefill_view(node, cached, now) for node in prefill_nodes],
            self._dice,
        )
        if plan is None:
            return False
        node = self.registry.find(plan.decode.node_id, plan.decode.epoch)
        assert node is not None
        targets = [self.registry.find(target.node_id, target.epoch) for target in plan.prefill]
        prefill_targets = [target for target in targets if target is not None]
        attempt_id = AttemptId(uuid.uuid4().hex)
        message = generation.start_message(
            attempt_id, node, indices, local_prefill_threshold=self._config.local_prefill_threshold
        )
        for target in prefill_targets:
            identity = pb.NodeIdentity(node_id=target.node_id, epoch=target.epoch)
            message.prefill_nodes.append(pb.PrefillTarget(identity=identity, address=target.address))
        prefills_there = len(tokens) - cached.get(node.node_id, 0) <= self._config.local_prefill_threshold
        first_target = prefill_targets[0] if prefill_targets and not prefills_there else None
        to_compute = max(1, len(tokens) - cached.get((first_target or node).node_id, 0))
        attempt = Attempt(
            attempt_id,
            generation,
            node,
            blocks_of_sequences=blocks,
            prefill_node=first_target,
            prefill_tokens=to_compute if first_target else 0,
        )
        attempt.start(message, now)
        generation.note_placed(attempt, indices, to_compute)
        self.counters.attempts += 1
        self._decisions.append(
            Decision(generation.request.request_id, attempt_id, time.time(), tuple(indices), question, plan)
        )
        logger.info(
            "attempt_started request_id=%s attempt_id=%s decode=%s prefill=%s sequences=%d tokens=%d cached=%d",
            generation.request.request_id,
            attempt_id,
            node.node_id,
            ",".join(target.node_id for target in prefill_targets) or "-",
            len(indices),
            len(tokens),
            max(cached.values(), default=0),
        )
        return True

    def _candidates(
        self, generation: DispatchedGeneration, indices: Sequence[int], fingerprint: Fingerprint | None
    ) -> list[Node]:
        """Routable decode nodes whose pool, context and steps these sequences of a request fit."""
        if fingerprint is None:
            return []
        ready = self.registry.routable("decode", fingerprint)
        if not ready:
            return []
        request = generation.request
        total = len(request.prompt_token_ids) + request.sampling.max_tokens
        side_by_side = len(indices) if request.beam_search is None else request.num_running
        fitting = [
            node
            for node in ready
            if node.description is not None
            and node.description.max_model_len >= total
            and node.description.max_num_seqs >= side_by_side
            and node.description.num_blocks >= -(-total // fingerprint.block_size)
        ]
        if not fitting:
            check_fits(request, self.limits)
        return fitting

    def _blocks_of_sequences(
        self, generation: DispatchedGeneration, indices: Sequence[int], num_tokens: int, block_size: int
    ) -> dict[int, int]:
        """Blocks to expect: the first sequence with the prompt that all share, each with its likely output."""
        usual = self._output_length.value
        expected = OUTPUT_TOKENS_UNTIL_KNOWN if usual is None else int(usual * OUTPUT_MARGIN) + 1
        output_so_far = num_tokens - len(generation.request.prompt_token_ids)
        output = max(1, min(generation.request.sampling.max_tokens - output_so_far, expected))
        first, *others = indices
        of_output = -(-output // block_size) + 1
        hidden = generation.request.num_running - generation.request.num_sequences  # Beams that are not shown.
        blocks = {first: -(-(num_tokens + output) // block_size) + hidden * of_output}
        blocks.update((index, of_output) for index in others)
        return blocks

    def _known_limits(self) -> ModelLimits | None:
        served = self.registry.served_fingerprint
        known = [
            node.description
            for node in self.registry.nodes()
            if node.role == "decode" and node.fingerprint == served and node.description is not None
        ]
        if served is not None and known:
            longest = max(description.max_model_len for description in known)
            self._limits = ModelLimits(
                vocab_size=min(description.vocab_size for description in known),
                max_model_len=min(longest, self._config.max_model_len or longest),
                block_size=served.block_size,
                max_request_blocks=max(description.num_blocks for description in known),
                max_sequences=max(description.max_num_seqs for description in known),
            )
        return self._limits

    def _capacity(self) -> Capacity:
        """What the ready decode nodes hold."""
        served = self.registry.served_fingerprint
        ready = [node.description for node in self.registry.routable("decode", served) if node.description is not None]
        blocks = sum(description.num_blocks for description in ready)
        return Capacity(
            sequences=sum(description.max_num_seqs for description in ready),
            kv_tokens=blocks * served.block_size if served is not None else 0,
        )

    def _cut_short(self, message: str) -> None:
        for generation in list(self._running):
            generation.fail(Unavailable(message, reason="draining"))

    def _describe_router(self) -> dict[str, object]:
        admission = self.admission
        return {
            "router_id": self.router_id,
            "draining": self._is_draining,
            "ready": self.is_ready(),
            "in_flight_requests": admission.requests,
            "in_flight_sequences": admission.sequences,
            "waiting_tokens": admission.waiting_tokens,
            "in_flight": {node.node_id: node.own.attempts + node.own.prefills for node in self.registry.nodes()},
            "admitted": admission.admitted,
            "refused": admission.refused,
            **{outcome.value: count for outcome, count in admission.outcomes.items()},
            **asdict(self.counters),
        }


def _decode_view(node: Node, cached: dict[NodeId, int], *, is_avoided: bool) -> DecodeView:
    return DecodeView(
        node_id=node.node_id,
        epoch=node.epoch,
        total_blocks=node.total_blocks(),
        max_num_seqs=node.description.max_num_seqs if node.description is not None else 1,
        cached_tokens=cached.get(node.node_id, 0),
        used_blocks=node.used_blocks(),
        own_sequences=node.own.sequences,
        foreign_sequences=node.foreign_sequences(),
        is_avoided=is_avoided,
    )


def _prefill_view(node: Node, cached: dict[NodeId, int], now: float) -> PrefillView:
    return PrefillView(
        node_id=node.node_id,
        epoch=node.epoch,
        cached_tokens=cached.get(node.node_id, 0),
        own_tokens=node.own.prefill_tokens,
        foreign_tokens=node.foreign_prefill_tokens(),
        in_flight=node.own.prefills,
        recent_tokens=node.recent_tokens.value(now),
        tokens_per_s=node.status.prefill_tokens_per_s if node.status is not None else 0.0,
    )
