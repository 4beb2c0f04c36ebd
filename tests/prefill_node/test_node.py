"""A prefill node alone, driven over real gRPC by a decode side that may be slow, wrong or gone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from ctypes import c_int64
from typing import Any

import grpc
import pytest
import torch

from engine.config import EngineConfig, NodeConfig
from engine.forward_batch import ForwardBatch
from engine.sampling_params import SamplingParams
from engine.sim_runner import SimCost, SimRunner
from kv_transfer.channels import open_channel
from kv_transfer.wire import fingerprint_to_wire, sampling_to_wire
from prefill_node.config import PrefillConfig
from proto import worker_pb2 as pb
from proto import worker_pb2_grpc
from tests.node_cluster import SIM_LAYOUT, Host, alone, cluster, idle, pool_memory, sim_runner, until

PROMPT = list(range(10, 32))
_UNKNOWN: Any = 99
GREEDY = sampling_to_wire(SamplingParams(temperature=0.0, max_tokens=4))


class Decode:
    """The decode side of one hand-off, by hand."""

    def __init__(self, host: Host, channel: grpc.aio.Channel) -> None:
        self.host = host
        self.stub = worker_pb2_grpc.PrefillServiceStub(channel)
        self.events: list[pb.HandoffEvent] = []

    def message(self, attempt_id: str = "a" * 32, prompt: Sequence[int] = PROMPT, **fields: Any) -> pb.OpenHandoff:
        return pb.OpenHandoff(
            **{
                "attempt_id": attempt_id,
                "decode_node": pb.NodeIdentity(node_id="decode", epoch=1),
                "prefill_node": self.host.node.description.identity,
                "deadline_ms": 10_000,
                "fingerprint": fingerprint_to_wire(sim_runner(1).fingerprint),
                "token_ids": prompt,
                "prompt_length": len(prompt),
                "sampling": GREEDY,
                "sequence_indices": [0],
                "transports": [pb.TRANSPORT_KIND_GRPC],
                **fields,
            }
        )

    async def open(self, message: pb.OpenHandoff) -> Decode:
        self.call = self.stub.Handoff()
        await self.send(open=message)
        return self

    async def send(self, **command: Any) -> None:
        await self.call.write(pb.HandoffCommand(**command))

    async def grant(self, block_ids: Sequence[int]) -> None:
        await self.send(grant=pb.Grant(block_ids=block_ids))

    async def hear(self, *names: str, timeout_s: float = 3.0) -> pb.HandoffEvent:
        """Read on until one of these events, which it returns."""
        async with asyncio.timeout(timeout_s):
            while True:
                event: pb.HandoffEvent = await self.call.read()
                assert event is not grpc.aio.EOF, f"the stream ended before {names}"
                self.events.append(event)
                if event.WhichOneof("event") in names:
                    return event

    async def end(self, timeout_s: float = 3.0) -> grpc.StatusCode:
        """Read to the end of the stream."""
        async with asyncio.timeout(timeout_s):
            with contextlib.suppress(grpc.aio.AioRpcError):  # The code says it too.
                while (event := await self.call.read()) is not grpc.aio.EOF:
                    self.events.append(event)
            code: grpc.StatusCode = await self.call.code()
            return code

    async def failure(self) -> str:
        """The reason that the stream ends with."""
        assert await self.end() is grpc.StatusCode.OK
        last = self.events[-1]
        assert last.WhichOneof("event") == "failed", last
        return last.failed.reason


@contextlib.asynccontextmanager
async def decode_side(host: Host) -> AsyncIterator[Callable[[], Decode]]:
    async with open_channel(host.node.description.address) as channel:
        yield lambda: Decode(host, channel)


async def test_the_straight_way_message_by_message() -> None:
    async with cluster() as nodes:
        host = await nodes.prefill(engine={"max_num_batched_tokens": 8})
        async with decode_side(host) as decode:
            side = decode()
            await side.open(side.message())
            started = await side.hear("started")
            assert side.events[0].WhichOneof("event") == "accepted"
            assert started.started == pb.Started(blocks_to_send=6, cached_tokens=0)
            # Computing does not wait for the grant, and the first token does not wait for the blocks.
            first = await side.hear("first_tokens")
            assert [token.token_id for token in first.first_tokens.tokens] == alone(PROMPT, 1)
            assert host.node.status().leases == 1
            await side.grant(range(6))
            complete = (await side.hear("complete")).complete
            assert (complete.num_tokens, complete.blocks_sent, complete.num_layers) == (22, 6, 2)
            blocks = [event.block for event in side.events if event.HasField("block")]
            assert [block.block_index for block in blocks] == list(range(6))
            # Nothing is let go of before decode has committed.
            assert host.node.status().blocks.in_use == 6
            await side.send(committed=pb.Committed())
            assert await side.end() is grpc.StatusCode.OK
            await idle([host])
            assert host.node.counters.transfers_committed == 1
            # Again: all but the last token is cached, and three blocks need not be sent.
            again = decode()
            await again.open(again.message("b" * 32, blocks_held=3))
            assert (await again.hear("started")).started == pb.Started(blocks_to_send=3, cached_tokens=20)
            await again.grant(range(3))
            await again.hear("complete")
            assert [e.block.block_index for e in again.events if e.HasField("block")] == [3, 4, 5]
            await again.send(abort=pb.AbortHandoff(reason="enough"))
            await again.end()


@pytest.mark.parametrize("block_ids", [[], [1], list(range(7))])
async def test_grant_of_another_size_fails_by_name(block_ids: list[int]) -> None:
    async with cluster() as nodes:
        host = await nodes.prefill()
        async with decode_side(host) as decode:
            side = await decode().open(decode().message())
            await side.hear("started")
            await side.grant(block_ids)
            assert await side.failure() == "grant_count_mismatch"


async def test_grant_outside_the_peer_pool_fails_by_name_and_writes_nothing() -> None:
    memory = pool_memory(8)
    async with cluster() as nodes:
        host = await nodes.prefill()
        async with decode_side(host) as decode:
            side = decode()
            await side.open(side.message(transports=[pb.TRANSPORT_KIND_SHARED_MEMORY], shared_memory=memory.offer()))
            await side.hear("started")
            await side.grant([8, 9, 10, 11, 12, 2**31])
            assert await side.failure() == "bad_grant"
            assert not any(memory.view)
    memory.close()


async def test_a_decode_node_that_falls_silent_loses_its_lease() -> None:
    async with cluster() as nodes:
        host = await nodes.prefill(lease_s=0.4)
        async with decode_side(host) as decode:
            silent, renewing = decode(), decode()
            await silent.open(silent.message("a" * 32))
            await renewing.open(renewing.message("b" * 32))
            for _ in range(8):
                await asyncio.sleep(0.1)
                await renewing.send(renew=pb.RenewLease())
            assert await silent.failure() == "lease_expired"
            assert host.node.status().leases == 1
            renewing.call.cancel()
            await idle([host], 1.0)


async def test_deadline_ends_it_in_each_state() -> None:
    async with cluster() as nodes:
        host = await nodes.prefill(max_ungranted=1)
        async with decode_side(host) as decode:
            ungranted = await decode().open(decode().message("a" * 32, deadline_ms=400))
            await ungranted.hear("first_tokens")
            queued = await decode().open(decode().message("b" * 32, deadline_ms=200))
            at_once = await decode().open(decode().message("c" * 32, deadline_ms=0))
            for side in (queued, at_once, ungranted):
                assert await side.failure() == "handoff_deadline"
        assert host.node.counters.failures == {"handoff_deadline": 3}


async def test_gone_at_any_moment_frees_everything_within_a_second() -> None:
    async with cluster() as nodes:
        host = await nodes.prefill(sim_runner(step_s=0.05), engine={"max_num_batched_tokens": 8})
        async with decode_side(host) as decode:
            for name in ("accepted", "started", "first_tokens", "block", "complete"):
                side = decode()
                await side.open(side.message(name, [*PROMPT, len(name)]))
                await side.hear("accepted" if name == "accepted" else "started")
                if name in ("block", "complete"):
                    await side.grant(range(6))
                if name not in ("accepted", "started"):
                    await side.hear(name)
                side.call.cancel()
                await idle([host], 1.0)
            # A closed half of the stream counts as gone too: no commit can follow.
            side = await decode().open(decode().message("half"))
            await side.hear("started")
            await side.call.done_writing()
            assert await side.end() is grpc.StatusCode.OK
            await idle([host], 1.0)


async def test_waiting_for_a_turn_to_send_is_not_silence() -> None:
    async with cluster() as nodes:
        host = await nodes.prefill(max_sending_per_peer=1)
        async with decode_side(host) as decode:
            slot = host.node.peer_slot(("decode", 1))
            await slot.acquire()
            side = await decode().open(decode().message())
            await side.hear("first_tokens")
            await side.grant(range(6))
            for _ in range(3):
                await side.hear("progress", timeout_s=1.0)
            slot.release()
            await side.hear("complete")
            side.call.cancel()


async def test_queue_and_attempt_ids_are_guarded() -> None:
    async with cluster() as nodes:
        host = await nodes.prefill(max_ungranted=1, max_waiting=1)
        async with decode_side(host) as decode:
            first = await decode().open(decode().message("a"))
            await first.hear("started")
            second = await decode().open(decode().message("b"))
            await second.hear("accepted")
            assert await (await decode().open(decode().message("c"))).failure() == "prefill_queue_full"
            second.call.cancel()
            await until(lambda: host.node.status().in_flight == 1)
            assert await (await decode().open(decode().message("a"))).failure() == "attempt_id_reused"
            assert await (await decode().open(decode().message(""))).failure() == "attempt_id_reused"
            assert host.node.status().in_flight == 1
            first.call.cancel()


async def test_fence_says_whether_an_attempt_may_still_write() -> None:
    async with cluster() as nodes:
        host = await nodes.prefill()
        async with decode_side(host) as decode:
            side = await decode().open(decode().message("a"))
            await side.hear("started")
            identity = host.node.description.identity

            async def is_stopped(**fields: Any) -> bool:
                request = pb.FenceRequest(**{"attempt_id": "a", "prefill_node": identity, **fields})
                return bool((await side.stub.Fence(request)).stopped)

            assert not await is_stopped()
            assert await is_stopped(attempt_id="unknown")
            other = pb.NodeIdentity(node_id=identity.node_id, epoch=identity.epoch + 1)
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await is_stopped(prefill_node=other)
            assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            side.call.cancel()
            await idle([host])
            assert await is_stopped()


async def test_every_field_turned_into_nonsense_gets_an_answer() -> None:
    huge = 2**32 - 1
    memory = pool_memory(8)
    changes: list[Callable[[pb.OpenHandoff], Any]] = [
        lambda m: m.ClearField("prefill_node"),
        lambda m: m.ClearField("decode_node"),
        lambda m: m.ClearField("fingerprint"),
        lambda m: m.ClearField("token_ids"),
        lambda m: m.ClearField("sampling"),
        lambda m: m.ClearField("sequence_indices"),
        lambda m: m.ClearField("transports"),
        lambda m: setattr(m, "attempt_id", "x\n" * 5000),
        lambda m: setattr(m, "request_id", "y" * 100_000),
        lambda m: setattr(m, "deadline_ms", huge),
        lambda m: setattr(m, "prompt_length", 0),
        lambda m: setattr(m, "prompt_length", huge),
        lambda m: setattr(m, "blocks_held", huge),
        lambda m: setattr(m, "blocks_held", 6),
        lambda m: setattr(m, "tenant_salt", b"\x00" * 100_000),
        lambda m: m.token_ids.append(huge),
        lambda m: m.token_ids.extend([1] * 200_000),
        lambda m: m.sequence_indices.append(0),
        lambda m: m.sequence_indices.extend(range(1, 100_000)),
        lambda m: m.transports.extend((pb.TRANSPORT_KIND_TORCH_DISTRIBUTED, _UNKNOWN)),
        lambda m: m.transports.__setitem__(slice(None), [_UNKNOWN]),
        lambda m: m.transports.append(pb.TRANSPORT_KIND_SHARED_MEMORY),
        lambda m: setattr(m.fingerprint, "kv_dtype", "z" * 5000),
        lambda m: setattr(m.fingerprint, "num_layers", huge),
        lambda m: setattr(m.fingerprint, "protocol_version", 99),
        lambda m: setattr(m.sampling, "temperature", float("nan")),
        lambda m: setattr(m.sampling, "max_tokens", 0),
        lambda m: m.sampling.stop_token_ids.append(huge),
        lambda m: m.sampling.logit_bias.update({huge: 1.0}),
        lambda m: setattr(m.sampling, "prompt_logprobs", huge),
    ]
    for field, value in (
        ("pid", 1),
        ("pid", huge),
        ("fd", 0),
        ("size_bytes", 7),
        ("size_bytes", 2**63),
        ("nonce", b""),
    ):

        def offer(message: pb.OpenHandoff, field: str, value: Any) -> None:
            message.transports.append(pb.TRANSPORT_KIND_SHARED_MEMORY)
            message.shared_memory.CopyFrom(memory.offer())
            setattr(message.shared_memory, field, value)

        changes.append(functools.partial(offer, field=field, value=value))
    async with cluster() as nodes:
        host = await nodes.prefill()
        async with decode_side(host) as decode:
            for number, change in enumerate(changes):
                side = decode()
                message = side.message(f"attempt-{number}")
                change(message)
                await side.open(message)
                try:
                    await side.hear("started", "failed")
                except (AssertionError, grpc.aio.AioRpcError):
                    assert await side.call.code() in (
                        grpc.StatusCode.FAILED_PRECONDITION,
                        grpc.StatusCode.INVALID_ARGUMENT,
                    )
                side.call.cancel()
            for first in (pb.HandoffCommand(), pb.HandoffCommand(committed=pb.Committed())):
                side = decode()
                side.call = side.stub.Handoff()
                await side.call.write(first)
                assert await side.end() is grpc.StatusCode.INVALID_ARGUMENT
            # Out of order and unknown commands are counted.
            side = await decode().open(decode().message("last"))
            await side.send(committed=pb.Committed())
            await side.call.write(pb.HandoffCommand())
            await side.hear("started")
            await side.send(open=side.message("again"))
            await side.grant(range(6))
            await side.grant(range(6))
            await side.hear("complete")
            await side.send(committed=pb.Committed())
            assert await side.end() is grpc.StatusCode.OK
            assert host.node.counters.messages_ignored >= 4
    memory.close()


async def test_a_system_prompt_of_three_requests_that_come_together_is_computed_once() -> None:
    system = list(range(100, 142))
    prompts = [[*system, 200 + number, 7, 7] for number in range(3)]
    async with cluster() as nodes:
        host = await nodes.prefill(sim_runner(128, step_s=0.02), engine={"max_num_batched_tokens": 16})
        async with decode_side(host) as decode:
            sides = [await decode().open(decode().message(str(i), prompt)) for i, prompt in enumerate(prompts)]
            cached = [(await side.hear("started")).started.cached_tokens for side in sides]
            for side, prompt in zip(sides, prompts, strict=True):
                first = (await side.hear("first_tokens")).first_tokens
                assert [token.token_id for token in first.tokens] == alone(prompt, 1)
            # 42 tokens in common are ten full blocks of four.
            assert sorted(cached) == [0, 40, 40]
            status = host.node.status()
            assert status.prefill_tokens_computed == 45 + 2 * 5
            assert status.prefill_tokens_cached == 80
            for side in sides:
                side.call.cancel()


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_who_waits_for_a_prefix_takes_over_when_its_hand_off_ends(how: str) -> None:
    system = list(range(100, 140))
    # A step that meets token 500 raises, and ends the hand-off whose step it was.
    first_prompt = [*system, 500 if how == "failed" else 1, 7]
    async with cluster() as nodes:
        host = await nodes.prefill(poisoned(step_s=0.05), engine={"max_num_batched_tokens": 16})
        async with decode_side(host) as decode:
            first = await decode().open(decode().message("first", first_prompt))
            await first.hear("started")
            second = await decode().open(decode().message("second", [*system, 2, 7]))
            await second.hear("accepted")
            if how == "failed":
                assert await first.failure() == "step_failed"
            else:
                first.call.cancel()
            tokens = (await second.hear("first_tokens")).first_tokens.tokens
            assert [token.token_id for token in tokens] == alone([*system, 2, 7], 1)
            assert host.node.status().prefill_tokens_computed <= len(first_prompt) + 16 + 2
            second.call.cancel()


async def test_a_short_prompt_is_answered_while_a_long_one_computes() -> None:
    async with cluster() as nodes:
        host = await nodes.prefill(sim_runner(256, step_s=0.02), engine={"max_num_batched_tokens": 16})
        async with decode_side(host) as decode:
            long = await decode().open(decode().message("long", range(480)))
            await long.hear("started")
            short = await decode().open(decode().message("short", [301, 302]))
            await short.hear("first_tokens")
            (job,) = [job for job in host.node.scheduler._computing if job.attempt_id == "long"]
            assert not job.is_computed, "thirty steps of the long prompt did not come first"
            for side in (short, long):
                side.call.cancel()


def test_an_unknown_policy_is_named() -> None:
    node = NodeConfig(engine=EngineConfig(model="x"))
    with pytest.raises(ValueError, match="scheduling_policy must be one of fcfs, priority, not 'lottery'"):
        PrefillConfig(node, scheduling_policy="lottery")  # type: ignore[arg-type]


async def test_priority_comes_over_the_wire() -> None:
    async with cluster() as nodes:
        host = await nodes.prefill(sim_runner(step_s=0.05), engine={"max_num_batched_tokens": 8})
        async with decode_side(host) as decode:
            busy = await decode().open(decode().message("busy"))
            await busy.hear("started")
            usual = await decode().open(decode().message("usual", range(40, 50), priority=2))
            urgent = await decode().open(decode().message("urgent", range(60, 80), priority=-1))
            await urgent.hear("first_tokens")
            assert not host.node._senders["usual"].job.is_computed, "the longer, later, but more urgent one came first"
            await usual.hear("first_tokens")
            for side in (busy, usual, urgent):
                side.call.cancel()


class Poisoned(SimRunner):
    """Raises for one token, and gives NaN for another."""

    def run(self, batch: ForwardBatch, *, layers_done: c_int64 | None = None) -> torch.Tensor:
        if 500 in batch.token_ids.tolist():
            raise ValueError("poison")
        logits = super().run(batch, layers_done=layers_done)
        for index, token_id in enumerate(batch.token_ids[batch.logits_rows].tolist()):
            if token_id == 499:
                logits[index] = torch.nan
        return logits


def poisoned(*, step_s: float = 0.0) -> Poisoned:
    return Poisoned(num_blocks=64, layout=SIM_LAYOUT, cost=SimCost(step_s=step_s))


async def test_a_step_that_raises_ends_its_own_hand_offs_only() -> None:
    async with cluster() as nodes:
        host = await nodes.prefill(poisoned())
        async with decode_side(host) as decode:
            bad = await decode().open(decode().message("a", [1, 2, 500]))
            assert await bad.failure() == "step_failed"
            good = await decode().open(decode().message("b"))
            await good.hear("first_tokens")
            good.call.cancel()


@pytest.mark.parametrize("scored", [True, False])
async def test_logits_that_are_not_finite_end_one_hand_off_only(scored: bool) -> None:
    sampling = sampling_to_wire(SamplingParams(max_tokens=4, prompt_logprobs=0 if scored else None))
    async with cluster() as nodes:
        host = await nodes.prefill(poisoned(), engine={"max_num_batched_tokens": 64})
        async with decode_side(host) as decode:
            # Both wait for the first, then share a step.
            busy = await decode().open(decode().message("first", range(60)))
            bad = await decode().open(decode().message("a", [1, 2, 499], sampling=sampling))
            good = await decode().open(decode().message("b"))
            assert await bad.failure() == "nonfinite_logits"
            for side in (busy, good):
                await side.hear("first_tokens")
                side.call.cancel()


async def test_logits_that_are_not_finite_end_one_attempt_only_on_decode() -> None:
    async with cluster() as nodes:
        decode = await nodes.decode(poisoned())
        async with nodes.router(decode) as router:
            streams = [
                await router.start(router.message(prompt, prompt_logprobs=scored))
                for prompt, scored in (([1, 2, 499], 0), ([1, 2, 499], None), (PROMPT, 0))
            ]
            for (stream,) in streams:
                await asyncio.wait_for(stream.ended.wait(), 3)
            assert [stream.failure for (stream,) in streams[:2]] == ["nonfinite_logits"] * 2
            assert streams[2][0].tokens == alone(PROMPT, 6)


async def test_a_hung_step_is_shown_and_falls_silent() -> None:
    async with cluster() as nodes:
        host = await nodes.prefill(faults="after_chunk=sleep:1.2", progress_deadline_s=0.3)
        async with decode_side(host) as decode:
            side = await decode().open(decode().message())
            await until(lambda: host.node.status().state == pb.NODE_STATE_STALLED, 1.0)
            await asyncio.sleep(0.3)
            heard = len(side.events)
            with pytest.raises(TimeoutError):
                await side.hear("progress", timeout_s=0.3)
            assert [event.WhichOneof("event") for event in side.events[heard:]] in ([], ["accepted", "started"])
        await until(lambda: host.node.status().state == pb.NODE_STATE_READY, 3.0)


async def test_drain_refuses_finishes_and_cuts_short() -> None:
    async with cluster() as nodes:
        host = await nodes.prefill()
        async with decode_side(host) as decode:
            stuck = await decode().open(decode().message("a"))
            ready = await decode().open(decode().message("b", list(range(50, 60))))
            await ready.hear("first_tokens")
            drain = asyncio.create_task(host.node.drain(0.5))
            await asyncio.sleep(0.05)
            assert await (await decode().open(decode().message("c"))).failure() == "draining"
            await ready.grant(range(3))
            await ready.hear("complete")
            await ready.send(committed=pb.Committed())
            assert await ready.end() is grpc.StatusCode.OK
            assert await drain == (1, 1)
            assert await stuck.failure() == "draining"


async def test_times_that_are_no_numbers_do_no_harm() -> None:
    async with cluster() as nodes:
        host = await nodes.prefill()
        async with open_channel(host.node.description.address) as channel:
            stub = worker_pb2_grpc.NodeServiceStub(channel)
            for interval_s in (float("nan"), float("inf"), -1.0):
                watch = stub.Watch(pb.WatchRequest(interval_s=interval_s))
                assert (await watch.read()).state == pb.NODE_STATE_READY
                watch.cancel()
            assert (await stub.Drain(pb.DrainRequest(timeout_s=float("nan")), timeout=2)).cut_short == 0
            assert (await stub.Describe(pb.DescribeRequest())).role == pb.ROLE_PREFILL
            assert (await stub.GetStatus(pb.DescribeRequest())).state == pb.NODE_STATE_DRAINING
