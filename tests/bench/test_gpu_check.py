"""The GPU check tells apart what is wrong, failed, not to be had here and cut; its status says so; it has an end."""

from __future__ import annotations

import io
import json
import sys
import time
from typing import Any

import pytest
import torch

from bench.gpu_table import CUT, FAILED, NOT_RUN, WRONG, Check, Found, NotRun, Task, exit_status, perform, table
from tests.kernels.triton_interpreter import load

for name in ("triton_attention", "triton_blocks", "triton_elementwise", "triton_sampling"):
    load(name)

from bench import gpu_check  # noqa: E402  # over the interpreted kernels


def task_that_raises(error: BaseException) -> Task:
    def run() -> Found:
        raise error

    return Task("speed", "a kernel", run)


@pytest.mark.parametrize(
    ("error", "result", "detail"),
    [
        (AssertionError("off by 1"), WRONG, "off by 1"),
        (RuntimeError("Triton Error [CUDA]:\n invalid argument"), FAILED, "RuntimeError: Triton Error [CUDA]: invalid"),
        (NotRun("needs 10 GiB"), NOT_RUN, "needs 10 GiB"),
        (torch.OutOfMemoryError("tried 9 GiB"), NOT_RUN, "too little memory: tried 9 GiB"),
    ],
)
def test_what_a_check_raises_says_how_it_went(error: Exception, result: str, detail: str) -> None:
    check = perform(task_that_raises(error))
    assert (check.part, check.name, check.result) == ("speed", "a kernel", result)
    assert check.detail.startswith(detail)


@pytest.mark.parametrize(
    ("results", "status"),
    [
        (["ok", "12.0 us", NOT_RUN], 0),
        (["ok", FAILED, CUT], 1),
        (["ok", WRONG], 1),
        (["ok", CUT], 3),
        ([NOT_RUN, NOT_RUN], 3),
        ([], 3),
    ],
)
def test_only_what_was_run_and_is_right_exits_with_0(results: list[str], status: int) -> None:
    assert exit_status([Check(result) for result in results]) == status


def test_the_table_has_a_line_for_each_check_and_counts_them() -> None:
    checks = [
        Check("ok", detail="worst error 1e-3", part="correctness", name="a"),
        Check("12.0 us", 0.5, 2.0, "of the copy bandwidth", "speed", "longer"),
        Check(FAILED, detail="RuntimeError: no", part="speed", name="b"),
        Check(CUT, part="speed", name="c"),
    ]
    lines = table(checks).splitlines()
    assert len(lines) == 6
    assert lines[2].split() == ["speed", "longer", "12.0", "us", "50%", "2.00x", "of", "the", "copy", "bandwidth"]
    assert lines[3].split() == ["speed", "b", "failed:", "RuntimeError:", "no"]
    assert lines[5] == "2 right or measured, 0 WRONG, 1 failed, 0 not run, 1 cut"


def test_a_part_says_what_it_plans_and_cuts_what_it_has_no_time_for() -> None:
    def slow() -> Found:
        time.sleep(0.06)
        return Found(detail="done")

    output = io.StringIO()
    gpu_check.work([Task("speed", "first", slow), Task("speed", "second", slow)], 0.05, output)
    plan, first, second = [json.loads(line) for line in output.getvalue().splitlines()]
    assert plan == {"planned": ["first", "second"]}
    assert (first["check"]["result"], second["check"]["result"]) == ("ok", CUT)


def checks_of(script: str, limit_s: float = 60.0, **options: Any) -> list[Check]:
    taken: list[Check] = []
    lines = (
        "import json, os, signal, sys, time",
        "def tell(**told): print(json.dumps(told), flush=True)",
        "def ok(name): tell(check={'result': 'ok', 'part': 'engine', 'name': name})",
        "tell(planned=['a', 'b', 'c'])",
        script,
    )
    gpu_check.run_apart("engine", [sys.executable, "-c", "\n".join(lines)], limit_s, taken.append, **options)
    return taken


def results(checks: list[Check]) -> list[tuple[str, str]]:
    return [(check.name, check.result) for check in checks]


def test_a_part_runs_in_a_process_of_its_own() -> None:
    checks = checks_of("print('a library says hello'); ok('a'); ok('b'); ok('c')")
    assert results(checks) == [("a", "ok"), ("b", "ok"), ("c", "ok")]


def test_a_crash_fails_what_was_under_way_and_cuts_the_rest() -> None:
    checks = checks_of("ok('a'); sys.stderr.write('illegal address\\n'); sys.stderr.flush(); os.abort()")
    assert results(checks) == [("a", "ok"), ("b", FAILED), ("c", CUT)]
    assert checks[1].detail == "the process ended with -6 illegal address"


def test_a_part_that_hangs_is_ended_and_has_failed() -> None:
    checks = checks_of("signal.signal(signal.SIGTERM, signal.SIG_IGN); ok('a'); time.sleep(600)", 0.5, stop_s=0.2)
    assert results(checks) == [("a", "ok"), ("b", FAILED), ("c", CUT)]
    assert "no result" in checks[1].detail


def test_a_part_that_does_not_start_has_failed() -> None:
    taken: list[Check] = []
    gpu_check.run_apart("speed", [sys.executable, "-c", "raise SystemExit('no driver')"], 60.0, taken.append)
    assert results(taken) == [("start", FAILED)]
    assert "no driver" in taken[0].detail
    failed_at_the_end = checks_of("ok('a'); ok('b'); ok('c'); sys.exit(7)")
    assert results(failed_at_the_end)[3:] == [("end", FAILED)]
    assert all(status == 1 for status in (exit_status(taken), exit_status(failed_at_the_end)))
