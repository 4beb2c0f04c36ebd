"""The gRPC door on a real socket, over a scripted cluster."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from engine.chat_template import ChatTemplate
from engine.errors import (
    AttemptFailed,
    ConfigError,
    DeadlinePassed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PdserveError,
    Unavailable,
)
from examples.grpc_client import main as example_client
from proto import inference_pb2 as pb
from proto import inference_pb2_grpc as rpc
from router.beam_search import BeamSearch
from router.config import RouterConfig
from router.grpc_inference import TOKENS_PER_MESSAGE, generate_params
from router.grpc_server import SERVICE_NAME, GrpcServer, start_grpc_server, status_of
from router.inference_api import InferenceApi
from router.metrics import RouterMetrics
from router.testing import FakeCluster, ScriptedSequence
from tests.router.api_harness import CHATML, IM_END, LIMITS, MODEL, saying, tokenizer
from tests.router.test_beam_search import many

ROOT = Path(__file__).parents[2]
Code = grpc.StatusCode
Serving = health_pb2.HealthCheckResponse


@dataclass
class Door:
    """A server that runs, what it runs on, and a channel to it."""

    api: InferenceApi
    cluster: FakeCluster
    server: GrpcServer
    channel: grpc.aio.Channel

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def stub(self) -> Any:
        return rpc.InferenceStub(self.channel)

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)

    async def generate(self, request: pb.GenerateRequest | None = None, **fields: Any) -> list[pb.GenerateResponse]:
        request = request or pb.GenerateRequest(**{"text": "red", "max_tokens": 50, **fields})
        return [response async for response in self.stub.Generate(request)]


@asynccontextmanager
async def door(
    script: Any = None, *, keys: Sequence[str] = (), cluster: FakeCluster | None = None, **settings: Any
) -> AsyncIterator[Door]:
    """A server on a free port; afterwards nothing of any call may be left."""
    cluster = cluster or FakeCluster(script or saying("the blue sea"), model_limits=LIMITS)
    config = RouterConfig(model=MODEL, grpc_port=0, api_keys=tuple(keys), **settings)
    metrics = RouterMetrics(CollectorRegistry(), model_name=MODEL)
    api = InferenceApi(config, tokenizer(), ChatTemplate({"default": CHATML}, {}), cluster, metrics)
    server = await start_grpc_server(config, api)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield Door(api, cluster, server, channel)
            await until(lambda: api.num_running == 0)
    finally:
        await server.stop(0)
        api.close()
    assert cluster.open_generations == []


async def until(condition: Callable[[], bool], timeout_s: float = 1.0) -> None:
    """Wait for what must come to be within a second."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for signals nothing
            await asyncio.sleep(0.005)


