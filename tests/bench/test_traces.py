"""Traces of both forms: reading, scaling without breaking who shares what, and replaying."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.datasets import PromptMaker
from bench.traces import TraceRow, TraceScale, read_trace, scale_trace, trace_work
from bench.vocabulary import Vocabulary
from engine.errors import ConfigError

MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 40, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 3]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 16, "hash_ids": [0, 1]},
]


def write_lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_maker() -> PromptMaker:
    return PromptMaker(Vocabulary(range(100, 300)), np.random.default_rng(0), as_text=False)


def test_mooncake_is_read_in_seconds(tmp_path: Path) -> None:
    rows = read_trace(write_lines(tmp_path / "t.jsonl", MOONCAKE))
    assert rows[2] == TraceRow(3.0, 1024, 16, (0, 1))


def test_azure_is_read_from_json_lines_and_from_the_published_csv(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "t.jsonl", [{"timestamp": 4315, "input_length": 396, "output_length": 109}])
    assert read_trace(lines) == [TraceRow(4.315, 396, 109)]
    table = tmp_path / "t.csv"
    table.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(table)
    assert first == TraceRow(0.0, 374, 44)
    assert second == TraceRow(pytest.approx(4.314579, abs=1e-6), 396, 109)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content", ["", "{}\n", "no json\n", '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}\n']
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"t\.jsonl"):
        read_trace(tmp_path / "t.jsonl")


def test_scaled_prompts_keep_one_block_for_each_hash_id(tmp_path: Path) -> None:
    rows = scale_trace(read_trace(write_lines(tmp_path / "t.jsonl", MOONCAKE)), TraceScale(16, output_divisor=16))
    assert [row.input_tokens for row in rows] == [38, 19, 32]  # a 32nd, rounded up
    assert [row.output_tokens for row in rows] == [2, 1, 1]  # a 16th, rounded to even, at least 1
    for row in rows:
        assert row.hash_ids is not None
        assert len(row.hash_ids) == -(-row.input_tokens // 16)


def test_prompts_with_hash_ids_shrink_by_blocks_only(tmp_path: Path) -> None:
    rows = read_trace(write_lines(tmp_path / "t.jsonl", MOONCAKE))
    with pytest.raises(ValueError, match=r"^trace_input_divisor .*trace_block_size"):
        scale_trace(rows, TraceScale(16, input_divisor=2.0))


def test_equal_hash_ids_are_equal_tokens_and_others_are_not(tmp_path: Path) -> None:
    rows = scale_trace(read_trace(write_lines(tmp_path / "t.jsonl", MOONCAKE)), TraceScale(16))
    first, second, third = (one.prompt for one in trace_work(rows, make_maker(), 16, seed=5))
    assert isinstance(first, list) and isinstance(second, list)
    assert first[:16] == second[:16]
    assert first[16:19] != second[16:19]
    assert first[:32] == third
    again = trace_work(rows, make_maker(), 16, seed=5)
    assert [one.prompt for one in again] == [first, second, third]
    assert trace_work(rows, make_maker(), 16, seed=6)[0].prompt != first


def test_requests_of_one_time_stamp_can_be_spread() -> None:
    rows = [TraceRow(time_s, 10, 1) for time_s in (0.0, 0.0, 0.0, 3.0)]
    assert [row.at_s for row in scale_trace(rows, TraceScale())] == [0, 0, 0, 3]
    assert [row.at_s for row in scale_trace(rows, TraceScale(spread_s=3.0))] == [0, 1, 2, 3]


def test_a_part_of_a_trace_starts_at_zero_and_may_run_faster() -> None:
    rows = [TraceRow(float(second), 100, 10) for second in range(10)]
    scale = TraceScale(speed=2.0, start_s=4.0, duration_s=3.0, input_divisor=3.0)
    scaled = scale_trace(rows, scale)
    assert [row.at_s for row in scaled] == [0.0, 0.5, 1.0]
    assert [row.input_tokens for row in scaled] == [34] * 3


def test_rows_without_hash_ids_share_nothing() -> None:
    one, other = trace_work([TraceRow(0.0, 40, 2), TraceRow(1.5, 40, 3)], make_maker(), 16, seed=0)
    assert (len(one.prompt), one.output_tokens, other.at_s) == (40, 2, 1.5)
    assert one.prompt != other.prompt


@pytest.mark.parametrize("wrong", [{"block_size": 7}, {"block_size": 0}, {"speed": 0.0}, {"output_divisor": 0.0}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="trace_"):
        TraceScale(**wrong)  # type: ignore[arg-type]
