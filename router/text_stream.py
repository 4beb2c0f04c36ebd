"""Tokens of one choice into the text its client gets, stop strings included. Knows no HTTP and no gRPC.

What holds for every choice, streamed or not, since there is only this one way from tokens to text:

* The joined texts are what the tokenizer makes of all output tokens, cut before the first stop string.
* `token_ids`, `logprobs` and `text_offsets` have one entry for each token and come with the token, even while its text
  is still held back. They go on to the token with which the stop string was complete, so after a cut they may cover
  more than the text; that token is the last one counted.
* The end or stop token that a node ended the sequence with is counted and listed, but has no text unless stop strings
  are to be included.
* Exactly one delta has a finish reason, and it is the last. A stop string that is complete wins over a length limit
  reached by the same token.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from engine.errors import AttemptFailed
from engine.tokens import FinishReason, PositionLogprobs
from router.detokenizer import IncrementalDetokenizer, TextTokenizer
from router.generation import Generation, TokenDelta
from router.stop_strings import StopChecker, StopStrings


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What is new for one choice.

    Attributes:
        text: ready to send: no part of a possible stop string, no half character.
        token_ids: the tokens.
        logprobs: one for each token, when asked for.
        text_offsets: where each token starts in the choice's text, in characters, before any cut.
        finish_reason: set once, in the last delta.
        stop_reason: the stop string, or the id of the stop token, that ended the choice; None for the model's own end.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    text_offsets: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


def join_deltas(deltas: Sequence[TextDelta]) -> TextDelta:
    """One delta that says what these consecutive ones of one choice say."""
    return TextDelta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(position for delta in deltas for position in delta.logprobs),
        text_offsets=tuple(offset for delta in deltas for offset in delta.text_offsets),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
    )


class TextStream:
    """The text of one choice. Not to be pushed to any more once `is_finished`.

    Args:
        tokenizer: of the model.
        stop: strings that end the choice; none of them empty. A StopStrings can be shared by the choices of a request.
        include_stop_str: keep what ended the choice in the text.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: text of so many first tokens is not searched for stop strings.
        prompt_ids: see IncrementalDetokenizer.

    Attributes:
        num_tokens: tokens so far, for usage.
        is_finished: the finish reason was given.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        stop: Sequence[str] | StopStrings = (),
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self.num_tokens = 0
        self.is_finished = False
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids
        )
        stop_strings = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        self._checker = StopChecker(stop_strings, include_stop_str=include_stop_str)
        self._include_stop_str = include_stop_str
        self._min_tokens = min_tokens
        self._offset = 0
        self._stop_string: str | None = None

    def push(self, delta: TokenDelta) -> TextDelta:
        """Take what a node sent; give out what a client may have. A stop string found here is news to the node."""
        assert not self.is_finished, "the choice has ended"
        texts: list[str] = []
        offsets: list[int] = []
        is_stopped = delta.finish_reason is FinishReason.STOP
        for index, token_id in enumerate(delta.token_ids, 1):
            self.num_tokens += 1
            offsets.append(self._offset)
            has_text = self._include_stop_str or not (is_stopped and index == len(delta.token_ids))
            texts.append(self._take(self._detokenizer.push((token_id,)) if has_text else ""))
            if self._stop_string is not None:
                break
        if self._stop_string is None and delta.finish_reason is not None:
            texts.append(self._take(self._detokenizer.finish()))
            texts.append(self._checker.release())
        self.is_finished = self._stop_string is not None or delta.finish_reason is not None
        return TextDelta(
            text="".join(texts),
            token_ids=delta.token_ids[: len(offsets)],
            logprobs=delta.logprobs[: len(offsets)],
            text_offsets=tuple(offsets),
            finish_reason=delta.finish_reason if self._stop_string is None else FinishReason.STOP,
            stop_reason=delta.stop_token_id if self._stop_string is None else self._stop_string,
        )

    def _take(self, text: str) -> str:
        """The part of new text that may go out."""
        self._offset += len(text)
        if self.num_tokens <= self._min_tokens:
            return text
        checked = self._checker.push(text)
        self._stop_string = checked.stop_string
        return checked.text


async def stream_text(
    generation: Generation, streams: Sequence[TextStream]
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Index and delta of every choice as they come, until all have ended; `streams[i]` is for sequence i.

    Tells the generation to end a sequence whose stop string was found. However it ends (exhausted, failed, cancelled or
    closed early), the generation is closed; a reader that leaves early must `aclose()` this generator to say so.

    Raises:
        PdserveError: what the generation failed with; text given out before stays valid.
    """
    unfinished = len(streams)
    try:
        async for delta in generation:
            stream = streams[delta.sequence_index]
            if stream.is_finished:
                continue  # It crossed with the news that the sequence was ended.
            text_delta = stream.push(delta)
            if stream.is_finished:
                unfinished -= 1
                if delta.finish_reason is None:
                    generation.end_sequence(delta.sequence_index)
            yield delta.sequence_index, text_delta
            if unfinished == 0:
                return
        if unfinished:
            raise AttemptFailed("the generation ended before all of its sequences did", reason="incomplete")
    finally:
        await generation.aclose()
