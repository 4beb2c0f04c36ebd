"""The Triton sampler draws the very tokens of `torch_sampling.sample_gumbel`, under the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import reference, torch_sampling
from kernels.token_choice import TokenChoice
from tests.kernels.triton_interpreter import load, only_last_programs_run, sparse

triton_sampling = load("triton_sampling")

pytestmark = pytest.mark.usefixtures("interpreter")


def check(scores: torch.Tensor, places: list[tuple[int, int, int]]) -> None:
    expected = [
        torch_sampling.sample_gumbel(row, None, reference.noise_key(*place))
        for row, place in zip(scores, places, strict=True)
    ]
    assert triton_sampling.sample_gumbel(scores, triton_sampling.noise_keys(places)).tolist() == expected


def places_of(count: int) -> list[tuple[int, int, int]]:
    return [(index * 7919 + (index % 2 << 63), index % 3, index * 11) for index in range(count)]


@pytest.mark.parametrize("vocab_size", [1, 1024, 1025, 2500])
@pytest.mark.parametrize("spread", [0.0, 3.0, 1000.0])
def test_draws_the_tokens_of_the_host(vocab_size: int, spread: float) -> None:
    scores = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * spread
    check(scores, places_of(3))


def test_removed_candidates_are_never_drawn() -> None:
    scores = torch.full((5, 3000), -torch.inf)
    for row, kept in enumerate([[2999], [0], [1023, 1024], [5, 2047, 2048], list(range(0, 3000, 7))]):
        scores[row, kept] = torch.randn(len(kept), generator=torch.Generator().manual_seed(row))
    check(scores, places_of(5))


def test_rows_of_a_wider_tensor() -> None:
    wide = torch.randn(4, 2000, generator=torch.Generator().manual_seed(1))
    check(wide[:, 100:1500], places_of(4))


def test_offsets_of_rows_past_two_to_the_31(monkeypatch: pytest.MonkeyPatch) -> None:
    near = torch.randn(1, 1024, generator=torch.Generator().manual_seed(6)) * 10.0 - 100.0  # below the zeros of others
    expected = triton_sampling.sample_gumbel(near, triton_sampling.noise_keys([(7, 0, 3)]))
    only_last_programs_run(monkeypatch)
    rows = 2**21 + 1
    scores, keys = sparse(rows, 1024, dtype=torch.float32), sparse(rows, 2, dtype=torch.int64)
    scores[-1], keys[-1] = near[0], triton_sampling.noise_keys([(7, 0, 3)])[0]
    assert triton_sampling.sample_gumbel(scores, keys)[-1] == expected[0]


def test_a_row_without_a_finite_score_gives_no_token_of_the_vocabulary() -> None:
    scores = torch.full((1, 70), -torch.inf)
    assert triton_sampling.sample_gumbel(scores, triton_sampling.noise_keys([(1, 0, 0)])).item() >= 70


def test_a_step_of_mixed_rows_gets_the_tokens_of_the_host() -> None:
    """All rows in one pass, as `ops.choose_tokens` does it on a GPU."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, 1100, generator=generator) * 3
    logits[2, ::3] = -torch.inf
    logits[4, 7] = torch.nan
    choices = [
        TokenChoice(temperature=(0.0, 0.8)[row % 3 > 0], top_k=(0, 50)[row % 2], top_p=(1.0, 0.9)[row // 4], seed=row)
        for row in range(8)
    ]
    together = torch_sampling.choose(logits, choices, triton_sampling.draw)
    assert together == torch_sampling.choose(logits, choices, torch_sampling.draw_on_host)
    assert together[4] == -1


def test_noise_equals_the_host_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(4)
    edges = [0, 1, 2, 2**31 - 1, 2**31 - 2, 2**30, 2**30 - 1, 2**24]
    bits = torch.tensor(edges + torch.randint(0, 2**31 - 1, (504,), generator=generator).tolist(), dtype=torch.int32)
    exact = torch.empty(512, dtype=torch.float64)
    rough = torch.empty(512, dtype=torch.float32)
    probe: Any = load_probe()
    probe.noise[(1,)](exact, rough, bits, COUNT=512)
    on_host = [torch_sampling.gumbel(value) for value in bits.tolist()]
    assert exact.tolist() == on_host
    assert (rough.double() - torch.tensor(on_host, dtype=torch.float64)).abs().max() < 1e-4

    mixed = torch.empty(512, dtype=torch.int32)
    token_ids = torch.arange(1000, 1512, dtype=torch.int32)
    probe.bits[(1,)](mixed, triton_sampling.noise_keys([(77, 1, 5)]), token_ids, COUNT=512)
    key = reference.noise_key(77, 1, 5)
    assert mixed.tolist() == [reference.noise_bits(key, token_id) for token_id in token_ids.tolist()]


def load_probe() -> Any:
    import importlib

    from tests.kernels import triton_probe

    return importlib.reload(triton_probe)
