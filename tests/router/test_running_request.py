"""What a running request reports: batches of what is ready, and the counts that both doors share."""

from __future__ import annotations

import asyncio

import pytest

from engine.errors import InvalidRequest, Unavailable
from router.generation import ModelLimits
from router.request_builder import GenerateParams, build_requests
from router.testing import FakeCluster, ScriptedSequence
from tests.router.api_harness import LIMITS, Serving, saying, serving, tokenizer


def metric(server: Serving, name: str, **labels: str) -> float:
    value = server.api.metrics.registry.get_sample_value(name, {"model_name": "tiny", **labels})
    assert value is not None, name
    return value


async def test_reader_that_comes_late_gets_everything_at_once() -> None:
    async with serving() as server:
        running = await server.api.submit([[5]], GenerateParams(max_tokens=50, n=2), response_id="x")
        await asyncio.sleep(0.05)
        batches = [batch async for batch in running.batches()]
        await running.aclose()
    (batch,) = batches
    assert [(index, delta.text) for index, delta in batch] == [(0, "the blue sea"), (1, "the blue sea")]
    assert all(delta.finish_reason is not None and len(delta.token_ids) == 4 for _, delta in batch)


async def test_reader_that_stops_stops_the_buffer() -> None:
    script = ScriptedSequence((5,) * 5000)
    limits = ModelLimits(
        vocab_size=512, max_model_len=10_000, block_size=16, max_request_blocks=1000, max_sequences=128
    )
    async with serving(cluster=FakeCluster(script=script, model_limits=limits)) as server:
        running = await server.api.submit([[5]], GenerateParams(max_tokens=5000), response_id="x")
        async with asyncio.timeout(30):
            while len(server.last.delivered) <= 1000:  # noqa: ASYNC110 - what is waited for signals nothing
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(server.last.delivered) < 1100
        batches = [batch async for batch in running.batches()]
        await running.aclose()
    assert sum(len(delta.token_ids) for batch in batches for _, delta in batch) == 5000


async def test_counts_of_a_finished_request() -> None:
    cluster = FakeCluster(script=saying("the blue sea"), model_limits=LIMITS, cached_tokens=16)
    async with serving(cluster=cluster) as server:
        await server.complete(prompt=[5] * 20, n=2)
        assert metric(server, "vllm:prompt_tokens_total") == 20
        assert metric(server, "vllm:generation_tokens_total") == 8
        assert metric(server, "vllm:prefix_cache_queries_total") == 20
        assert metric(server, "vllm:prefix_cache_hits_total") == 16
        assert metric(server, "vllm:request_success_total", finished_reason="stop") == 2
        assert metric(server, "vllm:request_success_total", finished_reason="length") == 0
        assert metric(server, "vllm:time_to_first_token_seconds_count") == 2
        assert metric(server, "vllm:inter_token_latency_seconds_count") == 6
        assert metric(server, "vllm:e2e_request_latency_seconds_count") == 1
        assert metric(server, "pdserve:requests_ended_total", outcome="finished") == 1
        assert metric(server, "pdserve:api_requests_open") == 0
        text = (await server.client.get("/metrics")).text
    assert 'vllm:prompt_tokens_total{model_name="tiny"} 20.0' in text


async def test_counts_of_requests_that_end_otherwise() -> None:
    async with serving(ScriptedSequence((5,), error=Unavailable("gone"))) as server:
        await server.complete()
        assert metric(server, "pdserve:requests_ended_total", outcome="failed") == 1
    async with serving(ScriptedSequence((5,), hang=True)) as server:
        running = await server.api.submit([[5]], GenerateParams(), response_id="x")
        assert metric(server, "pdserve:api_requests_open") == 1
        await running.aclose()
        await running.aclose()
        assert metric(server, "pdserve:requests_ended_total", outcome="cancelled") == 1
        assert metric(server, "pdserve:api_requests_open") == 0
        await server.complete(temperature=9)
        assert metric(server, "pdserve:requests_refused_total", reason="invalid_request") == 1
        assert metric(server, "vllm:e2e_request_latency_seconds_count") == 0


async def test_failure_of_a_later_prompt_ends_all() -> None:
    def script(request: object, index: int) -> ScriptedSequence:
        first = request.prompt_token_ids[0]  # type: ignore[attr-defined]
        return ScriptedSequence((), error=Unavailable("gone")) if first == 12 else ScriptedSequence((5,), hang=True)

    async with serving(script) as server:
        response = await server.complete(prompt=[[10], [11], [12]])
        assert response.status_code == 503
        assert all(generation.is_closed or generation.is_finished for generation in server.cluster.generations)


def build(prompts: list[list[int]], params: GenerateParams, limits: ModelLimits = LIMITS) -> object:
    return build_requests(
        prompts,
        params,
        limits,
        request_id="x",  # type: ignore[arg-type]
        seeds=[1] * len(prompts),
        eos_token_ids=(2,),
        tenant_salt=b"",
        deadline_s=1.0,
    )


def test_products_of_large_numbers_are_capped() -> None:
    with pytest.raises(InvalidRequest, match="n times"):
        build([[5]] * 100, GenerateParams(n=100))
    with pytest.raises(InvalidRequest, match="at most 1024 prompts"):
        build([[5]] * 1025, GenerateParams())
    wide = ModelLimits(vocab_size=512, max_model_len=10**6, block_size=16, max_request_blocks=10**6, max_sequences=128)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        build([[5]] * 8, GenerateParams(n=8, max_tokens=500_000), wide)


def test_tokenizer_ends_come_from_the_model() -> None:
    assert tokenizer().eos_token_ids == (0, 2)
