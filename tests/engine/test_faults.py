"""Injected faults: read strictly, performed at the visit that was asked for, and at no other."""

from __future__ import annotations

import time

import pytest

from engine.errors import AttemptFailed, ConfigError
from engine.faults import PLACES, Faults


async def test_no_faults_do_nothing() -> None:
    faults = Faults.parse("")
    for place in PLACES:
        await faults.reach(place)
        faults.reach_now(place)


async def test_raise_comes_at_its_visit_only() -> None:
    faults = Faults.parse("before_commit=raise@2; before_send=raise")
    await faults.reach("before_commit")
    with pytest.raises(AttemptFailed) as failure:
        await faults.reach("before_commit")
    assert failure.value.reason == "fault_injected"
    await faults.reach("before_commit")
    with pytest.raises(AttemptFailed):
        faults.reach_now("before_send")
    faults.reach_now("before_send")


async def test_star_is_every_visit() -> None:
    faults = Faults.parse("before_send=raise@*")
    for _ in range(3):
        with pytest.raises(AttemptFailed):
            await faults.reach("before_send")


async def test_sleep() -> None:
    faults = Faults.parse("before_send=sleep:0.05;after_chunk=sleep:0.05")
    before = time.monotonic()
    await faults.reach("before_send")
    faults.reach_now("after_chunk")
    assert time.monotonic() - before >= 0.1


def test_exit_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    with pytest.raises(AttemptFailed):  # os._exit does not return, except here
        Faults.parse("after_chunk=exit").reach_now("after_chunk")
    assert codes == [9]


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_FAULTS", "after_chunk=raise")
    assert Faults.from_env().due("after_chunk") is not None
    monkeypatch.delenv("PDSERVE_FAULTS")
    assert Faults.from_env().due("after_chunk") is None


@pytest.mark.parametrize(
    "text",
    [
        "nowhere=exit",
        "before_send=explode",
        "before_send",
        "before_send=sleep:x",
        "before_send=sleep:nan",
        "before_send=sleep:-1",
        "before_send=sleep:inf",
        "before_send=exit@x",
        "before_send=exit@0",
    ],
)
def test_what_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="PDSERVE_FAULTS"):
        Faults.parse(text)