def text_of(responses: Sequence[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(response.text for response in responses if response.index == index)


async def failure(awaitable: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value


# -- answers ----------------------------------------------------------------------------------------------------------


async def test_a_text_is_continued() -> None:
    cluster = FakeCluster(saying("the blue sea"), model_limits=LIMITS, cached_tokens=2)
    async with door(cluster=cluster) as served:
        responses = await served.generate()
    assert text_of(responses) == "the blue sea"
    assert [response.finish_reason for response in responses if response.finish_reason] == ["stop"]
    assert responses[-1].finish_reason == "stop"
    said = len(tokenizer().encode("the blue sea")) + 1
    assert responses[-1].usage == pb.Usage(
        prompt_tokens=len(tokenizer().encode("red")), completion_tokens=said, cached_tokens=2
    )
    assert not any(response.HasField("usage") for response in responses[:-1])
    assert {response.model for response in responses} == {MODEL}
    assert len({response.id for response in responses}) == 1
    token_ids = [token_id for response in responses for token_id in response.token_ids]
    assert token_ids == [*tokenizer().encode("the blue sea"), IM_END]


async def test_tokens_and_chats_are_prompts_too() -> None:
    async with door() as served:
        await served.generate(pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[5, 6, 7])))
        assert served.cluster.generations[-1].request.prompt_token_ids == (5, 6, 7)
        assert served.cluster.generations[-1].request.sampling.max_tokens == 16
        messages = [pb.ChatMessage(role="user", content="Hi")]
        await served.generate(pb.GenerateRequest(chat=pb.ChatPrompt(messages=messages)))
        request = served.cluster.generations[-1].request
        rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert request.prompt_token_ids == tuple(tokenizer().encode(rendered, add_special_tokens=False))
        assert request.sampling.max_tokens == LIMITS.max_model_len - len(request.prompt_token_ids)


async def test_every_setting_reaches_the_cluster() -> None:
    asked = pb.GenerateRequest(
        text="red", max_tokens=9, temperature=0.7, top_p=0.9, top_k=5, min_p=0.05, presence_penalty=0.5,
        frequency_penalty=-0.25, repetition_penalty=1.1, seed=2**63 + 1, n=2, stop_token_ids=[7], min_tokens=3,
        ignore_eos=True, logit_bias={4: -1.5}, logprobs=2, priority=6,
    )  # fmt: skip
    async with door() as served:
        await served.generate(asked)
        request = served.cluster.generations[-1].request
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.logprobs, request.num_sequences) == (9, 3, 2, 2)
    assert request.priority == 6
    # As written, not 0.699999988: what a float of 32 bits holds.
    assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty) == (0.7, 0.9, 0.05, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.top_k) == (0.5, -0.25, 5)
    assert (sampling.seed, sampling.stop_token_ids, sampling.ignore_eos) == (2**63 + 1, (7,), True)
    assert dict(sampling.logit_bias) == {4: -1.5}


def test_what_is_not_set_stays_unset() -> None:
    params = generate_params(pb.GenerateRequest(text="red"))
    assert (params.max_tokens, params.temperature, params.seed, params.logprobs, params.n) == (None,) * 4 + (1,)
    assert params.skip_special_tokens
    zero = generate_params(pb.GenerateRequest(text="red", temperature=0, skip_special_tokens=False))
    assert (zero.temperature, zero.skip_special_tokens) == (0.0, False)


async def test_each_choice_ends_once_and_usage_comes_last() -> None:
    def script(_: Any, index: int) -> ScriptedSequence:
        return saying(("red", "the blue sea and the fox", "one two")[index], delay_s=0.001)

    async with door(script) as served:
        responses = await served.generate(n=3)
    assert [text_of(responses, index) for index in range(3)] == ["red", "the blue sea and the fox", "one two"]
    ends = [response.index for response in responses if response.finish_reason]
    assert sorted(ends) == [0, 1, 2]
    assert [response.HasField("usage") for response in responses] == [False] * (len(responses) - 1) + [True]
    total = sum(len(response.token_ids) for response in responses)
    assert responses[-1].usage.completion_tokens == total


async def test_a_stop_string_cuts_the_text() -> None:
    async with door() as served:
        responses = await served.generate(stop=["ue s"])
    assert text_of(responses) == "the bl"
    assert responses[-1].finish_reason == "stop"


async def test_the_length_limit_is_said() -> None:
    async with door() as served:
        responses = await served.generate(max_tokens=2)
    assert (responses[-1].finish_reason, responses[-1].usage.completion_tokens) == ("length", 2)


async def test_log_probabilities_come_with_their_tokens() -> None:
    async with door() as served:
        responses = await served.generate(logprobs=2)
        plain = await served.generate()
    positions = [(i, p) for r in responses for i, p in zip(r.token_ids, r.logprobs, strict=True)]
    assert len(positions) == responses[-1].usage.completion_tokens
    for token_id, position in positions:
        assert position.chosen == pb.Logprob(token_id=token_id, token=tokenizer().token_text(token_id), logprob=-0.25)
        assert [entry.logprob for entry in position.top] == [-0.25, -1.25]
    assert not any(response.logprobs for response in plain)


