"""Work made of random tokens, of shared prefixes, or of a file of prompts. Traces are in traces.py."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.request_record import Work
from bench.vocabulary import Vocabulary
from engine.errors import ConfigError

SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048
"""What `vllm bench serve` keeps of ShareGPT: tokens of a prompt or answer, of a prompt, of both together."""


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Lengths drawn evenly from `[mean * (1 - ratio), mean * (1 + ratio)]`, at least 1.

    Attributes:
        input_len: mean tokens of a prompt, without the prefix.
        output_len: mean tokens of an answer.
        input_ratio, output_ratio: 0 to below 1.
    """

    input_len: int
    output_len: int
    input_ratio: float = 0.0
    output_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.input_ratio < 1 and 0 <= self.output_ratio < 1):
            raise ValueError("random_range_ratio must be at least 0 and below 1")

    def draw(self, count: int, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
        """Pairs of prompt and answer lengths."""
        inputs = _draw_lengths(self.input_len, self.input_ratio, count, rng)
        return zip(inputs, _draw_lengths(self.output_len, self.output_ratio, count, rng), strict=True)


def _draw_lengths(mean: int, ratio: float, count: int, rng: np.random.Generator) -> list[int]:
    low, high = max(1, math.floor(mean * (1 - ratio))), max(1, math.ceil(mean * (1 + ratio)))
    lengths: list[int] = rng.integers(low, high, count, endpoint=True).tolist()
    return lengths


class PromptMaker:
    """Makes prompts of token ids, as ids or as text.

    Args:
        vocabulary: where tokens come from.
        as_text: whether the server gets text; needs a tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary, rng: np.random.Generator, *, as_text: bool) -> None:
        self.vocabulary = vocabulary
        self.rng = rng
        self.as_text = as_text

    def draw(self, count: int) -> list[int]:
        """Random token ids."""
        return self.vocabulary.draw(count, self.rng)

    def work(self, ids: list[int], output_tokens: int, at_s: float | None = None) -> Work:
        """A request with these tokens as its prompt."""
        if not self.as_text:
            return Work(ids, len(ids), output_tokens, at_s)
        text, length = self.vocabulary.text_of(ids, self.rng)
        return Work(text, length, output_tokens, at_s)


def random_work(maker: PromptMaker, count: int, lengths: RandomLengths, prefix_len: int = 0) -> list[Work]:
    """Prompts that share nothing but a prefix of `prefix_len` tokens."""
    prefix = maker.draw(prefix_len)
    pairs = list(lengths.draw(count, maker.rng))
    return [maker.work(prefix + maker.draw(input_len), output_len) for input_len, output_len in pairs]


def shared_prefix_work(
    maker: PromptMaker, count: int, *, prefixes: int, prefix_len: int, suffix_len: int, output_len: int, shuffle: bool
) -> list[Work]:
    """`prefixes` prefixes, each with its share of `count` prompts; the first ones get what does not divide."""
    if not 1 <= prefixes <= count:
        raise ConfigError(f"--prefix-repetition-num-prefixes must be 1 to --num-prompts ({count}).")
    shared = [maker.draw(prefix_len) for _ in range(prefixes)]
    work = [maker.work(shared[index % prefixes] + maker.draw(suffix_len), output_len) for index in range(count)]
    if shuffle:
        maker.rng.shuffle(work)
    return work


def file_work(
    path: Path, vocabulary: Vocabulary, count: int | None, *, output_len: int | None, rng: np.random.Generator | None
) -> list[Work]:
    """Prompts of a file: ShareGPT's JSON, or JSON lines with `prompt` (text or token ids) and perhaps `output_tokens`.

    Of a ShareGPT conversation the first message is the prompt, and the second tells how long the answer shall be. As in
    `vllm bench serve`, what is very short or long there is left out.

    Args:
        count: how many requests; more than the file holds go round again. None takes each once.
        output_len: of every answer, instead of the file's own.
        rng: shuffles; None keeps the order.

    Raises:
        ConfigError: the file cannot be used; says why.
    """
    try:
        content = path.read_text(encoding="utf-8")
        is_sharegpt = content.lstrip().startswith("[")
        entries = json.loads(content) if is_sharegpt else [json.loads(line) for line in content.splitlines() if line]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if rng is not None:
        rng.shuffle(entries)
    work: list[Work] = []
    for entry in entries:
        one = _sharegpt(entry, vocabulary, output_len) if is_sharegpt else _line(path, entry, vocabulary, output_len)
        if one is not None:
            work.append(one)
        if len(work) == count:
            break
    if not work:
        raise ConfigError(f"{path} holds no prompt that can be used.")
    return work if count is None else [work[index % len(work)] for index in range(count)]


def _sharegpt(entry: dict[str, Any], vocabulary: Vocabulary, output_len: int | None) -> Work | None:
    turns = entry.get("conversations") or []
    if len(turns) < 2:
        return None
    prompt, answer = str(turns[0]["value"]), str(turns[1]["value"])
    if not vocabulary.has_tokenizer and output_len is not None:
        return Work(prompt, 0, output_len)
    prompt_tokens = len(vocabulary.encode(prompt))
    output_tokens = output_len or len(vocabulary.encode(answer))
    is_long_enough = prompt_tokens >= SHORTEST and (output_len is not None or output_tokens >= SHORTEST)
    if not is_long_enough or prompt_tokens > LONGEST_PROMPT or prompt_tokens + output_tokens > LONGEST:
        return None
    return Work(prompt, prompt_tokens, output_tokens)


def _line(path: Path, entry: Any, vocabulary: Vocabulary, output_len: int | None) -> Work:
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str | list):
        raise ConfigError(f"{path} has a line without a prompt.")
    output_tokens = output_len or entry.get("output_tokens")
    if not output_tokens:
        raise ConfigError(f"{path} has a line without output_tokens; give --output-len.")
    prompt = entry["prompt"]
    is_counted = isinstance(prompt, list) or vocabulary.has_tokenizer
    ids = prompt if isinstance(prompt, list) else vocabulary.encode(prompt) if is_counted else []
    return Work(prompt, len(ids), int(output_tokens))
