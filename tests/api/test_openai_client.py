"""OpenAI's own Python client against a real cluster: its answers, its stream helper and its exceptions."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionToolParam, ChatCompletionUserMessageParam

from tests.api.client import Api
from tests.api.conftest import KEY
from tests.e2e.cluster_processes import MODEL_NAME

pytestmark = pytest.mark.e2e

HI: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Hi"}]
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture
def client(api: Api) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{api.url}/v1", api_key=KEY, max_retries=0, timeout=20.0) as made:
        yield made


def test_stream_helper_assembles_the_whole_answer(client: OpenAI, end_ids: list[int]) -> None:
    """The helper takes only an answer that came to its end."""
    bias = {str(end_id): 100 for end_id in end_ids}
    extra = {"min_tokens": 12}
    whole = client.chat.completions.create(
        model=MODEL_NAME, messages=HI, temperature=0, logit_bias=bias, extra_body=extra
    )
    with client.chat.completions.stream(
        model=MODEL_NAME, messages=HI, temperature=0, logit_bias=bias, extra_body=extra
    ) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_tools_raise_bad_request_in_the_stream_helper_too(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model=MODEL_NAME, messages=HI, tools=[TOOL])
    with (
        pytest.raises(openai.BadRequestError, match="tools"),
        client.chat.completions.stream(model=MODEL_NAME, messages=HI, tools=[TOOL]) as stream,
    ):
        stream.get_final_completion()


def test_errors_are_the_matching_classes_with_a_readable_message(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no such path") as not_found:
        client.post("/nope", cast_to=object, body={})
    assert not_found.value.status_code == 404
    with pytest.raises(openai.APIStatusError, match="method GET is not allowed") as not_allowed:
        client.get("/chat/completions", cast_to=object)
    assert not_allowed.value.status_code == 405
    with pytest.raises(openai.NotFoundError, match="no-such-model") as no_model:
        client.chat.completions.create(model="no-such-model", messages=HI)
    assert no_model.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(model=MODEL_NAME, messages=HI, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError, match="API key"):
        client.with_options(api_key="wrong").models.list()
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
