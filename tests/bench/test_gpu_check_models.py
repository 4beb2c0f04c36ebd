"""The GPU check's models agree with the CPU through a hand-off, a wrong module is seen, answers may part at ties."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch

from bench import server
from tests.kernels.triton_interpreter import interpreted, load

load("triton_attention")
load("triton_elementwise")

from bench import gpu_models  # noqa: E402  # over the interpreted kernels
from bench.gpu_models import Agreement, Answer, Load, Size, disagreement  # noqa: E402
from bench.gpu_table import FAILED, NOT_RUN, WRONG, perform  # noqa: E402
from engine import fused_modules  # noqa: E402

TINY = Size(1, 2, 1, 16)
FEW = Load((3, 18), 17, 1)


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    torch.set_num_threads(1)
    with interpreted():
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runners_with_a_hand_off_between_them_agree_with_the_cpu(dtype: str) -> None:
    found = gpu_models.check_model("cpu", "llama", TINY, dtype, FEW)
    assert found.result == "ok"
    assert found.detail.startswith("23 rows within ")


def test_a_wrong_fused_module_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fused_modules._gated_silu

    def wrong(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return right(module, hidden_states) * 1.01

    def fuse(model: torch.nn.Module) -> int:
        for module in model.modules():
            if type(module).__name__ == "LlamaMLP":
                fused_modules._join_gate_and_up(module)
                module.forward = MethodType(wrong, module)
        return 1

    monkeypatch.setattr("engine.cuda_runner.fuse", fuse)
    with pytest.raises(AssertionError, match="prefill from 0: row"):
        gpu_models.check_model("cpu", "llama", TINY, "float32", FEW)


def test_rows_may_differ_by_rounding_and_by_a_constant_but_not_by_more() -> None:
    expected = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    agreement = Agreement(1e-3)
    agreement.take(expected + 5.0, expected, "shifted")
    assert (agreement.rows, agreement.near_ties) == (3, 0)
    for change in (0.05, torch.nan):
        changed = expected.clone()
        changed[1, 7] += change
        with pytest.raises(AssertionError, match="step: row 1 of 3 is off"):
            agreement.take(changed, expected, "step")


def test_most_likely_tokens_may_differ_only_at_a_near_tie() -> None:
    expected = torch.zeros(1, 10000)
    expected[0, ::2] = 1.0
    expected[0, 3], expected[0, 4] = 9.0, 9.0 - 1e-4
    swapped = expected.clone()
    swapped[0, 3], swapped[0, 4] = expected[0, 4], expected[0, 3]
    agreement = Agreement(1e-3)
    agreement.take(swapped, expected, "step")
    assert agreement.near_ties == 1
    expected[0, 3] += 0.03
    swapped[0, 4] += 0.03
    with pytest.raises(AssertionError, match="no near-tie"):
        agreement.take(swapped, expected, "step")


def answer(*places: dict[str, float]) -> Answer:
    return Answer(tuple(next(iter(place)) for place in places), places)


def test_answers_may_part_at_a_near_tie_alone() -> None:
    first = {"a": -0.1, "b": -3.0}
    one = answer(first, {"c": -0.700, "d": -0.705}, {"e": -0.1, "f": -3.0})
    parted = answer(first, {"d": -0.702, "c": -0.703}, {"x": -0.2, "y": -2.0})
    assert disagreement(one, one, 0.01) is None
    assert disagreement(one, parted, 0.01) is None  # what follows has another context
    assert disagreement(one, parted, 0.001) == "place 1 has other tokens, and no near-tie"
    other_context = answer({"a": -0.4, "b": -1.5}, *one.likely[1:])
    assert disagreement(one, other_context, 0.01) == "place 0 has -0.100 and -0.400 for one token"
    unlikely = answer({"z": -0.1, "a": -0.1}, *one.likely[1:])
    assert disagreement(one, unlikely, 0.01) == "place 0 has other tokens, and no near-tie"


def test_serving_says_which_packages_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_models, "SERVE_PACKAGES", ("json", "no_such_package"))
    (task,) = gpu_models.serving("cuda", None, "float32")
    check = perform(task)
    assert (check.result, check.detail) == (NOT_RUN, "this Python has no no_such_package")


@pytest.mark.parametrize(
    ("error", "result"), [(ChildProcessError("The server ended with 1."), FAILED), (AssertionError("other"), WRONG)]
)
def test_a_server_that_crashes_has_failed(monkeypatch: pytest.MonkeyPatch, error: Exception, result: str) -> None:
    @contextlib.contextmanager
    def crashing(command: str) -> Iterator[server.RunningServer]:
        assert "--device cpu" in command
        raise error
        yield

    monkeypatch.setattr(server, "started_server", crashing)
    (task,) = gpu_models.serving("cpu", "some-model", "float32")
    check = perform(task)
    assert check.result == result
    assert str(error) in check.detail
