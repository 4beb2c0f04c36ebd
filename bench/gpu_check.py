"""Everything that needs a GPU, in one command: are the Triton kernels right, how near the card's limits, does it serve.

    python -m bench.gpu_check --json gpu_check.json

runs, in under six minutes on one card, (1) every kernel against its oracle, on the card; (2) every kernel's share of
the copy bandwidth or the matrix rate that the card shows in the same run, beside torch's own operation; (3) models of
several families, prefill on one runner and decode on another, against the CPU; (4) one prefill and one decode node on
the card, through `pdserve serve`. It prints one table. It needs torch, Triton and this checkout; the last two parts
need what pdserve needs and say so where that is missing.

Each part runs in a process of its own, so that a crash or a poisoned context costs no other part, and has an end: past
three quarters of its time it begins no check, and at its end it is stopped. What was under way then has failed; what
was not begun is called cut.

The exit status is 1 when something is wrong or failed, else 3 when something was cut or nothing could run, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
import triton

from bench import gpu_kernels, gpu_models
from bench.gpu_table import CUT, FAILED, Check, Task, exit_status, perform, row, table

PART_ENDS_S = {"correctness": 110.0, "speed": 165.0, "engine": 225.0, "serving": 290.0}
"""When each part has to have ended, from the start of all; what one leaves over is the next one's."""

STOP_S = 62.0
"""What is left after a request to stop before a part is killed: a server under it takes up to a minute to end."""

LAST_BEGIN = 0.75
"""After this share of its time a part begins no check, so that a slow one is not taken for one that hangs."""

FIRST_CAPABILITY = (8, 0)


def tasks_of(part: str, model: str | None, dtype: str) -> list[Task]:
    """The checks of one part, on the first card."""
    if part == "correctness":
        shapes = gpu_kernels.CORRECTNESS_SHAPES
        return gpu_kernels.correctness("cuda", shapes=shapes, vocab_size=151936, far_pool=True)
    if part == "speed":
        return gpu_kernels.speed(
            "cuda",
            lambda: gpu_kernels.measure_limits("cuda", _seconds_on_gpu, scale=1),
            _seconds_on_gpu,
            scale=1,
        )
    return gpu_models.engine("cuda") if part == "engine" else gpu_models.serving("cuda", model, dtype)


def work(tasks: Sequence[Task], limit_s: float, output: IO[str]) -> None:
    """Make the checks of one part, and write one line of JSON for the plan and one for each check."""
    begun_s = time.monotonic()
    _write(output, {"planned": [task.name for task in tasks]})
    for task in tasks:
        is_late = time.monotonic() - begun_s > limit_s * LAST_BEGIN
        check = row(task.part, task.name, CUT, "no time was left to begin it") if is_late else perform(task)
        _write(output, {"check": asdict(check)})


def _write(output: IO[str], line: dict[str, Any]) -> None:
    output.write(json.dumps(line) + "\n")
    output.flush()


def run_apart(
    part: str, command: Sequence[str], limit_s: float, take: Callable[[Check], None], *, stop_s: float = STOP_S
) -> None:
    """Take the checks that a process of its own writes as `work` does, and account for those that it does not.

    Args:
        part: whose checks.
        command: of the process.
        limit_s: after so many seconds it is asked to stop.
        take: called with each check.
        stop_s: after so many more it is killed.
    """
    planned: list[str] = []
    done = 0
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        was_stopped = threading.Event()

        def stop() -> None:
            was_stopped.set()
            process.terminate()

        timers = [threading.Timer(limit_s, stop), threading.Timer(limit_s + stop_s, _kill_group, [process])]
        for timer in timers:
            timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                told = _told(line)
                planned = told.get("planned", planned)
                if "check" in told:
                    done += 1
                    take(Check(**told["check"]))
            status = process.wait()
        except BaseException:
            _kill_group(process)
            raise
        finally:
            for timer in timers:
                timer.cancel()
        errors.seek(0)
        last_words = [words.strip() for words in errors if words.strip()][-1:]
    if was_stopped.is_set():
        reason = f"no result when the {limit_s:.0f} s of this part were over"
    else:
        reason = " ".join([f"the process ended with {status}", *last_words])
    left = planned[done:] if planned else ["start"]
    for place, name in enumerate(left):
        result, detail = (FAILED, reason) if place == 0 else (CUT, "the check before did not end")
        take(row(part, name, result, detail))
    if not left and status != 0 and not was_stopped.is_set():
        take(row(part, "end", FAILED, reason))


def _told(line: str) -> dict[str, Any]:
    """What a line of `work` says; nothing for what libraries print."""
    with contextlib.suppress(json.JSONDecodeError):
        told = json.loads(line)
        if isinstance(told, dict):
            return told
    return {}


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):  # nothing of it is left, as it should be
        os.killpg(process.pid, signal.SIGKILL)


def _seconds_on_gpu(operation: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(operation, warmup=25, rep=100, return_mode="median")) / 1e3


def main() -> None:
    """Run all parts on the first card."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the table here, with date and card")
    parser.add_argument("--model", help="folder or id to serve; without it a small random one is made")
    parser.add_argument(
        "--dtype", choices=list(gpu_models.MARGINS), default="float32", help="to serve in, and so how strict to be"
    )
    parser.add_argument("--part", action="append", choices=list(PART_ENDS_S), help="only these")
    parser.add_argument("--work", type=float, metavar="SECONDS", help="make the checks of one part in this process")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here")
    parts: list[str] = arguments.part or list(PART_ENDS_S)
    if arguments.work is not None:
        (part,) = parts
        work(tasks_of(part, arguments.model, arguments.dtype), arguments.work, sys.stdout)
        return
    started = time.monotonic()
    properties = torch.cuda.get_device_properties(0)
    if (properties.major, properties.minor) < FIRST_CAPABILITY:
        sys.exit(f"{properties.name} is older than the cards that the kernels are for (compute capability 8.0)")
    card = f"{properties.name}, {properties.total_memory >> 30} GiB, sm_{properties.major}{properties.minor}"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    print(f"{card}; {', '.join(f'{name} {version}' for name, version in versions.items())}", flush=True)
    checks: list[Check] = []

    def take(check: Check) -> None:
        checks.append(check)
        print(f"{time.monotonic() - started:5.0f} s  {check.part}: {check.name}: {check.result}", flush=True)

    for part in parts:
        limit_s = max(PART_ENDS_S[part] - (time.monotonic() - started), 1.0)
        command = [sys.executable, "-m", "bench.gpu_check", "--part", part, "--work", str(limit_s)]
        command += ["--dtype", arguments.dtype, *(["--model", arguments.model] if arguments.model else [])]
        run_apart(part, command, limit_s, take)
    print()
    print(table(checks))
    if arguments.json:
        report = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "card": card,
            "versions": versions,
            "seconds": round(time.monotonic() - started, 1),
            "checks": [asdict(check) for check in checks],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.exit(exit_status(checks))


if __name__ == "__main__":
    main()
