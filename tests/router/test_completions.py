"""What /v1/completions answers, over a scripted cluster."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import Overloaded
from router.generation import GenerationRequest, ModelLimits
from router.testing import FakeCluster, ScriptedSequence
from tests.router.api_harness import LIMITS, MODEL, events, finish_reasons, joined, saying, serving, tokenizer


def error_of(response: Any) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    return error


async def test_stream_and_whole_answer_say_the_same() -> None:
    async with serving() as server:
        whole = (await server.complete(max_tokens=9)).json()
        streamed = await server.complete(max_tokens=9, stream=True, stream_options={"include_usage": True})
    chunks = events(streamed.text)
    assert chunks[-1] == "[DONE]"
    assert joined(chunks) == whole["choices"][0]["text"] == "the blue sea"
    assert finish_reasons(chunks) == [whole["choices"][0]["finish_reason"]] == ["stop"]
    assert chunks[-2]["choices"] == [] and chunks[-2]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    assert streamed.headers["cache-control"] == "no-cache"
    assert streamed.headers["x-accel-buffering"] == "no"
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert {chunk["id"] for chunk in chunks[:-1]} == {chunks[0]["id"]} and chunks[0]["id"].startswith("cmpl-")


async def test_usage_counts_each_token_once_up_to_the_limit() -> None:
    script = ScriptedSequence(tuple(tokenizer().encode("one two three four")))
    async with serving(script) as server:
        for limit in (1, 3):
            answer = (await server.complete(prompt="one two", max_tokens=limit)).json()
            assert answer["usage"]["completion_tokens"] == limit
            assert answer["usage"]["prompt_tokens"] == len(tokenizer().encode("one two"))
            assert answer["choices"][0]["finish_reason"] == "length"


async def test_continuous_usage_grows_with_the_stream() -> None:
    script = saying("the blue sea", delay_s=0.01)
    async with serving(script) as server:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events((await server.complete(stream=True, stream_options=options)).text)[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 1 and counts == sorted(counts) and counts[-1] == 4


async def test_defaults_are_sixteen_tokens_and_a_fresh_seed() -> None:
    async with serving() as server:
        await server.complete()
        await server.complete()
        first, second = (generation.request.sampling for generation in server.cluster.generations)
    assert first.max_tokens == 16 and first.temperature == 1.0 and first.top_p == 1.0
    assert first.seed != second.seed
    assert first.eos_token_ids == (0, 2)


async def test_default_limit_shrinks_to_the_room_that_is_left() -> None:
    async with serving() as server:
        response = await server.complete(prompt=[5] * (LIMITS.max_model_len - 3))
        assert response.status_code == 200
        assert server.last.request.sampling.max_tokens == 3


async def test_seeds_are_repeatable_when_the_router_has_one() -> None:
    drawn = []
    for _ in range(2):
        async with serving(seed=7) as server:
            await server.complete()
            drawn.append(server.last.request.sampling.seed)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("seed", [0, 42, -1, 2**63 - 1, -(2**63)])
async def test_given_seed_reaches_the_cluster(seed: int) -> None:
    async with serving() as server:
        assert (await server.complete(seed=seed)).status_code == 200
        assert server.last.request.sampling.seed == seed % 2**64


async def test_every_sampling_field_reaches_the_cluster() -> None:
    async with serving() as server:
        response = await server.complete(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            repetition_penalty=1.2,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            logit_bias={"5": -100, "6": 2.5},
            min_tokens=2,
            max_tokens=9,
            stop_token_ids=[11, 12],
            ignore_eos=True,
            logprobs=3,
        )
        assert response.status_code == 200
        sampling = server.last.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, -0.5, 0.25)
    assert sampling.logit_bias == {5: -100.0, 6: 2.5}
    assert (sampling.min_tokens, sampling.max_tokens, sampling.stop_token_ids) == (2, 9, (11, 12))
    assert sampling.ignore_eos and sampling.logprobs == 3


async def test_top_k_of_minus_one_keeps_all_tokens() -> None:
    async with serving() as server:
        assert (await server.complete(top_k=-1)).status_code == 200
        assert server.last.request.sampling.top_k == 0


def names_itself(request: GenerationRequest, index: int) -> ScriptedSequence:
    return saying(f"{request.prompt_token_ids[0]}:{index}", delay_s=0.005 * (3 - index))


async def test_choices_of_a_list_of_prompts_are_numbered_through() -> None:
    async with serving(names_itself) as server:
        whole = (await server.complete(prompt=[[10, 11], [20]], n=2)).json()
        streamed = events((await server.complete(prompt=[[10, 11], [20]], n=2, stream=True)).text)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    texts = ["10:0", "10:1", "20:0", "20:1"]
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["usage"]["completion_tokens"] == sum(len(tokenizer().encode(text)) + 1 for text in texts)
    for index, text in enumerate(texts):
        assert joined(streamed, index) == text
        assert finish_reasons(streamed, index) == ["stop"]


async def test_more_prompts_than_run_at_once_are_all_answered_though_the_cluster_is_often_full() -> None:
    class SmallCluster(FakeCluster):
        async def generate(self, request: GenerationRequest) -> Any:
            if len(self.open_generations) >= 3:
                raise Overloaded("three is enough")
            return await super().generate(request)

    cluster = SmallCluster(script=names_itself, model_limits=LIMITS)
    async with serving(cluster=cluster) as server:
        answer = (await server.complete(prompt=[[first] for first in range(10, 50)])).json()
    assert [choice["text"] for choice in answer["choices"]] == [f"{first}:0" for first in range(10, 50)]


async def test_list_of_texts() -> None:
    async with serving(names_itself) as server:
        answer = (await server.complete(prompt=["one", "two three"])).json()
    expected = [tokenizer().encode(text) for text in ("one", "two three")]
    assert [choice["text"] for choice in answer["choices"]] == [f"{ids[0]}:0" for ids in expected]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_one_bad_prompt_fails_all_before_any_work() -> None:
    async with serving() as server:
        response = await server.complete(prompt=[[10, 11], [10_000_000]])
        assert response.status_code == 400
        assert error_of(response)["param"] == "prompt"
        assert server.cluster.generations == []


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [1, "a"], [[1], []], [1.5], {"a": 1}, 5, True, [True], [[True]], [None], [[5], "red"]]
)
async def test_prompt_that_is_none_is_refused(prompt: Any) -> None:
    async with serving() as server:
        response = await server.complete(prompt=prompt)
        assert response.status_code == 400
        assert error_of(response)["param"] == "prompt"
        assert server.cluster.generations == []


@pytest.mark.parametrize("ids", [[1, 2, 10_000_000], [5, -1, 7], [300], [512], [2**63], [10**30]])
async def test_prompt_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    async with serving() as server:
        assert tokenizer().vocab_size <= 300
        response = await server.complete(prompt=ids)
        assert response.status_code == 400
        assert error_of(response)["param"] == "prompt"


async def test_missing_prompt_is_refused() -> None:
    async with serving() as server:
        response = await server.client.post("/v1/completions", json={"model": MODEL})
        assert response.status_code == 400
        assert error_of(response)["param"] == "prompt"


REFUSED = {
    "temperature": (-1, 2.5, "hot", True, [1]),
    "top_p": (0, 1.5, -0.1),
    "top_k": (-2, 0, 1.5, 2**40),
    "min_p": (2, -0.1),
    "presence_penalty": (2.5, -3),
    "frequency_penalty": (2.5, -3),
    "repetition_penalty": (0, -1, 1000),
    "n": (0, -1, 1.5, "many", 100000, True, 10**30),
    "best_of": (0, 100000, 1.5),
    "max_tokens": (0, -1, 1.5, "x", 2**40),
    "min_tokens": (-1, 17),
    "logprobs": (-1, 21, True, 10**9),
    "stop": ("", [""], ["a", None], 5, {"a": 1}, ["x"] * 17, "y" * 2000),
    "stop_token_ids": ([-1], [512], [2**63], ["a"], 5, [1] * 200),
    "logit_bias": ({"999999": 1}, {"-1": 1}, {"a": 1}, {"5": 101}, {"5": "x"}, [1], {str(i): 1 for i in range(2000)}),
    "seed": (1.5, "x", 2**64, -(2**63) - 1),
    "suffix": ("end", " "),
    "stream_options": ({"include_usage": True},),
    "prompt_logprobs": (1, -1),
    "use_beam_search": ("yes", 1),
    "length_penalty": (2, "x"),
    "priority": (2**31, 0.5),
    "guided_json": ({},),
    "response_format": ({"type": "json_object"},),
    "echo": ("yes",),
    "stream": ("yes", 1),
    "skip_special_tokens": (0,),
    "cache_salt": (5,),
    "model": (5,),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values])
async def test_value_that_cannot_be_served_is_a_400_naming_the_field(field: str, value: Any) -> None:
    async with serving() as server:
        response = await server.complete(**{field: value})
        assert response.status_code == 400, response.text
        error = error_of(response)
        assert field in error["param"] and field in error["message"]
        assert len(response.content) < 8192
        assert server.cluster.generations == []


async def test_null_is_the_same_as_absent_for_every_field() -> None:
    fields = [*REFUSED, "user", "metadata", "made_up"]
    async with serving() as server:
        response = await server.complete(**dict.fromkeys(fields))
        assert response.status_code == 200, response.text


async def test_fields_that_ask_for_nothing_and_unknown_ones_are_accepted() -> None:
    async with serving() as server:
        response = await server.complete(user="u", best_of=1, use_beam_search=False, made_up={"x": [1]}, n=1)
        assert response.status_code == 200


async def test_explicit_limit_beyond_the_context_is_refused() -> None:
    async with serving() as server:
        prompt = [5] * 10
        assert (await server.complete(prompt=prompt, max_tokens=LIMITS.max_model_len - 10)).status_code == 200
        response = await server.complete(prompt=prompt, max_tokens=LIMITS.max_model_len - 9)
    assert response.status_code == 400
    assert error_of(response)["param"] == "max_tokens"
    assert error_of(response)["code"] == "context_length_exceeded"


async def test_prompt_as_long_as_the_context_is_refused() -> None:
    async with serving() as server:
        response = await server.complete(prompt=[5] * LIMITS.max_model_len)
        assert response.status_code == 400
        assert error_of(response)["code"] == "context_length_exceeded"


async def test_request_that_no_pool_can_hold_is_refused() -> None:
    limits = ModelLimits(vocab_size=512, max_model_len=2048, block_size=16, max_request_blocks=4, max_sequences=128)
    async with serving(cluster=FakeCluster(script=saying("x"), model_limits=limits)) as server:
        assert (await server.complete(prompt=[5] * 4, max_tokens=60)).status_code == 200
        response = await server.complete(prompt=[5] * 4, max_tokens=61)
        assert response.status_code == 400
        assert error_of(response)["param"] == "max_tokens"
        assert (await server.complete(prompt=[5] * 64)).status_code == 400


async def test_own_context_limit_of_the_router_counts() -> None:
    async with serving(max_model_len=20) as server:
        assert (await server.complete(prompt=[5] * 10, max_tokens=10)).status_code == 200
        assert (await server.complete(prompt=[5] * 10, max_tokens=11)).status_code == 400


async def test_logprobs_have_equal_lengths_and_one_entry_for_each_token() -> None:
    async with serving() as server:
        answer = (await server.complete(logprobs=2)).json()
    logprobs = answer["choices"][0]["logprobs"]
    count = answer["usage"]["completion_tokens"]
    assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), count
    )
    assert logprobs["tokens"][:3] == ["the", " blue", " sea"]
    assert logprobs["text_offset"][:3] == [0, 3, 8]
    assert all(len(top) in (2, 3) for top in logprobs["top_logprobs"])


async def test_streamed_logprobs_are_those_of_the_whole_answer() -> None:
    async with serving() as server:
        whole = (await server.complete(logprobs=1, echo=True)).json()["choices"][0]["logprobs"]
        chunks = events((await server.complete(logprobs=1, echo=True, stream=True)).text)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1] if chunk["choices"][0]["logprobs"]]
    assert {name: [entry for part in parts for entry in part[name]] for name in whole} == whole


async def test_echo_puts_the_prompt_first() -> None:
    async with serving() as server:
        assert (await server.complete(prompt="red fox", echo=True)).json()["choices"][0][
            "text"
        ] == "red foxthe blue sea"
        chunks = events((await server.complete(prompt="red fox", echo=True, stream=True, n=2)).text)
        assert joined(chunks, 0) == joined(chunks, 1) == "red foxthe blue sea"
        ids = tokenizer().encode("red fox")
        assert (await server.complete(prompt=ids, echo=True)).json()["choices"][0]["text"] == "red foxthe blue sea"


async def test_echo_with_logprobs_scores_the_prompt() -> None:
    prompt = "the sea is blue"
    async with serving() as server:
        answer = (await server.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=1)).json()
        assert server.last.request.sampling.prompt_logprobs == 1
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == answer["usage"]["prompt_tokens"] + 1
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"][:-1]) == prompt
    assert logprobs["text_offset"][-1] == len(prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_alone_makes_no_token(stream: bool) -> None:
    async with serving() as server:
        response = await server.complete(
            prompt="red fox",
            echo=True,
            logprobs=0,
            max_tokens=0,
            stream=stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        )
    if stream:
        chunks = events(response.text)
        assert joined(chunks) == "red fox" and finish_reasons(chunks) == ["length"]
        assert chunks[-2]["usage"]["completion_tokens"] == 0
    else:
        answer = response.json()
        assert answer["choices"][0]["text"] == "red fox"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]


async def test_token_ids_on_request() -> None:
    prompt, output = tokenizer().encode("red"), [*tokenizer().encode("the blue sea"), 2]
    async with serving() as server:
        choice = (await server.complete(return_token_ids=True)).json()["choices"][0]
        assert choice["prompt_token_ids"] == prompt and choice["token_ids"] == output
        chunks = events((await server.complete(return_token_ids=True, stream=True)).text)[:-1]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == prompt
    assert [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]] == output


async def test_tokens_can_be_shown_as_ids() -> None:
    async with serving() as server:
        answer = (await server.complete(logprobs=0, return_tokens_as_token_ids=True)).json()
    expected = [f"token_id:{token_id}" for token_id in (*tokenizer().encode("the blue sea"), 2)]
    assert answer["choices"][0]["logprobs"]["tokens"] == expected


async def test_stop_string_cuts_and_wins_over_length() -> None:
    async with serving() as server:
        for stream in (False, True):
            response = await server.complete(stop=["lue s"], max_tokens=3, stream=stream)
            if stream:
                assert joined(events(response.text)) == "the b" and finish_reasons(events(response.text)) == ["stop"]
            else:
                choice = response.json()["choices"][0]
                assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("the b", "stop", "lue s")
        kept = (await server.complete(stop="blue", include_stop_str_in_output=True)).json()
        assert kept["choices"][0]["text"] == "the blue"


async def test_held_back_text_is_flushed_at_the_end() -> None:
    async with serving() as server:
        chunks = events((await server.complete(stop=["eazz"], stream=True)).text)
    assert joined(chunks) == "the blue sea"


async def test_special_tokens_can_be_kept() -> None:
    script = ScriptedSequence((1, *tokenizer().encode("red")))
    async with serving(script) as server:
        assert (await server.complete()).json()["choices"][0]["text"] == "red"
        shown = (await server.complete(skip_special_tokens=False)).json()
        assert shown["choices"][0]["text"] == "<|im_start|>red"


async def test_unfinished_bytes_end_as_replacement_characters_in_both_forms() -> None:
    byte = next(token_id for token_id in range(3, 300) if tokenizer().token_bytes(token_id) == b"\xf0")
    async with serving(ScriptedSequence((byte,) * 9)) as server:
        whole = (await server.complete(max_tokens=5)).json()
        chunks = events((await server.complete(max_tokens=5, stream=True)).text)
    text = whole["choices"][0]["text"]
    assert text and set(text) == {"\ufffd"} and joined(chunks) == text
    assert whole["usage"]["completion_tokens"] == 5 and finish_reasons(chunks) == ["length"]


async def test_cached_tokens_are_reported() -> None:
    cluster = FakeCluster(script=saying("x"), model_limits=LIMITS, cached_tokens=16)
    async with serving(cluster=cluster) as server:
        usage = (await server.complete(prompt=[5] * 20)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
