"""What a request for beam search or for the best of many becomes, and what its client gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.tokens import FinishReason
from proto import worker_pb2 as pb
from router.beam_search import BeamSearch
from router.generation import GenerationRequest
from router.testing import FakeCluster, ScriptedSequence
from tests.router.api_harness import LIMITS, saying, serving, tokenizer
from tests.router.cluster_harness import collect, make_request, running_cluster


async def test_n_is_the_width_and_a_search_is_asked_for() -> None:
    async with serving() as server:
        response = await server.complete(n=3, use_beam_search=True, length_penalty=0.5, max_tokens=4, ignore_eos=True)
        assert response.status_code == 200, response.text
        assert [choice["index"] for choice in response.json()["choices"]] == [0, 1, 2]
        request = server.last.request
        assert (request.num_sequences, request.beam_search) == (3, BeamSearch(width=3, length_penalty=0.5))
        assert request.sampling.is_greedy and request.sampling.ignore_eos
        response = await server.chat(n=2, use_beam_search=True)
        assert server.last.request.beam_search == BeamSearch(width=2, length_penalty=1.0)
        assert len(response.json()["choices"]) == 2


async def test_best_of_is_a_width_of_which_n_are_shown() -> None:
    async with serving() as server:
        response = await server.complete(n=2, best_of=5, use_beam_search=True)
        assert len(response.json()["choices"]) == 2
        assert server.last.request.num_sequences == 2
        assert server.last.request.beam_search == BeamSearch(width=5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", True),
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 1),
        ("frequency_penalty", 1),
        ("logit_bias", {"5": 1}),
        ("min_tokens", 2),
        ("stop", "x"),
        ("length_penalty", 11),
        ("early_stopping", True),
        ("n", 0),
        ("n", 129),
        ("best_of", 1),
    ],
)
async def test_what_a_search_does_not_heed_is_a_400_naming_the_field(field: str, value: Any) -> None:
    async with serving() as server:
        response = await server.complete(**{"n": 2, "use_beam_search": True, field: value})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == field and field in error["message"]
        assert server.cluster.generations == []


async def test_values_that_ask_for_nothing_go_with_a_search() -> None:
    async with serving() as server:
        for temperature in (0, 1, None):
            response = await server.complete(
                use_beam_search=True,
                temperature=temperature,
                top_p=1,
                top_k=-1,
                min_p=0,
                stop=[],
                logit_bias={},
                seed=5,
            )
            assert response.status_code == 200, response.text


async def test_a_length_penalty_needs_a_search() -> None:
    async with serving() as server:
        assert (await server.complete(length_penalty=1)).status_code == 200
        response = await server.complete(length_penalty=2)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "length_penalty"


async def test_priority_travels() -> None:
    async with serving(max_priority_boost=3) as server:
        for priority in (-3, 7):
            await server.complete(priority=priority)
            assert server.last.request.priority == priority
        for value in (-4, 2**31, 1.5, "high"):
            response = await server.complete(priority=value)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")


async def test_clients_cannot_push_ahead_unless_they_are_let() -> None:
    async with serving() as server:
        assert (await server.complete(priority=1)).status_code == 200
        response = await server.complete(priority=-1)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")


async def test_the_attempt_says_what_to_search_for() -> None:
    async with running_cluster() as harness:
        generation = await harness.cluster.generate(
            make_request(n=2, beam_search=BeamSearch(width=4, length_penalty=-1.5), priority=7)
        )
        await collect(generation)
        await harness.run(make_request())
        search, usual = harness.nodes["decode-0"].starts
        assert search.beam_search == pb.BeamSearch(width=4, length_penalty=-1.5)
        assert search.priority == 7
        assert [start.index for start in search.sequences] == [0, 1]
        assert not usual.HasField("beam_search") and usual.priority == 0


# The best of many ----------------------------------------------------------------------------------------------------


def many(request: GenerationRequest, index: int) -> ScriptedSequence:
    """Sequences of one to four tokens, whose log probabilities are -0.9, -0.1, -0.5 and -0.3 each."""
    words = ("red", "red fox", "red fox and", "red fox and the")[index % 4]
    logprob = (-0.9, -0.1, -0.5, -0.3)[index % 4]
    return saying(words, logprob=logprob, at_end=FinishReason.STOP)


async def test_the_best_of_many_have_the_highest_mean_log_probability() -> None:
    async with serving(many) as server:
        answer = (await server.complete(prompt=["a", "b"], n=2, best_of=4, max_tokens=9)).json()
        assert [choice["text"] for choice in answer["choices"]] == ["red fox", "red fox and the"] * 2
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert all(choice["logprobs"] is None for choice in answer["choices"])
        assert all(generation.request.num_sequences == 4 for generation in server.cluster.generations)
        # Tokens of what is not shown were generated all the same; each sequence has an end token.
        words = ("red", "red fox", "red fox and", "red fox and the")
        made = sum(len(tokenizer().encode(text)) + 1 for text in words)
        assert answer["usage"]["completion_tokens"] == 2 * made


async def test_log_probabilities_of_the_best_are_shown_when_asked_for() -> None:
    async with serving(many) as server:
        answer = (await server.complete(n=1, best_of=4, logprobs=1, echo=True, return_token_ids=True)).json()
        (choice,) = answer["choices"]
        assert choice["text"] == "red" + "red fox"
        assert choice["token_ids"] == [*tokenizer().encode("red fox"), 2]
        assert set(choice["logprobs"]["token_logprobs"][-3:]) == {-0.1}


async def test_the_best_of_as_many_as_shown_are_all_of_them_in_order() -> None:
    async with serving(many) as server:
        answer = (await server.complete(n=4, best_of=4)).json()
        assert [choice["text"] for choice in answer["choices"]][:2] == ["red", "red fox"]
        assert server.last.request.sampling.logprobs is None
        assert (await server.complete(n=2, best_of=2, stream=True)).status_code == 200


async def test_more_than_a_node_runs_at_once_is_refused_by_its_name() -> None:
    limits = replace(LIMITS, max_sequences=4)
    async with serving(cluster=FakeCluster(saying("red"), model_limits=limits)) as server:
        for fields, param in (
            ({"n": 5}, "n"),
            ({"best_of": 5}, "best_of"),
            ({"n": 5, "use_beam_search": True}, "n"),
            ({"n": 2, "best_of": 5, "use_beam_search": True}, "best_of"),
        ):
            response = await server.complete(**fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert server.cluster.generations == []
        assert (await server.complete(n=2, best_of=4)).status_code == 200
        assert (await server.complete(suffix="")).status_code == 200  # Asks for nothing.


async def test_the_best_are_not_known_while_a_stream_runs() -> None:
    async with serving(many) as server:
        response = await server.complete(n=1, best_of=2, stream=True)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
        response = await server.complete(n=3, best_of=2)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
        response = await server.complete(prompt=[[5]] * 100, best_of=11, max_tokens=LIMITS.max_model_len // 2)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
        response = await server.chat(best_of=2)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
