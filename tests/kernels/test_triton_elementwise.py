"""RMSNorm, rotary embedding and SiLU times up equal float64 and what transformers computes, under the interpreter."""

from __future__ import annotations

import math
from unittest.mock import MagicMock

import pytest
import torch

from tests.kernels.triton_interpreter import load, only_last_programs_run, results_are_sparse, sparse

triton_elementwise = load("triton_elementwise")

pytestmark = pytest.mark.usefixtures("interpreter")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 1e-5}
"""Two roundings of each dtype."""


def random(*shape: int, dtype: torch.dtype, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normalised(values: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = values.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 64), (3, 576), (40, 100), (0, 16), (2, 3000)])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    wide = random(rows, width + 7, dtype=dtype)
    values, weight = wide[:, :width], random(width, dtype=dtype, seed=4)
    output, summed = triton_elementwise.rms_norm(values, weight, epsilon=1e-6)
    assert summed is values
    expected = normalised(values, 1e-6) * weight.double()
    torch.testing.assert_close(output.double(), expected, atol=1e-6, rtol=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_a_residual_first(dtype: torch.dtype) -> None:
    values, residual = random(7, 72, dtype=dtype), random(7, 72, dtype=dtype, seed=5)
    weight = random(72, dtype=dtype, seed=6)
    output, summed = triton_elementwise.rms_norm(values, weight, epsilon=1e-5, residual=residual)
    assert torch.equal(summed, values + residual)
    expected = normalised(values + residual, 1e-5) * weight.double()
    torch.testing.assert_close(output.double(), expected, atol=1e-6, rtol=ROUNDING[dtype])


def test_rms_norm_of_gemma_adds_one_to_the_weight_and_rounds_once() -> None:
    values, weight = random(4, 96, dtype=torch.bfloat16), random(96, dtype=torch.bfloat16, seed=7)
    output, _ = triton_elementwise.rms_norm(values, weight, epsilon=1e-6, weight_offset=1.0, rounds_first=False)
    expected = normalised(values, 1e-6) * (1.0 + weight.double())
    torch.testing.assert_close(output.double(), expected, atol=1e-6, rtol=2.0**-8)


def test_rms_norm_rounds_where_llama_rounds() -> None:
    values, weight = random(16, 576, dtype=torch.bfloat16), random(576, dtype=torch.bfloat16, seed=8)
    output, _ = triton_elementwise.rms_norm(values, weight, epsilon=1e-5)
    wanted = weight * normalised(values, 1e-5).to(torch.bfloat16)
    assert (output == wanted).float().mean() > 0.999


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "rotated"),
    [(4, 9, 3, 64, 64), (3, 2, 2, 80, 32), (1, 1, 1, 16, 2), (2, 5, 1, 48, 24), (0, 2, 1, 16, 16)],
)
def test_rotary(tokens: int, heads: int, kv_heads: int, head_dim: int, rotated: int, dtype: torch.dtype) -> None:
    query = random(heads, tokens, head_dim, dtype=dtype).transpose(0, 1)  # heads far apart, as models hand them over
    key = random(tokens, kv_heads, head_dim, dtype=dtype, seed=9)
    angles = random(tokens, rotated // 2, dtype=torch.float32, seed=10).repeat(1, 2) * 30
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = [turned(states, cosines, sines) for states in (query, key)]
    triton_elementwise.rotary(query, key, cosines, sines)
    for actual, wanted in zip((query, key), expected, strict=True):
        torch.testing.assert_close(actual.double(), wanted, atol=4 * ROUNDING[dtype], rtol=ROUNDING[dtype])


def turned(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    wide, rotated = states.double(), cosines.shape[1]
    first, second = wide[..., : rotated // 2], wide[..., rotated // 2 : rotated]
    swapped = torch.cat([-second, first], dim=-1)
    result = wide.clone()
    result[..., :rotated] = wide[..., :rotated] * cosines.double()[:, None] + swapped * sines.double()[:, None]
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 1536), (3, 100), (0, 8)])
def test_silu_mul_of_halves_of_one_tensor(rows: int, width: int, dtype: torch.dtype) -> None:
    both = random(rows, 2 * width, dtype=dtype) * 8
    gate, up = both[:, :width], both[:, width:]
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    actual = triton_elementwise.silu_mul(gate, up)
    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=ROUNDING[dtype])


