"""From tokens of nodes to the text of clients: stops, ends, counts, and what becomes of the generation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from engine.errors import AttemptFailed, DeadlinePassed
from engine.ids import RequestId
from engine.sampling_params import SamplingParams
from engine.tokens import FinishReason
from router.generation import GenerationRequest, TokenDelta
from router.stop_strings import StopStrings
from router.testing import FakeCluster, FakeGeneration, ScriptedSequence, fake_logprobs
from router.text_stream import TextDelta, TextStream, join_deltas, stream_text
from tests.router.tiny_tokenizers import byte_fallback, byte_level

TOKENIZER = byte_level()
END, START = 0, 1
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def ids_of(text: str) -> list[int]:
    """One token for each byte, so that tests can count."""
    return [TOKENIZER.byte_id(byte) for byte in text.encode()]


def deltas_of(ids: Sequence[int], finish: FinishReason | None = LENGTH, *, at_once: int = 1) -> list[TokenDelta]:
    chunks = [tuple(ids[start : start + at_once]) for start in range(0, len(ids), at_once)]
    return [
        TokenDelta(
            0,
            chunk,
            tuple(fake_logprobs(token_id, 1, 400) for token_id in chunk),
            finish if index == len(chunks) else None,
        )
        for index, chunk in enumerate(chunks, 1)
    ]


def play(stream: TextStream, deltas: Sequence[TokenDelta]) -> list[TextDelta]:
    """Push until the stream is finished, as stream_text does."""
    given: list[TextDelta] = []
    for delta in deltas:
        given.append(stream.push(delta))
        if stream.is_finished:
            break
    return given


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "stop", "expected", "stop_reason", "num_tokens"),
    [
        ("one two", (), "one two", None, 7),
        ("one two three", ("two",), "one ", "two", 7),
        ("one two three", ("one",), "", "one", 3),
        ("one two", ("o", "two"), "", "o", 1),
        ("one two", ("two",), "one ", "two", 7),  # complete on the token that also reaches the limit
        ("one two", ("two!",), "one two", None, 7),  # held back to the end, then given out
        ("a😀b", ("😀",), "a", "😀", 5),
        ("日本", ("本",), "日", "本", 6),
    ],
)
def test_text_stop_reason_and_count(
    at_once: int, text: str, stop: tuple[str, ...], expected: str, stop_reason: str | None, num_tokens: int
) -> None:
    stream = TextStream(TOKENIZER, stop=stop)
    given = play(stream, deltas_of(ids_of(text), at_once=at_once))
    joined = join_deltas(given)
    assert joined.text == expected
    assert joined.stop_reason == stop_reason
    assert [delta.finish_reason for delta in given[:-1]] == [None] * (len(given) - 1)
    assert given[-1].finish_reason is (STOP if stop_reason else LENGTH)
    assert stream.num_tokens == num_tokens == len(joined.token_ids)
    assert len(joined.logprobs) == len(joined.text_offsets) == num_tokens
    assert [position[0].token_id for position in joined.logprobs] == list(joined.token_ids)


def test_nothing_of_a_stop_string_is_ever_given_out() -> None:
    given = play(TextStream(TOKENIZER, stop=["STOP"]), deltas_of(ids_of("go ST STOP")))
    assert [delta.text for delta in given] == ["g", "o", " ", "", "", "ST ", "", "", "", ""]


def test_tokens_come_at_once_even_when_their_text_waits() -> None:
    given = play(TextStream(TOKENIZER, stop=["xyz"]), deltas_of(ids_of("axyb")))
    assert [(delta.text, len(delta.token_ids)) for delta in given] == [("a", 1), ("", 1), ("", 1), ("xyb", 1)]
    assert [delta.text_offsets for delta in given] == [(0,), (1,), (2,), (3,)]


def test_offsets_count_characters_not_tokens() -> None:
    joined = join_deltas(play(TextStream(TOKENIZER), deltas_of(ids_of("a😀b"))))
    assert joined.text_offsets == (0, 1, 1, 1, 1, 2)


def test_the_stop_string_is_included_on_request() -> None:
    given = play(TextStream(TOKENIZER, stop=["wo"], include_stop_str=True), deltas_of(ids_of("two more"), at_once=5))
    assert join_deltas(given).text == "two"


def test_the_end_token_has_no_text_but_counts() -> None:
    for skip in (True, False):
        stream = TextStream(TOKENIZER, skip_special_tokens=skip)
        joined = join_deltas(play(stream, deltas_of([*ids_of("hi"), END], STOP)))
        assert (joined.text, joined.finish_reason, joined.stop_reason, stream.num_tokens) == ("hi", STOP, None, 3)


def test_a_stop_token_has_no_text_unless_included() -> None:
    ids = ids_of("hi!")
    last = TokenDelta(0, tuple(ids), finish_reason=STOP, stop_token_id=ids[-1])
    plain = TextStream(TOKENIZER).push(last)
    assert (plain.text, plain.stop_reason, plain.token_ids) == ("hi", ids[-1], tuple(ids))
    assert TextStream(TOKENIZER, include_stop_str=True).push(last).text == "hi!"


def test_special_tokens_within_the_text_follow_the_setting() -> None:
    ids = [*ids_of("a"), START, *ids_of("b")]
    assert join_deltas(play(TextStream(TOKENIZER), deltas_of(ids))).text == "ab"
    assert join_deltas(play(TextStream(TOKENIZER, skip_special_tokens=False), deltas_of(ids))).text == "a<|start|>b"


def test_the_end_may_come_without_tokens() -> None:
    stream = TextStream(TOKENIZER, stop=["bc"])
    assert stream.push(TokenDelta(0, tuple(ids_of("ab")))).text == "a"
    assert stream.push(TokenDelta(0, (), finish_reason=STOP)) == TextDelta("b", (), (), (), STOP)


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens() -> None:
    stream = TextStream(TOKENIZER, stop=["ab"], min_tokens=3)
    joined = join_deltas(play(stream, deltas_of(ids_of("ababab"), at_once=4)))
    # "ab" at 0 lies within the first three tokens, "ab" at 2 begins there.
    assert (joined.text, joined.stop_reason, stream.num_tokens) == ("abab", "ab", 6)


def test_an_unfinished_character_is_given_out_at_the_end() -> None:
    for finish in (STOP, LENGTH):
        ids = [*ids_of("a"), *ids_of("😀")[:2], *([END] if finish is STOP else [])]
        assert join_deltas(play(TextStream(TOKENIZER), deltas_of(ids, finish))).text == "a\ufffd"


def test_text_that_waits_for_the_end_is_searched_too() -> None:
    """A byte-fallback newline is certain only with the next token; here the end token is the next."""
    tokenizer = byte_fallback()
    ids = [tokenizer.id_of("a"), tokenizer.byte_id(0x0A), tokenizer.id_of("</s>")]
    joined = join_deltas(play(TextStream(tokenizer, stop=["\n"]), deltas_of(ids, STOP)))
    assert (joined.text, joined.finish_reason, joined.stop_reason) == ("a", STOP, "\n")


def test_a_prompt_keeps_the_first_space() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.encode("the dog", add_special_tokens=False)
    stream = TextStream(tokenizer, prompt_ids=tokenizer.encode("a", add_special_tokens=False))
    assert join_deltas(play(stream, deltas_of(ids))).text == " the dog"


def generation_of(*scripts: ScriptedSequence, max_tokens: int = 1000) -> FakeGeneration:
    request = GenerationRequest(
        RequestId("r"), (5, 6), SamplingParams(max_tokens=max_tokens, eos_token_ids=(END,)), num_sequences=len(scripts)
    )
    return FakeGeneration(request, scripts, 400)


def streams_of(count: int, *stop: str) -> list[TextStream]:
    shared = StopStrings(stop)
    return [TextStream(TOKENIZER, stop=shared) for _ in range(count)]


async def test_choices_end_on_their_own_with_one_reason_each() -> None:
    generation = generation_of(
        ScriptedSequence(ids_of("stop here now")),
        ScriptedSequence([*ids_of("fine"), END]),
        ScriptedSequence(ids_of("x" * 50), tokens_per_delta=7),
        max_tokens=20,
    )
    texts, reasons = ["", "", ""], [[], [], []]  # type: ignore[var-annotated]
    async for index, delta in stream_text(generation, streams_of(3, "here")):
        texts[index] += delta.text
        if delta.finish_reason is not None:
            reasons[index].append((delta.finish_reason, delta.stop_reason))
    assert texts == ["stop ", "fine", "x" * 20]
    assert reasons == [[(STOP, "here")], [(STOP, None)], [(LENGTH, None)]]
    assert generation.ended == [0]
    assert generation.is_closed and not generation.is_cancelled


async def test_a_stop_string_ends_a_sequence_that_never_would() -> None:
    generation = generation_of(ScriptedSequence(ids_of("a stop"), hang=True))
    async with asyncio.timeout(5):
        given = [delta async for _, delta in stream_text(generation, streams_of(1, "stop"))]
    assert join_deltas(given).text == "a "
    assert generation.ended == [0]
    assert not generation.is_cancelled


async def test_deltas_that_cross_with_the_end_are_dropped() -> None:
    class Late(FakeGeneration):
        def end_sequence(self, sequence_index: int) -> None:
            self.ended.append(sequence_index)

    request = GenerationRequest(RequestId("r"), (5,), SamplingParams(max_tokens=100), num_sequences=2)
    scripts = [ScriptedSequence(ids_of("a. b c d")), ScriptedSequence(ids_of("z" * 30))]
    generation = Late(request, scripts, 400)
    given = [(index, delta) async for index, delta in stream_text(generation, streams_of(2, "."))]
    assert "".join(delta.text for index, delta in given if index == 0) == "a"
    assert "".join(delta.text for index, delta in given if index == 1) == "z" * 30


async def test_a_failure_passes_through_and_closes_the_generation() -> None:
    generation = generation_of(ScriptedSequence(ids_of("ab"), error=DeadlinePassed("too late")))
    given: list[str] = []
    with pytest.raises(DeadlinePassed):
        async for _, delta in stream_text(generation, streams_of(1)):
            given.append(delta.text)
    assert given == ["a", "b"]
    assert generation.is_closed


async def test_a_generation_that_ends_too_early_is_a_failure() -> None:
    class Short(FakeGeneration):
        async def __anext__(self) -> TokenDelta:
            raise StopAsyncIteration

    request = GenerationRequest(RequestId("r"), (5,), SamplingParams())
    generation = Short(request, [ScriptedSequence(hang=True)], 400)
    with pytest.raises(AttemptFailed, match="before all"):
        async for _ in stream_text(generation, streams_of(1)):
            raise AssertionError("nothing comes")
    assert generation.is_closed


async def test_leaving_early_closes_the_generation() -> None:
    generation = generation_of(ScriptedSequence(ids_of("abc"), hang=True))
    async with aclosing(stream_text(generation, streams_of(1))) as deltas:
        async for _ in deltas:
            break
    assert generation.is_cancelled


async def test_cancelling_the_reader_closes_the_generation() -> None:
    generation = generation_of(ScriptedSequence(hang=True))

    async def read() -> None:
        async for _ in stream_text(generation, streams_of(1)):
            raise AssertionError("nothing comes")

    task = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert generation.is_cancelled


async def test_the_fake_cluster_keeps_its_books() -> None:
    cluster = FakeCluster(ScriptedSequence(ids_of("abc"), hang=True))
    generation = await cluster.generate(GenerationRequest(RequestId("r"), (5,), SamplingParams(max_tokens=9)))
    assert cluster.open_generations == [generation]
    await generation.aclose()
    await generation.aclose()
    assert cluster.open_generations == []
    assert generation.close_calls == 2
