"""Runs `pdserve bench peers`: installs, then rounds in which every engine does every row, then the table."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import typer
from rich.console import Console

from bench.datasets import PromptMaker, RandomLengths, random_work
from bench.load import run_load
from bench.peer_engines import ENGINES, OURS, Engine, Layout, Setting
from bench.peer_rows import ROWS, RowFailed
from bench.peer_table import Seat, Values, compare, table_of
from bench.peers_options import PeersSettings
from bench.server import started_server
from bench.stream_client import StreamClient, Target
from bench.vocabulary import Vocabulary
from engine.cache_folder import cache_root

EnumT = TypeVar("EnumT", bound=StrEnum)

WARM_UP = ((1, 128, 8), (1, 2048, 1), (4, 64, 4))
"""Requests at once, prompt tokens and output tokens: so that first-run costs of each shape are paid before."""

WARM_UP_GUESS_S = 12.0


def run(settings: PeersSettings) -> int:
    """0 when every seat measured something, else 1."""
    layouts = _chosen("--threads", settings.threads, [layout.value for layout in Layout])
    row_names = _chosen("--rows", settings.rows, list(ROWS))
    if not layouts or not row_names:
        raise typer.BadParameter("--threads and --rows must not be empty")
    engines = [OURS, *_chosen("--peers", settings.peers, [name for name in ENGINES if name != OURS])]
    rounds = 1 if settings.quick else settings.repeats
    setting = make_setting(settings)
    seats: list[Seat] = [
        (name, Layout(layout)) for layout in layouts for name in engines if Layout(layout) in ENGINES[name].layouts
    ]
    for name in engines:
        ENGINES[name].install(setting)
    estimate_s = rounds * sum(guess_s(ENGINES[name], row_names, settings.quick) for name, _ in seats)
    _say(f"{rounds} rounds of {len(seats)} servers, about {estimate_s / 60:.0f} minutes if tokens cost what is usual.")
    measured: dict[Seat, Values] = {seat: {} for seat in seats}
    started_s = time.monotonic()
    for number in range(rounds):
        for index, seat in enumerate(seats):
            measure_seat(setting, seat, row_names, measured[seat], settings, number)
            done = number * len(seats) + index + 1
            left_s = (time.monotonic() - started_s) / done * (rounds * len(seats) - done)
            _say(f"about {left_s / 60:.0f} minutes left")
    comparisons = list(compare(measured))
    Console(width=None if sys.stdout.isatty() else 160).print(table_of(comparisons, rounds))
    if settings.result_filename is not None:
        content = _facts(settings, setting, rounds) | {
            "measured": {f"{name} {layout.value}": values for (name, layout), values in measured.items()},
            "comparisons": [asdict(one) for one in comparisons],
        }
        settings.result_filename.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0 if all(any(any(values) for values in of_seat.values()) for of_seat in measured.values()) else 1


def make_setting(settings: PeersSettings) -> Setting:
    """Raises ConfigError when the model cannot be had."""
    from engine.model_store import resolve_model

    folder = resolve_model(settings.model, report=_say).folder
    dtype = settings.dtype
    if dtype == "auto":
        from engine.model_loader import resolve_dtype  # loads torch, which takes its time

        dtype = resolve_dtype(folder, dtype, "cpu")
    workdir = settings.workdir or cache_root() / "bench-peers"
    workdir.mkdir(parents=True, exist_ok=True)
    given = {"vllm": settings.vllm_venv, "llama.cpp": settings.llama_cpp_venv}
    return Setting(
        folder,
        dtype,
        workdir.absolute(),
        {name: venv.absolute() for name, venv in given.items() if venv is not None},
        _say,
        settings.gguf or (Path(settings.model) if settings.model.endswith(".gguf") else None),
    )


def guess_s(engine: Engine, row_names: Sequence[str], is_quick: bool) -> float:
    """About how long one server takes with all its rows."""
    return engine.start_s + WARM_UP_GUESS_S + sum(ROWS[name].guess_s(is_quick) for name in row_names)


def measure_seat(
    setting: Setting, seat: Seat, row_names: Sequence[str], values: Values, settings: PeersSettings, number: int
) -> None:
    """Start one server, let it do every row once, and end it. A row that fails is None, and said."""
    name, layout = seat
    engine = ENGINES[name]
    text = f"round {number + 1}, {name} {layout.value}"
    for row_name in row_names:
        values.setdefault(row_name, []).append(None)
    try:
        with started_server(engine.command(setting, layout)) as server:
            _say(f"{text}: ready after {server.ready_s:.0f} s, load {os.getloadavg()[0]:.1f}")
            target = Target(f"{server.url}/completions", server.model, body={"temperature": 0, **engine.body(setting)})
            asyncio.run(_measure_rows(setting, engine, target, row_names, values, settings, number))
    except (ChildProcessError, ConnectionError, TimeoutError, httpx.HTTPError) as error:
        _say(f"{text}: {type(error).__name__}: {error}")


async def _measure_rows(
    setting: Setting,
    engine: Engine,
    target: Target,
    row_names: Sequence[str],
    values: Values,
    settings: PeersSettings,
    number: int,
) -> None:
    """All engines get the same prompts in one round, and others in the next, so that no cache helps."""
    vocabulary = Vocabulary.of_tokenizer(str(setting.folder))

    def maker(part: int) -> PromptMaker:
        return PromptMaker(vocabulary, np.random.default_rng([settings.seed, number, part]), as_text=engine.takes_text)

    async with StreamClient(target) as client:
        warm_up = maker(0)
        for count, input_len, output_len in WARM_UP:
            work = random_work(warm_up, count, RandomLengths(input_len, output_len))
            await run_load(client, work, [0.0] * count)
        for row_name in row_names:
            try:
                figures = await ROWS[row_name].measure(client, maker(1 + list(ROWS).index(row_name)), settings.quick)
            except RowFailed as error:
                _say(f"{row_name} failed: {error}")
            else:
                values[row_name][number] = figures
                _say(f"{row_name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))


def _facts(settings: PeersSettings, setting: Setting, rounds: int) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "model": settings.model,
        "dtype": setting.dtype,
        "rounds": rounds,
        "is_quick": settings.quick,
    }


def _chosen(name: str, text: str, known: Sequence[str]) -> list[str]:
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    if unknown := [part for part in chosen if part not in known]:
        raise typer.BadParameter(f"{name} knows {', '.join(known)}, not {', '.join(unknown)}")
    return chosen


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
