"""Errors: one small envelope for all of them, whatever was sent, and nothing of it repeated."""

from __future__ import annotations

import httpx
import pytest

from tests.api.client import CHAT, COMPLETIONS, Api, check_error
from tests.e2e.cluster_processes import MODEL_NAME, ClusterProcesses

pytestmark = pytest.mark.e2e

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_wrong_path_and_wrong_method(api: Api) -> None:
    check_error(api.post("/v1/nope", {}), 404)
    check_error(api.http.get(CHAT), 405)
    check_error(api.http.delete(COMPLETIONS), 405)


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model_is_404_by_name_in_streams_too(api: Api, stream: bool) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "Hi"})):
        reply = api.post(path, {"model": "no-such-model", "max_tokens": 4, "stream": stream, **body})
        error = check_error(reply, 404, param="model")
        assert error["code"] == "model_not_found" and "no-such-model" in error["message"]


BROKEN_BODIES = {
    "list": b"[]",
    "true": b"true",
    "null": b"null",
    "number": b"123",
    "string": b'"str"',
    "empty": b"",
    "unclosed": b'{"messages":[{"role":"user","content":"Hi"}',
    "not UTF-8": b'{"prompt":"\xff\xfe","messages":[{"role":"user","content":"\xff\xfe"}]}',
}


@pytest.mark.parametrize("name", BROKEN_BODIES)
def test_body_that_is_no_json_object_is_400(api: Api, name: str) -> None:
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        check_error(api.post_bytes(path, BROKEN_BODIES[name]), 400)


def test_body_of_another_type_is_415(api: Api) -> None:
    check_error(api.post_bytes(CHAT, b'{"messages":[{"role":"user","content":"Hi"}]}', "text/plain"), 415)


@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_deep_nesting_is_400(api: Api, cluster: ClusterProcesses, brackets: str) -> None:
    opening = b"[" if brackets == "[]" else b'{"a":'
    closing = brackets[1].encode()
    for depth in (150, 20_000):
        nested = opening * depth + b"1" + closing * depth
        for field, path in ((b"messages", CHAT), (b"prompt", COMPLETIONS), (b"made_up_field", CHAT)):
            if (field, depth) == (b"made_up_field", 150):
                continue
            body = b'{"model":"%s","max_tokens":1,"%s":%s}' % (MODEL_NAME.encode(), field, nested)
            check_error(api.post_bytes(path, body), 400)
    assert not any("RecursionError" in line for line in cluster["router-0"].log)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_number_that_is_no_json_is_400_and_not_repeated(api: Api, number: str) -> None:
    for path, rest in ((COMPLETIONS, '"prompt":"hi"'), (CHAT, '"messages":[{"role":"user","content":"Hi"}]')):
        for field in ("temperature", "top_p", "presence_penalty"):
            body = f'{{"model":"{MODEL_NAME}",{rest},"max_tokens":2,"{field}":{number}}}'
            check_error(api.post_bytes(path, body.encode()), 400)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", 2.5),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 0),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
    ],
)
def test_value_out_of_range_is_400_by_name(api: Api, field: str, value: float) -> None:
    body = {"prompt": "The sea is", "temperature": 1, "max_tokens": 2, field: value}
    assert field in check_error(api.post(COMPLETIONS, body), 400, param=field)["message"]


def test_many_wrong_messages_give_one_short_error_without_what_was_sent(api: Api) -> None:
    canary = "canary-of-the-caller"
    wrong = {"role": 5, "content": {"bad": canary}}
    for messages in ([wrong] * 5000, [{"role": "user", "content": wrong}] * 5000, [{"role": canary * 100}]):
        reply = api.post(CHAT, {"max_tokens": 1, "messages": messages})
        check_error(reply, 400, param="messages")
        assert canary not in reply.text


def test_error_shows_no_more_than_a_short_name(api: Api) -> None:
    long_name = "x" * 5000
    for reply in (
        api.post(CHAT, {"model": long_name, "messages": MESSAGES}),
        api.post(CHAT, {"messages": [{"role": "user", "content": [{"type": long_name}]}]}),
        api.http.get(f"/v1/models/{long_name}"),
        api.http.request(long_name[:100], CHAT),
    ):
        assert 400 <= reply.status_code < 500
        check_error(reply, reply.status_code)
        assert len(reply.content) < 600


def test_answers_and_errors_are_json(api: Api) -> None:
    replies: list[httpx.Response] = [
        api.post(CHAT, {"messages": []}),
        api.post("/v1/nope", {}),
        api.http.get("/v1/models"),
    ]
    assert {reply.headers["content-type"] for reply in replies} == {"application/json"}
