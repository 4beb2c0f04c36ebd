"""Where a step of a node goes: schedule, build, forward, attention, sample, emit; beside the bytes that it must read.

A real node runs in this process (local_nodes.py). The clock is put around the node's own functions while it runs, so
what is measured is the loop that serves, not a copy of it:

    schedule    admit, decide and commit of the scheduler
    build       from the decision to a ForwardBatch
    forward     the model, without attention
    attention   writing K/V and attending. Where the model runs in one native call, nothing can be seen inside it; then
                it is what the step takes beyond one at a context of a single block
    sample      logits to tokens
    emit        tokens into updates for the router
    loop        the rest: to the worker thread and back, and other tasks of the event loop

For decode steps prompts are not computed: the pool holds random K/V. A time does not depend on what the values are.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import decode_node.step
import prefill_node.node
from bench import costs
from bench.costs import ModelShape
from bench.local_nodes import LocalDecode, LocalPrefill, engine_config, fill_pool, replaced
from bench.machine import MachineLimits
from engine.forward_batch import ForwardBatch
from engine.model_runner import Runner
from engine.sampling_params import SamplingParams
from kernels import ops

STAGES = ("schedule", "build", "forward", "attention", "sample", "emit", "loop")
GLUE = ("schedule", "build", "emit", "loop")
"""Stages in which the device computes nothing."""

WARM_UP_STEPS = 3

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=1)


@dataclass(slots=True)
class StepRecord:
    """One step: its slices as (new tokens, context) and seconds by stage; `loop` is what the others leave of total."""

    started_s: float
    slices: list[tuple[int, int]] = field(default_factory=list)
    logits_rows: int = 0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    total_s: float = 0.0


class StepClock:
    """Collects StepRecords of one node while its functions are timed.

    Calls nest: what an inner timed call takes is not counted for the outer one. Decide and commit run on the event loop
    and the rest in the worker thread, never two at a time, so one stack is enough.
    """

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self._inner_s: list[float] = []

    def begin(self) -> None:
        """The node decides: the step before, if there was one, ends here."""
        self.end()
        self.records.append(StepRecord(time.perf_counter()))

    def end(self) -> None:
        """The last step ends here, unless it has ended before."""
        if self.records and self.records[-1].total_s == 0.0:
            record = self.records[-1]
            record.total_s = time.perf_counter() - record.started_s
            record.stages["loop"] = record.total_s - sum(record.stages.values())

    @contextlib.contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Count what happens meanwhile to a stage of the step that runs."""
        self._inner_s.append(0.0)
        started_s = time.perf_counter()
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - started_s
            inner_s = self._inner_s.pop()
            if self._inner_s:
                self._inner_s[-1] += elapsed_s
            if self.records and self.records[-1].total_s == 0.0:
                self.records[-1].stages[stage] += elapsed_s - inner_s

    @contextlib.contextmanager
    def watch(self, owner: Any, name: str, stage: str) -> Iterator[None]:
        """Time the function `name` of a module or an object while the context lasts."""
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **words: Any) -> Any:
            with self.time(stage):
                return original(*arguments, **words)

        with replaced(owner, name, timed):
            yield


@dataclass(frozen=True, slots=True)
class StepReport:
    """Steps of one kind.

    Attributes:
        phase: `decode` or `prefill`.
        batch: sequences at once.
        context: tokens that each has in the cache, of a prefill its whole prompt.
        tokens: computed in a step, on average.
        steps: that were measured.
        step_s: a step's time: of decode steps the median, of prefill steps the mean.
        stages: the same of each stage, in seconds.
        attention_by_difference: whether attention could only be told by comparing with a short context.
        num_bytes: that a step must move at least.
        flops: that a step must do at least.
    """

    phase: str
    batch: int
    context: int
    tokens: float
    steps: int
    step_s: float
    stages: dict[str, float]
    attention_by_difference: bool
    num_bytes: float
    flops: float

    @property
    def glue(self) -> float:
        """Share of a step in which the device computes nothing."""
        return sum(self.stages[stage] for stage in GLUE) / self.step_s

    def share_of_limit(self, limits: MachineLimits, dtype: str) -> float:
        """Least time for these bytes and FLOPs over the time taken; 1 is as fast as the machine can be."""
        return limits.seconds(self.num_bytes, self.flops, dtype) / self.step_s

    def growth(self, reference: StepReport) -> float:
        """How much more the time of a step grew than what it must read, from another step on; 1 or less is right."""
        return self.step_s / reference.step_s / (self.num_bytes / reference.num_bytes)


