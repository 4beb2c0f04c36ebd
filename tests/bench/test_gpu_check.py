"""The GPU check runs on interpreted kernels, calls wrong what is wrong, and says why a part was not run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.triton_interpreter import interpreted, load

for name in ("triton_attention", "triton_blocks", "triton_elementwise", "triton_sampling"):
    load(name)

from bench import gpu_check  # noqa: E402  # over the interpreted kernels
from kernels import triton_attention  # noqa: E402

SMALL = gpu_check.Shape(2, 1, 16, 16, torch.float32)


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    torch.set_num_threads(1)
    with interpreted():
        yield


def correctness(part: str) -> gpu_check.Check:
    checks = gpu_check.correctness("cpu", shapes=[SMALL], vocab_size=1100, far_pool=False)
    return next(check for check in checks if check.name.startswith(part))


@pytest.fixture(autouse=True)
def few_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "MIXED", ((1, 9), (3, 8), (1, 260), (52, 52)))


def test_right_kernels_are_ok() -> None:
    checks = gpu_check.correctness("cpu", shapes=[SMALL], vocab_size=1100, far_pool=False)
    for check in checks:
        if "same bits" not in check.name:  # of an interpreter's matrix products the bits of a row depend on its place
            assert check.result == "ok", check


def test_a_wrong_kernel_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = triton_attention.paged_attention

    def off(*arguments: Any, **options: Any) -> torch.Tensor:
        return attention(*arguments, **options) * 1.01

    monkeypatch.setattr(triton_attention, "paged_attention", off)
    check = correctness("attention 2/1")
    assert check.result == "WRONG"
    assert "is allowed" in check.detail


def test_speed_is_a_share_of_what_binds_and_a_ratio_to_torch() -> None:
    def seconds_of(work: Any) -> float:
        return 2e-3

    limits = gpu_check.Limits(copied_bytes_per_s=1e12, flop_per_s=1e15)
    rows = list(gpu_check.speed("cpu", limits, seconds_of, scale=256))
    norm = next(row for row in rows if row.name.startswith("RMSNorm"))
    assert norm.share == pytest.approx(4 * 32 * 4096 * 2 / 1e12 / 2e-3)
    assert norm.beside_torch == 1.0
    assert norm.detail == "of the copy bandwidth"
    prefill = next(row for row in rows if row.name.startswith("prefill 1 x 32"))
    assert prefill.share == pytest.approx(4 * 32 * 128 * 32 * 33 / 2 / 1e15 / 2e-3)
    assert prefill.detail == "of the matrix rate"


def test_runners_hand_over_in_one_process() -> None:
    check = gpu_check.engine("cpu", layers=1, sequences=2, prompt=3, steps=1)
    assert check.result == "ok", check


def test_says_which_packages_serving_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "SERVE_PACKAGES", ("json", "no_such_package"))
    check = gpu_check.serving("cuda", None)
    assert (check.result, check.detail) == ("not run", "this Python has no no_such_package")


def test_the_table_has_a_line_for_each_check() -> None:
    checks = [
        gpu_check.Check("correctness", "a", "ok", detail="worst error 1e-3"),
        gpu_check.Check("speed", "longer", "12.0 us", 0.5, 2.0, "of the copy bandwidth"),
    ]
    lines = gpu_check.table(checks).splitlines()
    assert len(lines) == 3
    assert lines[2].split() == ["speed", "longer", "12.0", "us", "50%", "2.00x", "of", "the", "copy", "bandwidth"]