async def test_many_tokens_at_once_are_several_messages() -> None:
    tokens = tokenizer().encode("red fox") * 400
    script = ScriptedSequence(tokens, tokens_per_delta=len(tokens))
    limits = type(LIMITS)(
        vocab_size=512, max_model_len=100_000, block_size=16, max_request_blocks=10_000, max_sequences=128
    )
    async with door(cluster=FakeCluster(script, model_limits=limits)) as served:
        responses = await served.generate(max_tokens=90_000, logprobs=20)
    assert max(len(response.token_ids) for response in responses) <= TOKENS_PER_MESSAGE
    assert max(response.ByteSize() for response in responses) < 1024 * 1024
    assert [token_id for response in responses for token_id in response.token_ids] == tokens
    assert text_of(responses) == "red fox" * 400
    assert [bool(response.finish_reason) for response in responses] == [False] * (len(responses) - 1) + [True]


async def test_the_best_of_many_come_when_all_have_ended() -> None:
    async with door(many) as served:
        responses = await served.generate(n=2, best_of=4)
        assert [text_of(responses, index) for index in range(3)] == ["red fox", "red fox and the", ""]
        assert [response.finish_reason for response in responses] == ["stop", "stop"]
        assert not any(response.logprobs for response in responses)
        made = [len(tokenizer().encode(text)) + 1 for text in ("red", "red fox", "red fox and", "red fox and the")]
        assert responses[-1].usage.completion_tokens == sum(made)
        assert [response.HasField("usage") for response in responses] == [False, True]
        shown = await served.generate(n=1, best_of=2, logprobs=1)
        assert [position.chosen.logprob for position in shown[0].logprobs] == pytest.approx([-0.1] * made[1])
        served.cluster.script = ScriptedSequence(hang=True)
        call = served.stub.Generate(pb.GenerateRequest(text="red", best_of=3))
        await until(lambda: len(served.cluster.generations) == 3)
        call.cancel()
        await until(lambda: served.cluster.generations[-1].is_cancelled)


async def test_a_search_is_asked_for() -> None:
    async with door() as served:
        responses = await served.generate(n=2, best_of=5, use_beam_search=True, length_penalty=0.1, ignore_eos=True)
        request = served.cluster.generations[-1].request
        assert (request.num_sequences, request.beam_search) == (2, BeamSearch(width=5, length_penalty=0.1))
        assert request.sampling.is_greedy and request.sampling.logprobs is None
        assert {response.index for response in responses} == {0, 1}
        neutral = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0, "repetition_penalty": 1}
        await served.generate(n=3, use_beam_search=True, seed=5, frequency_penalty=0, min_tokens=0, **neutral)
        assert served.cluster.generations[-1].request.beam_search == BeamSearch(width=3)
        await served.generate(length_penalty=1)
        assert served.cluster.generations[-1].request.beam_search is None


async def test_tokenize_and_models() -> None:
    async with door() as served:
        text = await served.stub.Tokenize(pb.TokenizeRequest(text="red fox"))
        assert (list(text.ids), text.max_model_len) == (tokenizer().encode("red fox"), LIMITS.max_model_len)
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")])
        ids = (await served.stub.Tokenize(pb.TokenizeRequest(chat=chat))).ids
        assert tokenizer().decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
        models = (await served.stub.ListModels(pb.ListModelsRequest())).models
        assert [(card.id, card.max_model_len) for card in models] == [(MODEL, LIMITS.max_model_len)]
        served.cluster.model_limits = None
        assert (await served.stub.ListModels(pb.ListModelsRequest())).models[0].max_model_len == 0


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n must"),
        ({"n": 100_000}, "n must"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"min_tokens": 60}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [LIMITS.vocab_size]}, "stop_token_ids"),
        ({"logit_bias": {LIMITS.vocab_size: 1}}, "logit_bias"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"n": 3, "best_of": 2, "use_beam_search": True}, "best_of"),
        ({"best_of": 0, "use_beam_search": True}, "best_of"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"length_penalty": 10.5, "use_beam_search": True}, "length_penalty"),
        ({"length_penalty": float("nan"), "use_beam_search": True}, "length_penalty"),
        ({"temperature": 0.7, "use_beam_search": True}, "temperature"),
        ({"top_k": 5, "use_beam_search": True}, "top_k"),
        ({"stop": ["x"], "use_beam_search": True}, "stop"),
        ({"logit_bias": {5: 1}, "use_beam_search": True}, "logit_bias"),
        ({"min_tokens": 2, "use_beam_search": True}, "min_tokens"),
        ({"priority": -1}, "priority"),
        ({"text": ""}, "text"),
        ({"text": "red " * 10_000}, "text"),
        ({"text": None, "tokens": pb.TokenPrompt(ids=[1, LIMITS.vocab_size])}, "tokens"),
        ({"text": None, "tokens": pb.TokenPrompt()}, "tokens"),
        ({"text": None, "chat": pb.ChatPrompt()}, "messages"),
        ({"text": None}, "prompt"),
    ],
)
async def test_a_wrong_value_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    async with door() as served:
        error = await failure(served.generate(**fields))
        assert error.code() is Code.INVALID_ARGUMENT
        assert named in (error.details() or "")
        assert served.cluster.generations == []


