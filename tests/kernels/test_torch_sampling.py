"""Choosing tokens in torch: noise and weights against the oracle and fixed vectors; rows together as each alone."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import reference
from kernels.token_choice import TokenChoice, natural_log
from kernels.torch_sampling import WEIGHT_BITS, choose, draw_on_host, gumbel, noise_bits, sample_gumbel, weights

torch.set_num_threads(1)


def test_noise_bits_equal_the_oracle_and_fixed_vectors() -> None:
    key = reference.noise_key(2**64 - 1, 3, 17)
    ids = [0, 1, 2, 49151, 128255, 2**31 - 1]
    bits = noise_bits(key, torch.tensor(ids, dtype=torch.int32)).tolist()
    assert bits == [reference.noise_bits(key, token_id) for token_id in ids]
    assert key == (1700359195, 358837614)
    assert bits == [515837378, 184417122, 1769814334, 105254928, 932200824, 1320776013]


def test_every_part_of_the_key_matters() -> None:
    keys = [
        reference.noise_key(*parts) for parts in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (2**32, 0, 0)]
    ]
    assert len(set(keys)) == len(keys)


def test_noise_bits_are_uniform_and_unrelated() -> None:
    ids = torch.arange(1 << 14, dtype=torch.int32)
    rows = [noise_bits(reference.noise_key(0, 0, position), ids).double() / 2**31 for position in range(8)]
    for row in rows:
        counts = torch.histc(row.float(), bins=64, min=0.0, max=1.0)
        chi_square = float(((counts - 256) ** 2 / 256).sum())  # 63 degrees of freedom: mean 63, deviation 11.2
        assert 20 < chi_square < 120
    correlations = torch.corrcoef(torch.stack(rows)).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / 2**7
    assert abs(float(torch.corrcoef(torch.stack([rows[0][1:], rows[0][:-1]]))[0, 1])) < 5 / 2**7


def test_gumbel_is_as_exact_as_a_library() -> None:
    some = torch.randint(0, 2**31 - 1, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    for bits in [0, 1, 2, 2**30, 2**31 - 2, 2**31 - 1, *some]:
        assert gumbel(bits) == pytest.approx(reference.gumbel(bits), abs=1e-12, rel=1e-12)


def test_gumbel_vectors() -> None:
    """Fixed bits, so that a platform that computes others is noticed."""
    assert [gumbel(bits).hex() for bits in (0, 12345, 2**30, 2**31 - 1)] == [
        "0x1.62e42fef9b9efp+4",
        "0x1.8220df7e33762p+3",
        "0x1.774f29b24c165p-2",
        "-0x1.8cb356b3d1af7p+1",
    ]


def test_the_first_pass_never_loses_the_winner() -> None:
    generator = torch.Generator().manual_seed(5)
    for position in range(300):
        scores = torch.randn(211, generator=generator) * (position % 7)
        if position % 3 == 0:
            scores[torch.rand(211, generator=generator) < 0.9] = -torch.inf
            scores[position % 211] = 0.0
        token = sample_gumbel(scores, None, reference.noise_key(9, 2, position))
        key = reference.noise_key(9, 2, position)
        totals = [score + reference.gumbel(reference.noise_bits(key, i)) for i, score in enumerate(scores.tolist())]
        assert token == max(range(211), key=totals.__getitem__)


def test_one_candidate_is_drawn_whatever_its_noise() -> None:
    scores = torch.full((50,), -torch.inf)
    scores[31] = -1e30
    assert all(sample_gumbel(scores, None, reference.noise_key(s, 0, 0)) == 31 for s in range(50))


def test_noise_belongs_to_token_ids_not_places() -> None:
    scores = torch.randn(100, generator=torch.Generator().manual_seed(2))
    for position in range(20):
        whole = sample_gumbel(scores, None, reference.noise_key(1, 0, position))
        some = torch.tensor(sorted({whole, 5, 17, 70}))
        drawn = sample_gumbel(scores[some], some, reference.noise_key(1, 0, position))
        assert drawn == whole


def test_weights_are_exponentials() -> None:
    scores = torch.cat([torch.linspace(-30.0, 0.0, 5000), torch.tensor([0.0, -1e-30, -1e30, -torch.inf])])
    expected = scores.double().exp() * 2.0**WEIGHT_BITS
    difference = (weights(scores).double() - expected).abs()
    assert bool((difference <= expected * 2e-7 + 0.5).all())
    assert weights(scores)[-4:].tolist() == [2**WEIGHT_BITS, 2**WEIGHT_BITS, 0, 0]


def test_weight_vectors() -> None:
    """Fixed bits, as for the noise."""
    assert weights(torch.tensor([-0.1, -1.0, -3.7, -10.0, -28.3])).tolist() == [
        994_879_275_008,
        404_487_733_248,
        27_183_804_416,
        49_917_752,
        1,
    ]


def test_natural_log_is_that_of_a_library() -> None:
    for value in (1.0, 0.05, 1e-12, 5e-324, 0.999, 1e300):
        assert natural_log(value) == pytest.approx(math.log(value), rel=1e-14, abs=1e-15)


def test_rows_together_are_chosen_as_each_alone() -> None:
    """As a GPU chooses them: greedy and drawn, filtered and not, good and bad, in one pass."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(12, 700, generator=generator) * 3
    logits[3, 5], logits[7] = math.nan, -torch.inf
    logits[8, ::2] = -torch.inf
    choices = [
        TokenChoice(
            temperature=(0.0, 0.7, 1.3)[row % 3],
            top_k=(0, 40, 600)[row // 2 % 3],
            top_p=(1.0, 0.8, 0.9999)[row // 3 % 3],
            min_p=0.01 * (row % 2),
            seed=row,
        )
        for row in range(12)
    ]
    together = choose(logits, choices, draw_on_host)
    assert together == [choose(logits[i : i + 1], choices[i : i + 1], draw_on_host)[0] for i in range(12)]
    assert [row for row in range(12) if together[row] == -1] == [3, 7]
