"""A decode node beside prefill nodes over real gRPC: tokens, failures at each place, cancels, nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import transformers

from decode_node import block_moves
from decode_node.growth import PRIOR_LENGTH, OutputLengths
from engine.model_runner import ModelRunner
from engine.model_store import ModelFiles
from kv_transfer.channels import open_channel
from kv_transfer.pool_memory import PoolMemory
from kv_transfer.transports import BlockReceiver
from proto import worker_pb2 as pb
from proto import worker_pb2_grpc
from tests.node_cluster import (
    BLOCK,
    Host,
    alone,
    cluster,
    ended,
    engine_config,
    idle,
    pool_memory,
    sim_runner,
    until,
)
from tests.tiny_model import build_tiny_model

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 10 * BLOCK + 3)
TRANSPORTS = pytest.mark.parametrize("in_memory", [False, True], ids=["grpc", "shared_memory"])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}-{seed}").choices(range(3, 250), k=length)


# -- a real model ------------------------------------------------------------------------------------------------


def admit_too_much(decode: Host) -> None:
    """Let it believe that outputs are short."""
    decode.node.scheduler.lengths = OutputLengths(prior=1)


class RealModel:
    """A tiny llama, runners for two nodes, and what transformers says."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        files = ModelFiles("tiny", build_tiny_model(folder))
        config = engine_config(64, dtype="float32", max_model_len=200)
        self.memories: list[PoolMemory] = []
        self.prefill = ModelRunner(config, files)
        self.decode = ModelRunner(config, files, allocate_pool=self._allocate)
        self.small = ModelRunner(engine_config(20, dtype="float32", max_model_len=76), files)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None
        self.generate = cache(self._generate)

    def _allocate(self, num_bytes: int) -> memoryview:
        self.memories.append(PoolMemory(num_bytes))
        return self.memories[0].view

    def _generate(self, prompt: tuple[int, ...], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
            )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    def says(self, prompt: Sequence[int], count: int) -> list[int]:
        return list(self.generate(tuple(prompt), count))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealModel]:
    model = RealModel(tmp_path_factory.mktemp("tiny"))
    yield model
    for memory in model.memories:
        memory.close()
    # The runners still lie on that memory.
    vars(model).clear()
    gc.collect()


@TRANSPORTS
async def test_tokens_equal_transformers_cold_and_with_hits_on_either_node(real: RealModel, in_memory: bool) -> None:
    async with cluster() as nodes:
        prefill = await nodes.prefill(real.prefill)
        decode = await nodes.decode(real.decode, memory=real.memories[0] if in_memory else None)
        async with nodes.router(decode) as router:
            prompts = [prompt_of(length) for length in LENGTHS]
            expected = [[real.says(prompt, 6)] for prompt in prompts]
            # All at once with strangers, then again: prefixes now lie on both nodes.
            for _ in range(2):
                results = await asyncio.gather(*(router.generate(prompt, [prefill]) for prompt in prompts))
                assert results == expected
        await idle(nodes.hosts)
        counters = decode.node.counters
        assert counters.transfers_committed == 2 * len(LENGTHS) and counters.local_prefills == 0
        # A decode node that forgot everything finds the prefix on the prefill node.
        forgetful = await nodes.decode(real.small)
        async with nodes.router(forgetful) as router:
            cached = prefill.node.counters.prefill_tokens_cached
            assert await router.generate(prompts[-1], [prefill]) == expected[-1]
            assert prefill.node.counters.prefill_tokens_cached == cached + 10 * BLOCK


async def test_tokens_equal_transformers_when_decode_prefills(real: RealModel) -> None:
    async with cluster() as nodes:
        prefill, decode = await nodes.prefill(real.prefill), await nodes.decode(real.decode)
        async with nodes.router(decode) as router:
            for _ in range(2):
                for length in LENGTHS:
                    prompt = prompt_of(length)
                    assert await router.generate(prompt) == [real.says(prompt, 6)]
            # A short uncached rest is not worth a hand-off.
            assert await router.generate(prompt_of(9), [prefill], threshold=9) == [real.says(prompt_of(9), 6)]
            assert decode.node.counters.transfers_started == 0


@pytest.mark.parametrize("way_back", ["here", "prefill", "host_copy"])
async def test_tokens_equal_transformers_when_preempted(real: RealModel, way_back: str) -> None:
    async with cluster() as nodes:
        prefill = await nodes.prefill(real.prefill)
        decode = await nodes.decode(real.small, swap_space_gib=1.0 if way_back == "host_copy" else 0.0)
        admit_too_much(decode)
        # Whether computing here is thought to take no time, or an hour per token.
        decode.node.scheduler.costs.prompt.record(1e9, 1.0 if way_back == "here" else 3.6e12)
        async with nodes.router(decode) as router:
            prompts = [prompt_of(14, seed) for seed in range(4)]
            results = await asyncio.gather(*(router.generate(prompt, [prefill], max_tokens=30) for prompt in prompts))
            assert results == [[real.says(prompt, 30)] for prompt in prompts]
            # Sampled ones too, several of one request among them.
            sampling: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 30}
            prompt = prompts[0]
            separate = [(await router.generate(prompt, [prefill], index=i, **sampling))[0] for i in range(4)]
            before = decode.node.scheduler.preemptions
            together = await asyncio.gather(
                router.generate(prompt, [prefill], n=4, **sampling), router.generate(prompts[1], max_tokens=30)
            )
            assert together == [separate, [real.says(prompts[1], 30)]]
            assert decode.node.scheduler.preemptions > before > 0
        status = decode.node.status()
        assert (status.swaps > 0) == (way_back == "host_copy")
        assert (status.transfers.committed > 4 + 4 + 1) == (way_back == "prefill")
        assert status.swap_bytes == 0