async def test_an_unknown_model_is_not_found() -> None:
    async with door() as served:
        for call in (
            served.generate(model="other"),
            served.stub.Tokenize(pb.TokenizeRequest(model="other", text="red")),
        ):
            assert (await failure(call)).code() is Code.NOT_FOUND
        assert text_of(await served.generate(model=MODEL)) == "the blue sea"


@pytest.mark.parametrize(
    ("error", "code", "retry_after"),
    [
        (InvalidRequest("must be even", param="n"), Code.INVALID_ARGUMENT, None),
        (ModelNotFound("no such model"), Code.NOT_FOUND, None),
        (Overloaded("full", retry_after_s=2.1), Code.RESOURCE_EXHAUSTED, "3"),
        (Unavailable("no node", retry_after_s=0.2), Code.UNAVAILABLE, "1"),
        (AttemptFailed("node lost"), Code.UNAVAILABLE, "1"),
        (DeadlinePassed("too late"), Code.DEADLINE_EXCEEDED, None),
        (ConfigError("secret path"), Code.INTERNAL, None),
        (PdserveError("secret detail"), Code.INTERNAL, None),
        (KeyError("secret key"), Code.INTERNAL, None),
    ],
)
def test_every_error_has_one_status(error: Exception, code: grpc.StatusCode, retry_after: str | None) -> None:
    got, message, metadata = status_of(error)
    assert got is code
    assert dict(metadata).get("retry-after") == retry_after
    assert "secret" not in message
    if isinstance(error, InvalidRequest):
        assert message == "n: must be even"


async def test_a_refusal_says_when_to_try_again() -> None:
    async with door() as served:
        served.cluster.refuse = Overloaded("all nodes are full", retry_after_s=7, reason="queue_full")
        error = await failure(served.generate())
        assert (error.code(), error.details()) == (Code.RESOURCE_EXHAUSTED, "all nodes are full")
        assert dict(error.trailing_metadata() or ()) == {"pdserve-reason": "queue_full", "retry-after": "7"}
        assert b'reason="queue_full"} 1.0' in served.api.metrics.exposition()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AttemptFailed("every node failed"), Code.UNAVAILABLE),
        (DeadlinePassed("too late"), Code.DEADLINE_EXCEEDED),
        (RuntimeError("secret"), Code.INTERNAL),
    ],
)
async def test_a_failure_after_text_ends_the_stream_with_a_status(error: Exception, code: grpc.StatusCode) -> None:
    async with door(ScriptedSequence(tokenizer().encode("red fox"), error=error)) as served:
        call, got = served.stub.Generate(pb.GenerateRequest(text="red")), []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for response in call:
                got.append(response)
        assert caught.value.code() is code
        assert "secret" not in (caught.value.details() or "")
        assert text_of(got) == "red fox"
        assert not any(response.finish_reason for response in got)
        assert b"requests_refused_total{" not in served.api.metrics.exposition()


async def test_a_message_above_the_limit_is_refused() -> None:
    async with door(max_body_bytes=10_000) as served:
        error = await failure(served.generate(stop=["x" * 20_000]))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert text_of(await served.generate()) == "the blue sea"


