"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.api_harness import LIMITS, serving, tokenizer


async def test_text_to_ids_and_back() -> None:
    async with serving() as server:
        answer = (await server.client.post("/tokenize", json={"prompt": "red fox é", "return_token_strs": True})).json()
        assert answer["tokens"] == tokenizer().encode("red fox é") and answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == LIMITS.max_model_len
        assert len(answer["token_strs"]) == answer["count"] and answer["token_strs"][0] == "re"
        back = await server.client.post("/detokenize", json={"tokens": answer["tokens"]})
        assert back.json() == {"prompt": "red fox é"}


async def test_messages_are_those_of_a_chat() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    async with serving() as server:
        answer = (await server.client.post("/tokenize", json={"messages": messages})).json()
        await server.chat(messages=messages)
        assert tuple(answer["tokens"]) == server.last.request.prompt_token_ids
        assert answer["token_strs"] is None
        shorter = await server.client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})
        assert shorter.json()["count"] < answer["count"]


async def test_empty_texts_have_no_tokens() -> None:
    async with serving() as server:
        assert (await server.client.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
        assert (await server.client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [5] * 257}, "tokens"),
    ],
)
async def test_wrong_bodies_name_the_field(path: str, body: dict[str, Any], param: str) -> None:
    async with serving() as server:
        response = await server.client.post(path, json=body)
        assert response.status_code == (404 if param == "model" else 400)
        assert response.json()["error"]["param"].startswith(param)
