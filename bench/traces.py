"""Replays request traces of Mooncake and of Azure, at their own times, scaled to fit a small machine.

Mooncake: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for each block of 512
prompt tokens; equal ids stand for equal prefixes (https://github.com/kvcache-ai/Mooncake, FAST 2025). Azure: JSON lines
without `hash_ids`, or the published CSV with TIMESTAMP, ContextTokens and GeneratedTokens
(https://github.com/Azure/AzurePublicDataset).
"""

from __future__ import annotations

import csv
import datetime
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from bench.datasets import PromptMaker
from bench.request_record import Work
from engine.errors import ConfigError

MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. `hash_ids` is None where the trace does not tell which prefixes are equal."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TraceScale:
    """How a trace is made to fit.

    Attributes:
        block_size: tokens that one hash id stands for after scaling. Prompts shrink by 512 / block_size, which keeps
            who shares which blocks with whom exactly. Counts only for Mooncake.
        input_divisor: prompts shrink by this where there are no hash ids; with them it must be 1.
        output_divisor: answers shrink by this.
        speed: how many times faster than recorded.
        spread_s: requests of one timestamp are spread evenly over so long; Mooncake's conversation trace has steps
            of 3 s.
        start_s, duration_s: which part of the trace, as recorded; None is to its end.
    """

    block_size: int = 16
    input_divisor: float = 1.0
    output_divisor: float = 1.0
    speed: float = 1.0
    spread_s: float = 0.0
    start_s: float = 0.0
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MOONCAKE_BLOCK or MOONCAKE_BLOCK % self.block_size:
            raise ValueError(f"trace_block_size must divide {MOONCAKE_BLOCK}")
        if min(self.input_divisor, self.output_divisor, self.speed) <= 0:
            raise ValueError("trace_speed and divisors must be above 0")


def read_trace(path: Path) -> list[TraceRow]:
    """Rows by time, the first at its own time. Raises ConfigError naming what is wrong."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = _read_csv(file.read().splitlines()) if path.suffix == ".csv" else [_read_json(line) for line in file]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no trace in the form of Mooncake or Azure: {error!r}") from error
    if not rows:
        raise ConfigError(f"{path} holds no request.")
    return sorted(rows, key=lambda row: row.at_s)


def _read_json(line: str) -> TraceRow:
    entry = json.loads(line)
    ids = entry.get("hash_ids")
    hash_ids = None if ids is None else tuple(int(number) for number in ids)
    row = TraceRow(entry["timestamp"] / 1000, int(entry["input_length"]), int(entry["output_length"]), hash_ids)
    if hash_ids is not None and len(hash_ids) != math.ceil(row.input_tokens / MOONCAKE_BLOCK):
        raise ValueError(f"{row.input_tokens} prompt tokens with {len(hash_ids)} hash ids")
    return row


def _read_csv(lines: Sequence[str]) -> list[TraceRow]:
    rows = list(csv.DictReader(lines))
    times = [datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]  # microseconds of 100 ns
    return [
        TraceRow((time - times[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for time, row in zip(times, rows, strict=True)
    ]


def scale_trace(rows: Sequence[TraceRow], scale: TraceScale) -> list[TraceRow]:
    """The chosen part of a trace, starting at 0, with shorter prompts and answers and other times.

    Raises ValueError for a divisor of prompts that have hash ids: cut in other places, they would share other blocks.
    """
    if scale.input_divisor != 1 and any(row.hash_ids is not None for row in rows):
        raise ValueError("trace_input_divisor is not for Mooncake's traces: trace_block_size says how prompts shrink")
    end_s = math.inf if scale.duration_s is None else scale.start_s + scale.duration_s
    chosen = [row for row in rows if scale.start_s <= row.at_s < end_s]
    scaled: list[TraceRow] = []
    for row, at_s in zip(chosen, _spread([row.at_s for row in chosen], scale.spread_s), strict=True):
        divisor = scale.input_divisor if row.hash_ids is None else MOONCAKE_BLOCK / scale.block_size
        scaled.append(
            replace(
                row,
                at_s=(at_s - scale.start_s) / scale.speed,
                input_tokens=max(1, math.ceil(row.input_tokens / divisor)),
                output_tokens=max(1, round(row.output_tokens / scale.output_divisor)),
            )
        )
    return scaled


def _spread(times_s: Sequence[float], over_s: float) -> list[float]:
    """Times of which equal ones are spread evenly over `over_s`."""
    spread: list[float] = []
    for time_s, group in groupby(times_s):
        same = len(list(group))
        spread += [time_s + over_s * number / same for number in range(same)]
    return spread


def trace_work(rows: Sequence[TraceRow], maker: PromptMaker, block_size: int, seed: int) -> list[Work]:
    """Requests of a scaled trace. With one seed, a hash id always becomes the same tokens; others are random."""
    blocks: dict[int, list[int]] = {}

    def block(hash_id: int) -> list[int]:
        if hash_id not in blocks:
            blocks[hash_id] = maker.vocabulary.draw(block_size, np.random.default_rng([seed, hash_id]))
        return blocks[hash_id]

    work: list[Work] = []
    for row in rows:
        if row.hash_ids is None:
            ids = maker.draw(row.input_tokens)
        else:
            ids = [token for hash_id in row.hash_ids for token in block(hash_id)][: row.input_tokens]
        work.append(maker.work(ids, row.output_tokens, row.at_s))
    return work