# -- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
async def test_a_cancelled_call_frees_everything(num_tokens: int) -> None:
    script = ScriptedSequence(tokenizer().encode("the blue sea")[:num_tokens], hang=True)
    async with door(script) as served:
        call = served.stub.Generate(pb.GenerateRequest(text="red", n=2))
        await until(lambda: bool(served.cluster.generations))
        for _ in range(num_tokens):
            await call.read()
        call.cancel()
        await until(lambda: served.cluster.generations[0].is_cancelled)
        await until(lambda: served.api.num_running == 0)


async def test_a_call_cancelled_while_it_is_admitted_starts_nothing() -> None:
    async with door() as served:
        served.cluster.admit_delay_s = 30
        call = served.stub.Generate(pb.GenerateRequest(text="red"))
        await until(lambda: served.api.num_running == 1)
        call.cancel()
        await until(lambda: served.api.num_running == 0)
        assert served.cluster.generations == []


async def test_a_channel_that_closes_cancels_its_calls() -> None:
    async with door(ScriptedSequence(hang=True)) as served:
        async with grpc.aio.insecure_channel(served.target) as channel:
            call = rpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="red"))
            await until(lambda: bool(served.cluster.generations))
        await until(lambda: served.cluster.generations[0].is_cancelled)
        call.cancel()


async def test_the_clients_deadline_goes_along_and_holds() -> None:
    async with door(ScriptedSequence(hang=True)) as served:
        start = time.monotonic()
        call = served.stub.Generate(pb.GenerateRequest(text="red"), timeout=0.5)
        assert (await failure(call.read())).code() is Code.DEADLINE_EXCEEDED
        assert time.monotonic() - start < 2
        assert 0 < served.cluster.generations[0].request.deadline_s <= 0.5
        await until(lambda: served.cluster.generations[0].is_cancelled)


async def test_the_routers_own_limit_stays() -> None:
    async with door(request_timeout_s=5) as served:
        await served.generate()
        assert served.cluster.generations[-1].request.deadline_s == 5
        _ = [response async for response in served.stub.Generate(pb.GenerateRequest(text="red"), timeout=99)]
        assert served.cluster.generations[-1].request.deadline_s == 5


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    tokens = tokenizer().encode("red") * 4_000
    limits = type(LIMITS)(
        vocab_size=512, max_model_len=10**6, block_size=16, max_request_blocks=10**5, max_sequences=128
    )
    cluster = FakeCluster(ScriptedSequence(tokens, tokens_per_delta=200, hang=True), model_limits=limits)
    little_room = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
    async with (
        door(cluster=cluster, slow_client_s=0.3) as served,
        grpc.aio.insecure_channel(served.target, options=little_room) as channel,
    ):
        call = rpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="red", max_tokens=900_000, logprobs=20))
        await until(lambda: bool(cluster.generations) and cluster.generations[0].is_cancelled, timeout_s=10)
        await until(lambda: served.api.num_running == 0)
        # Once it reads again it learns why.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(20):
                async for _ in call:
                    pass
        assert caught.value.code() is Code.RESOURCE_EXHAUSTED
        assert "read nothing" in (caught.value.details() or "")


async def test_stopping_waits_for_calls_then_cancels_them() -> None:
    async with door(saying("the blue sea", delay_s=0.02)) as served:
        patient = asyncio.create_task(served.generate())
        await until(lambda: bool(served.cluster.generations))
        await served.server.stop(5)
        assert text_of(await patient) == "the blue sea"
    async with door(ScriptedSequence(hang=True)) as served:
        endless = asyncio.create_task(served.generate())
        await until(lambda: bool(served.cluster.generations))
        await served.server.stop(0.1)
        assert (await failure(endless)).code() in (Code.CANCELLED, Code.UNAVAILABLE)
        assert served.cluster.generations[0].is_cancelled


# -- keys -------------------------------------------------------------------------------------------------------------