@pytest.mark.parametrize("broken", ["_save", "_restore"])
async def test_a_copy_that_fails_costs_at_most_its_own_attempt(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    async with cluster() as nodes:
        all_are_here = threading.Event()
        runner = sim_runner(20, step_s=1.0, sleep=lambda seconds: all_are_here.wait(10))
        decode = await nodes.decode(runner, swap_space_gib=1.0)
        admit_too_much(decode)
        monkeypatch.setattr(block_moves, broken, lambda move, runner: 1 / 0)
        # What lies in the cache need not be restored.
        monkeypatch.setattr(decode.node.scheduler, "_max_reusable", lambda sequence: 0)
        async with nodes.router(decode) as router:
            streams = [(await router.start(router.message(prompt_of(14, seed), max_tokens=30)))[0] for seed in range(4)]
            await until(lambda: decode.node.status().in_flight == 4)
            all_are_here.set()
            await ended(streams)
        assert decode.node.status().swaps > 0
        failed = [stream for stream in streams if stream.error is not None]
        assert all(stream.failure == "restore_failed" for stream in failed)
        assert {stream.error.kind for stream in failed if stream.error} <= {pb.ERROR_KIND_TRY_ELSEWHERE}
        assert bool(failed) == (broken == "_restore") and len(failed) < 4
        for seed, stream in enumerate(streams):
            whole = alone(prompt_of(14, seed), 30)
            # Where it goes on elsewhere, what came out so far is right.
            assert stream.tokens == whole[: len(stream.tokens)] and (
                stream.error is not None or len(stream.tokens) == 30
            )


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 7])
async def test_tokens_equal_transformers_when_moved(real: RealModel, length: int) -> None:
    async with cluster() as nodes:
        prefill, decode = await nodes.prefill(real.prefill), await nodes.decode(real.decode)
        async with nodes.router(decode) as router:
            prompt = prompt_of(length, 7)
            whole = real.says(prompt, 10)
            for so_far in (1, 3, 4, 5):
                for targets in ([prefill], []):
                    rest = await router.generate(prompt, targets, output=whole[:so_far], max_tokens=10)
                    assert rest == [whole[so_far:]]


# -- several sequences -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [True, False])
async def test_n_sequences_equal_n_requests(elsewhere: bool) -> None:
    async with cluster() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        async with nodes.router(decode) as router:
            targets = [prefill] if elsewhere else []
            for length in (3, 4, 5, 11):
                sampling: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 8}
                prompt = prompt_of(length)
                together = await router.generate(prompt, targets, n=4, **sampling)
                assert len({tuple(tokens) for tokens in together}) == 4
                separate = [(await router.generate(prompt, targets, index=i, **sampling))[0] for i in range(4)]
                sampling.pop("max_tokens")
                assert together == separate == [alone(prompt, 8, i, **sampling) for i in range(4)]


@pytest.mark.parametrize("elsewhere", [True, False])
async def test_parallel_samples_prefill_once(elsewhere: bool) -> None:
    async with cluster() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        async with nodes.router(decode) as router:
            await router.generate(prompt_of(11), [prefill] if elsewhere else [], n=4, temperature=1.0)
        computed = [node.node.counters.prefill_tokens_computed for node in (prefill, decode)]
        assert computed == ([11, 0] if elsewhere else [0, 11])
        assert decode.node.counters.transfers_started == elsewhere


async def test_leader_cancelled_before_siblings_have_the_prompt() -> None:
    async with cluster() as nodes:
        prefill = await nodes.prefill(sim_runner(step_s=0.1), engine={"max_num_batched_tokens": 8})
        decode = await nodes.decode()
        async with nodes.router(decode) as router:
            prompt = prompt_of(22)
            message = router.message(prompt, [prefill], n=3, temperature=1.0, seed=3)
            streams = await router.start(message)
            await until(lambda: decode.node.status().leases)
            await router.cancel(message, 0)
            await ended(streams)
            assert streams[0].finish_reason == pb.FINISH_REASON_CANCELLED
            for i in (1, 2):
                assert streams[i].tokens == alone(prompt, 6, i, temperature=1.0, seed=3)


async def test_one_token_needs_no_blocks_on_decode() -> None:
    async with cluster() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        async with nodes.router(decode) as router:
            assert await router.generate(prompt_of(9), [prefill], max_tokens=1) == [alone(prompt_of(9), 1)]


async def test_everything_cached_still_commits() -> None:
    async with cluster() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        async with nodes.router(decode) as router:
            for _ in range(3):
                assert await router.generate(prompt_of(13), [prefill]) == [alone(prompt_of(13), 6)]
        assert decode.node.counters.transfers_committed == 3


