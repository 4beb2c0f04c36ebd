"""What /v1/chat/completions answers, over a scripted cluster."""

from __future__ import annotations

from typing import Any

import pytest

from router.openai_protocol import chat_messages
from router.testing import FakeCluster, ScriptedSequence
from tests.router.api_harness import (
    LIMITS,
    MODEL,
    Serving,
    events,
    finish_reasons,
    joined,
    saying,
    serving,
    tokenizer,
)

CALL = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"city":"Oslo"}'}}
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


def prompt_text(server: Serving) -> str:
    return tokenizer().decode(server.last.request.prompt_token_ids, skip_special_tokens=False)


async def test_whole_answer_has_openais_shape() -> None:
    async with serving() as server:
        answer = (await server.chat()).json()
        assert prompt_text(server) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "the blue sea", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None and choice["index"] == 0


async def test_stream_has_role_first_and_one_finish_reason_for_each_choice() -> None:
    async with serving() as server:
        chunks = events((await server.chat(stream=True, n=3, stream_options={"include_usage": True})).text)
    assert chunks.pop() == "[DONE]"
    usage = chunks.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert joined(chunks, index) == "the blue sea" and finish_reasons(chunks, index) == ["stop"]
        assert own[-1]["finish_reason"] == "stop"


async def test_default_limit_is_the_rest_of_the_context() -> None:
    async with serving() as server:
        await server.chat()
        request = server.last.request
        assert request.sampling.max_tokens == LIMITS.max_model_len - len(request.prompt_token_ids)


async def test_newer_name_of_the_limit_wins() -> None:
    async with serving() as server:
        await server.chat(max_tokens=2, max_completion_tokens=3)
        assert server.last.request.sampling.max_tokens == 3
        answer = await server.chat(max_completion_tokens=-1)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_completion_tokens"
        answer = await server.chat(max_completion_tokens=5000)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_completion_tokens"


async def test_limit_of_minus_one_is_refused_without_computed_numbers() -> None:
    async with serving() as server:
        error = (await server.chat(max_tokens=-1)).json()["error"]
    assert error["message"] == "max_tokens must be at least 1"


async def test_logprobs_without_top_have_empty_lists() -> None:
    async with serving() as server:
        answer = (await server.chat(logprobs=True)).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"]
        assert all(entry["top_logprobs"] == [] and entry["logprob"] <= 0 for entry in content)
        assert bytes(content[1]["bytes"]).decode() == content[1]["token"] == " blue"

        top = (await server.chat(logprobs=True, top_logprobs=3)).json()["choices"][0]["logprobs"]["content"]
        for entry in top:
            values = [other["logprob"] for other in entry["top_logprobs"]]
            assert len(values) == 3 and values == sorted(values, reverse=True)


async def test_streamed_logprobs_are_those_of_the_whole_answer() -> None:
    async with serving() as server:
        whole = (await server.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]["content"]
        chunks = events((await server.chat(logprobs=True, top_logprobs=1, stream=True)).text)[:-1]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == whole


async def test_tool_history_is_rendered_and_null_content_is_empty() -> None:
    plain = [
        {"role": "user", "content": "What time is it in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "What time "}, {"type": "text", "text": "is it in Oslo?"}],
        },
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12:00"}]},
    ]
    rendered = []
    async with serving() as server:
        for messages in (plain, parts):
            assert (await server.chat(messages=messages)).status_code == 200
            rendered.append(prompt_text(server))
    assert rendered[0] == rendered[1]
    assert "None" not in rendered[0] and "What time is it in Oslo?" in rendered[0]


def test_arguments_of_tool_calls_become_objects_where_they_are_some() -> None:
    odd = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "not json"}}
    (message,) = chat_messages([{"role": "assistant", "tool_calls": [CALL, odd]}])
    calls: Any = message["tool_calls"]
    assert calls[0]["function"]["arguments"] == {"city": "Oslo"}
    assert calls[1]["function"]["arguments"] == "not json"


async def test_developer_speaks_as_system() -> None:
    async with serving() as server:
        await server.chat(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
        assert prompt_text(server).startswith("<|im_start|>system\nBe brief.")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "Hi",
        {},
        [5],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "content": 5}],
        [{"content": "x"}],
        [{"role": 5, "content": "x"}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [[]]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]}],
        [{"role": "assistant", "tool_calls": 5}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}],
        [{"role": "tool", "content": "x", "tool_call_id": 7}],
        [{"role": 5, "content": {"bad": "shape"}}] * 5000,
    ],
)
async def test_messages_that_are_none_are_refused_and_the_next_chat_works(messages: Any) -> None:
    async with serving() as server:
        response = await server.chat(messages=messages)
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("messages")
        assert len(response.content) < 8192
        assert server.cluster.generations == []
        assert (await server.chat()).status_code == 200