async def test_a_key_is_asked_for() -> None:
    async with door(keys=["first", "second"]) as served:
        for metadata in ([], [("authorization", "Bearer wrong")], [("authorization", "first")]):
            for method, request in (
                (served.stub.ListModels, pb.ListModelsRequest()),
                (served.stub.Tokenize, pb.TokenizeRequest(text="red")),
                (served.channel.unary_unary("/pdserve.v1.Inference/Unknown"), b""),
            ):
                assert (await failure(method(request, metadata=metadata))).code() is Code.UNAUTHENTICATED
            stream = served.stub.Generate(pb.GenerateRequest(text="red"), metadata=metadata)
            assert (await failure(stream.read())).code() is Code.UNAUTHENTICATED
        assert served.cluster.generations == []
        salts = []
        for key in ("first", "second"):
            metadata = [("authorization", f"Bearer {key}"), ("x-request-id", "mine")]
            call = served.stub.Generate(pb.GenerateRequest(text="red"), metadata=metadata)
            assert text_of([response async for response in call]) == "the blue sea"
            request = served.cluster.generations[-1].request
            assert request.request_id == "mine"
            assert request.tenant_salt == served.api.tenant_salt(key)
            salts.append(request.tenant_salt)
        assert len(set(salts)) == 2


async def test_health_is_open_and_reflection_is_not() -> None:
    async with door(keys=["secret"]) as served:
        assert (await served.health.Check(health_pb2.HealthCheckRequest())).status == Serving.SERVING
        assert (await failure(reflected_services(served.channel))).code() is Code.UNAUTHENTICATED
        services = await reflected_services(served.channel, metadata=[("authorization", "Bearer secret")])
        assert SERVICE_NAME in services


# -- health -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["", SERVICE_NAME])
async def test_health_follows_readiness(service: str) -> None:
    async with door() as served:
        asked = health_pb2.HealthCheckRequest(service=service)
        watch = served.health.Watch(asked)
        assert (await watch.read()).status == Serving.SERVING
        served.cluster.ready = False
        assert (await served.health.Check(asked)).status == Serving.NOT_SERVING
        assert (await watch.read()).status == Serving.NOT_SERVING
        served.cluster.ready = True
        assert (await watch.read()).status == Serving.SERVING
        served.api.start_draining()
        assert (await served.health.Check(asked)).status == Serving.NOT_SERVING
        assert (await watch.read()).status == Serving.NOT_SERVING
        watch.cancel()


async def test_health_of_all_services() -> None:
    async with door() as served:
        statuses = (await served.health.List(health_pb2.HealthListRequest())).statuses
        assert {name: answer.status for name, answer in statuses.items()} == dict.fromkeys(
            ("", SERVICE_NAME), Serving.SERVING
        )


async def test_health_of_an_unknown_service() -> None:
    async with door() as served:
        asked = health_pb2.HealthCheckRequest(service="other")
        assert (await failure(served.health.Check(asked))).code() is Code.NOT_FOUND
        watch = served.health.Watch(asked)
        assert (await watch.read()).status == Serving.SERVICE_UNKNOWN
        watch.cancel()


async def test_draining_refuses_new_calls() -> None:
    async with door() as served:
        served.api.start_draining()
        error = await failure(served.generate())
        assert error.code() is Code.UNAVAILABLE
        assert dict(error.trailing_metadata() or ())["pdserve-reason"] == "draining"


async def test_a_taken_port_is_an_error() -> None:
    async with door() as served:
        with pytest.raises(ConfigError, match=f"{served.server.port} on 127.0.0.1"):
            await start_grpc_server(RouterConfig(model=MODEL, grpc_port=served.server.port), served.api)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError):
            await start_grpc_server(RouterConfig(model=MODEL, grpc_port=other.getsockname()[1]), served.api)


# -- what the documents promise ---------------------------------------------------------------------------------------


async def reflected(channel: Any, metadata: Any = (), **question: Any) -> reflection_pb2.ServerReflectionResponse:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(metadata=metadata)
    await call.write(reflection_pb2.ServerReflectionRequest(**question))
    await call.done_writing()
    answers = [answer async for answer in call]
    return answers[0]


async def reflected_services(channel: Any, metadata: Any = ()) -> list[str]:
    answer = await reflected(channel, metadata, list_services="")
    return [service.name for service in answer.list_services_response.service]


