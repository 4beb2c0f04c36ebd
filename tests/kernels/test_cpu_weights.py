"""A weight of the compiled kernels gives the products that torch would, in float32, and shares its memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional

from kernels.cpu_library import CpuLibrary
from kernels.cpu_weights import CpuWeight, cpu_weight

torch.set_num_threads(1)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def from_the_left(plain: torch.Tensor) -> torch.Tensor:
    """[depth, rows] whose memory is [rows, depth]."""
    return plain.t().contiguous().t()


@DTYPES
def test_products_are_those_of_torch_in_float32(library: CpuLibrary, dtype: torch.dtype) -> None:
    plain, bias, tokens = randn(33, 40, dtype=dtype), randn(33, dtype=dtype), randn(2, 7, 40)
    weight = cpu_weight(library, plain, num_threads=1)
    assert weight.data_ptr() == plain.data_ptr()
    expected = tokens @ plain.float().t()
    for inputs in (tokens, tokens.transpose(0, 1).contiguous().transpose(0, 1)):
        torch.testing.assert_close(functional.linear(inputs, weight), expected)
    torch.testing.assert_close(functional.linear(tokens, weight, bias), expected + bias.float())
    torch.testing.assert_close(functional.linear(tokens, weight, bias=bias), expected + bias.float())

    left = cpu_weight(library, from_the_left(plain.t()), num_threads=1)
    products: list[Callable[[], torch.Tensor]] = [
        lambda: tokens @ left,
        lambda: tokens.matmul(left),
        lambda: torch.matmul(tokens, left),
    ]
    for product in products:
        assert type(product()) is torch.Tensor
        torch.testing.assert_close(product(), expected)
    torch.testing.assert_close(torch.addmm(bias, tokens[0], left), expected[0] + bias.float())


@DTYPES
def test_products_have_the_same_bits_in_any_company(library: CpuLibrary, dtype: torch.dtype) -> None:
    tokens, weight = randn(20, 72), cpu_weight(library, randn(50, 72, dtype=dtype), num_threads=1)
    together = functional.linear(tokens, weight)
    assert all(torch.equal(functional.linear(tokens[i], weight), together[i]) for i in range(20))


@DTYPES
def test_one_of_several_and_views_are_weights_too(library: CpuLibrary, dtype: torch.dtype) -> None:
    experts, tokens = randn(3, 24, 16, dtype=dtype), randn(5, 16)
    weights = cpu_weight(library, experts, num_threads=1)
    for one in (weights[torch.tensor(2)], weights[2].t().t(), weights[2].type(torch.float32), weights[2].detach()):
        assert type(one) is CpuWeight
        torch.testing.assert_close(functional.linear(tokens, one), tokens @ experts[2].float().t())
    torch.testing.assert_close(tokens @ weights[1].transpose(0, 1), tokens @ experts[1].float().t())
    assert type(weights[0] + 1) is torch.Tensor


@DTYPES
def test_rows_of_an_embedding_are_float32(library: CpuLibrary, dtype: torch.dtype) -> None:
    table = randn(9, 4, dtype=dtype)
    rows = functional.embedding(torch.tensor([[3, 8]]), cpu_weight(library, table, num_threads=1), padding_idx=0)
    assert rows.dtype == torch.float32 and torch.equal(rows[0], table[[3, 8]].float())


def test_what_the_kernels_do_not_compute_stays_with_torch(library: CpuLibrary) -> None:
    plain = randn(6, 12)
    for weight in (plain[:, ::2], plain.t()):
        tokens = randn(3, weight.shape[1])
        given = cpu_weight(library, weight, num_threads=1)
        torch.testing.assert_close(functional.linear(tokens, given), tokens @ weight.t())
    batched = cpu_weight(library, randn(2, 6, 5), num_threads=1)
    torch.testing.assert_close(randn(2, 3, 6) @ batched, randn(2, 3, 6) @ randn(2, 6, 5))
    with pytest.raises(ValueError, match="float16"):
        cpu_weight(library, plain.half(), num_threads=1)


def test_serves_as_a_parameter(library: CpuLibrary) -> None:
    plain = randn(6, 6)
    parameter = torch.nn.Parameter(cpu_weight(library, plain, num_threads=1), requires_grad=False)
    assert isinstance(parameter, CpuWeight) and parameter.data_ptr() == plain.data_ptr()
    linear = torch.nn.Linear(6, 6, bias=False)
    linear.weight = parameter
    torch.testing.assert_close(linear(plain), plain @ plain.t())