async def test_prompt_logprobs_come_whole_from_either_node_and_despite_caches() -> None:
    async with cluster() as nodes:
        prefill, decode = await nodes.prefill(engine={"max_num_batched_tokens": 5}), await nodes.decode()
        async with nodes.router(decode) as router:
            prompt, seen = prompt_of(11), []
            for targets in ([prefill], [prefill], [], []):
                message = router.message(prompt, targets, prompt_logprobs=1, logprobs=0)
                await ended(await router.start(message))
                facts = router.facts[message.attempt_id].prompt_logprobs
                assert [len(position.entries) for position in facts] == [0, *[2] * 10]
                assert [position.entries[0].token_id for position in facts[1:]] == prompt[1:]
                seen.append([[entry.logprob for entry in position.entries] for position in facts])
            assert seen == [seen[0]] * 4


# -- tight pools -------------------------------------------------------------------------------------------------


async def test_ten_clients_of_half_the_pool_each() -> None:
    async with cluster() as nodes:
        prefill = await nodes.prefill(sim_runner(48), max_ungranted=3)
        decode = await nodes.decode(sim_runner(24))
        async with nodes.router(decode) as router:
            prompts = [prompt_of(11 * BLOCK + 1, seed) for seed in range(10)]
            results = await asyncio.gather(*(router.generate(prompt, [prefill]) for prompt in prompts))
            assert results == [[alone(prompt, 6)] for prompt in prompts]


async def test_what_can_never_fit_is_refused_at_once() -> None:
    async with cluster() as nodes:
        decode = await nodes.decode(sim_runner(4, max_model_len=16), engine={"max_num_seqs": 3})
        async with nodes.router(decode) as router:

            async def refusal(message: pb.StartAttempt) -> tuple[int, str]:
                streams = await router.start(message)
                await ended(streams, 1)
                assert all(stream.error == streams[0].error for stream in streams)
                assert streams[0].error is not None
                return streams[0].error.kind, streams[0].error.reason

            invalid = (pb.ERROR_KIND_INVALID, "invalid_request")
            assert await refusal(router.message(prompt_of(16))) == invalid
            assert await refusal(router.message(prompt_of(3), n=4)) == invalid
            # Begun where the context is longer.
            moved = router.message(prompt_of(10), output=prompt_of(8), max_tokens=20)
            assert await refusal(moved) == (pb.ERROR_KIND_TRY_ELSEWHERE, "context_too_short")
            # And the queue is not blocked.
            assert await router.generate(prompt_of(3)) == [alone(prompt_of(3), 6)]


async def test_priority_is_refused_where_it_would_be_ignored() -> None:
    async with cluster() as nodes:
        decode = await nodes.decode(scheduling_policy="fcfs")
        async with nodes.router(decode) as router:
            message = router.message(prompt_of(5))
            message.priority = -1
            (stream,) = await router.start(message)
            await ended([stream])
            assert stream.error is not None
            assert (stream.error.kind, stream.error.param) == (pb.ERROR_KIND_INVALID, "priority")


@pytest.mark.parametrize("elsewhere", [True, False])
async def test_the_higher_priority_overtakes_what_waits(elsewhere: bool) -> None:
    async with cluster() as nodes:
        prefill = await nodes.prefill()
        decode = await nodes.decode(sim_runner(step_s=0.05), engine={"max_num_seqs": 1})
        async with nodes.router(decode) as router:
            order: list[int] = []

            async def one(priority: int) -> None:
                message = router.message(prompt_of(9, priority), [prefill] if elsewhere else [], max_tokens=8)
                message.priority = priority
                streams = await router.start(message)
                await ended(streams)
                assert streams[0].tokens == alone(prompt_of(9, priority), 8)
                order.append(priority)

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(one(0))
                await until(lambda: decode.node.status().running_sequences)
                for count, priority in enumerate((5, 3, 1, 4), start=1):
                    tasks.create_task(one(priority))
                    await until(lambda least=count: decode.node.status().waiting_sequences >= least)  # type: ignore[misc]
            assert order == [0, 1, 3, 4, 5]


async def test_status_tells_of_memory_and_of_what_is_expected() -> None:
    async with cluster() as nodes:
        decode = await nodes.decode(sim_runner(step_s=0.01))
        async with nodes.router(decode) as router:
            streams = await router.start(router.message(prompt_of(5), max_tokens=7))
            await until(lambda: decode.node.status().running_sequences)
            status = decode.node.status()
            assert status.allocated_slots == status.blocks.in_use * BLOCK
            assert status.unused_slots == status.allocated_slots - decode.node.scheduler._running[0].num_computed
            assert status.expected_output_tokens == PRIOR_LENGTH
            await ended(streams)
        status = decode.node.status()
        assert status.HasField("allocated_slots") and status.allocated_slots == 0
        assert (status.unused_slots, status.reserved_blocks) == (0, 0)
        assert status.expected_output_tokens == (PRIOR_LENGTH + 7) / 2


# -- failures ----------------------------------------------------------------------------------------------------

FAULTS_OF_PREFILL = ("before_start", "after_chunk", "before_first_token", "before_send", "before_complete")