class EngineBench:
    """Measures steps of one loaded model.

    Args:
        runner: the model; its pool must hold what is asked for.
        shape: of the model.
        sampling: how tokens are chosen.
    """

    def __init__(self, runner: Runner, shape: ModelShape, sampling: SamplingParams = GREEDY) -> None:
        self._runner = runner
        self._shape = shape
        self._sampling = sampling
        fill_pool(runner)

    def decode(self, batch: int, context: int, steps: int) -> StepReport:
        """Steps in which `batch` sequences of about `context` tokens add one token each."""
        records = asyncio.run(self._decode(batch, context, steps + WARM_UP_STEPS))
        wanted = [record for record in records if [new for new, _ in record.slices] == [1] * batch]
        return self._report("decode", batch, context, wanted[WARM_UP_STEPS:], statistics.median)

    def prefill(self, batch: int, length: int, max_num_batched_tokens: int) -> StepReport:
        """All steps in which a node computes `batch` prompts that arrive at once."""
        records = asyncio.run(self._prefill(batch, length, max_num_batched_tokens))
        return self._report("prefill", batch, length, records, statistics.fmean)

    async def _decode(self, batch: int, context: int, steps: int) -> list[StepRecord]:
        clock = StepClock()
        # All prompts in one step, so that all sequences decode from the next one on.
        config = engine_config(self._runner, max_num_seqs=batch, max_num_batched_tokens=batch * context)
        local = LocalDecode(self._runner, config)
        sampling = replace(self._sampling, max_tokens=steps + 1)
        with _watched(clock, local.node, decode_node.step, self._runner, computes_prompts=False):
            async with local.running():
                streams = [local.start(self._prompt(context), sampling)[0] for _ in range(batch)]
                await local.finish(streams)
        return [record for record in clock.records if record.slices]

    async def _prefill(self, batch: int, length: int, max_num_batched_tokens: int) -> list[StepRecord]:
        clock = StepClock()
        config = engine_config(self._runner, max_num_seqs=batch, max_num_batched_tokens=max_num_batched_tokens)
        local = LocalPrefill(self._runner, config)
        sampling = replace(self._sampling, max_tokens=1)
        with _watched(clock, local.node, prefill_node.node, self._runner, computes_prompts=True):
            async with local.running():
                await asyncio.gather(*(local.compute(self._prompt(length), sampling) for _ in range(batch)))
        return [record for record in clock.records if record.slices]

    def _prompt(self, length: int) -> list[int]:
        return random.choices(range(self._runner.vocab_size), k=length)

    def _report(
        self,
        phase: str,
        batch: int,
        context: int,
        records: Sequence[StepRecord],
        average: Callable[[list[float]], float],
    ) -> StepReport:
        if not records:
            raise RuntimeError(f"no {phase} step of {batch} sequences was seen: the node chose other steps")
        dtype = self._runner.layout.dtype
        least = [costs.forward_pass(self._shape, record.slices, record.logits_rows, dtype) for record in records]
        return StepReport(
            phase=phase,
            batch=batch,
            context=context,
            tokens=statistics.fmean(sum(new for new, _ in record.slices) for record in records),
            steps=len(records),
            step_s=average([record.total_s for record in records]),
            stages={stage: average([record.stages[stage] for record in records]) for stage in STAGES},
            attention_by_difference=False,
            num_bytes=statistics.fmean(cost.num_bytes for cost in least),
            flops=statistics.fmean(cost.flops for cost in least),
        )


def split_attention(report: StepReport, reference: StepReport) -> StepReport:
    """Tell attention from the rest of the forward pass by a report of the same batch at a short context.

    Only where attention was not seen by itself.
    """
    if report.stages["attention"] > 0:
        return report
    rest = min(reference.stages["forward"], report.stages["forward"])
    stages = report.stages | {"forward": rest, "attention": report.stages["forward"] - rest}
    return replace(report, stages=stages, attention_by_difference=True)


@contextlib.contextmanager
def _watched(clock: StepClock, node: Any, module: Any, runner: Runner, *, computes_prompts: bool) -> Iterator[None]:
    """Put the clock around the functions of a node that runs in this process."""
    decide, run = node.step_loop._decide, runner.run

    def begin_and_decide() -> Any:
        clock.begin()
        with clock.time("schedule"):
            return decide()

    def note_and_run(batch: ForwardBatch, **words: Any) -> torch.Tensor:
        record = clock.records[-1]
        lengths = [last - first for first, last in itertools.pairwise(batch.query_start_list)]
        record.slices = list(zip(lengths, batch.context_len_list, strict=True))
        record.logits_rows = len(batch.logits_rows)
        if not computes_prompts and max(lengths) > 1:
            return torch.zeros(record.logits_rows, runner.vocab_size)
        with clock.time("forward"):
            return run(batch, **words)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(node.step_loop, "_decide", begin_and_decide))
        stack.enter_context(replaced(runner, "run", note_and_run))
        for owner, name, stage in (
            (node.step_loop, "_run", "build"),
            (node.step_loop, "_commit", "emit"),
            (node.scheduler, "commit", "schedule"),
            (module, "sample", "sample"),
            (ops, "write_kv", "attention"),
            (ops, "paged_attention", "attention"),
        ):
            stack.enter_context(clock.watch(owner, name, stage))
        yield
        clock.end()
