"""The compiled sampler against torch's: the same tokens, the same weights, the same ranks, for whatever comes."""

from __future__ import annotations

import math
import random

import pytest
import torch

from kernels import cpu_sampling, torch_sampling
from kernels.cpu_library import CpuLibrary
from kernels.token_choice import TokenChoice

torch.set_num_threads(1)

VOCABULARIES = [1, 5, 63, 64, 65, 500, 1003, 5000]


def in_torch(rows: list[torch.Tensor], choices: list[TokenChoice]) -> list[int]:
    draw = torch_sampling.draw_on_host
    return [torch_sampling.choose(row[None], [choice], draw)[0] for row, choice in zip(rows, choices, strict=True)]


def any_row(vocab_size: int, dice: random.Random) -> torch.Tensor:
    """Logits of a random kind: peaked, flat, full of ties, full of -inf, or far from 0."""
    generator = torch.Generator().manual_seed(dice.getrandbits(32))
    row = torch.randn(vocab_size, generator=generator) * dice.choice([0.01, 1.0, 3.0, 20.0])
    if dice.random() < 0.3:
        row = (row * dice.choice([0.5, 1.0, 2.0])).round()
    if dice.random() < 0.3:
        row[torch.rand(vocab_size, generator=generator) < dice.choice([0.1, 0.9, 1.0])] = -torch.inf
        row[dice.randrange(vocab_size)] = 1.0
    if dice.random() < 0.1:
        row *= 1e37
    return row


def any_choice(dice: random.Random) -> TokenChoice:
    return TokenChoice(
        temperature=dice.choice([0.0, 2e-5, 0.3, 0.8, 1.0, 1.0, 2.0]),
        top_k=dice.choice([0, 0, 0, 1, 2, 7, 50, 300, 10**6]),
        top_p=dice.choice([1.0, 1.0, 1e-9, 0.3, 0.9, 0.9, 0.99, 1 - 2**-53]),
        min_p=dice.choice([0.0, 0.0, 0.0, 1e-12, 0.05, 0.7, 1.0]),
        seed=dice.getrandbits(64),
        sequence_index=dice.randrange(3),
        position=dice.randrange(5000),
    )


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_chooses_the_tokens_that_torch_chooses(library: CpuLibrary, vocab_size: int) -> None:
    dice = random.Random(vocab_size)
    rows = [any_row(vocab_size, dice) for _ in range(250)]
    choices = [any_choice(dice) for _ in rows]
    expected = in_torch(rows, choices)
    assert cpu_sampling.choose(library, rows, choices) == expected
    assert cpu_sampling.choose(library, rows, choices, num_threads=2) == expected
    assert [cpu_sampling.choose(library, [rows[i]], [choices[i]])[0] for i in range(20)] == expected[:20]
    assert vocab_size == 1 or len(set(expected)) > 1


def test_keeps_just_the_tokens_that_torch_keeps(library: CpuLibrary) -> None:
    """Many draws from one row: a filter off by one token would show."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(30, generator=generator).mul(2).round()
    for filters in ({"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.8, "min_p": 0.1}):
        choices = [TokenChoice(temperature=1.5, seed=seed, **filters) for seed in range(120)]  # type: ignore[arg-type]
        rows = [logits] * len(choices)
        tokens = cpu_sampling.choose(library, rows, choices)
        assert tokens == in_torch(rows, choices)
        least = min(logits[token] for token in tokens)
        assert set(tokens) >= set((logits > least).nonzero().flatten().tolist())


def test_a_flat_row_of_many_tokens(library: CpuLibrary) -> None:
    """Nothing stands out, so no shortcut may cut anything off."""
    for logits in (torch.zeros(20_000), torch.linspace(0.0, 0.001, 20_000), torch.linspace(-60.0, 0.0, 20_000)):
        choices = [
            TokenChoice(temperature=1.0, seed=seed, top_p=top_p, top_k=top_k)
            for seed in range(5)
            for top_p in (0.5, 0.999999, 1.0)
            for top_k in (0, 15_000)
        ]
        rows = [logits] * len(choices)
        assert cpu_sampling.choose(library, rows, choices) == in_torch(rows, choices)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 130])
def test_a_bad_row_has_no_token(library: CpuLibrary, bad: float, place: int) -> None:
    row = torch.full((131,), -torch.inf)
    if bad != -math.inf:
        row[:] = 0.0
    row[place] = bad
    choices = [TokenChoice(0.0), TokenChoice(1.0), TokenChoice(1.0, top_p=0.5), TokenChoice(1.0, top_k=2, min_p=0.1)]
    rows = [row] * len(choices)
    assert cpu_sampling.choose(library, rows, choices) == [-1] * len(choices) == in_torch(rows, choices)
    assert cpu_sampling.rank(library, [row], [3], [2]) == [None] == [torch_sampling.rank(row, 3, 2)]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_ranks_as_torch_does(library: CpuLibrary, vocab_size: int) -> None:
    dice = random.Random(vocab_size)
    rows = [any_row(vocab_size, dice) for _ in range(60)]
    tokens = [dice.randrange(vocab_size) for _ in rows]
    top = [dice.choice([0, 1, 5, 20]) for _ in rows]
    expected = [torch_sampling.rank(*row) for row in zip(rows, tokens, top, strict=True)]
    # Equal to the bit, and so the weights are, from whose sum the log probabilities come.
    assert cpu_sampling.rank(library, rows, tokens, top) == expected
    assert cpu_sampling.rank(library, rows, tokens, top, num_threads=2) == expected


def test_refuses_what_it_cannot_read(library: CpuLibrary) -> None:
    choice = TokenChoice(1.0)
    for rows in (
        [torch.zeros(5, dtype=torch.bfloat16)],
        [torch.zeros(5), torch.zeros(6)],
        [torch.zeros(5, 2)[:, 0]],
        [torch.zeros(0)],
    ):
        with pytest.raises(ValueError):
            cpu_sampling.choose(library, rows, [choice] * len(rows))
    for token in (-1, 5):
        with pytest.raises(ValueError, match="out of range"):
            cpu_sampling.rank(library, [torch.zeros(5)], [token], [1])
