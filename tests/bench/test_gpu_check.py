"""The GPU check tells apart what is wrong, failed, not to be had here and cut; its status says so; it has an end."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
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


def test_a_part_says_what_it_plans_and_cuts_what_it_has_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(gpu_check, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow() -> Found:
        now[0] += 46.0
        return Found(detail="done")

    output = io.StringIO()
    gpu_check.work([Task("speed", "first", slow), Task("speed", "second", slow)], 60.0, output)
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
    # Where Python itself starts too slowly, it is the start that has failed.
    assert results(checks) in ([("a", "ok"), ("b", FAILED), ("c", CUT)], [("start", FAILED)])
    assert any("no result when" in check.detail for check in checks)


def test_a_part_that_does_not_start_has_failed() -> None:
    taken: list[Check] = []
    gpu_check.run_apart("speed", [sys.executable, "-c", "raise SystemExit('no driver')"], 60.0, taken.append)
    assert results(taken) == [("start", FAILED)]
    assert "no driver" in taken[0].detail
    failed_at_the_end = checks_of("ok('a'); ok('b'); ok('c'); sys.exit(7)")
    assert results(failed_at_the_end)[3:] == [("end", FAILED)]
    assert all(status == 1 for status in (exit_status(taken), exit_status(failed_at_the_end)))


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["gpu_check", *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    card = SimpleNamespace(name="Card", total_memory=2**34, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    return ended.value.code


def test_the_command_runs_each_part_apart_and_in_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    commands: list[Sequence[str]] = []

    def run_apart(part: str, command: Sequence[str], limit_s: float, take: Any) -> None:
        commands.append(command)
        assert 0 < limit_s <= 360 - gpu_check.STOP_S
        take(Check("ok" if part != "speed" else FAILED, part=part, name="all"))

    monkeypatch.setattr(gpu_check, "run_apart", run_apart)
    assert run_main(monkeypatch, "--json", str(tmp_path / "report"), "--model", "some/model") == 1
    assert "3 right or measured, 0 WRONG, 1 failed" in capsys.readouterr().out
    report = json.loads((tmp_path / "report").read_text())
    assert [check["result"] for check in report["checks"]] == ["ok", FAILED, "ok", "ok"]
    assert run_main(monkeypatch, "--part", "engine") == 0
    assert max(gpu_check.PART_ENDS_S.values()) + gpu_check.STOP_S < 360

    # What the command starts is a command of its own that does the work.
    monkeypatch.setattr(gpu_check, "tasks_of", lambda *told: [Task(told[0], str(told[1:]), Found)])
    monkeypatch.setattr(sys, "argv", list(commands[3][2:]))
    capsys.readouterr()
    gpu_check.main()
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[0]) == {"planned": ["('some/model', 'float32')"]}
    assert json.loads(lines[1])["check"]["part"] == "serving"


def test_a_card_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "FIRST_CAPABILITY", (9, 5))
    assert "older" in str(run_main(monkeypatch))
