"""Chat: messages as the template sees them, log probabilities, lengths, and what is refused, on real nodes."""

from __future__ import annotations

import re
import time
from uuid import uuid4

import pytest
from tokenizers import Tokenizer

from tests.api.client import CHAT, Api, Json, check_error
from tests.api.conftest import POOL_TOKENS
from tests.e2e.cluster_processes import MODEL_NAME

pytestmark = pytest.mark.e2e

COLOURS = "Name three colours."
CALL: Json = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"city":"Oslo"}'}}
QUESTION: Json = {"role": "user", "content": "What time is it in Oslo?"}
ANSWERED: Json = {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}


def test_length_is_the_one_finish_reason_at_the_limit(api: Api) -> None:
    fields = {"max_tokens": 3, "ignore_eos": True, "cache_salt": uuid4().hex}
    whole = api.chat("Count from one to fifty in words.", **fields)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 3
    streamed = api.stream_chat("Count from one to fifty in words.", **{**fields, "cache_salt": uuid4().hex})
    assert streamed.finish_reasons == {0: ["length"]}
    assert streamed.usage == whole["usage"]
    assert streamed.text == whole["choices"][0]["message"]["content"]
    assert streamed.events[0]["choices"][0]["delta"]["role"] == "assistant"


def test_empty_stop_list_keeps_the_models_own_end(api: Api, end_ids: list[int]) -> None:
    bias = {str(end_id): 100 for end_id in end_ids}
    answer = api.chat("Say hello.", max_tokens=64, stop=[], min_tokens=3, logit_bias=bias)
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 4
    for end_id in end_ids:
        one = api.chat("Say hello.", max_tokens=64, stop=[], logit_bias={str(end_id): 100})
        assert one["choices"][0]["finish_reason"] == "stop" and one["choices"][0]["message"]["content"] == ""
    free = api.chat("Say hello.", max_tokens=64, stop=[])
    for choice in (answer["choices"][0], free["choices"][0]):
        assert not re.search(r"<\|im_end\|>|<\|im_start\|>|<\|endoftext\|>", choice["message"]["content"])


def rendered(api: Api, messages: list[Json]) -> str:
    """The prompt that the template makes of messages, special tokens included."""
    tokens = api.post("/tokenize", {"messages": messages}).json()["tokens"]
    text: str = api.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    return text


@pytest.mark.parametrize(
    "call",
    [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [CALL]}],
    ids=["null", "absent"],
)
def test_tool_call_without_content_is_an_empty_message(api: Api, call: Json) -> None:
    messages = [QUESTION, call, ANSWERED]
    text = rendered(api, messages)
    assert "None" not in text
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n12:00<|im_end|>\n" in text
    answer = api.chat(messages, max_tokens=8)
    assert answer["usage"]["completion_tokens"] > 0
    assert answer["usage"]["prompt_tokens"] == api.post("/tokenize", {"messages": messages}).json()["count"]


def test_text_parts_are_joined(api: Api) -> None:
    in_parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "What time "}, {"type": "text", "text": "is it in Oslo?"}],
        },
        {"role": "assistant", "tool_calls": [CALL]},
        {**ANSWERED, "content": [{"type": "text", "text": "12:00"}]},
    ]
    plain = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, ANSWERED]
    assert rendered(api, in_parts) == rendered(api, plain)
    answers = [api.chat(messages, max_tokens=8) for messages in (in_parts, plain)]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_log_probabilities_have_one_entry_for_each_token(api: Api, tokenizer: Tokenizer) -> None:
    answer = api.chat("Hi", logprobs=True, max_tokens=4, ignore_eos=True, return_token_ids=True)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"] == 4
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["logprob"] <= 0 and entry["top_logprobs"] == []
        assert all(0 <= byte <= 255 for byte in entry["bytes"])
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
    assert text == answer["choices"][0]["message"]["content"]
    assert text == tokenizer.decode(answer["choices"][0]["token_ids"])