REFUSED = {
    "tools": ([TOOL], "x", [5], {"a": 1}),
    "tool_choice": ("required", {"type": "function", "function": {"name": "f"}}),
    "functions": ([{"name": "f"}],),
    "function_call": ("auto", {"name": "f"}),
    "response_format": ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x"}}, "text", 5),
    "audio": ({"voice": "a", "format": "wav"},),
    "modalities": (["audio"], ["text", "audio"], "text"),
    "top_logprobs": (21, -1, 3, 1.5),
    "logprobs": (1, "yes"),
    "n": (0, -1, 1.5, "many", 100000),
    "max_tokens": (0, -1),
    "chat_template": ("{{ messages }}",),
    "chat_template_kwargs": ({"messages": []}, [1], {"tools": []}),
    "continue_final_message": (True,),
    "documents": ([{"text": "x"}],),
    "web_search_options": ({},),
    "verbosity": ("low",),
    "echo": (True,),
    "reasoning_effort": (5,),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values])
async def test_value_that_cannot_be_served_is_a_400_naming_the_field(field: str, value: Any) -> None:
    async with serving() as server:
        response = await server.chat(**{field: value})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert field in error["param"] and field in error["message"]
        assert server.cluster.generations == []


async def test_null_is_the_same_as_absent_for_every_field() -> None:
    async with serving() as server:
        fields = [*REFUSED, "stop", "seed", "logit_bias", "stream_options", "temperature", "max_completion_tokens"]
        assert (await server.chat(**dict.fromkeys(fields))).status_code == 200


async def test_fields_that_ask_for_nothing_and_unknown_ones_are_accepted() -> None:
    async with serving() as server:
        response = await server.chat(
            messages=[{"role": "user", "content": "Hi", "name": "u1", "id": 7}],
            store=False,
            metadata={"a": "b"},
            user="u",
            service_tier="auto",
            made_up_field={"x": 1},
            response_format={"type": "text"},
            modalities=["text"],
            tools=[],
            tool_choice="auto",
            functions=[],
            parallel_tool_calls=True,
            prediction=None,
        )
        assert response.status_code == 200, response.text


async def test_tools_that_must_not_be_called_are_allowed() -> None:
    async with serving() as server:
        assert (await server.chat(tools=[TOOL], tool_choice="none")).status_code == 200


async def test_template_options_reach_the_template() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    async with serving() as server:
        await server.chat(messages=messages, add_generation_prompt=False)
        assert prompt_text(server).endswith("Well<|im_end|>\n")
        await server.chat(messages=messages, add_generation_prompt=False, continue_final_message=True)
        assert prompt_text(server).endswith("Well")


async def test_deep_json_inside_a_field_is_refused_by_name() -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    async with serving() as server:
        for field, value in (("chat_template_kwargs", {"a": deep}), ("tools", [{"a": deep}])):
            response = await server.chat(**{field: value})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == field


async def test_empty_list_of_stops_leaves_the_models_own_end() -> None:
    async with serving() as server:
        content = (await server.chat(stop=[])).json()["choices"][0]["message"]["content"]
    assert content == "the blue sea"


async def test_token_ids_on_request() -> None:
    async with serving() as server:
        answer = (await server.chat(return_token_ids=True)).json()
        prompt = list(server.last.request.prompt_token_ids)
        chunks = events((await server.chat(return_token_ids=True, stream=True)).text)[:-1]
    assert answer["prompt_token_ids"] == prompt == chunks[0]["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    output = [*tokenizer().encode("the blue sea"), 2]
    assert answer["choices"][0]["token_ids"] == output
    assert [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", ())] == output


async def test_unknown_model_is_404_streamed_or_not() -> None:
    async with serving() as server:
        for stream in (False, True):
            response = await server.chat(model="no-such-model", stream=stream)
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "model_not_found"
            assert "no-such-model" in response.json()["error"]["message"]
        assert len((await server.chat(model="x" * 100_000)).content) < 8192
        missing = await server.client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]}
        )
        assert missing.status_code == 200 and missing.json()["model"] == MODEL


async def test_served_names_replace_the_models_own() -> None:
    async with serving(served_model_names=("first", "second")) as server:
        assert (await server.chat(model="second")).json()["model"] == "second"
        assert (await server.chat(model=MODEL)).status_code == 404
        cards = (await server.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["first", "second"]
        assert {card["root"] for card in cards} == {"first"}  # Nothing of the server's folders.


async def test_model_without_a_template_says_so() -> None:
    async with serving() as server:
        server.api.chat_template = None
        response = await server.chat()
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "no_chat_template"


async def test_text_far_beyond_the_context_is_refused_without_tokenising() -> None:
    async with serving() as server:
        response = await server.chat(messages=[{"role": "user", "content": "lorem ipsum " * 400_000}])
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert len(response.content) < 8192


async def test_unready_cluster_is_503_with_a_time_to_come_back() -> None:
    async with serving(cluster=FakeCluster(model_limits=None)) as server:
        response = await server.chat()
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1


async def test_only_the_end_token_gives_an_empty_answer() -> None:
    async with serving(ScriptedSequence((2,))) as server:
        answer = (await server.chat()).json()
        assert answer["choices"][0]["message"]["content"] == "" and answer["choices"][0]["finish_reason"] == "stop"
        chunks = events((await server.chat(stream=True)).text)
        assert joined(chunks) == "" and finish_reasons(chunks) == ["stop"]


async def test_script_of_another_kind_streams_too() -> None:
    async with serving(lambda request, index: saying(f"choice {index}")) as server:
        answer = (await server.chat(n=2)).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["choice 0", "choice 1"]
