"""RMSNorm, rotary embedding and SiLU times up equal float64 and what transformers computes, under the interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.triton_interpreter import interpreted, load

triton_elementwise = load("triton_elementwise")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 1e-5}
"""Two roundings of each dtype."""


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with interpreted():
        yield
    torch.use_deterministic_algorithms(False)


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