@TRANSPORTS
@pytest.mark.parametrize("place", FAULTS_OF_PREFILL)
async def test_prefill_fails_at_each_place_and_the_next_one_does_it(place: str, in_memory: bool) -> None:
    memory = pool_memory(64) if in_memory else None
    async with cluster() as nodes:
        broken, good = await nodes.prefill(faults=f"{place}=raise"), await nodes.prefill()
        decode = await nodes.decode(sim_runner(memory=memory), memory=memory)
        async with nodes.router(decode) as router:
            prompt = prompt_of(22)
            assert await router.generate(prompt, [broken, good], max_tokens=9) == [alone(prompt, 9)]
        counters = decode.node.counters
        assert (counters.transfers_committed, counters.transfers_failed, counters.local_prefills) == (1, 1, 0)
        # Every failure is named, on both sides.
        reason = "step_failed" if place == "after_chunk" else "fault_injected"
        assert counters.failures == broken.node.counters.failures == {reason: 1}


async def test_slow_at_each_place_changes_nothing() -> None:
    faults = ";".join(f"{place}=sleep:0.03@*" for place in FAULTS_OF_PREFILL)
    async with cluster() as nodes:
        prefill = await nodes.prefill(faults=faults)
        decode = await nodes.decode(
            faults="before_commit=sleep:0.03@*;after_commit_before_ack=sleep:0.03@*;after_decode_step=sleep:0.01@*"
        )
        async with nodes.router(decode) as router:
            results = await asyncio.gather(*(router.generate(prompt_of(22, seed), [prefill]) for seed in range(3)))
            assert results == [[alone(prompt_of(22, seed), 6)] for seed in range(3)]


async def test_commit_fails_and_decode_does_it_itself() -> None:
    async with cluster() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode(faults="before_commit=raise")
        async with nodes.router(decode) as router:
            assert await router.generate(prompt_of(22), [prefill]) == [alone(prompt_of(22), 6)]
        assert decode.node.counters.local_prefills == 1
        assert prefill.node.counters.transfers_aborted == 1


async def test_commit_is_never_acknowledged() -> None:
    async with cluster() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode(faults="after_commit_before_ack=raise")
        async with nodes.router(decode) as router:
            assert await router.generate(prompt_of(22), [prefill]) == [alone(prompt_of(22), 6)]


async def test_a_failed_decode_step_fails_its_attempts_and_not_the_node() -> None:
    async with cluster() as nodes:
        decode = await nodes.decode(faults="after_decode_step=raise@2")
        async with nodes.router(decode) as router:
            streams = await router.start(router.message(prompt_of(5)))
            await ended(streams)
            assert streams[0].failure == "step_failed"
            assert await router.generate(prompt_of(5)) == [alone(prompt_of(5), 6)]


async def test_prefill_dies_while_sending() -> None:
    async with cluster() as nodes:
        dying, decode = await nodes.prefill(faults="before_complete=sleep:9"), await nodes.decode()
        dying.node.scheduler._max_num_batched_tokens = 8
        async with nodes.router(decode) as router:
            for others in ([], [await nodes.prefill()]):
                streams = await router.start(router.message(prompt_of(22, len(others)), [dying, *others]))
                if not others:
                    await until(lambda: decode.node.status().leases)
                    await nodes.crash(dying)
                await ended(streams, 5)
                assert streams[0].tokens == alone(prompt_of(22, len(others)), 6)
        assert decode.node.counters.local_prefills == 1


async def test_blocks_stay_in_quarantine_until_the_dead_writer_is_fenced() -> None:
    memory = pool_memory(64)
    async with cluster() as nodes:
        dying = await nodes.prefill(faults="before_complete=sleep:9")
        decode = await nodes.decode(sim_runner(memory=memory), memory=memory)
        async with nodes.router(decode) as router:
            streams = await router.start(router.message(prompt_of(22), [dying]))
            await until(lambda: decode.node.status().leases)
            await until(lambda: streams[0].tokens)
            await nodes.crash(dying)
            # The process that could write lives on (it is ours): the request goes on, its old blocks are nobody's.
            await ended(streams, 5)
            assert streams[0].tokens == alone(prompt_of(22), 6)
            assert decode.node.status().blocks.quarantined == 6
            # Another incarnation at the same address proves that the old one is gone.
            await nodes.prefill(port=int(dying.node.description.address.rpartition(":")[2]))
            await idle([decode], 4)


async def test_silent_prefill_is_given_up_within_the_progress_deadline() -> None:
    async def silence(commands: AsyncIterator[pb.HandoffCommand], write: Any) -> None:
        await asyncio.sleep(30)

    async with cluster() as nodes:
        decode = await nodes.decode(progress_deadline_s=0.5)
        target, _ = await nodes.fake_prefill(silence)
        async with nodes.router(decode) as router:
            streams = await router.start(router.message(prompt_of(9), [target]))
            await ended(streams, 2.0)
            assert streams[0].tokens == alone(prompt_of(9), 6)
        assert decode.node.counters.failures == {"prefill_silent": 1}


