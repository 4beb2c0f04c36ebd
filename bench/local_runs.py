"""Runs `pdserve bench kernels`, `engine` and `claims`: model and limits in, one table and JSON out."""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from bench import claims
from bench.claims import ClaimRow
from bench.costs import ModelShape
from bench.engine import GREEDY, SAMPLED, STAGES, WARM_UP_STEPS, EngineBench, StepReport, split_attention
from bench.kernels import KernelBench, KernelShapes
from bench.kv_waste import GPU_PREFILL_TOKENS_PER_S, Replay
from bench.local_nodes import load_runner
from bench.machine import MachineLimits, describe_machine, measure_limits, torch_threads
from bench.traces import TraceRow, read_trace
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.model_store import resolve_model
from kernels.cpu_library import load_library

BLOCK_SIZE = 16
CLAIM_TOKENS = 8192
"""Tokens that the pool of the claims' nodes holds."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What every command takes: the model, how to compute, and where JSON goes."""

    model: str
    threads: int
    dtype: str
    json: Path | None

    def load(self, num_blocks: int, dtype: str | None = None) -> ModelRunner:
        """The model over a pool of so many blocks. Raises ConfigError."""
        return load_runner(
            EngineConfig(
                model=self.model,
                dtype=dtype or self.dtype,
                block_size=BLOCK_SIZE,
                num_blocks=max(2, num_blocks),
                num_threads=self.threads,
            )
        )

    def shape(self) -> ModelShape:
        """Of the model. Raises ConfigError."""
        return ModelShape.read(resolve_model(self.model).folder)

    def limits(self, dtype: str) -> MachineLimits:
        """Of this machine, now, over memory of the size of the weights."""
        return measure_limits(self.threads, dtypes=(dtype,))


def run_kernels(
    setup: Setup, batches: tuple[int, ...], contexts: tuple[int, ...], prompts: tuple[int, ...], seconds: float
) -> int:
    """0."""
    wanted = KernelShapes(batches, contexts, prompts, seconds)
    with torch_threads(setup.threads):
        runner = setup.load(wanted.blocks(BLOCK_SIZE))
        dtype = runner.layout.dtype
        limits = setup.limits(dtype)
        bench = KernelBench(runner, setup.shape(), wanted)
        reports = list(_noting_progress(bench.reports(), lambda report: f"{report.path} {report.name} {report.shape}"))
        limits = limits.best(setup.limits(dtype))
    table = _table("path", "operation", "shape", "µs", "GB/s", "of read", "GFLOP/s", "of matmul", "of limit")
    entries = []
    for report in reports:
        rates = report.rates(limits, dtype)
        shown = ["lost in the noise", *[""] * 5]
        if rates is not None:
            shown = [
                f"{report.seconds * 1e6:.1f}",
                f"{rates.gb_per_s:.2f}",
                f"{rates.share_of_read:.0%}",
                f"{rates.gflop_per_s:.2f}",
                f"{rates.share_of_matmul:.0%}",
                f"{rates.share_of_limit:.0%}",
            ]
        table.add_row(report.path, report.name, report.shape, *shown)
        entries.append(asdict(report) | {"rates": None if rates is None else asdict(rates)})
    _publish(setup, runner, limits, table, {"operations": entries})
    return 0


