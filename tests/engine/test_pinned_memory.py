"""Pinned memory is of the size asked for and is let go in time; what the driver refuses is a ConfigError."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.errors import ConfigError
from engine.pinned_memory import PinnedMemory


class Driver:
    """Stands where torch's binding of the CUDA runtime is."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.calls: list[tuple[str, int, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address, size))
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address, 0))
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return f"error {status}"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


def test_exactly_what_is_asked_for_is_pinned_until_it_is_let_go(driver: Driver) -> None:
    memory = PinnedMemory(12_288 + 5)
    view, address = memory.view, torch.frombuffer(memory.view, dtype=torch.uint8).data_ptr()
    assert len(view) == 12_293 and not any(view)
    assert driver.calls == [("register", address, 12_293)]
    del memory
    assert driver.calls[1:] == [("unregister", address, 0)]
    view[12_292] = 7  # still mapped


def test_what_the_driver_refuses_is_said(driver: Driver) -> None:
    driver.answer = 2
    with pytest.raises(ConfigError, match=r"4096 bytes .* \(error 2\)"):
        PinnedMemory(4096)
    assert [name for name, _, _ in driver.calls] == ["register"]