async def test_a_hand_off_has_a_deadline_of_its_own() -> None:
    async def busy(commands: AsyncIterator[pb.HandoffCommand], write: Any) -> None:
        while True:
            await write(pb.HandoffEvent(progress=pb.Progress()))
            await asyncio.sleep(0.05)

    async with cluster() as nodes:
        decode = await nodes.decode(handoff_deadline_s=0.4)
        target, _ = await nodes.fake_prefill(busy)
        async with nodes.router(decode) as router:
            assert await router.generate(prompt_of(9), [target]) == [alone(prompt_of(9), 6)]
        assert decode.node.counters.failures == {"handoff_deadline": 1}


async def test_the_deadline_of_an_attempt_ends_it_in_each_state() -> None:
    async with cluster() as nodes:
        prefill, decode = await nodes.prefill(sim_runner(step_s=0.3)), await nodes.decode(sim_runner(step_s=0.05))
        async with nodes.router(decode) as router:
            waiting = await router.start(router.message(prompt_of(9), [prefill], deadline_ms=100))
            decoding = await router.start(router.message(prompt_of(5), max_tokens=200, deadline_ms=400))
            at_once = await router.start(router.message(prompt_of(5), deadline_ms=0))
            await ended([*waiting, *decoding, *at_once], 2)
            assert [stream.failure for stream in (*waiting, *decoding, *at_once)] == ["deadline"] * 3
            assert decoding[0].tokens


async def test_other_fingerprint_and_other_epoch_are_refused_by_name() -> None:
    async with cluster() as nodes:
        other = await nodes.prefill(sim_runner(model_id="another"))
        restarted, decode = await nodes.prefill(), await nodes.decode()
        stale = restarted.target
        stale.identity.epoch += 1000
        async with nodes.router(decode) as router:
            assert await router.generate(prompt_of(9), [other, stale]) == [alone(prompt_of(9), 6)]
        assert decode.node.counters.failures == {"fingerprint_mismatch": 1, "prefill_refused": 1}
        assert decode.node.counters.local_prefills == 1


async def test_router_gone_frees_everything_within_a_second() -> None:
    async with cluster() as nodes:
        prefill = await nodes.prefill(sim_runner(step_s=0.05), engine={"max_num_batched_tokens": 8})
        decode = await nodes.decode(sim_runner(step_s=0.02))
        admit_too_much(decode)
        async with nodes.router(decode) as router:
            for seed in range(3):
                await router.start(router.message(prompt_of(30, seed), [prefill], max_tokens=100))
                await router.start(router.message(prompt_of(5, seed), max_tokens=100))
            await until(lambda: decode.node.status().running_sequences >= 3)
            await until(lambda: decode.node.status().in_flight == 6)
        await idle(nodes.hosts, 1.0)


async def test_drain_finishes_what_it_can_and_says_so_to_the_rest() -> None:
    async with cluster() as nodes:
        decode = await nodes.decode(sim_runner(step_s=0.03))
        async with nodes.router(decode) as router, open_channel(decode.node.description.address) as channel:
            short = await router.start(router.message(prompt_of(5), max_tokens=4))
            long = await router.start(router.message(prompt_of(5), max_tokens=200))
            await until(lambda: short[0].tokens)
            stub = worker_pb2_grpc.NodeServiceStub(channel)
            drain = asyncio.create_task(_drain(stub, 0.4))
            await until(lambda: decode.node.status().state == pb.NODE_STATE_DRAINING)
            refused = await router.start(router.message(prompt_of(5)))
            await ended([*short, *long, *refused], 2)
            assert short[0].tokens == alone(prompt_of(5), 4)
            assert long[0].failure == refused[0].failure == "draining"
            assert await drain == pb.DrainReply(finished=1, cut_short=1)


async def _drain(stub: Any, timeout_s: float) -> pb.DrainReply:
    reply: pb.DrainReply = await stub.Drain(pb.DrainRequest(timeout_s=timeout_s))
    return reply


# -- cancels -----------------------------------------------------------------------------------------------------


@TRANSPORTS
@pytest.mark.parametrize("state", ["queued", "computing", "ungranted", "sending", "decoding", "local"])
async def test_cancel_in_each_state_frees_both_nodes_within_a_second(state: str, in_memory: bool) -> None:
    memory = pool_memory(32) if in_memory else None
    async with cluster() as nodes:
        faults = "before_send=sleep:0.3" if state == "sending" else ""
        runner = sim_runner(step_s=0.2 if state in ("queued", "computing") else 0.01)
        prefill = await nodes.prefill(runner, faults=faults, max_ungranted=1, engine={"max_num_batched_tokens": 16})
        decode = await nodes.decode(sim_runner(32, step_s=0.01, memory=memory), memory=memory)
        async with nodes.router(decode) as router:
            hog = router.message(prompt_of(100), max_tokens=20)
            if state == "ungranted":
                await router.start(hog)
                await until(lambda: decode.node.status().running_sequences)
            prompt = prompt_of(40, 1)
            message = router.message(prompt, [] if state == "local" else [prefill], max_tokens=60)
            streams = await router.start(message)
            if state == "queued":
                # A second one, behind the first.
                message = router.message(prompt_of(40, 2), [prefill], max_tokens=60)
                streams = await router.start(message)

            def is_there() -> Any:
                status, there = decode.node.status(), prefill.node.status()
                match state:
                    case "queued":
                        return there.waiting_sequences == 1 and there.in_flight == 2
                    case "computing":
                        return there.running_sequences == 1
                    case "ungranted":
                        return status.waiting_sequences == 1
                    case "sending":
                        return status.leases == 1
                return bool(streams[0].tokens)

            await until(is_there)
            await router.cancel(message)
            await ended(streams, 0.5)
            assert streams[0].finish_reason == pb.FINISH_REASON_CANCELLED
            if state == "ungranted":
                assert decode.node.status().waiting_sequences == 0
                await router.cancel(hog)
            if state != "queued":
                await idle(nodes.hosts, 1.0)
                assert await router.generate(prompt, [prefill]) == [alone(prompt, 6)]
            else:
                await until(lambda: prefill.node.status().in_flight == 1, 1.0)
                await router.cancel(router.message(prompt))
        await idle(nodes.hosts, 1.0)


