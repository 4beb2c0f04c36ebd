"""Requests through a router to fake nodes: continuity over failures, cancellation at every stage, no leaks."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import pytest

from engine.errors import DeadlinePassed, InvalidRequest, Overloaded, PdserveError, Unavailable
from engine.tokens import FinishReason
from proto import worker_pb2 as pb
from router.admission import WAITING_POOLS, Outcome
from router.beam_search import BeamSearch
from router.node import NodeHealth
from tests.router.cluster_harness import (
    PROGRESS_DEADLINE_S,
    collect,
    expected,
    make_request,
    running_cluster,
    until,
)

BUSY = pb.Error(kind=pb.ERROR_KIND_BUSY, reason="queue_full", message="full")
ELSEWHERE = pb.Error(kind=pb.ERROR_KIND_TRY_ELSEWHERE, reason="digest_mismatch", message="broken")
INTERNAL = pb.Error(kind=pb.ERROR_KIND_INTERNAL, reason="internal", message="bug")
INVALID = pb.Error(kind=pb.ERROR_KIND_INVALID, reason="invalid_request", message="bad")
DEADLINE = pb.Error(kind=pb.ERROR_KIND_DEADLINE, reason="deadline", message="late")


async def test_tokens_arrive_in_order_with_one_finish_reason() -> None:
    async with running_cluster(prefill=1) as harness:
        request = make_request()
        generation = await harness.cluster.generate(request)
        received = await collect(generation)
        assert received.tokens == {0: expected(request)}
        assert received.reasons == {0: FinishReason.LENGTH}
        assert generation.facts.attempts == 1
        assert generation.facts.decode_node_id == "decode-0"
        assert generation.facts.prefill_node_id == "prefill-0"
        times = generation.facts.times
        assert times.queue_s is not None and 0.25 <= times.queue_s < 0.5
        assert times.prefill_s == 0.5
        assert times.decode_s is not None and times.decode_s > 0.0
        assert harness.cluster.admission.outcomes[Outcome.FINISHED] == 1


async def test_start_attempt_carries_the_whole_request() -> None:
    async with running_cluster(prefill=2, local_prefill_threshold=5) as harness:
        await harness.run(make_request(tenant_salt=b"salt", seed=99, deadline_s=20.0))
        (start,) = harness.nodes["decode-0"].starts
        assert start.tenant_salt == b"salt"
        assert start.sampling.seed == 99
        assert start.local_prefill_threshold == 5
        assert 19_000 < start.deadline_ms <= 20_000
        assert len(start.attempt_id) == 32
        targets = {(target.identity.node_id, target.address) for target in start.prefill_nodes}
        assert targets == {(f"prefill-{i}", harness.nodes[f"prefill-{i}"].address) for i in range(2)}


async def test_several_sequences_go_in_one_attempt() -> None:
    async with running_cluster() as harness:
        request = make_request(n=3)
        received = await harness.run(request)
        assert received.tokens == {index: expected(request, index) for index in range(3)}
        assert len(received.reasons) == 3
        assert len(harness.nodes["decode-0"].starts) == 1


async def test_a_stream_goes_on_when_its_node_dies() -> None:
    async with running_cluster(decode=2) as harness:
        request = make_request(max_tokens=20)
        for node in harness.nodes.values():
            node.does.die_after_tokens = 7
        generation = await harness.cluster.generate(request)
        first = harness.serving(generation)
        for node in harness.nodes.values():
            if node is not first:
                node.does.die_after_tokens = None
        received = await collect(generation)
        assert first.is_dead
        assert received.tokens == {0: expected(request)}
        assert generation.facts.attempts == 2
        moved = harness.serving(generation).starts[0]
        assert list(moved.sequences[0].output_token_ids) == expected(request)[:7]
        assert moved.sampling.max_tokens == 20
        assert harness.cluster.counters.failovers == 1


async def test_each_sequence_moves_alone_once_it_has_output() -> None:
    async with running_cluster(decode=2) as harness:
        request = make_request(max_tokens=10, n=3)
        for node in harness.nodes.values():
            node.does.hold_after_tokens = 4
        generation = await harness.cluster.generate(request)
        first = harness.serving(generation)
        await until(lambda: first.tokens_sent == 12)
        for node in harness.nodes.values():
            node.does.hold_after_tokens = None if node is not first else 4
        await asyncio.sleep(0.05)
        await first.die()
        received = await collect(generation)
        assert received.tokens == {index: expected(request, index) for index in range(3)}
        second = harness.serving(generation)
        assert sorted(len(start.sequences) for start in second.starts) == [1, 1, 1]
        assert len({start.attempt_id for start in (*first.starts, *second.starts)}) == 4


async def test_fresh_sequences_move_together() -> None:
    async with running_cluster(decode=2) as harness:
        request = make_request(n=4)
        for node in harness.nodes.values():
            node.does.refusals = [ELSEWHERE]
        received = await harness.run(request)
        assert received.tokens == {index: expected(request, index) for index in range(4)}
        sizes = [len(start.sequences) for node in harness.nodes.values() for start in node.starts]
        assert sizes == [4] * len(sizes) and 2 <= len(sizes) <= 3


async def test_a_frozen_node_loses_its_requests_within_the_progress_deadline() -> None:
    async with running_cluster(decode=2) as harness:
        request = make_request(max_tokens=30)
        for node in harness.nodes.values():
            node.does.token_delay_s = 0.005
        generation = await harness.cluster.generate(request)
        first = harness.serving(generation)
        await until(lambda: first.tokens_sent >= 3)
        first.freeze()
        frozen_at = time.monotonic()
        received = await collect(generation)
        assert received.tokens == {0: expected(request)}
        assert time.monotonic() - frozen_at < 2 * PROGRESS_DEADLINE_S + 0.5
        assert harness.health(first.node_id) is NodeHealth.UNREACHABLE
        first.thaw()
        await harness.ready()
        await until(lambda: not first.live_attempts)


async def test_a_node_without_steps_is_stalled_and_fenced() -> None:
    async with running_cluster(decode=2) as harness:
        request = make_request(max_tokens=12)
        for node in harness.nodes.values():
            node.does.hold_after_tokens = 4
        generation = await harness.cluster.generate(request)
        first = harness.serving(generation)
        await until(lambda: first.tokens_sent == 4)
        for node in harness.nodes.values():
            node.does.hold_after_tokens = 4 if node is first else None
        first.last_step_age_s = 10.0
        received = await collect(generation)
        assert received.tokens == {0: expected(request)}
        assert harness.health(first.node_id) is NodeHealth.STALLED
        await until(lambda: [cancel.attempt_id for cancel in first.cancels] == [first.starts[0].attempt_id])
        first.last_step_age_s = 0.0
        await harness.ready(first.node_id)


async def test_late_tokens_of_a_given_up_attempt_are_ignored_and_counted() -> None:
    async with running_cluster(decode=2) as harness:
        request = make_request(max_tokens=40)
        for node in harness.nodes.values():
            node.does.token_delay_s = 0.01
            node.does.ignore_cancels = True
        generation = await harness.cluster.generate(request)
        first = harness.serving(generation)
        await until(lambda: first.tokens_sent >= 2)
        first.state = pb.NODE_STATE_STALLED
        received = await collect(generation)
        assert received.tokens == {0: expected(request)}
        assert harness.cluster.counters.late_updates > 0


@pytest.mark.parametrize("error", [BUSY, ELSEWHERE, INTERNAL])
async def test_a_refusal_is_tried_elsewhere(error: pb.Error) -> None:
    async with running_cluster(decode=2) as harness:
        for node in harness.nodes.values():
            node.does.refusals = [error]
        for _ in range(2):
            request = make_request()
            received = await harness.run(request)
            assert received.tokens == {0: expected(request)}
        assert all(not node.does.refusals for node in harness.nodes.values())
        assert harness.cluster.counters.retries == 2


async def test_the_only_node_is_tried_again_after_a_refusal() -> None:
    async with running_cluster() as harness:
        harness.nodes["decode-0"].does.refusals = [ELSEWHERE, BUSY]
        request = make_request()
        assert (await harness.run(request)).tokens == {0: expected(request)}
        assert len({start.attempt_id for start in harness.nodes["decode-0"].starts}) == 3


async def test_attempts_without_progress_are_bounded() -> None:
    async with running_cluster(decode=2) as harness:
        for node in harness.nodes.values():
            node.does.always_refuse = BUSY
        with pytest.raises(Overloaded) as caught:
            await harness.run(make_request())
        assert 1.0 <= caught.value.retry_after_s <= 60.0
        assert sum(len(node.starts) for node in harness.nodes.values()) == 4
        for node in harness.nodes.values():
            node.does.always_refuse = None
        request = make_request()
        assert (await harness.run(request)).tokens == {0: expected(request)}


async def test_retries_of_the_whole_router_have_a_budget() -> None:
    async with running_cluster(decode=1, max_waiting_requests=500) as harness:
        harness.nodes["decode-0"].does.always_refuse = ELSEWHERE
        ends = await asyncio.gather(*(harness.run(make_request()) for _ in range(60)), return_exceptions=True)
        assert all(isinstance(end, PdserveError) for end in ends)
        assert harness.cluster.counters.retries_denied > 0
        assert len(harness.nodes["decode-0"].starts) < 60 + 60


@pytest.mark.parametrize(("error", "kind"), [(INVALID, InvalidRequest), (DEADLINE, DeadlinePassed)])
async def test_errors_that_no_other_node_can_help_reach_the_consumer(error: pb.Error, kind: type[PdserveError]) -> None:
    async with running_cluster(decode=2) as harness:
        for node in harness.nodes.values():
            node.does.always_refuse = error
        with pytest.raises(kind):
            await harness.run(make_request(n=2))
        assert sum(len(node.starts) for node in harness.nodes.values()) == 1
        assert harness.cluster.admission.outcomes[Outcome.FAILED] == 1


async def test_wrong_requests_never_take_a_node_out() -> None:
    async with running_cluster() as harness:
        harness.nodes["decode-0"].does.refusals = [INVALID] * 20
        for _ in range(20):
            with pytest.raises(InvalidRequest):
                await harness.run(make_request())
        request = make_request()
        assert (await harness.run(request)).tokens == {0: expected(request)}


async def test_internal_errors_suspend_a_node() -> None:
    async with running_cluster(decode=2) as harness:
        bad, good = harness.nodes["decode-0"], harness.nodes["decode-1"]
        bad.does.always_refuse = INTERNAL
        for _ in range(12):
            request = make_request()
            assert (await harness.run(request)).tokens == {0: expected(request)}
        assert len(bad.starts) == 3
        assert harness.health("decode-0") is NodeHealth.SUSPENDED
        assert len(good.starts) == 12


async def test_a_new_decode_node_wakes_waiting_requests_at_once() -> None:
    async with running_cluster(decode=1) as harness:
        request = make_request(max_tokens=12)
        node = harness.nodes["decode-0"]
        node.does.hold_after_tokens = 5
        generation = await harness.cluster.generate(request)
        await until(lambda: node.tokens_sent == 5)
        await asyncio.sleep(0.05)
        await node.die()
        reading = asyncio.create_task(collect(generation))
        await asyncio.sleep(0.1)
        assert not reading.done()
        await harness.add("decode", "decode-9")
        received = await asyncio.wait_for(reading, 1.0)
        assert received.tokens == {0: expected(request)}


async def test_requests_wait_for_a_node_but_not_for_ever() -> None:
    async with running_cluster(decode=1, failover_wait_s=0.3) as harness:
        await harness.nodes["decode-0"].die()
        await until(lambda: not harness.cluster.is_ready())
        started_at = time.monotonic()
        with pytest.raises(Unavailable):
            await harness.cluster.generate(make_request())
        assert 0.25 < time.monotonic() - started_at < 1.0
        assert harness.cluster.admission.outcomes[Outcome.FAILED] == 1


async def test_a_request_that_waits_is_served_by_a_node_that_restarts() -> None:
    async with running_cluster(decode=1) as harness:
        await harness.nodes["decode-0"].die()
        await until(lambda: not harness.cluster.is_ready())
        request = make_request()
        waiting = asyncio.create_task(harness.run(request))
        await asyncio.sleep(0.05)
        await harness.restart("decode-0")
        assert (await asyncio.wait_for(waiting, 2.0)).tokens == {0: expected(request)}


async def test_a_request_never_outlives_its_deadline() -> None:
    async with running_cluster() as harness:
        harness.nodes["decode-0"].does.forget_attempts = True
        started_at = time.monotonic()
        with pytest.raises(DeadlinePassed):
            await harness.run(make_request(deadline_s=0.3))
        assert 0.3 <= time.monotonic() - started_at < 0.8
        await until(lambda: len(harness.nodes["decode-0"].cancels) == 1)


async def test_the_deadline_also_ends_waiting_for_a_node() -> None:
    async with running_cluster(decode=1, failover_wait_s=20.0) as harness:
        await harness.nodes["decode-0"].die()
        await until(lambda: not harness.cluster.is_ready())
        with pytest.raises((Unavailable, DeadlinePassed)):
            await asyncio.wait_for(harness.cluster.generate(make_request(deadline_s=0.2)), 1.0)


async def test_close_while_streaming_cancels_on_the_node() -> None:
    async with running_cluster() as harness:
        node = harness.nodes["decode-0"]
        node.does.token_delay_s = 0.01
        generation = await harness.cluster.generate(make_request(max_tokens=1000))
        await anext(aiter(generation))
        await generation.aclose()
        await generation.aclose()
        await until(lambda: not node.live_attempts, 1.0)
        with pytest.raises(StopAsyncIteration):
            await anext(aiter(generation))
        assert harness.cluster.admission.outcomes[Outcome.CANCELLED] == 1


async def test_close_before_the_first_token_cancels_on_the_node() -> None:
    async with running_cluster() as harness:
        node = harness.nodes["decode-0"]
        node.does.hold_after_tokens = 0
        generation = await harness.cluster.generate(make_request(n=2))
        await generation.aclose()
        await until(lambda: len(node.cancels) == 1 and not node.live_attempts, 1.0)


async def test_close_while_moving_starts_nothing_more() -> None:
    async with running_cluster(decode=1) as harness:
        node = harness.nodes["decode-0"]
        node.does.hold_after_tokens = 2
        generation = await harness.cluster.generate(make_request())
        await until(lambda: node.tokens_sent == 2)
        await node.die()
        await until(lambda: not harness.cluster.is_ready())
        await asyncio.sleep(0.05)
        await asyncio.wait_for(generation.aclose(), 0.5)
        again = await harness.restart("decode-0")
        await harness.ready()
        await asyncio.sleep(0.1)
        assert not again.starts


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.15])
async def test_cancelling_generate_leaves_nothing(delay_s: float) -> None:
    async with running_cluster(decode=1) as harness:
        await harness.nodes["decode-0"].die()
        await until(lambda: not harness.cluster.is_ready())
        task = asyncio.create_task(harness.cluster.generate(make_request()))
        await asyncio.sleep(delay_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert harness.cluster.admission.requests == 0


async def test_cancels_at_random_moments_leave_nothing() -> None:
    async with running_cluster(decode=2, prefill=2, max_waiting_requests=500) as harness:
        for node in harness.nodes.values():
            node.does.token_delay_s = 0.002

        async def run_and_leave(number: int) -> None:
            task = asyncio.create_task(harness.run(make_request(max_tokens=50, n=1 + number % 3)))
            await asyncio.sleep(0.0015 * number)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(run_and_leave(number) for number in range(100)))
        outcomes = harness.cluster.admission.outcomes
        assert outcomes[Outcome.FAILED] == 0
        assert outcomes[Outcome.CANCELLED] > 20


async def test_a_reader_that_is_cancelled_may_read_on() -> None:
    async with running_cluster() as harness:
        harness.nodes["decode-0"].does.token_delay_s = 0.03
        request = make_request()
        generation = await harness.cluster.generate(request)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(aiter(generation)), 0.005)
        assert (await collect(generation)).tokens == {0: expected(request)}


async def test_ending_one_sequence_leaves_the_others() -> None:
    async with running_cluster() as harness:
        node = harness.nodes["decode-0"]
        node.does.token_delay_s = 0.01
        request = make_request(n=2, max_tokens=10)
        generation = await harness.cluster.generate(request)
        seen: list[int] = []
        async for delta in generation:
            if delta.sequence_index == 0:
                assert not seen, "a delta of an ended sequence"
                seen.extend(delta.token_ids)
                generation.end_sequence(0)
                generation.end_sequence(0)
            elif delta.finish_reason is not None:
                assert delta.finish_reason is FinishReason.LENGTH
        (cancel,) = node.cancels
        assert cancel.sequence_index == 0 and cancel.HasField("sequence_index")
        assert harness.cluster.admission.outcomes[Outcome.FINISHED] == 1


async def test_ending_the_last_sequence_ends_the_generation() -> None:
    async with running_cluster() as harness:
        node = harness.nodes["decode-0"]
        node.does.token_delay_s = 0.01
        generation = await harness.cluster.generate(make_request(max_tokens=500))
        count = 0
        async for _ in generation:
            count += 1
            if count == 3:
                generation.end_sequence(0)
        assert count == 3
        await until(lambda: not node.live_attempts, 1.0)


async def test_ended_sequences_are_not_moved() -> None:
    async with running_cluster(decode=2) as harness:
        request = make_request(n=2, max_tokens=12)
        for node in harness.nodes.values():
            node.does.hold_after_tokens = 3
        generation = await harness.cluster.generate(request)
        first = harness.serving(generation)
        await until(lambda: first.tokens_sent == 6)
        generation.end_sequence(1)
        for node in harness.nodes.values():
            node.does.hold_after_tokens = 3 if node is first else None
        await asyncio.sleep(0.05)
        await first.die()
        received = await collect(generation)
        assert received.tokens == {0: expected(request)}
        assert [next(iter(start.sequences)).index for start in harness.serving(generation).starts] == [0]


async def test_a_sequence_whose_last_token_had_come_is_not_sent_again() -> None:
    async with running_cluster(decode=2) as harness:
        request = make_request(max_tokens=50)
        tokens = expected(request)
        end = next(i for i, token in enumerate(tokens) if token not in tokens[:i] and i >= 3)
        request = make_request(max_tokens=50, eos_token_ids=(tokens[end],))
        for node in harness.nodes.values():
            node.does.hold_after_tokens = end + 1
        generation = await harness.cluster.generate(request)
        first = harness.serving(generation)
        await until(lambda: first.tokens_sent == end + 1)
        await asyncio.sleep(0.05)
        await first.die()
        received = await collect(generation)
        assert received.tokens == {0: tokens[: end + 1]}
        assert received.reasons == {0: FinishReason.STOP}
        assert generation.facts.attempts == 1


async def test_cached_tokens_come_from_the_first_attempt_only() -> None:
    async with running_cluster(decode=2) as harness:
        for node in harness.nodes.values():
            node.does.cached_tokens = 4
            node.does.hold_after_tokens = 2
        generation = await harness.cluster.generate(make_request())
        first = harness.serving(generation)
        await until(lambda: generation.facts.cached_tokens == 4 and first.tokens_sent == 2)
        for node in harness.nodes.values():
            node.does.cached_tokens = 6
            node.does.hold_after_tokens = 2 if node is first else None
        await asyncio.sleep(0.05)
        await first.die()
        await collect(generation)
        assert generation.facts.attempts == 2
        assert generation.facts.cached_tokens == 4
        assert harness.cluster.counters.prefix_tokens_hit == 4
        assert harness.cluster.counters.prefix_tokens_queried == 6


async def test_prompt_logprobs_arrive_once_even_when_the_request_moves() -> None:
    async with running_cluster(decode=2) as harness:
        request = make_request(prompt_logprobs=0)
        for node in harness.nodes.values():
            node.does.hold_after_tokens = 2
        generation = await harness.cluster.generate(request)
        first = harness.serving(generation)
        await until(lambda: first.tokens_sent == 2)
        for node in harness.nodes.values():
            node.does.hold_after_tokens = 2 if node is first else None
        await asyncio.sleep(0.05)
        await first.die()
        await collect(generation)
        logprobs = generation.facts.prompt_logprobs
        assert logprobs[0] == ()
        assert [entry[0].token_id for entry in logprobs[1:]] == list(request.prompt_token_ids[1:])
        assert not harness.serving(generation).starts[0].sampling.HasField("prompt_logprobs")


async def test_what_can_never_fit_is_refused_by_field() -> None:
    async with running_cluster() as harness:
        with pytest.raises(InvalidRequest) as caught:
            await harness.cluster.generate(make_request(max_tokens=1995))
        assert caught.value.param == "max_tokens"
        await harness.add("decode", "tiny", num_blocks=2)
        await harness.ready()
        request = make_request(max_tokens=30)
        for _ in range(5):
            assert (await harness.run(request)).tokens == {0: expected(request)}
        assert not harness.nodes["tiny"].starts


async def test_too_many_requests_are_refused_with_a_time() -> None:
    async with running_cluster(max_waiting_requests=2) as harness:
        node = harness.nodes["decode-0"]
        node.does.hold_after_tokens = 0
        generations = [await harness.cluster.generate(make_request(n=2)) for _ in range(5)]
        with pytest.raises(Overloaded) as caught:
            await harness.cluster.generate(make_request())
        assert 1.0 <= caught.value.retry_after_s <= 60.0
        for generation in generations:
            await generation.aclose()
        node.does.hold_after_tokens = None
        await harness.run(make_request())


async def test_a_request_goes_where_its_sequences_fit_side_by_side() -> None:
    async with running_cluster() as harness:
        await harness.add("decode", "small", max_num_seqs=2)
        await harness.ready()
        for _ in range(6):
            await harness.run(make_request(n=3))
            await harness.run(make_request(n=1, beam_search=BeamSearch(width=3)))
        assert not harness.nodes["small"].starts
        many = harness.cluster.limits.max_sequences + 1
        with pytest.raises(InvalidRequest) as caught:
            await harness.cluster.generate(make_request(n=many))
        assert caught.value.param == "n"


async def test_prompts_that_wait_are_measured_by_the_pool_of_the_decode_nodes() -> None:
    async with running_cluster(max_waiting_requests=500) as harness:
        node = harness.nodes["decode-0"]
        node.does.hold_after_tokens = 0
        pool_tokens = harness.cluster.limits.max_request_blocks * harness.cluster.limits.block_size
        prompt = tuple(index % 50 for index in range(1000))
        generations = []
        with pytest.raises(Overloaded) as caught:
            while True:
                generations.append(await harness.cluster.generate(make_request(prompt=prompt)))
        assert caught.value.reason == "tokens_full"
        assert len(generations) == WAITING_POOLS * pool_tokens // len(prompt)
        for generation in generations:
            await generation.aclose()
        node.does.hold_after_tokens = None
        await harness.run(make_request())


async def test_the_directory_may_be_away() -> None:
    async with running_cluster(decode=1, prefill=1) as harness:
        harness.directory.available = False
        for _ in range(10):
            request = make_request(prompt=tuple(range(20)))
            assert (await harness.run(request)).tokens == {0: expected(request)}
            await asyncio.sleep(0.02)
        assert harness.cluster.counters.directory_errors > 0
        assert harness.cluster.is_ready()
        harness.directory.available = True


async def test_draining_lets_running_requests_finish_and_refuses_new_ones() -> None:
    async with running_cluster() as harness:
        harness.nodes["decode-0"].does.token_delay_s = 0.01
        request = make_request(max_tokens=20)
        generation = await harness.cluster.generate(request)
        draining = asyncio.create_task(harness.cluster.drain(5.0))
        await asyncio.sleep(0.01)
        assert not harness.cluster.is_ready()
        with pytest.raises(Unavailable):
            await harness.cluster.generate(make_request())
        assert (await collect(generation)).tokens == {0: expected(request)}
        await asyncio.wait_for(draining, 1.0)


async def test_draining_tells_those_it_cuts_short() -> None:
    async with running_cluster() as harness:
        harness.nodes["decode-0"].does.hold_after_tokens = 3
        generation = await harness.cluster.generate(make_request())
        await harness.cluster.drain(0.1)
        with pytest.raises(Unavailable):
            await collect(generation)


async def test_closing_ends_running_requests_with_a_message() -> None:
    async with running_cluster() as harness:
        node = harness.nodes["decode-0"]
        node.does.hold_after_tokens = 3
        generation = await harness.cluster.generate(make_request())
        await harness.cluster.close()
        with pytest.raises(Unavailable):
            await collect(generation)
        await until(lambda: not node.live_attempts, 1.0)


async def test_describe_lists_nodes_fresh_and_marks_old_news() -> None:
    async with running_cluster(decode=2, prefill=1) as harness:
        await harness.run(make_request())
        harness.nodes["decode-1"].freeze()
        started_at = time.monotonic()
        described = await harness.cluster.describe()
        assert time.monotonic() - started_at < 1.0
        nodes = {node["id"]: node for node in described["nodes"]}  # type: ignore[attr-defined]
        assert set(nodes) == {"decode-0", "decode-1", "prefill-0"}
        fresh = nodes["decode-0"]
        assert fresh["blocks"] == {"total": 1000, "free": 1000, "cached": 0, "in_use": 0, "quarantined": 0}
        assert fresh["transfers"] == {"started": 3, "committed": 2, "failed": 1, "aborted": 0}
        assert fresh["state"] == "ready" and fresh["stale"] is False and fresh["epoch"] == 1
        assert nodes["decode-1"]["stale"] is True
        assert nodes["decode-1"]["blocks"]["total"] == 1000
        router = described["router"]
        assert router["admitted"] == router["finished"] == 1  # type: ignore[index]
        assert router["in_flight"] == {"decode-0": 0, "decode-1": 0, "prefill-0": 0}  # type: ignore[index]
        harness.nodes["decode-1"].thaw()


async def test_explain_tells_why_a_request_went_where_it_went() -> None:
    async with running_cluster(decode=2, prefill=2) as harness:
        request = make_request(request_id="why")
        await harness.run(request)
        told = harness.cluster.explain("why")
        assert told is not None
        (attempt,) = told["attempts"]  # type: ignore[misc]
        assert len(attempt["plan"]["decode_candidates"]) == 2
        assert len(attempt["plan"]["prefill_candidates"]) == 2
        assert harness.cluster.explain("unknown") is None


async def test_two_routers_serve_side_by_side() -> None:
    async with (
        running_cluster(decode=2, prefill=1) as one,
        running_cluster(decode=0, wait=False, is_alone=False) as two,
    ):
        for node in one.nodes.values():
            await two.directory.register(node.record, ttl_s=60.0)
        await until(two.cluster.is_ready)
        requests = [make_request(seed=seed, max_tokens=20) for seed in range(20)]
        both = [one, two]
        results = await asyncio.gather(*(both[i % 2].run(request) for i, request in enumerate(requests)))
        for request, received in zip(requests, results, strict=True):
            assert received.tokens == {0: expected(request)}
        assert one.cluster.router_id != two.cluster.router_id


async def test_load_spreads_over_decode_nodes_at_once() -> None:
    async with running_cluster(decode=2) as harness:
        for node in harness.nodes.values():
            node.does.hold_after_tokens = 1
        generations = [await harness.cluster.generate(make_request()) for _ in range(10)]
        held = {node.node_id: node.own.sequences for node in harness.cluster.registry.nodes()}
        assert held == {"decode-0": 5, "decode-1": 5}
        for generation in generations:
            await generation.aclose()


async def test_a_prefill_counts_as_load_until_the_first_token() -> None:
    async with running_cluster(decode=1, prefill=1) as harness:
        harness.nodes["decode-0"].does.hold_after_tokens = 0
        (prefill,) = [node for node in harness.cluster.registry.nodes() if node.role == "prefill"]
        generation = await harness.cluster.generate(make_request(prompt=tuple(range(30))))
        assert (prefill.own.prefills, prefill.own.prefill_tokens) == (1, 30)
        harness.nodes["decode-0"].does.hold_after_tokens = 1
        await anext(aiter(generation))
        assert (prefill.own.prefills, prefill.own.prefill_tokens) == (0, 0)
        await generation.aclose()


async def test_our_own_work_is_not_counted_twice() -> None:
    async with running_cluster(decode=1) as harness:
        fake = harness.nodes["decode-0"]
        fake.does.hold_after_tokens = 0
        (node,) = harness.cluster.registry.nodes()
        generation = await harness.cluster.generate(make_request(n=3))
        await until(lambda: node.status is not None and node.status.running_sequences == 3)
        assert (node.own.sequences, node.foreign_sequences()) == (3, 0)
        fake.running_sequences = 5
        await until(lambda: node.status is not None and node.status.running_sequences == 5)
        assert (node.own.sequences, node.foreign_sequences()) == (3, 2)
        await generation.aclose()


async def test_a_node_that_talks_nonsense_is_believed_nothing_more() -> None:
    async with running_cluster(decode=2) as harness:
        for node in harness.nodes.values():
            node.does.nonsense = 1
        request = make_request(n=2)
        received = await harness.run(request)
        assert received.tokens == {index: expected(request, index) for index in range(2)}
        first = next(node for node in harness.nodes.values() if node.cancels)
        assert first.cancels[0].attempt_id == first.starts[0].attempt_id


async def test_hits_that_an_earlier_attempt_may_have_made_are_not_counted() -> None:
    async with running_cluster(decode=2) as harness:
        for node in harness.nodes.values():
            node.does.forget_attempts = True
            node.does.cached_tokens = 4
        generation = await harness.cluster.generate(make_request())
        first = harness.serving(generation)
        await until(lambda: len(first.starts) == 1)
        for node in harness.nodes.values():
            node.does.forget_attempts = node is first
        await first.die()
        await collect(generation)
        assert generation.facts.attempts == 2
        assert generation.facts.cached_tokens == 0


async def test_hits_count_after_a_mere_refusal() -> None:
    async with running_cluster(decode=1) as harness:
        harness.nodes["decode-0"].does.refusals = [BUSY]
        harness.nodes["decode-0"].does.cached_tokens = 4
        generation = await harness.cluster.generate(make_request())
        await collect(generation)
        assert generation.facts.cached_tokens == 4


async def test_a_finished_request_is_not_kept_in_memory() -> None:
    async with running_cluster() as harness:
        generation = await harness.cluster.generate(make_request(deadline_s=600.0))
        await collect(generation)
        await generation.aclose()
        kept = weakref.ref(generation)
        del generation
        gc.collect()
        assert kept() is None
