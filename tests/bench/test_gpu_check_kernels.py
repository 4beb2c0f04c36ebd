"""The GPU check's parts on kernels run interpreted, and call wrong what is wrong, whichever kernel it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.triton_interpreter import interpreted, load

for name in ("triton_attention", "triton_blocks", "triton_elementwise", "triton_sampling"):
    load(name)

from bench import gpu_kernels  # noqa: E402  # over the interpreted kernels
from bench.gpu_table import FAILED, NOT_RUN, WRONG, Check, perform  # noqa: E402
from kernels import torch_sampling, triton_attention, triton_elementwise, triton_sampling  # noqa: E402

SMALL = gpu_kernels.Shape(2, 1, 16, 16, torch.float32)
LIMITS = gpu_kernels.Limits(copied_bytes_per_s=1e12, flop_per_s=1e15)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1)
    monkeypatch.setattr(gpu_kernels, "MIXED", ((1, 9), (3, 8), (1, 260), (52, 52)))
    monkeypatch.setattr(gpu_kernels, "CHOICE_ROWS", 24)
    with interpreted():
        yield


def correctness(part: str = "") -> list[Check]:
    tasks = gpu_kernels.correctness("cpu", shapes=[SMALL], vocab_size=1100, far_pool=False)
    return [perform(task) for task in tasks if part in task.name]


def test_right_kernels_are_ok() -> None:
    for check in correctness():
        if "same bits" not in check.name:  # of an interpreter's matrix products the bits of a row depend on its place
            assert check.result == "ok", check


def test_a_wrong_kernel_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = triton_attention.paged_attention

    def off(*arguments: Any, **options: Any) -> torch.Tensor:
        return attention(*arguments, **options) * 1.01

    monkeypatch.setattr(triton_attention, "paged_attention", off)
    (check,) = correctness("attention 2/1")
    assert check.result == WRONG
    assert "is allowed" in check.detail


@pytest.mark.parametrize("lost", ["top_k", "top_p", "min_p"])
def test_a_filter_that_a_device_loses_is_seen(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    choose = torch_sampling.choose
    neutral: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}

    def without(logits: torch.Tensor, choices: Any, draw: Any) -> list[int]:
        if draw is not torch_sampling.draw_on_host:
            choices = [replace(choice, **{lost: neutral[lost]}) for choice in choices]
        return choose(logits, choices, draw)

    def drawn(scores: torch.Tensor, choices: Any) -> torch.Tensor:
        return torch_sampling.draw_on_host(scores, choices)

    monkeypatch.setattr(torch_sampling, "choose", without)
    monkeypatch.setattr(triton_sampling, "draw", drawn)
    monkeypatch.setattr(gpu_kernels, "CHOICE_ROWS", 64)
    (check,) = correctness("top_k, top_p")
    assert check.result == WRONG
    assert "where the host chooses" in check.detail


def test_a_pool_for_which_there_is_no_memory_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**32, 2**33))
    tasks = gpu_kernels.correctness("cpu", shapes=[SMALL], vocab_size=1100, far_pool=True)
    check = perform(tasks[-1])
    assert (check.result, check.detail) == (NOT_RUN, "needs 10 GiB of free memory, and 4 are free")


def test_speed_is_a_share_of_what_binds_and_a_ratio_to_torch() -> None:
    def seconds_of(operation: Any) -> float:
        return 2e-3

    tasks = gpu_kernels.speed("cpu", lambda: LIMITS, seconds_of, scale=256)
    rows = [perform(task) for task in tasks]
    assert rows[0].detail == "copy 1000 GB/s read and written, bfloat16 product 1000 TFLOP/s"
    norm = next(row for row in rows if row.name.startswith("RMSNorm"))
    assert norm.share == pytest.approx(4 * 32 * 4096 * 2 / 1e12 / 2e-3)
    assert norm.beside_torch == 1.0
    assert norm.detail == "of the copy bandwidth"
    prefill = next(row for row in rows if row.name.startswith("prefill 1 x 32"))
    assert prefill.share == pytest.approx(4 * 32 * 128 * 32 * 33 / 2 / 1e15 / 2e-3)
    assert prefill.detail == "of the matrix rate"


def test_a_kernel_that_does_not_launch_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(triton_elementwise, "silu_mul", refuse)
    tasks = gpu_kernels.speed("cpu", lambda: LIMITS, lambda operation: float(operation() is None), scale=256)
    check = next(perform(task) for task in tasks if task.name.startswith("SiLU"))
    assert (check.result, check.detail) == (FAILED, "RuntimeError: out of resource: shared memory")