async def test_two_hundred_cancels_at_random_times() -> None:
    chance = random.Random(4)
    memory = pool_memory(24)
    async with cluster() as nodes:
        prefill = await nodes.prefill(sim_runner(48, step_s=0.002))
        decode = await nodes.decode(sim_runner(24, step_s=0.002, memory=memory), memory=memory)
        async with nodes.router(decode) as router:

            async def one(seed: int) -> None:
                prompt = prompt_of(chance.randint(1, 40), seed % 5)
                targets = [prefill] if chance.random() < 0.8 else []
                await asyncio.sleep(chance.random())
                message = router.message(prompt, targets, n=chance.choice((1, 1, 3)), max_tokens=30, temperature=1.0)
                streams = await router.start(message)
                await asyncio.sleep(chance.random() * 0.3)
                await router.cancel(message)
                await ended(streams)

            await asyncio.gather(*map(one, range(200)))
            await idle(nodes.hosts, 1.5)
            assert await router.generate(prompt_of(40), [prefill]) == [alone(prompt_of(40), 6)]


@pytest.mark.parametrize("end", ["commits", "cancelled"])
async def test_a_stream_out_of_blocks_waits_for_the_hand_off_behind_it_and_then_goes_on(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    gate = threading.Event()
    runner = sim_runner(8)
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda *args, **more: (gate.wait(20), run(*args, **more))[1])
    async with cluster() as nodes:
        prefill = await nodes.prefill(faults=f"before_complete=sleep:{0.5 if end == 'commits' else 9}")
        decode = await nodes.decode(runner)
        admit_too_much(decode)
        async with nodes.router(decode) as router:
            first = await router.start(router.message(prompt_of(6), max_tokens=20))
            await until(lambda: decode.node.scheduler.num_running)
            (sequence,) = decode.node.scheduler._running
            # All that the first one does not hold yet is promised to the second one.
            message = router.message(prompt_of(22, 1), [prefill])
            second = await router.start(message)
            await until(lambda: decode.node.status().leases)
            gate.set()
            await until(lambda: len(first[0].tokens) >= 3)
            if end == "cancelled":
                await router.cancel(message)
            await ended(first, 8)
            await ended(second, 8)
            assert first[0].tokens == alone(prompt_of(6), 20)
            assert sequence.num_preemptions == 0
            if end == "commits":
                assert second[0].tokens == alone(prompt_of(22, 1), 6)
        await idle(nodes.hosts)


# -- nonsense ----------------------------------------------------------------------------------------------------


async def test_attempt_ids_in_use_and_other_epochs_are_refused_without_harm() -> None:
    async with cluster() as nodes:
        decode = await nodes.decode(sim_runner(step_s=0.02))
        async with nodes.router(decode) as router, nodes.router(decode) as other:
            message = router.message(prompt_of(5), max_tokens=60)
            streams = await router.start(message)
            await until(lambda: streams[0].tokens)  # On another connection, the copy could be there first.
            copied = await other.start(message)
            wrong = other.message(prompt_of(5))
            wrong.decode_node.epoch += 1
            stale = await other.start(wrong)
            # Another router's cancel must not reach it either.
            await other.cancel(message)
            await ended([*streams, *copied, *stale])
            assert copied[0].failure == "attempt_id_reused" and stale[0].failure == "epoch_mismatch"
            assert streams[0].tokens == alone(prompt_of(5), 60)


