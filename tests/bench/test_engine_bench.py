"""Where a step goes: the clock's arithmetic, and real nodes that are watched while they work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import bench.engine
import decode_node.step
from bench import costs
from bench.costs import ModelShape
from bench.engine import GREEDY, SAMPLED, STAGES, EngineBench, StepClock, StepReport, split_attention
from engine.kv_layout import KvLayout
from engine.model_runner import ModelRunner
from engine.sampling import SampleRow, sample
from engine.sampling_params import SamplingParams
from engine.sim_runner import SimCost, SimRunner
from kernels import ops
from tests.bench.tiny_runner import LIMITS, tiny_runner

REPORT = StepReport("decode", 4, 100, 4.0, 8, 0.010, dict.fromkeys(STAGES, 0.0), False, 1e6, 2e6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return tiny_runner(folder)


class ManualTime:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


def test_nested_calls_are_counted_once_and_the_loop_gets_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    manual = ManualTime()
    monkeypatch.setattr(bench.engine, "time", manual)
    clock = StepClock()

    def spend(seconds: float) -> None:
        manual.now_s += seconds

    class Work:
        def run(self) -> str:
            spend(1.0)
            self.forward()
            spend(2.0)
            return "done"

        def forward(self) -> None:
            spend(4.0)

    work = Work()
    with clock.watch(work, "run", "build"), clock.watch(work, "forward", "forward"):
        clock.begin()
        assert work.run() == "done"
        spend(8.0)
        clock.begin()
        with clock.time("schedule"):
            spend(0.5)
        clock.end()
        work.run()  # after the end: nobody's
    assert "run" not in vars(work) and "forward" not in vars(work)
    first, second = clock.records
    assert first.total_s == 15.0
    assert first.stages == dict.fromkeys(STAGES, 0.0) | {"build": 3.0, "forward": 4.0, "loop": 8.0}
    assert second.total_s == 0.5 and second.stages["schedule"] == 0.5 and second.stages["loop"] == 0.0


def test_a_call_that_raises_is_counted_and_unwound(monkeypatch: pytest.MonkeyPatch) -> None:
    manual = ManualTime()
    monkeypatch.setattr(bench.engine, "time", manual)
    clock = StepClock()
    clock.begin()
    with pytest.raises(ValueError), clock.time("build"):
        manual.now_s += 1.0
        raise ValueError
    with clock.time("sample"):
        manual.now_s += 2.0
    assert (clock.records[0].stages["build"], clock.records[0].stages["sample"]) == (1.0, 2.0)


@pytest.mark.parametrize(("batch", "context"), [(1, 20), (3, 33)])
def test_decode_steps_of_a_real_node(runner: ModelRunner, folder: Path, batch: int, context: int) -> None:
    originals = (ops.paged_attention, ops.write_kv, runner.run)
    shape = ModelShape.read(folder)
    report = EngineBench(runner, shape).decode(batch, context, steps=5)
    assert (ops.paged_attention, ops.write_kv, runner.run) == originals
    assert (report.phase, report.batch, report.context, report.steps, report.tokens) == (
        "decode",
        batch,
        context,
        5,
        batch,
    )
    # Steps after the prompt, its first token and three to warm up.
    contexts = [context + 3 + step for step in range(1, 6)]
    each = [costs.forward_pass(shape, [(1, length)] * batch, batch, "float32").num_bytes for length in contexts]
    assert report.num_bytes == pytest.approx(sum(each) / 5)
    assert all(report.stages[stage] >= 0 for stage in STAGES)
    assert all(report.stages[stage] > 0 for stage in ("schedule", "build", "forward", "sample", "emit"))
    assert 0 < report.glue < 1


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_tokens_are_chosen_as_asked(
    runner: ModelRunner, folder: Path, monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams
) -> None:
    chosen: list[tuple[float, float]] = []

    def note(logits: object, rows: Sequence[SampleRow]) -> object:
        # As they come over the wire, in float32.
        chosen.extend((round(row.params.temperature, 3), round(row.params.top_p, 3)) for row in rows)
        return sample(logits, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(decode_node.step, "sample", note)
    EngineBench(runner, ModelShape.read(folder), sampling).decode(2, 20, steps=1)
    assert set(chosen) == {(sampling.temperature, sampling.top_p)} and len(chosen) >= 2


def test_prefill_steps_of_a_real_node(runner: ModelRunner, folder: Path) -> None:
    shape = ModelShape.read(folder)
    report = EngineBench(runner, shape).prefill(3, 50, max_num_batched_tokens=64)
    assert report.steps * report.tokens == pytest.approx(3 * 50)
    assert report.steps >= 3
    matrices = 2 * 3 * 50 * shape.layer_weights
    head = 2 * 3 * shape.vocab * shape.hidden
    assert report.flops * report.steps > matrices + head
    assert report.num_bytes > shape.read_weights * 4


def test_the_time_of_the_model_is_forward_time() -> None:
    layout = KvLayout(num_layers=2, kv_heads=1, head_dim=4, block_size=16, dtype="float32")
    shape = ModelShape(2, 1, 1, 4, 4, 8, 512, 1000)
    simulated = SimRunner(num_blocks=32, layout=layout, cost=SimCost(step_s=0.02))
    report = EngineBench(simulated, shape).decode(2, 20, steps=3)
    assert report.stages["forward"] >= 0.02 and report.step_s >= 0.02
    # Nothing is seen inside a runner of another kind.
    assert report.stages["attention"] == 0


def test_attention_is_told_by_difference_only_where_it_is_not_seen() -> None:
    short = replace(REPORT, stages=REPORT.stages | {"forward": 0.004})
    long = replace(REPORT, stages=REPORT.stages | {"forward": 0.009})
    split = split_attention(long, short)
    assert split.stages["forward"] == 0.004 and split.stages["attention"] == pytest.approx(0.005)
    assert split.attention_by_difference
    # Noise does not make it negative.
    assert split_attention(short, long).stages["attention"] == 0
    seen = replace(long, stages=long.stages | {"attention": 0.001})
    assert split_attention(seen, short) is seen


def test_glue_growth_and_share_of_the_limit() -> None:
    report = replace(REPORT, stages=REPORT.stages | {"schedule": 0.001, "emit": 0.002, "loop": 0.001, "sample": 0.003})
    assert report.glue == pytest.approx(0.4)
    # 1e6 bytes at 10 GB/s are 0.1 ms.
    assert REPORT.share_of_limit(LIMITS, "float32") == pytest.approx(0.01)
    twice = replace(REPORT, step_s=0.030, num_bytes=2e6)
    assert twice.growth(REPORT) == pytest.approx(1.5)