def test_top_log_probabilities_descend_and_hold_the_chosen_token(api: Api) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 4, "ignore_eos": True}
    greedy = api.chat("Hi", **fields)["choices"][0]["logprobs"]["content"]
    sampled = api.chat("Hi", temperature=1.5, seed=1, **fields)["choices"][0]["logprobs"]["content"]
    for entry in greedy + sampled:
        top = entry["top_logprobs"]
        assert len(top) == 3
        assert [item["logprob"] for item in top] == sorted((item["logprob"] for item in top), reverse=True)
        for item in top:
            if item["bytes"] == entry["bytes"]:
                assert item["logprob"] == entry["logprob"]
    for entry in greedy:
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]


def test_null_is_absent_for_every_optional_field(api: Api) -> None:
    names = [
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "n",
        "seed",
        "logit_bias",
        "tools",
        "tool_choice",
        "stream",
        "stream_options",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logprobs",
        "top_logprobs",
        "response_format",
        "user",
        "metadata",
        "store",
        "service_tier",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "parallel_tool_calls",
        "cache_salt",
    ]
    absent = api.chat("Say one word.")
    given = api.chat("Say one word.", **dict.fromkeys(names))
    assert given["choices"] == absent["choices"]
    ended, usage = given["choices"][0]["finish_reason"], given["usage"]
    assert ended == "stop" or (ended == "length" and usage["total_tokens"] == POOL_TOKENS)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_no_room_for_a_token_is_refused_in_the_callers_own_words(api: Api, name: str, value: int) -> None:
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": COLOURS}], name: value, "stream": stream}
        message = check_error(api.post(CHAT, body), 400, param=name)["message"]
        assert set(re.findall(r"-?\d+", message)) <= {"0", "1", "-1"}, message


def test_newer_name_of_max_tokens_wins(api: Api) -> None:
    answer = api.chat(COLOURS, max_tokens=7, max_completion_tokens=3, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("n", [0, -1, 1.5, "many", 100_000])
def test_impossible_number_of_choices_is_refused(api: Api, n: object) -> None:
    check_error(api.post(CHAT, {"messages": [QUESTION], "n": n, "max_tokens": 4}), 400, param="n")


def test_unknown_fields_and_fields_of_no_effect_are_accepted(api: Api) -> None:
    plain = api.chat("Hi", max_tokens=4)
    answer = api.chat(
        [{"role": "user", "content": "Hi", "name": "u1", "id": 7}],
        max_tokens=4,
        store=False,
        metadata={"a": "b"},
        user="u",
        service_tier="auto",
        made_up_field={"x": 1},
    )
    assert answer["choices"] == plain["choices"]
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_refused_by_name(api: Api, stream: bool) -> None:
    function = {"name": "get_time", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    body = {
        "messages": [QUESTION],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "get_time"}},
        "stream": stream,
        "max_tokens": 48,
    }
    assert "tool" in check_error(api.post(CHAT, body), 400, param="tool")["message"]


def test_chat_without_messages_is_refused(api: Api) -> None:
    check_error(api.post(CHAT, {"messages": [], "max_tokens": 4}), 400, param="messages")
    check_error(api.post(CHAT, {"max_tokens": 4}), 400, param="messages")


def test_malformed_chat_does_not_hurt_the_next_one(api: Api) -> None:
    bad = [{"role": "user"}, {"role": "assistant", "content": 5}, {"content": "x"}]
    for messages in (bad, *([message] for message in bad)):
        check_error(api.post(CHAT, {"messages": messages, "max_tokens": 2}), 400, param="messages")
    started = time.monotonic()
    assert api.chat("Hi", max_tokens=2)["usage"]["completion_tokens"] > 0
    assert time.monotonic() - started < 5.0


def json_schema(schema: object) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": schema}}


def test_schemas_are_refused_and_never_answered_with_free_text(api: Api) -> None:
    for schema in (
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^abc([0-9"}}, "required": ["a"]},
        {"type": "object", "properties": {"foo": "bar"}},
        {"type": "no-such-type"},
        {"$ref": "#/$defs/nowhere"},
        "bar",
    ):
        body = {"messages": [QUESTION], "response_format": json_schema(schema), "max_tokens": 16}
        check_error(api.post(CHAT, body), 400, param="response_format")
    assert api.chat("Say hi.", max_tokens=2)["model"] == MODEL_NAME
