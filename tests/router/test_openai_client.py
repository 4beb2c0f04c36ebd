"""OpenAI's own Python client against the API: what most people call it with."""

from __future__ import annotations

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionUserMessageParam

from engine.errors import AttemptFailed, Overloaded
from router.testing import FakeCluster, ScriptedSequence
from tests.router.api_harness import LIMITS, MODEL, Serving, serving, tokenizer

HI: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Hi"}]


def client(server: Serving, key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0, timeout=10.0)


async def test_chat_whole_and_streamed() -> None:
    async with serving() as server, client(server) as openai_client:
        whole = await openai_client.chat.completions.create(model=MODEL, messages=HI, logprobs=True, top_logprobs=1)
        assert whole.choices[0].message.content == "the blue sea" and whole.usage is not None
        assert whole.choices[0].logprobs is not None
        text, usage = "", None
        async for chunk in await openai_client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
        ):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
        assert text == "the blue sea" and usage == whole.usage


async def test_stream_helper_assembles_the_answer() -> None:
    async with (
        serving() as server,
        client(server) as openai_client,
        openai_client.chat.completions.stream(model=MODEL, messages=HI) as stream,
    ):
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == "the blue sea" and answer.choices[0].finish_reason == "stop"


async def test_completions_and_models() -> None:
    async with serving() as server, client(server) as openai_client:
        completion = await openai_client.completions.create(model=MODEL, prompt="red", logprobs=1, echo=True)
        assert completion.choices[0].text == "redthe blue sea"
        assert [model.id async for model in openai_client.models.list()] == [MODEL]
        assert (await openai_client.models.retrieve(MODEL)).owned_by == "pdserve"


async def test_errors_are_the_matching_classes_with_their_message() -> None:
    async with serving(keys=("right",)) as server, client(server, "right") as openai_client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await openai_client.chat.completions.create(model="other", messages=HI)
        with pytest.raises(openai.BadRequestError, match="temperature") as raised:
            await openai_client.chat.completions.create(model=MODEL, messages=HI, temperature=3)
        assert raised.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError, match="API key"):
            await client(server, "wrong").models.list()
    refusing = FakeCluster(model_limits=LIMITS, refuse=Overloaded("full"))
    async with serving(cluster=refusing) as server, client(server) as openai_client:
        with pytest.raises(openai.RateLimitError, match="full"):
            await openai_client.chat.completions.create(model=MODEL, messages=HI, stream=True)


async def test_error_in_mid_stream_is_raised() -> None:
    script = ScriptedSequence(tuple(tokenizer().encode("the blue")), error=AttemptFailed("node died"))
    async with serving(script) as server, client(server) as openai_client:
        stream = await openai_client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="node died"):
            async for _ in stream:
                pass


async def test_leaving_a_stream_early_frees_it() -> None:
    script = ScriptedSequence(tuple(tokenizer().encode("the blue")), hang=True)
    async with serving(script) as server:
        async with client(server) as openai_client:
            stream = await openai_client.chat.completions.create(model=MODEL, messages=HI, stream=True)
            async for _ in stream:
                break
            await stream.close()
        assert await server.api.wait_idle(1.0)
        assert server.last.is_cancelled