async def test_every_field_of_an_attempt_turned_into_nonsense_gets_an_answer() -> None:
    async with cluster() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        async with nodes.router(decode) as router:

            def changed(change: Callable[[pb.StartAttempt], Any]) -> pb.StartAttempt:
                message = router.message(prompt_of(9), [prefill], max_tokens=3)
                change(message)
                return message

            huge = 2**32 - 1
            changes: list[Callable[[pb.StartAttempt], Any]] = [
                lambda m: m.ClearField("attempt_id"),
                lambda m: m.ClearField("decode_node"),
                lambda m: m.ClearField("deadline_ms"),
                lambda m: m.ClearField("prompt_token_ids"),
                lambda m: m.ClearField("sampling"),
                lambda m: setattr(m, "attempt_id", "x\n" * 5000),
                lambda m: setattr(m, "request_id", "y" * 100_000),
                lambda m: setattr(m, "deadline_ms", huge),
                lambda m: m.prompt_token_ids.append(huge),
                lambda m: m.prompt_token_ids.extend([1] * 100_000),
                lambda m: setattr(m, "tenant_salt", b"\x00" * 100_000),
                lambda m: setattr(m, "local_prefill_threshold", huge),
                lambda m: setattr(m.sequences[0], "index", huge),
                lambda m: m.sequences[0].output_token_ids.append(huge),
                lambda m: m.sequences[0].output_token_ids.extend([1] * 500),
                lambda m: m.sequences.add(index=0),
                lambda m: m.sequences.extend([pb.SequenceStart(index=i) for i in range(2000)]),
                lambda m: setattr(m.prefill_nodes[0], "address", "no such place:xyz"),
                lambda m: setattr(m.prefill_nodes[0], "address", ""),
                lambda m: setattr(m.prefill_nodes[0], "address", "127.0.0.1:1"),
                lambda m: m.prefill_nodes[0].ClearField("identity"),
                lambda m: setattr(m.sampling, "temperature", float("nan")),
                lambda m: setattr(m.sampling, "top_p", float("inf")),
                lambda m: setattr(m.sampling, "top_k", huge),
                lambda m: setattr(m.sampling, "seed", 2**64 - 1),
                lambda m: setattr(m.sampling, "max_tokens", 0),
                lambda m: setattr(m.sampling, "max_tokens", huge),
                lambda m: setattr(m.sampling, "min_tokens", huge),
                lambda m: m.sampling.stop_token_ids.append(huge),
                lambda m: m.sampling.eos_token_ids.append(huge),
                lambda m: m.sampling.logit_bias.update({huge: 1.0}),
                lambda m: m.sampling.logit_bias.update({1: float("nan")}),
                lambda m: setattr(m.sampling, "logprobs", huge),
                lambda m: setattr(m.sampling, "prompt_logprobs", huge),
            ]
            for change in changes:
                message = changed(change)
                streams = await router.start(message)
                await ended(streams[:1], 3)
            await router.send(pb.SessionCommand())
            await router.send(pb.SessionCommand(cancel=pb.CancelAttempt(attempt_id="nobody")))
            assert await router.generate(prompt_of(9), [prefill]) == [alone(prompt_of(9), 6)]
            assert decode.node.counters.messages_ignored >= 2


async def test_a_session_must_begin_with_hello_to_this_incarnation() -> None:
    async with cluster() as nodes:
        decode = await nodes.decode()
        async with open_channel(decode.node.description.address) as channel:
            wrong = pb.NodeIdentity(node_id=decode.node.description.identity.node_id, epoch=1)
            for first, code in (
                (pb.SessionCommand(), grpc.StatusCode.INVALID_ARGUMENT),
                (pb.SessionCommand(hello=pb.SessionHello(decode_node=wrong)), grpc.StatusCode.FAILED_PRECONDITION),
            ):
                call = worker_pb2_grpc.DecodeServiceStub(channel).Session()
                await call.write(first)
                assert await call.code() is code


Write = Callable[[pb.HandoffEvent], Awaitable[None]]
FAKE = pb.NodeIdentity(node_id="fake", epoch=1)
ACCEPTED = pb.HandoffEvent(accepted=pb.Accepted(identity=FAKE, transport=pb.TRANSPORT_KIND_GRPC))
STARTED = pb.HandoffEvent(started=pb.Started(blocks_to_send=3))
_UNKNOWN: Any = 99
TOKENS = pb.HandoffEvent(first_tokens=pb.FirstTokens(tokens=[pb.FirstToken(token_id=7)]))