async def call_by_reflection(channel: Any, method: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What grpcurl does: ask the server what the method takes, build that from JSON, call, and show JSON."""
    service, _, name = method.rpartition("/")
    pool = descriptor_pool.DescriptorPool()
    answer = await reflected(channel, file_containing_symbol=service)
    for file in answer.file_descriptor_response.file_descriptor_proto:
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
    descriptor = pool.FindServiceByName(service).FindMethodByName(name)
    request_class = message_factory.GetMessageClass(descriptor.input_type)
    response_class = message_factory.GetMessageClass(descriptor.output_type)
    request = json_format.ParseDict(body, request_class())
    kind = channel.unary_stream if descriptor.server_streaming else channel.unary_unary
    multi = kind(f"/{method}", request_serializer=lambda m: m.SerializeToString(),
                 response_deserializer=response_class.FromString)  # fmt: skip
    call = multi(request)
    responses = [message async for message in call] if descriptor.server_streaming else [await call]
    return [json_format.MessageToDict(message) for message in responses]


def documented_commands(program: str) -> list[list[str]]:
    """The words of every command of that program in docs/grpc.md."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/grpc.md").read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line)) and words[0] == program]


async def test_every_documented_grpcurl_command_works() -> None:
    commands = documented_commands("grpcurl")
    assert len(commands) == 7
    async with door() as served:
        called = {}
        for words in commands:
            if words[-1] == "list":
                services = await reflected_services(served.channel)
                assert {SERVICE_NAME, "grpc.health.v1.Health"} <= set(services)
            else:
                body = json.loads(words[words.index("-d") + 1])
                called[words[-1]] = await call_by_reflection(served.channel, words[-1], body)
    answers = called["pdserve.v1.Inference/Generate"]
    for index in range(2):
        of_choice = [answer for answer in answers if answer.get("index", 0) == index]
        assert "".join(answer.get("text", "") for answer in of_choice) == "the blue sea"
    assert answers[-1]["finishReason"] == "stop"
    assert called["pdserve.v1.Inference/Tokenize"][0]["ids"] == tokenizer().encode("one two three")
    assert called["pdserve.v1.Inference/ListModels"][0]["models"][0]["id"] == MODEL
    assert called["grpc.health.v1.Health/Check"] == [{"status": "SERVING"}]


async def test_every_documented_python_command_works() -> None:
    commands = documented_commands("python")
    assert len(commands) == 2
    async with door() as served:
        for words in commands:
            words[0], words[words.index("--target") + 1] = sys.executable, served.target
            process = await asyncio.create_subprocess_exec(
                *words,
                cwd=ROOT,
                env={"PYTHONPATH": str(ROOT), "PATH": ""},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, err = await process.communicate()
            assert (process.returncode, out.decode()) == (0, "the blue sea"), err.decode()
            assert re.fullmatch(r"\n\[stop: \d+ prompt tokens, \d+ generated\]\n", err.decode())


async def test_the_documented_python_code_works(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/grpc.md").read_text(), re.DOTALL)
    async with door() as served:
        code = code.replace("127.0.0.1:8001", served.target)
        await asyncio.to_thread(exec, compile(code, "docs/grpc.md", "exec"), {})
    assert capsys.readouterr().out == "the blue sea"


async def test_the_example_client_says_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    async with door(keys=["secret"]) as served:
        to_server = ["--target", served.target, "red"]
        assert await asyncio.to_thread(example_client, to_server) == 1
        assert "UNAUTHENTICATED" in capsys.readouterr().err
        served.cluster.refuse = Overloaded("full", retry_after_s=4)
        assert await asyncio.to_thread(example_client, ["--api-key", "secret", *to_server]) == 1
        assert "RESOURCE_EXHAUSTED: full (try again after 4 s)" in capsys.readouterr().err
        served.cluster.refuse = None
        assert await asyncio.to_thread(example_client, ["--api-key", "secret", "--stop", "blue", *to_server]) == 0
        assert capsys.readouterr().out == "the "
