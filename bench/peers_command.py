"""Runs `pdserve bench peers`: installs, then rounds in which every engine does every row, then the table."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
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

_LOST = (ChildProcessError, ConnectionError, TimeoutError, httpx.HTTPError)
"""What a server that does not start, or goes, raises."""


def run(settings: PeersSettings) -> int:
    """0 when every seat measured something, else 1."""
    layouts = _chosen("--threads", settings.threads, [layout.value for layout in Layout])
    row_names = _chosen("--rows", settings.rows, list(ROWS))
    if not layouts or not row_names:
        raise typer.BadParameter("--threads and --rows must not be empty")
    if settings.repeats is not None and settings.repeats < 1:
        raise typer.BadParameter("--repeats must be at least 1")
    engines = [OURS, *_chosen("--peers", settings.peers, [name for name in ENGINES if name != OURS])]
    rounds = settings.repeats or (1 if settings.quick else 3)
    setting = make_setting(settings)
    seats: list[Seat] = [
        (name, Layout(layout)) for layout in layouts for name in engines if Layout(layout) in ENGINES[name].layouts
    ]
    for name in engines:
        ENGINES[name].install(setting)
    whole = Run(settings, setting, row_names, rounds, {seat: {} for seat in seats})
    _say(f"{rounds} rounds of {len(seats)} servers, about {whole.left_s() / 60:.0f} minutes if tokens cost the usual.")
    try:
        if settings.together:
            measure_together(whole)
        else:
            for number in range(rounds):
                for seat in seats:
                    measure_seat(whole, seat, number)
                    _say(f"about {whole.left_s() / 60:.0f} minutes left")
    finally:  # also when it is interrupted
        if any(whole.measured.values()):
            Console(width=None if sys.stdout.isatty() else 160).print(table_of(list(compare(whole.measured)), rounds))
    return 0 if all(any(any(values) for values in of_seat.values()) for of_seat in whole.measured.values()) else 1


@dataclass(slots=True)
class Run:
    """What has been measured, and how long the rest may take.

    Attributes:
        settings: as asked.
        setting: what all engines share.
        row_names: which rows.
        rounds: how often.
        measured: so far.
        guessed_done_s: how long what is done was guessed to take.
    """

    settings: PeersSettings
    setting: Setting
    row_names: Sequence[str]
    rounds: int
    measured: dict[Seat, Values]
    started_s: float = field(default_factory=time.monotonic)
    guessed_done_s: float = 0.0

    def left_s(self) -> float:
        """By guess, and then by how well the guess did so far."""
        names, is_quick = self.row_names, self.settings.quick
        starts = 1 if self.settings.together else self.rounds
        whole_s = sum(
            starts * guess_s(ENGINES[name], (), is_quick) + self.rounds * rows_guess_s(names, is_quick)
            for name, _ in self.measured
        )
        pace = (time.monotonic() - self.started_s) / self.guessed_done_s if self.guessed_done_s else 1.0
        return max(0.0, whole_s - self.guessed_done_s) * pace

    def save(self) -> None:
        """Write what there is, so that a run which is cut leaves it."""
        if (file := self.settings.result_filename) is None:
            return
        content = _facts(self.settings, self.setting, self.rounds) | {
            "measured": {f"{name} {layout.value}": values for (name, layout), values in self.measured.items()},
            "comparisons": [asdict(one) for one in compare(self.measured)],
        }
        partial = file.with_name(f"{file.name}.partial")
        partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
        partial.replace(file)


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
    return engine.start_s + WARM_UP_GUESS_S + rows_guess_s(row_names, is_quick)


def rows_guess_s(row_names: Sequence[str], is_quick: bool) -> float:
    """About how long these rows take."""
    return sum(ROWS[name].guess_s(is_quick) for name in row_names)


def measure_seat(run: Run, seat: Seat, number: int) -> None:
    """Start one server, let it do every row once, and end it.

    A row that fails is None, and said. One that an interruption cut is not there.
    """
    guessed_before_s, text = run.guessed_done_s, f"round {number + 1}, "
    try:
        with _server_of(run, seat, text) as target:
            asyncio.run(_warm_up(run, seat, target, number))
            for row_name in run.row_names:
                asyncio.run(_measure_row(run, seat, target, number, row_name))
    except _LOST as error:
        _say(f"{text}{_name_of(seat)}: {type(error).__name__}: {error}")
    for row_name in run.row_names:
        if len(of_row := run.measured[seat].setdefault(row_name, [])) == number:
            of_row.append(None)
    run.guessed_done_s = guessed_before_s + guess_s(ENGINES[seat[0]], run.row_names, run.settings.quick)
    run.save()


def measure_together(run: Run) -> None:
    """Start all servers, and keep them while they take turns row by row. One that does not start has None in each."""
    with contextlib.ExitStack() as servers:
        targets: dict[Seat, Target] = {}
        for seat in run.measured:
            guessed_before_s = run.guessed_done_s
            try:
                with contextlib.ExitStack() as server:
                    target = server.enter_context(_server_of(run, seat, ""))
                    asyncio.run(_warm_up(run, seat, target, 0))
                    servers.push(server.pop_all())
            except _LOST as error:
                rows_s = run.rounds * rows_guess_s(run.row_names, run.settings.quick)
                run.guessed_done_s = guessed_before_s + guess_s(ENGINES[seat[0]], (), run.settings.quick) + rows_s
                _say(f"{_name_of(seat)}: {type(error).__name__}: {error}")
            else:
                targets[seat] = target
        for number in range(run.rounds):
            for row_name in run.row_names:
                for seat in run.measured:
                    if seat in targets:
                        _say(f"round {number + 1}, {_name_of(seat)}")
                        asyncio.run(_measure_row(run, seat, targets[seat], number, row_name))
                    else:
                        run.measured[seat].setdefault(row_name, []).append(None)
            run.save()
            _say(f"about {run.left_s() / 60:.0f} minutes left")


def _name_of(seat: Seat) -> str:
    name, layout = seat
    return f"{name} {layout.value}"


@contextlib.contextmanager
def _server_of(run: Run, seat: Seat, text: str) -> Iterator[Target]:
    """The server of a seat; raises one of _LOST when it does not start."""
    name, layout = seat
    engine = ENGINES[name]
    with started_server(engine.command(run.setting, layout)) as server:
        _say(f"{text}{_name_of(seat)}: ready after {server.ready_s:.0f} s, load {os.getloadavg()[0]:.1f}")
        body = {"temperature": 0, **engine.body(run.setting)}
        yield Target(f"{server.url}/completions", server.model, body=body)


def _maker(run: Run, seat: Seat, number: int, part: int) -> PromptMaker:
    """All engines get the same prompts in one round, and others in the next, so that no cache helps."""
    vocabulary = Vocabulary.of_tokenizer(str(run.setting.folder))
    draw = np.random.default_rng([run.settings.seed, number, part])
    return PromptMaker(vocabulary, draw, as_text=ENGINES[seat[0]].takes_text)


async def _warm_up(run: Run, seat: Seat, target: Target, number: int) -> None:
    maker = _maker(run, seat, number, 0)
    async with StreamClient(target) as client:
        for count, input_len, output_len in WARM_UP:
            work = random_work(maker, count, RandomLengths(input_len, output_len))
            await run_load(client, work, [0.0] * count)
    run.guessed_done_s += guess_s(ENGINES[seat[0]], (), run.settings.quick)


async def _measure_row(run: Run, seat: Seat, target: Target, number: int, row_name: str) -> None:
    row, figures = ROWS[row_name], None
    maker = _maker(run, seat, number, 1 + list(ROWS).index(row_name))
    try:
        async with StreamClient(target) as client:
            figures = await row.measure(client, maker, run.settings.quick)
    except RowFailed as error:
        _say(f"{row_name} failed: {error}")
    else:
        _say(f"{row_name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
    run.measured[seat].setdefault(row_name, []).append(figures)
    run.guessed_done_s += row.guess_s(run.settings.quick)
    run.save()


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
    chosen = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if unknown := [part for part in chosen if part not in known]:
        raise typer.BadParameter(f"{name} knows {', '.join(known)}, not {', '.join(unknown)}")
    return chosen


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
