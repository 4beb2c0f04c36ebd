"""Text of a sequence of tokens, as the tokens arrive. Knows no stop strings and no requests.

Whatever the tokens are, the pieces joined are what the tokenizer makes of all of them at once. A piece is given out as
soon as no later token can change it, and never before: half a character waits for its other half. Each token costs the
same, however long the sequence gets.

How soon a piece is certain depends on how the tokenizer writes bytes, which is found out once per tokenizer by trying:

* byte-level vocabularies: the text is the tokens' bytes read as UTF-8, so only an unfinished character waits;
* byte fallback: a run of byte tokens is valid UTF-8 as a whole or shown as one U+FFFD for each byte, so the run waits
  for the first token after it;
* anything else: text that ends in U+FFFD waits.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from enum import Enum
from typing import Protocol
from weakref import WeakKeyDictionary

REPLACEMENT = "\ufffd"
_PROBE = "\U0010fffd"  # A private character: no vocabulary has a token for it, so it is spelled in bytes.
_EAGER_TOKENS = 16
_PROMPT_TOKENS = 8


class TextTokenizer(Protocol):
    """What is asked of a tokenizer here; `engine.tokenizer.Tokenizer` fits."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class IncrementalDetokenizer:
    """The text of one sequence: `push` tokens, then `finish` once.

    Args:
        tokenizer: decides what the text is.
        skip_special_tokens: leave special tokens out.
        prompt_ids: the tokens before the first one. Empty: the joined pieces are `tokenizer.decode(pushed ids)`, in
            which tokenizers that mark words by a leading space drop the first one. Given: they are how the text goes
            on after the prompt, first space included.
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._spelling = _spelling_of(tokenizer)
        self._pieces: _BytePieces | _WindowPieces
        if self._spelling.kind is _Kind.BYTE_LEVEL:
            self._pieces = _BytePieces(tokenizer)
        else:
            prompt = [token_id for token_id in prompt_ids[-_PROMPT_TOKENS:] if self._is_shown(token_id)]
            self._pieces = _WindowPieces(tokenizer, self._spelling, prompt)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens made certain; may be empty."""
        return "".join(self._pieces.push(token_id) for token_id in token_ids if self._is_shown(token_id))

    def finish(self) -> str:
        """The text that waited for tokens which will not come. Nothing may be pushed afterwards."""
        return self._pieces.finish()

    def _is_shown(self, token_id: int) -> bool:
        # A model may have more rows of logits than its tokenizer has tokens; such a row has no text.
        if not 0 <= token_id < self._tokenizer.vocab_size:
            return False
        return not (self._skip_special_tokens and self._tokenizer.is_special(token_id))


def text_offsets(tokenizer: TextTokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> list[int]:
    """Where each token starts in the text of all of them, in characters; tokens of one character share its start."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    offsets: list[int] = []
    offset = 0
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(detokenizer.push((token_id,)))
    return offsets


class _Kind(Enum):
    BYTE_LEVEL = "byte_level"
    BYTE_FALLBACK = "byte_fallback"
    OTHER = "other"


class _Spelling:
    """How one tokenizer writes bytes."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.kind = _Kind.OTHER
        self._stray_byte: int | None = None  # A token that is a byte of the kind that never starts a character.
        self._byte_tokens: dict[int, bool] = {}
        probe = tokenizer.encode(_PROBE, add_special_tokens=False)
        if not probe:
            return
        text = tokenizer.decode([*probe, probe[-1]], skip_special_tokens=False).strip()
        if text and not text.strip(REPLACEMENT):
            self.kind = _Kind.BYTE_FALLBACK
            self._stray_byte = probe[-1]
        elif text == _PROBE + REPLACEMENT and _is_bytes_joined(tokenizer, probe):
            self.kind = _Kind.BYTE_LEVEL

    def is_byte_token(self, tokenizer: TextTokenizer, token_id: int) -> bool:
        """Whether the token joins a run of byte tokens (byte fallback only)."""
        if self._stray_byte is None:
            return False
        known = self._byte_tokens.get(token_id)
        if known is None:
            # No character has four such bytes after its first, so a run that starts like this is never valid.
            run = [token_id, *[self._stray_byte] * 4]
            known = len(tokenizer.token_bytes(token_id)) == 1 and tokenizer.decode(run) == REPLACEMENT * 5
            self._byte_tokens[token_id] = known
        return known


def _is_bytes_joined(tokenizer: TextTokenizer, probe: Sequence[int]) -> bool:
    """Whether the text of tokens is their bytes joined, first space and cut characters included."""
    spaced = tokenizer.encode("  a b", add_special_tokens=False)
    for ids in (probe, probe[:1], [*probe, *probe[:1], *spaced], spaced, spaced[-1:]):
        joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        if tokenizer.decode(ids, skip_special_tokens=False) != joined.decode("utf-8", "replace"):
            return False
    return True


_spellings: WeakKeyDictionary[TextTokenizer, _Spelling] = WeakKeyDictionary()


def _spelling_of(tokenizer: TextTokenizer) -> _Spelling:
    spelling = _spellings.get(tokenizer)
    if spelling is None:
        spelling = _spellings[tokenizer] = _Spelling(tokenizer)
    return spelling


class _BytePieces:
    """Pieces of a byte-level vocabulary: bytes through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowPieces:
    """Pieces of any other vocabulary: what the tokenizer makes of a window of tokens, less what it made before.

        tokens:  ...given out long ago... | before | waiting
                                            decoded together

    `before` gives the tokenizer the context of a text that has begun; it is the tokens of the last piece.
    """

    def __init__(self, tokenizer: TextTokenizer, spelling: _Spelling, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._spelling = spelling
        self._waiting: list[int] = []
        self._try_at = 1
        # After half a character there is no way to tell which text is the prompt's and which is ours.
        self._before = [] if self._is_open(prompt) else list(prompt)
        self._before_text = self._decode(self._before)

    def push(self, token_id: int) -> str:
        self._waiting.append(token_id)
        if self._spelling.is_byte_token(self._tokenizer, token_id) or len(self._waiting) < self._try_at:
            return ""
        text = self._decode(self._before + self._waiting)
        is_certain = self._spelling.kind is _Kind.BYTE_FALLBACK or not text.endswith(REPLACEMENT)
        if is_certain and len(text) > len(self._before_text):
            piece = text[len(self._before_text) :]
            self._before, self._waiting = self._waiting, []
            self._before_text = self._decode(self._before)
            self._try_at = 1
            return piece
        if len(self._waiting) >= _EAGER_TOKENS:
            # Trying at every token would cost the square of what waits.
            self._try_at = 2 * len(self._waiting)
        return ""

    def finish(self) -> str:
        piece = self._decode(self._before + self._waiting)[len(self._before_text) :]
        self._waiting = []
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        # Special tokens that are to be skipped never get here.
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def _is_open(self, ids: Sequence[int]) -> bool:
        if not ids:
            return False
        if self._spelling.kind is _Kind.BYTE_FALLBACK:
            return self._spelling.is_byte_token(self._tokenizer, ids[-1])
        return self._decode(ids).endswith(REPLACEMENT)