def _accepted(**fields: Any) -> pb.HandoffEvent:
    return pb.HandoffEvent(accepted=pb.Accepted(**{"identity": FAKE, **fields}))


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([], "prefill_lost"),
        ([pb.HandoffEvent()], "prefill_lost"),
        ([_accepted(transport=pb.TRANSPORT_KIND_TORCH_DISTRIBUTED), STARTED], "bad_transport"),
        ([_accepted(transport=pb.TRANSPORT_KIND_UNSPECIFIED), STARTED], "bad_transport"),
        ([_accepted(transport=77), STARTED], "bad_transport"),
        ([_accepted(transport=pb.TRANSPORT_KIND_SHARED_MEMORY), STARTED], "bad_transport"),
        ([_accepted(transport=pb.TRANSPORT_KIND_SHARED_MEMORY, pid=1), STARTED], "bad_transport"),
        ([_accepted(identity=pb.NodeIdentity(node_id="fake", epoch=2)), STARTED], "epoch_mismatch"),
        ([ACCEPTED, pb.HandoffEvent(started=pb.Started(blocks_to_send=9))], "block_count_mismatch"),
        ([ACCEPTED, pb.HandoffEvent(block=pb.BlockPiece())], "block_before_grant"),
        (
            [
                ACCEPTED,
                STARTED,
                pb.HandoffEvent(first_tokens=pb.FirstTokens(tokens=[pb.FirstToken(sequence_index=5, token_id=7)])),
            ],
            "first_tokens_mismatch",
        ),
        (
            [ACCEPTED, STARTED, pb.HandoffEvent(first_tokens=pb.FirstTokens(tokens=[pb.FirstToken(token_id=2**31)]))],
            "bad_first_token",
        ),
        ([ACCEPTED, STARTED, None, pb.HandoffEvent(complete=pb.Complete())], "no_first_token"),
        ([ACCEPTED, STARTED, None, TOKENS, pb.HandoffEvent(complete=pb.Complete())], "bad_complete"),
        ([ACCEPTED, STARTED, None, pb.HandoffEvent(block=pb.BlockPiece(block_index=2**31))], "bad_piece"),
        ([ACCEPTED, STARTED, None, pb.HandoffEvent(block=pb.BlockPiece(payload=b"x" * 9999))], "bad_piece"),
        (
            [
                ACCEPTED,
                pb.HandoffEvent(
                    prompt_logprobs=pb.PromptLogprobs(tokens=[pb.TokenLogprobs(entries=[pb.TokenLogprob(rank=0)])])
                ),
            ],
            "bad_logprobs",
        ),
        ([ACCEPTED, pb.HandoffEvent(failed=pb.Error(kind=_UNKNOWN, reason="prefix_lost"))], "prefix_lost"),
        ([ACCEPTED, pb.HandoffEvent(failed=pb.Error(kind=pb.ERROR_KIND_INTERNAL, reason="A B\n"))], "unknown"),
        ([ACCEPTED, STARTED, ACCEPTED, STARTED, None, None], "prefill_lost"),
    ],
)
@TRANSPORTS
async def test_a_prefill_node_that_talks_nonsense_costs_only_its_own_try(
    events: list[pb.HandoffEvent | None], reason: str, in_memory: bool
) -> None:
    async def script(commands: AsyncIterator[pb.HandoffCommand], write: Write) -> None:
        for event in events:
            if event is None:  # wait for the grant
                await asyncio.wait_for(anext(aiter(commands), None), 0.2)
            else:
                await write(event)

    async def careful(commands: AsyncIterator[pb.HandoffCommand], write: Write) -> None:
        with contextlib.suppress(TimeoutError):  # It is about to leave anyway.
            await script(commands, write)

    memory = pool_memory(64) if in_memory else None
    async with cluster() as nodes:
        decode = await nodes.decode(sim_runner(step_s=0.002, memory=memory), memory=memory)
        target, fake = await nodes.fake_prefill(careful)
        async with nodes.router(decode) as router:
            stranger = asyncio.create_task(router.generate(prompt_of(5), max_tokens=40))
            streams = await router.start(router.message(prompt_of(11), [target]))
            await ended(streams, 3)
            assert len(streams[0].tokens) == 6
            if TOKENS not in events:
                assert streams[0].tokens == alone(prompt_of(11), 6)
            assert await stranger == [alone(prompt_of(5), 40)]
        assert dict(decode.node.counters.failures) == {reason: 1}
        assert len(fake.opened) == 1 and decode.node.counters.local_prefills == 2


@TRANSPORTS
async def test_a_mistake_of_our_own_ends_one_try_and_no_block_is_lost(
    monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    def crash(self: BlockReceiver, piece: pb.BlockPiece) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(BlockReceiver, "accept", crash)
    memory = pool_memory(64) if in_memory else None
    async with cluster() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode(sim_runner(memory=memory), memory=memory)
        async with nodes.router(decode) as router:
            assert await router.generate(prompt_of(22), [prefill]) == [alone(prompt_of(22), 6)]
        assert decode.node.counters.failures == {"internal": 1}


async def test_an_attempt_that_crashes_at_its_start_does_not_break_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster() as nodes:
        decode = await nodes.decode()
        async with nodes.router(decode) as router:
            with monkeypatch.context() as patch:
                patch.setattr(decode.node.scheduler, "reusable_blocks", lambda sequence: 1 / 0)
                streams = await router.start(router.message(prompt_of(5)))
                await ended(streams)
            assert streams[0].failure == "internal"
            assert await router.generate(prompt_of(5)) == [alone(prompt_of(5), 6)]


async def test_a_prefix_evicted_before_the_grant_is_asked_for_again_from_the_same_node() -> None:
    async with cluster() as nodes:
        prefill, decode = await nodes.prefill(sim_runner(step_s=0.1)), await nodes.decode()
        async with nodes.router(decode) as router:
            await router.generate(prompt_of(22))
            stranger = await router.start(router.message(prompt_of(9), [prefill]))
            await until(lambda: prefill.node.status().running_sequences)
            streams = await router.start(router.message(prompt_of(22), [prefill]))
            await until(lambda: prefill.node.status().waiting_sequences)
            # Everything is evicted before prefill begins.
            decode.node.pool.release(decode.node.pool.allocate(decode.node.pool.num_allocatable))
            await ended([*stranger, *streams])
            assert streams[0].tokens == alone(prompt_of(22), 6)
        counters = decode.node.counters
        assert counters.local_prefills == 1 and counters.transfers_committed == 2
        assert counters.failures == {"prefix_lost": 1}
