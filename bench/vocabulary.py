"""Which token ids random prompts are made of, and texts that have as many tokens as asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from engine.errors import ConfigError

COMMON_IDS = range(1000, 30000)
"""Ordinary tokens of every usual vocabulary; used where no tokenizer is given."""

TEXT_TRIES = 10


class Vocabulary:
    """Draws token ids. Without a tokenizer it knows no text.

    Args:
        ids: what to draw from.
        tokenizer: for texts.
    """

    def __init__(self, ids: Sequence[int] = COMMON_IDS, tokenizer: Tokenizer | None = None) -> None:
        self._ids = np.asarray(ids)
        self._tokenizer = tokenizer

    @staticmethod
    def of_tokenizer(name: str) -> Vocabulary:
        """From a folder, a `tokenizer.json`, or a model that pdserve can find. Raises ConfigError."""
        path = Path(name)
        if path.suffix != ".json":
            from engine.model_store import resolve_model

            path = resolve_model(name, weights=False).folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is no tokenizer: {error}") from error
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        return Vocabulary(
            [number for number in sorted(tokenizer.get_vocab().values()) if number not in special], tokenizer
        )

    @property
    def has_tokenizer(self) -> bool:
        """Whether texts can be made and counted."""
        return self._tokenizer is not None

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """`count` random token ids."""
        drawn: list[int] = rng.choice(self._ids, count).tolist()
        return drawn

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        ids: list[int] = self._need_tokenizer().encode(text, add_special_tokens=False).ids
        return ids

    def text_of(self, ids: Sequence[int], rng: np.random.Generator) -> tuple[str, int]:
        """A text of about these tokens, and how many it has: as many as given, where the tokenizer lets it be."""
        tokenizer, wanted = self._need_tokenizer(), list(ids)
        text = tokenizer.decode(wanted)
        for _ in range(TEXT_TRIES):
            again = self.encode(text)
            if len(again) == len(ids):
                break
            wanted = again[: len(ids)] + self.draw(len(ids) - min(len(again), len(ids)), rng)
            text = tokenizer.decode(wanted)
        return text, len(self.encode(text))

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError("Texts need --tokenizer, the folder or name of the model.")
        return self._tokenizer