def test_silu_mul_does_not_overflow() -> None:
    gate = torch.tensor([[-1e4, 1e4, 0.0, -88.0]])
    expected = torch.nn.functional.silu(gate)
    torch.testing.assert_close(triton_elementwise.silu_mul(gate, torch.ones_like(gate)), expected)


ROWS = 2**21 + 1
"""Of 1024: the last begins at 2^31."""


def far(near: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """As many zeros as it takes for the last row to be `near`."""
    tensor = sparse(ROWS, *near.shape, dtype=near.dtype, stride=stride)
    tensor[-1] = near
    return tensor


def test_offsets_of_rows_past_two_to_the_31(monkeypatch: pytest.MonkeyPatch) -> None:
    values, residual, weight = random(3, 1024, dtype=torch.float16)
    near = [values[None], residual[None]]
    normed, summed = triton_elementwise.rms_norm(near[0], weight, epsilon=1e-6, residual=near[1])
    activated = triton_elementwise.silu_mul(*near)
    results_are_sparse(monkeypatch)
    only_last_programs_run(monkeypatch)
    rows = [far(values, (1024, 1)), far(residual, (1024, 1))]
    far_normed, far_summed = triton_elementwise.rms_norm(rows[0], weight, epsilon=1e-6, residual=rows[1])
    assert torch.equal(far_normed[-1], normed[0])
    assert torch.equal(far_summed[-1], summed[0])
    assert torch.equal(triton_elementwise.silu_mul(*rows)[-1], activated[0])


@pytest.mark.parametrize("strides", [(1024, 32, 1), (1, 2**30, 1)], ids=["tokens", "heads"])
def test_offsets_of_rotary_past_two_to_the_31(strides: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = random(4, 32, dtype=torch.float16), random(3, 32, dtype=torch.float16, seed=9)
    angles = random(16, dtype=torch.float32, seed=10)
    near = [query[None].clone(), key[None].clone()]
    triton_elementwise.rotary(*near, angles.cos()[None], angles.sin()[None])
    only_last_programs_run(monkeypatch)
    states = [far(query, strides), far(key, strides)]
    triton_elementwise.rotary(*states, far(angles.cos(), (1024, 1)), far(angles.sin(), (1024, 1)))
    for actual, expected in zip(states, near, strict=True):
        assert torch.equal(actual[-1], expected[0])


def test_more_rows_than_the_second_axis_of_a_grid_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = MagicMock()
    monkeypatch.setattr(triton_elementwise, "_silu_mul_kernel", kernel)
    rows = torch.empty(70_000, 1536, device="meta")
    triton_elementwise.silu_mul(rows, rows)
    grids = [call.args[0] for call in kernel.__getitem__.call_args_list]
    assert sum(map(math.prod, grids)) == 2 * 70_000
    assert all(max(grid[1:], default=1) <= 65535 for grid in grids)


def test_refuses_what_does_not_fit() -> None:
    rows = torch.zeros(4, 8)
    with pytest.raises(ValueError, match="residual"):
        triton_elementwise.rms_norm(rows, torch.ones(8), epsilon=1e-6, residual=rows[:2])
    with pytest.raises(ValueError, match="weight"):
        triton_elementwise.rms_norm(rows, torch.ones(9), epsilon=1e-6)
    with pytest.raises(ValueError, match="up must be"):
        triton_elementwise.silu_mul(rows, rows[:3])
    with pytest.raises(ValueError, match="rotated"):
        triton_elementwise.rotary(rows.view(4, 1, 8), rows.view(4, 1, 8), torch.ones(4, 10), torch.ones(4, 10))
