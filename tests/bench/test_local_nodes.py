"""Nodes in this process: they answer as nodes do, say what went wrong, and leave nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from bench.local_nodes import LocalDecode, LocalPrefill, engine_config, fill_pool, replaced
from engine.sampling_params import SamplingParams
from engine.sim_runner import SimRunner
from proto import worker_pb2 as pb
from tests.node_cluster import SIM_LAYOUT, alone

PROMPT = list(range(10, 25))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def simulated() -> SimRunner:
    return SimRunner(num_blocks=64, layout=SIM_LAYOUT)


async def test_a_decode_node_says_what_the_model_says() -> None:
    runner = simulated()
    local = LocalDecode(runner, engine_config(runner, max_num_seqs=4, max_num_batched_tokens=8))
    before = asyncio.all_tasks()
    async with local.running():
        sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=5)
        streams = [*local.start(PROMPT, GREEDY), *local.start(PROMPT[:9], sampling, n=2)]
        await local.finish(streams)
        assert local.node.pool.counts.in_use == 0
    assert streams[0].token_ids == alone(PROMPT, 6)
    for index in range(2):
        assert streams[1 + index].token_ids == alone(PROMPT[:9], 5, index, temperature=1.0, seed=3)
    assert {stream.finish_reason for stream in streams} == {pb.FINISH_REASON_LENGTH}
    assert asyncio.all_tasks() == before


async def test_a_decode_node_that_refuses_says_why() -> None:
    runner = simulated()
    local = LocalDecode(runner, engine_config(runner, max_num_seqs=4, max_num_batched_tokens=8))
    async with local.running():
        with pytest.raises(RuntimeError, match="vocabulary"):
            await local.finish(local.start([runner.vocab_size], GREEDY))


async def test_a_prefill_node_says_the_first_token_and_keeps_the_prompt_cached() -> None:
    runner = simulated()
    local = LocalPrefill(runner, engine_config(runner, max_num_seqs=4, max_num_batched_tokens=8))
    async with local.running():
        for cached_tokens in (0, 12):
            assert await local.compute(PROMPT, GREEDY) == alone(PROMPT, 1)[0]
            assert local.node.counters.prefill_tokens_cached == cached_tokens
        assert local.node.pool.counts.in_use == 0


async def test_a_prefill_node_that_fails_says_why() -> None:
    runner = simulated()
    local = LocalPrefill(runner, engine_config(runner, max_num_seqs=4, max_num_batched_tokens=8))

    def fail(*arguments: object, **words: object) -> None:
        raise ValueError("no such thing")

    with replaced(runner, "run", fail):
        async with local.running():
            with pytest.raises(RuntimeError, match="step_failed"):
                await local.compute(PROMPT, GREEDY)


def test_what_was_replaced_comes_back() -> None:
    class Thing:
        def name(self) -> str:
            return "class"

    thing, own = Thing(), Thing()
    own.__dict__["name"] = lambda: "own"
    for owner, expected in ((thing, "class"), (own, "own")):
        with pytest.raises(KeyError), replaced(owner, "name", lambda: "other"):
            assert owner.name() == "other"
            raise KeyError
        assert owner.name() == expected
    assert "name" not in vars(thing)


def test_every_block_of_a_pool_is_written() -> None:
    runner = simulated()
    fill_pool(runner)
    contents = {bytes(runner.block_bytes(block)) for block in range(runner.num_blocks)}  # type: ignore[arg-type]
    assert bytes(SIM_LAYOUT.block_bytes) not in contents
