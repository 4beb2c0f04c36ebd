"""The text layer against its definition, on tokens, stop strings and cuts that nobody thought of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tokens import FinishReason
from router.detokenizer import IncrementalDetokenizer, text_offsets
from router.generation import TokenDelta
from router.text_stream import TextDelta, TextStream, join_deltas
from tests.router.tiny_tokenizers import TinyTokenizer, byte_fallback, byte_level, metaspace

ALPHABET = "ab \n日😀é"
PROFILE = settings(max_examples=100, deadline=None)

tokenizers = st.sampled_from(
    [byte_level(), byte_level(strip=True), byte_fallback(), byte_fallback(strip=False), metaspace()]
)
stop_strings = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)


@st.composite
def tokens(draw: st.DrawFn, max_size: int = 24) -> tuple[TinyTokenizer, list[int]]:
    """A tokenizer, and tokens of it: any at all, mixed with those of real text so that characters come out whole."""
    tokenizer = draw(tokenizers)
    spelled = st.text(ALPHABET, max_size=4).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    any_token = st.integers(0, tokenizer.vocab_size - 1).map(lambda token_id: [token_id])
    ids = [token_id for part in draw(st.lists(spelled | any_token, max_size=8)) for token_id in part]
    return tokenizer, ids[:max_size]


@st.composite
def cut_tokens(draw: st.DrawFn) -> tuple[TinyTokenizer, list[list[int]]]:
    """The same, as the pieces in which they arrive."""
    tokenizer, ids = draw(tokens())
    places = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return tokenizer, [ids[start:end] for start, end in pairwise([0, *places, len(ids)])]


def play(stream: TextStream, pieces: Sequence[Sequence[int]]) -> list[TextDelta]:
    """Push the pieces, the last one with LENGTH, until the stream is finished."""
    given_out: list[TextDelta] = []
    for index, piece in enumerate(pieces, 1):
        finish = FinishReason.LENGTH if index == len(pieces) else None
        given_out.append(stream.push(TokenDelta(0, tuple(piece), finish_reason=finish)))
        if stream.is_finished:
            break
    return given_out


def first_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """By definition: the first stop string to be complete, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [candidate for candidate in stop if text[:end].endswith(candidate)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@PROFILE
@given(cut_tokens(), st.booleans())
def test_pieces_joined_are_the_tokenizers_text(cut: tuple[TinyTokenizer, list[list[int]]], skip: bool) -> None:
    tokenizer, pieces = cut
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.push(piece) for piece in pieces) + detokenizer.finish()
    assert text == tokenizer.decode([token_id for piece in pieces for token_id in piece], skip_special_tokens=skip)


@PROFILE
@given(tokens(), tokens())
def test_what_was_given_out_never_changes(
    before: tuple[TinyTokenizer, list[int]], later: tuple[object, list[int]]
) -> None:
    """Whatever tokens follow, the text starts with what is out already."""
    tokenizer, ids = before
    rest = [token_id % tokenizer.vocab_size for token_id in later[1]]
    given_out = IncrementalDetokenizer(tokenizer).push(ids)
    assert tokenizer.decode(ids + rest).startswith(given_out)


@PROFILE
@given(cut_tokens(), stop_strings, st.booleans())
def test_text_is_cut_before_the_first_stop_string(
    cut: tuple[TinyTokenizer, list[list[int]]], stop: list[str], include: bool
) -> None:
    tokenizer, pieces = cut
    joined = join_deltas(play(TextStream(tokenizer, stop=stop, include_stop_str=include), pieces))
    whole = tokenizer.decode([token_id for piece in pieces for token_id in piece])
    text, found = first_stop(whole, stop)
    assert joined.text == text + (found or "") * include
    assert joined.stop_reason == found
    assert joined.finish_reason is (FinishReason.LENGTH if found is None else FinishReason.STOP)


@PROFILE
@given(cut_tokens(), stop_strings, st.integers(0, 6))
def test_the_answer_does_not_depend_on_how_tokens_arrive(
    cut: tuple[TinyTokenizer, list[list[int]]], stop: list[str], min_tokens: int
) -> None:
    tokenizer, pieces = cut
    ids = [token_id for piece in pieces for token_id in piece]
    answers = [
        join_deltas(play(TextStream(tokenizer, stop=stop, min_tokens=min_tokens), arriving))
        for arriving in (pieces, [ids], [*([token_id] for token_id in ids), []])
    ]
    assert answers[0] == answers[1] == answers[2]


@PROFILE
@given(cut_tokens(), stop_strings)
def test_every_token_is_listed_once_with_its_place(cut: tuple[TinyTokenizer, list[list[int]]], stop: list[str]) -> None:
    tokenizer, pieces = cut
    ids = [token_id for piece in pieces for token_id in piece]
    stream = TextStream(tokenizer, stop=stop)
    given_out = play(stream, pieces)
    joined = join_deltas(given_out)
    assert list(joined.token_ids) == ids[: stream.num_tokens]
    assert list(joined.text_offsets) == text_offsets(tokenizer, ids)[: stream.num_tokens]
    assert [delta.finish_reason is not None for delta in given_out] == [False] * (len(given_out) - 1) + [True]


@PROFILE
@given(cut_tokens(), stop_strings)
def test_no_more_text_waits_than_must(cut: tuple[TinyTokenizer, list[list[int]]], stop: list[str]) -> None:
    """Of the certain text, all is out but the longest end of it that begins a stop string."""
    tokenizer, pieces = cut
    stream, detokenizer = TextStream(tokenizer, stop=stop), IncrementalDetokenizer(tokenizer)
    certain = given_out = ""
    for piece in pieces:
        delta = stream.push(TokenDelta(0, tuple(piece)))
        if stream.is_finished:
            break
        certain += detokenizer.push(piece)
        given_out += delta.text
        waiting = max((n for word in stop for n in range(len(word)) if certain.endswith(word[:n])), default=0)
        assert given_out == certain[: len(certain) - waiting]