def run_engine(
    setup: Setup,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    steps: int,
    prefill_tokens: int,
    max_num_batched_tokens: int,
    *,
    is_sampled: bool = False,
) -> int:
    """0."""
    sampling = SAMPLED if is_sampled else GREEDY
    longest = max(*contexts, BLOCK_SIZE) + steps + WARM_UP_STEPS + 2
    blocks = max(max(batches) * (-(-longest // BLOCK_SIZE) + 1), -(-prefill_tokens // BLOCK_SIZE) + max(batches))
    with torch_threads(setup.threads):
        # Nodes leave some blocks to growth.
        runner = setup.load(blocks + blocks // 4 + 16)
        dtype = runner.layout.dtype
        limits = setup.limits(dtype)
        bench = EngineBench(runner, setup.shape(), sampling)
        reports = list(
            _noting_progress(_steps(bench, batches, contexts, steps, prefill_tokens, max_num_batched_tokens))
        )
        limits = limits.best(setup.limits(dtype))
    table = _table(
        "phase", "batch", "context", "tokens", "step ms", *STAGES, "glue", "must read MB", "of limit", "growth"
    )
    entries = []
    for report in reports:
        reference = next(other for other in reports if other.phase == report.phase)
        shares = {
            "glue": report.glue,
            "share_of_limit": report.share_of_limit(limits, dtype),
            "growth": report.growth(reference),
        }
        table.add_row(
            report.phase,
            str(report.batch),
            str(report.context),
            f"{report.tokens:.0f}",
            f"{report.step_s * 1e3:.2f}",
            *(f"{report.stages[stage] * 1e3:.2f}" for stage in STAGES),
            f"{report.glue:.1%}",
            f"{report.num_bytes / 1e6:.0f}",
            f"{shares['share_of_limit']:.0%}",
            f"{shares['growth']:.2f}" if report.phase == "decode" else "",
        )
        entries.append(asdict(report) | shares)
    if is_sampled:
        table.title = f"Tokens drawn with temperature {sampling.temperature:g} and top_p {sampling.top_p:g}"
    _publish(setup, runner, limits, table, {"sampled": is_sampled, "steps": entries})
    return 0


def _steps(
    bench: EngineBench,
    batches: Sequence[int],
    contexts: Sequence[int],
    steps: int,
    prefill_tokens: int,
    max_num_batched_tokens: int,
) -> Iterator[StepReport]:
    for batch in batches:
        short = bench.decode(batch, BLOCK_SIZE, steps)
        yield short
        for context in contexts:
            if context != BLOCK_SIZE:
                yield split_attention(bench.decode(batch, context, steps), short)
    for batch in batches:
        yield bench.prefill(batch, max(1, prefill_tokens // batch), max_num_batched_tokens)


def run_claims(setup: Setup, traces: Sequence[Path], wanted: Collection[int]) -> int:
    """1 when a claim does not hold here."""
    if unknown := set(wanted) - set(range(1, 7)):
        raise typer.BadParameter(f"--only knows 1 to 6, not {', '.join(map(str, sorted(unknown)))}")
    if 2 in wanted and not traces:
        print("Claim 2 is left out: it needs --trace.", file=sys.stderr)
    rows_of = {path.stem: read_trace(path) for path in traces}
    with torch_threads(setup.threads):
        runner = setup.load(CLAIM_TOKENS // BLOCK_SIZE)
        dtype = runner.layout.dtype
        limits = setup.limits(dtype)
        checks = _claims(setup, runner, rows_of, wanted)
        rows = list(_noting_progress(checks, lambda row: f"claim {row.number}: {row.holds}"))
        limits = limits.best(setup.limits(dtype))
    table = _table("", "claim", "measured", "holds", "by")
    for row in rows:
        table.add_row(str(row.number), row.claim, row.measured, "yes" if row.holds else "NO", row.source)
    _publish(setup, runner, limits, table, {"claims": [asdict(row) for row in rows]})
    return 0 if all(row.holds for row in rows) else 1


def _claims(
    setup: Setup, runner: ModelRunner, rows_of: dict[str, list[TraceRow]], wanted: Collection[int]
) -> Iterator[ClaimRow]:
    if 1 in wanted:
        in_float32 = runner if runner.layout.dtype == "float32" else setup.load(64, "float32")
        yield claims.prefix_states(resolve_model(setup.model).folder, in_float32, tokens=400, prefix=133)
    if 2 in wanted and rows_of:
        # As fast as on a GPU, and as fast as here.
        rates = (GPU_PREFILL_TOKENS_PER_S, claims.prefill_tokens_per_s(runner, setup.shape(), prompt=1024))
        for (name, rows), rate in itertools.product(rows_of.items(), rates):
            yield claims.kv_memory(name, rows, Replay(prefill_tokens_per_s=rate))
    if 3 in wanted:
        yield claims.batching(runner, output_lengths(next(iter(rows_of.values()), []), 40), 8, repeats=2)
    if 4 in wanted:
        yield claims.shared_prompt(runner, shared=1000, own=24)
    if 5 in wanted:
        yield claims.sharing(runner, prompt_tokens=64, output_tokens=64, width=4)
    if 6 in wanted:
        yield claims.bounds(
            runner, setup.shape(), lambda: setup.limits(runner.layout.dtype), prompt=1024, context=1024, steps=16
        )


def output_lengths(rows: Sequence[TraceRow], count: int) -> list[int]:
    """An eighth of the outputs of requests from all over a trace; without a trace exponential, with a mean of 32."""
    if rows:
        chosen = rows[:: max(1, len(rows) // count)][:count]
        return [max(1, round(row.output_tokens / 8)) for row in chosen]
    draw = random.Random(3)
    return [max(1, round(draw.expovariate(1 / 32))) for _ in range(count)]


def _noting_progress(items: Iterator[Any], text: Callable[[Any], str] | None = None) -> Iterator[Any]:
    for item in items:
        if sys.stderr.isatty():
            print(text(item) if text else f"{item.phase} {item.batch} x {item.context}", file=sys.stderr)
        yield item


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _publish(setup: Setup, runner: ModelRunner, limits: MachineLimits, table: Table, results: dict[str, Any]) -> None:
    """Print the table under what it depends on, and write both as JSON where that is wanted."""
    machine, library, dtype = describe_machine(), load_library(), runner.layout.dtype
    facts = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": str(machine),
        "model": setup.model,
        "dtype": dtype,
        "threads": setup.threads,
        "forward": runner.forward,
        "cpu_kernels": "none" if library is None else library.name,
        "limits": asdict(limits),
    }
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(f"{facts['date']} · {machine}")
    console.print(
        f"{setup.model} · {dtype} · {setup.threads} threads · {runner.forward} forward, compiled kernels: "
        f"{facts['cpu_kernels']}"
    )
    console.print(
        f"limits: read {limits.read_gb_per_s:.1f} GB/s, matrix-vector {limits.matvec_gb_per_s[dtype]:.1f} GB/s, "
        f"matmul {limits.matmul_gflop_per_s[dtype]:.0f} GFLOP/s"
    )
    console.print(table)
    if setup.json is not None:
        setup.json.write_text(json.dumps(facts | results, indent=1) + "\n", encoding="utf-8")
