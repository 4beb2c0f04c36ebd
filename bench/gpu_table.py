"""What the GPU check says of each thing it checked, as rows of one table and an exit status."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

OK, WRONG, FAILED, NOT_RUN, CUT = "ok", "WRONG", "failed", "not run", "cut"


class NotRun(Exception):
    """Raised by a check that this machine cannot run; says what is missing: memory, a package, a kind of card."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a check that ran through has found.

    Attributes:
        result: `ok` or a measure.
        share: of the limit that binds it, measured in this run; None where there is none.
        beside_torch: torch's time over ours; None where torch has nothing like it.
        detail: the worst error, the limit, or why there is no better result.
    """

    result: str = OK
    share: float | None = None
    beside_torch: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Check(Found):
    """One row of the table: what was found, or why not.

    Attributes:
        part: correctness, speed, engine or serving.
        name: what was checked.
        result: also `WRONG` (it ran, and the result is not right), `failed` (it should have run, and raised, crashed or
            never ended), `not run` (this machine lacks what it needs) or `cut` (no time was left to begin it).
    """

    part: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """A check that is still to be made.

    Attributes:
        part: see Check.
        name: see Check.
        run: raises AssertionError where a result is wrong, NotRun where it cannot be had here.
    """

    part: str
    name: str
    run: Callable[[], Found]


def perform(task: Task) -> Check:
    """Make one check; never raises what the check raised."""
    try:
        found = task.run()
    except NotRun as error:
        return row(task.part, task.name, NOT_RUN, str(error))
    except torch.OutOfMemoryError as error:
        return row(task.part, task.name, NOT_RUN, f"too little memory: {error}")
    except AssertionError as error:
        return row(task.part, task.name, WRONG, str(error))
    except Exception as error:
        return row(task.part, task.name, FAILED, f"{type(error).__name__}: {error}")
    return Check(found.result, found.share, found.beside_torch, found.detail, task.part, task.name)


def row(part: str, name: str, result: str, detail: str) -> Check:
    """A row without a measure."""
    return Check(result, detail=" ".join(detail.split())[:300], part=part, name=name)


def exit_status(checks: Sequence[Check]) -> int:
    """1 when something is wrong or failed; else 3 when something was cut or nothing was found; else 0."""
    results = [check.result for check in checks]
    if WRONG in results or FAILED in results:
        return 1
    return 3 if CUT in results or all(result == NOT_RUN for result in results) else 0


def table(checks: Sequence[Check]) -> str:
    """One line per check, and one that counts them."""
    width = max((len(check.name) for check in checks), default=0)
    lines = [f"{'part':12} {'what':{width}} {'result':>14} {'share':>6} {'/torch':>7}  detail"]
    for check in checks:
        share = "" if check.share is None else f"{check.share:.0%}"
        beside = "" if check.beside_torch is None else f"{check.beside_torch:.2f}x"
        result = f"{check.result}:" if check.result in (WRONG, FAILED) else check.result
        line = f"{check.part:12} {check.name:{width}} {result:>14} {share:>6} {beside:>7}  {check.detail}"
        lines.append(line.rstrip())
    counts = {name: sum(check.result == name for check in checks) for name in (WRONG, FAILED, NOT_RUN, CUT)}
    right = len(checks) - sum(counts.values())
    lines.append(f"{right} right or measured, " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    return "\n".join(lines)
