"""Each claim holds for what is right, and is rejected where the thing it is about is broken or switched off."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bench import claims, local_runs
from bench.cli import app
from bench.costs import ModelShape
from bench.kv_waste import Replay
from bench.local_nodes import replaced
from bench.machine import MachineLimits
from bench.traces import TraceRow
from engine.block_pool import BlockPool
from engine.forward_batch import ForwardBatch
from engine.ids import BlockHash, BlockId
from engine.model_runner import ModelRunner
from tests.bench.tiny_runner import LIMITS, tiny_runner

LENGTHS = [max(1, round(random.Random(number).expovariate(1 / 24))) for number in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return tiny_runner(folder)


def broken(runner: ModelRunner, harm: Callable[[ForwardBatch, torch.Tensor], torch.Tensor]) -> Any:
    """A runner whose results somebody touches."""
    run = runner.run

    def harmed(batch: ForwardBatch, **words: Any) -> torch.Tensor:
        return harm(batch, run(batch, **words))

    return replaced(runner, "run", harmed)


# ------------------------------------------------------------------------------------------------- 1: prefixes


def test_states_of_a_prefix(runner: ModelRunner, folder: Path) -> None:
    row = claims.prefix_states(folder, runner, tokens=70, prefix=37)
    assert row.holds, row
    assert all(0 <= value <= claims.TOLERANCE for value in row.figures.values())


def test_states_that_depend_on_what_follows_are_found(runner: ModelRunner, folder: Path) -> None:
    def look_ahead(batch: ForwardBatch, logits: torch.Tensor) -> torch.Tensor:
        # One element of one layer, by how long the text is.
        runner.pool[int(batch.block_tables[0, 0]), 1, 1, 0, 0, 0] += 1e-4 * batch.num_tokens
        return logits

    with broken(runner, look_ahead):
        row = claims.prefix_states(folder, runner, tokens=70, prefix=37)
    assert not row.holds and row.figures["pool"] > claims.TOLERANCE


@pytest.mark.parametrize(("by_length", "figure"), [(True, "logits"), (False, "logits_against_transformers")])
def test_what_only_the_last_layer_gets_wrong_is_found(
    runner: ModelRunner, folder: Path, by_length: bool, figure: str
) -> None:
    def touch(batch: ForwardBatch, logits: torch.Tensor) -> torch.Tensor:
        # One logit of the first row, by how long the text is, or always.
        touched = logits.clone()
        touched[0, 3] += 1e-3 * (batch.num_tokens if by_length else 1)
        return touched

    with broken(runner, touch):
        row = claims.prefix_states(folder, runner, tokens=70, prefix=37)
    assert not row.holds and row.figures[figure] > claims.TOLERANCE > row.figures["pool"]


def test_states_that_are_not_numbers_are_found(runner: ModelRunner, folder: Path) -> None:
    def spoil(batch: ForwardBatch, logits: torch.Tensor) -> torch.Tensor:
        runner.pool[int(batch.block_tables[0, 0]), 0, 0, 0, 0, 0] = torch.nan
        return logits

    try:
        with broken(runner, spoil):
            row = claims.prefix_states(folder, runner, tokens=70, prefix=37)
    finally:
        runner.pool.zero_()
    assert not row.holds and row.figures["pool"] == float("inf")


# --------------------------------------------------------------------------------------------------- 2: memory


def trace() -> list[TraceRow]:
    draw = random.Random(2)
    return [TraceRow(number * 0.2, draw.randint(300, 900), draw.randint(20, 200)) for number in range(40)]


@pytest.mark.parametrize(
    ("settings", "holds"),
    [
        (Replay(num_blocks=1024, max_model_len=4096), True),
        (Replay(num_blocks=16, max_model_len=4096, block_size=4096), False),  # paging in name only
        (Replay(num_blocks=1024, max_model_len=900), False),  # contiguous, and little to spare
    ],
)
def test_memory_over_a_trace(settings: Replay, holds: bool) -> None:
    row = claims.kv_memory("made up", trace(), settings)
    assert row.holds == holds, row
    assert row.figures["requests"] == 40 and "40 requests" in row.source


def test_slow_prefill_is_seen_in_what_is_promised() -> None:
    slow, fast = (
        claims.kv_memory("made up", trace(), Replay(num_blocks=4096, prefill_tokens_per_s=rate)) for rate in (250, 1e4)
    )
    assert "computed at 250 tokens/s" in slow.source
    assert f"{slow.figures['promised_mean']:.1%} of all blocks" in slow.measured
    assert slow.figures["promised_mean"] > 5 * fast.figures["promised_mean"] > 0
    assert slow.figures["empty_mean"] > 2 * fast.figures["empty_mean"] > 2 * fast.figures["paged_mean"]


# ------------------------------------------------------------------------------------------------- 3: batching


def test_batching(runner: ModelRunner) -> None:
    row = claims.batching(runner, LENGTHS, 8, repeats=2)
    assert row.holds, row
    assert row.figures["static_busy"] < 0.6 < row.figures["continuous_busy"]
    assert len(row.figures["throughput_ratios"]) == 2 and min(row.figures["throughput_ratios"]) > 0
    # Each batch takes as many steps as its longest request: the first one computes the prompts.
    steps = sum(max(LENGTHS[first : first + 8]) for first in range(0, 40, 8))
    assert row.figures["static_busy"] == pytest.approx(sum(LENGTHS) / (8 * steps))


def test_requests_of_one_length_leave_nothing_idle(runner: ModelRunner) -> None:
    row = claims.batching(runner, [6] * 24, 8)
    assert not row.holds and row.figures["static_busy"] == 1.0


def test_a_pool_for_a_few_keeps_places_idle(tmp_path: Path) -> None:
    # 6 blocks: two sequences of up to three blocks each, where eight have a place.
    row = claims.batching(tiny_runner(tmp_path, num_blocks=6), [24, 24, 20, 24, 22, 24, 24, 24, 24, 24], 8)
    assert not row.holds and row.figures["continuous_busy_under_load"] < claims.CONTINUOUS_BUSY


# -------------------------------------------------------------------------------------------- 4: shared prompts


def test_a_shared_prompt(runner: ModelRunner) -> None:
    row = claims.shared_prompt(runner, shared=200, own=10)
    assert row.holds, row
    assert 1 <= row.figures["one_after_another"] <= claims.COMPUTED_ONCE
    assert 1 <= row.figures["at_once"] <= claims.COMPUTED_ONCE


def test_without_a_prefix_cache_it_is_computed_by_each(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(self: BlockPool, hashes: Sequence[BlockHash]) -> list[BlockId]:
        return []

    monkeypatch.setattr(BlockPool, "match", find_nothing)
    monkeypatch.setattr(BlockPool, "publish_or_adopt", lambda self, block_id, block_hash: block_id)
    row = claims.shared_prompt(runner, shared=200, own=10)
    assert not row.holds and row.figures["one_after_another"] == 3.0 and row.figures["same_tokens"]


def test_a_cache_that_changes_tokens_is_found(runner: ModelRunner) -> None:
    def mistake_hits(batch: ForwardBatch, logits: torch.Tensor) -> torch.Tensor:
        was_cached = batch.context_len_list[0] > batch.num_tokens
        return logits.roll(1, dims=-1) if was_cached else logits

    with broken(runner, mistake_hits):
        row = claims.shared_prompt(runner, shared=200, own=10)
    assert not row.holds and not row.figures["same_tokens"]


# ------------------------------------------------------------------------------------- 5: sharing within a request


def test_sharing_within_a_request(runner: ModelRunner) -> None:
    row = claims.sharing(runner, prompt_tokens=64, output_tokens=48, width=4)
    assert row.holds, row
    # 4 of the blocks of each are shared by all, of 4 to 7.
    assert 3 * 4 / (4 * 7) < row.figures["parallel_samples"] < 3 * 4 / (4 * 4)


def test_nothing_is_saved_where_nothing_is_shared(runner: ModelRunner) -> None:
    row = claims.sharing(runner, prompt_tokens=3, output_tokens=40, width=4)
    assert not row.holds and row.figures["parallel_samples"] < claims.SAMPLES_SAVED


def test_samples_that_share_nothing_are_found(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    share = BlockPool.share
    copies: list[int] = []

    def take_more(self: BlockPool, block_ids: Sequence[BlockId]) -> None:
        share(self, block_ids)
        copies.extend(self.allocate(len(block_ids)))  # what copies of their own would take

    monkeypatch.setattr(BlockPool, "share", take_more)
    row = claims.sharing(runner, prompt_tokens=64, output_tokens=8, width=4)
    assert copies and not row.holds


# ---------------------------------------------------------------------------------------------- 6: what binds


@pytest.mark.parametrize(
    ("flop_per_byte", "holds"),
    [(10, True), (1000, False), (0.1, False)],
)
def test_what_binds(runner: ModelRunner, folder: Path, flop_per_byte: float, holds: bool) -> None:
    limits = MachineLimits(1, 10.0, {"float32": 8.0}, {"float32": 10.0 * flop_per_byte})
    row = claims.bounds(runner, ModelShape.read(folder), lambda: limits, prompt=128, context=20, steps=3)
    assert row.holds == holds, row
    assert row.figures["decode"]["intensity"] < 1 < row.figures["prefill"]["intensity"]
    assert row.figures["balance"] == pytest.approx(flop_per_byte)


# -------------------------------------------------------------------------------------------------- the commands


@pytest.fixture
def given_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_runs, "measure_limits", lambda threads, **words: LIMITS)


def invoke(folder: Path, tmp_path: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    file = tmp_path / "out.json"
    result = CliRunner().invoke(
        app, [arguments[0], "--model", str(folder), "--json", str(file), *arguments[1:]], standalone_mode=False
    )
    if result.exception is not None:
        raise result.exception
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for fact in ("date", "machine", "model", "dtype", "threads", "forward", "cpu_kernels"):
        assert str(content[fact]) in " ".join(result.output.split())
    return int(result.return_value), result.output, content


def test_lengths_come_from_all_over_a_trace() -> None:
    rows = [TraceRow(0.0, 1, 8 * number) for number in range(100)]
    assert local_runs.output_lengths(rows, 10) == [1, *range(10, 100, 10)]
    assert local_runs.output_lengths(rows[:3], 10) == [1, 1, 2]
    made_up = local_runs.output_lengths([], 500)
    assert len(made_up) == 500 and min(made_up) >= 1 and 25 < sum(made_up) / 500 < 40


@pytest.mark.usefixtures("given_limits", "runner")
def test_the_claims_as_one_table(folder: Path, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.jsonl"
    lines = [
        json.dumps({"timestamp": row.at_s * 1000, "input_length": row.input_tokens, "output_length": row.output_tokens})
        for row in trace()
    ]
    lengths.write_text("\n".join(lines), encoding="utf-8")
    code, output, content = invoke(folder, tmp_path, "claims", "--trace", str(lengths))
    assert [row["number"] for row in content["claims"]] == [1, 2, 2, 3, 4, 5, 6]
    rates = [row["source"].rpartition("computed at ")[2] for row in content["claims"] if row["number"] == 2]
    assert rates[0] == "10000 tokens/s" and rates[1].removesuffix(" tokens/s").isdecimal()
    assert code == (0 if all(row["holds"] for row in content["claims"]) else 1)
    assert "lengths: 40 requests" in " ".join(output.replace("│", " ").split())


@pytest.mark.usefixtures("given_limits", "runner")
def test_one_claim_that_does_not_hold(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "COMPUTED_ONCE", 0.5)
    code, output, content = invoke(folder, tmp_path, "claims", "--only", "4")
    assert code == 1 and [row["holds"] for row in content["claims"]] == [False] and "NO" in output


@pytest.mark.usefixtures("given_limits", "runner")
def test_kernels_and_engine_as_tables(folder: Path, tmp_path: Path) -> None:
    sizes = ("--batch", "2", "--context", "20")
    code, output, content = invoke(folder, tmp_path, "kernels", *sizes, "--prompt", "32", "--seconds", "0")
    operations = {(one["path"] == "part", one["name"], one["shape"]) for one in content["operations"]}
    assert code == 0 and "RMSNorm" in output and len(operations) == 3 + 2 + 2 * 9 + 1 + 2 + 2
    code, output, content = invoke(
        folder, tmp_path, "engine", *sizes, "--steps", "2", "--prefill-tokens", "64", "--sampled"
    )
    assert code == 0 and "attention" in output and content["sampled"] is True and "temperature" in output
    assert [(step["phase"], step["batch"], step["context"]) for step in content["steps"]] == [
        ("decode", 2, 16),
        ("decode", 2, 20),
        ("prefill", 2, 32),
    ]
