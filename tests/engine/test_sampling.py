"""Sampling: each parameter against a plain oracle, the right distribution, and no dependence on company."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import AttemptFailed
from engine.sampling import SampleRow, prompt_logprobs, sample
from engine.sampling_params import SamplingParams
from engine.tokens import SampledToken
from kernels import reference


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_row(
    *, index: int = 0, prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), **changes: Any
) -> SampleRow:
    return SampleRow(SamplingParams(**changes), index, prompt, output)


def token_of(result: SampledToken | AttemptFailed) -> int:
    assert isinstance(result, SampledToken)
    return result.token_id


def draw(logits: torch.Tensor, row: SampleRow) -> int:
    return token_of(sample(logits[None], [row])[0])


def oracle(logits: list[float], row: SampleRow) -> int:
    """One token by the definition, in float64 and plain Python."""
    p = row.params
    scores = np.array(logits, dtype=np.float64)
    for token_id, bias in p.logit_bias.items():
        scores[token_id] += bias
    if len(row.output_token_ids) < p.min_tokens:
        scores[list(p.eos_token_ids + p.stop_token_ids)] = -np.inf
    for token_id in set(row.prompt_token_ids) | set(row.output_token_ids):
        scores[token_id] *= p.repetition_penalty if scores[token_id] <= 0 else 1 / p.repetition_penalty
    for token_id in set(row.output_token_ids):
        scores[token_id] -= p.presence_penalty + p.frequency_penalty * list(row.output_token_ids).count(token_id)
    if p.temperature < 1e-5:
        return int(scores.argmax())
    scores /= p.temperature
    if p.top_k:
        scores[scores < np.sort(scores)[::-1][min(p.top_k, len(scores)) - 1]] = -np.inf
    if p.top_p < 1:
        probabilities = np.exp(scores - scores.max())
        probabilities /= probabilities.sum()
        order = np.argsort(-scores, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        last = order[(before < p.top_p).sum() - 1]
        scores[scores < scores[last]] = -np.inf
    if p.min_p > 0:
        scores[scores < scores.max() + math.log(p.min_p)] = -np.inf
    key = reference.noise_key(p.seed, row.sequence_index, len(row.prompt_token_ids) + len(row.output_token_ids))
    noise = [reference.gumbel(reference.noise_bits(key, i)) for i in range(len(scores))]
    return int((scores + noise).argmax())


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "nearly zero temperature": {"temperature": 1e-6},
    "cold": {"temperature": 0.3},
    "very cold": {"temperature": 2e-5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k above the vocabulary": {"top_k": 10_000},
    "top_p": {"top_p": 0.6},
    "tiny top_p": {"top_p": 1e-6},
    "wide top_p": {"top_p": 0.999, "temperature": 2.0},
    "min_p": {"min_p": 0.2},
    "min_p of one": {"min_p": 1.0},
    "all filters": {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
    "bias": {"logit_bias": {3: 4.0, 77: -100.0, 12: 2.5}},
    "bias, greedy": {"logit_bias": {3: 100.0}, "temperature": 0.0},
    "min_tokens": {"min_tokens": 4, "eos_token_ids": (7, 8), "stop_token_ids": (9,), "logit_bias": {7: 50.0}},
    "min_tokens reached": {"min_tokens": 3, "eos_token_ids": (7,), "logit_bias": {7: 50.0}},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below one": {"repetition_penalty": 0.5, "temperature": 0.0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -2.0},
    "all penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.7, "frequency_penalty": 0.9, "top_p": 0.9},
}


@pytest.mark.parametrize("name", list(CASES))
def test_each_parameter_against_the_oracle(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    drawn = set()
    for seed in range(30):
        logits = torch.randn(151, generator=generator) * 2
        row = make_row(seed=seed, index=seed % 3, prompt=(5, 6, 7, 7), output=(10, 11, 10), **CASES[name])
        expected = oracle(logits.tolist(), row)
        assert draw(logits, row) == expected
        drawn.add(expected)
    assert len(drawn) > 1 or "bias" in name or "min_tokens" in name


def test_the_min_tokens_mask_ends_exactly_at_min_tokens() -> None:
    logits = torch.zeros(10)
    logits[4] = 50.0
    for num_output, expected in ((0, False), (1, False), (2, True), (3, True)):
        row = make_row(min_tokens=2, eos_token_ids=(4,), output=(1,) * num_output, temperature=0.0)
        assert (draw(logits, row) == 4) == expected


def frequencies(logits: torch.Tensor, num_draws: int, **changes: Any) -> np.ndarray:
    rows = [make_row(seed=seed, **changes) for seed in range(num_draws)]
    results = sample(logits.expand(num_draws, -1), rows)
    return np.bincount([token_of(result) for result in results], minlength=logits.shape[0])


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.7}, [0, 1]),
        ({"top_p": 0.8}, [0, 1, 2]),
        ({"min_p": 0.3}, [0, 1, 2]),
    ],
)
def test_distribution_over_many_seeds(changes: dict[str, Any], kept: list[int]) -> None:
    probabilities = np.array([0.40, 0.35, 0.12, 0.06, 0.04, 0.03])
    num_draws = 1500
    counts = frequencies(torch.from_numpy(np.log(probabilities)).float(), num_draws, **changes)
    weights = probabilities ** (1 / changes.get("temperature", 1.0))
    expected = np.zeros(6)
    expected[kept] = weights[kept] / weights[kept].sum() * num_draws
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < 20.5  # 99.9% of 5 degrees of freedom


def test_positions_and_sequences_of_one_seed_are_independent_draws() -> None:
    logits = torch.zeros(4)
    by_position = [draw(logits, make_row(seed=1, output=(0,) * n)) for n in range(1000)]
    by_index = [draw(logits, make_row(seed=1, index=n)) for n in range(1000)]
    for tokens in (by_position, by_index):
        counts = np.bincount(tokens, minlength=4)
        assert ((counts - 250) ** 2 / 250).sum() < 16.3  # 99.9% of 3 degrees of freedom
        pairs = np.bincount(np.array(tokens[:-1]) * 4 + np.array(tokens[1:]), minlength=16)
        assert ((pairs - 62.5) ** 2 / 62.5).sum() < 40


def test_noise_depends_on_the_length_so_far_not_on_where_the_prompt_ends() -> None:
    """After a move to another node the output so far has become part of the prompt."""
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    before = make_row(seed=4, prompt=(1, 2, 3), output=(4, 5))
    after = make_row(seed=4, prompt=(1, 2, 3, 4, 5), output=())
    assert draw(logits, before) == draw(logits, after)


def test_alone_in_a_batch_and_in_any_order() -> None:
    generator = torch.Generator().manual_seed(8)
    names = list(CASES)
    logits = torch.randn(len(names), 1003, generator=generator) * 3
    rows = [
        make_row(seed=i, index=i % 2, output=(9, 10, 9), logprobs=i % 4 if i % 3 else None, **CASES[name])
        for i, name in enumerate(names)
    ]
    together = sample(logits, rows)
    order = torch.randperm(len(names), generator=generator).tolist()
    shuffled = sample(logits[order], [rows[i] for i in order])
    for place, i in enumerate(order):
        assert shuffled[place] == together[i] == sample(logits[i : i + 1].clone(), [rows[i]])[0]


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(2, 50)
    before = logits.clone()
    sample(
        logits,
        [make_row(logit_bias={1: 9.0}, repetition_penalty=2.0, top_k=3), make_row(min_tokens=2, stop_token_ids=(3,))],
    )
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.0}, {"top_p": 0.5, "logprobs": 2}, {"repetition_penalty": 2.0}]
)
def test_a_bad_row_fails_alone(bad: float, changes: dict[str, Any]) -> None:
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    rows = [make_row(seed=i, **changes) for i in range(3)]
    good = sample(logits, rows)
    logits[1, 40] = bad
    results = sample(logits, rows)
    failure = results[1]
    assert isinstance(failure, AttemptFailed) and failure.reason == "nonfinite_logits"
    assert [results[0], results[2]] == [good[0], good[2]]


def test_minus_infinity_is_a_token_that_is_never_drawn() -> None:
    logits = torch.full((40,), -torch.inf)
    logits[[3, 9]] = 0.0
    for changes in ({}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.1}, {"temperature": 0.0}):
        assert {draw(logits, make_row(seed=s, **changes)) for s in range(40)} <= {3, 9}
    result = sample(torch.full((1, 40), -torch.inf), [make_row()])[0]
    assert isinstance(result, AttemptFailed)
    masked = sample(logits[None], [make_row(min_tokens=1, stop_token_ids=(3, 9))])[0]
    assert isinstance(masked, AttemptFailed)


def test_ties_go_to_the_lowest_id_when_greedy() -> None:
    logits = torch.zeros(2, 5000)
    logits[:, [4001, 17]] = 1.0
    rows = [make_row(temperature=0.0), make_row(temperature=0.0, logit_bias={0: -1.0})]
    assert [token_of(result) for result in sample(logits, rows)] == [17, 17]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(4)) * 3
    expected = torch.log_softmax(logits.double(), dim=-1)
    row = make_row(temperature=0.7, top_k=50, logit_bias={8: 30.0}, repetition_penalty=1.5, logprobs=4)
    result = sample(logits[None], [row])[0]
    assert isinstance(result, SampledToken) and result.token_id == 8
    chosen, *top = result.logprobs
    assert chosen.token_id == 8
    assert chosen.rank == 1 + int((logits > logits[8]).sum())
    assert chosen.logprob == pytest.approx(float(expected[8]), abs=1e-5)
    order = expected.argsort(descending=True)[:4]
    assert [entry.token_id for entry in top] == order.tolist()
    assert [entry.rank for entry in top] == [1, 2, 3, 4]
    assert [entry.logprob for entry in top] == pytest.approx(expected[order].tolist(), abs=1e-5)


def test_logprobs_of_zero_report_the_chosen_token_only() -> None:
    results = sample(torch.randn(2, 30), [make_row(logprobs=0), make_row()])
    assert [len(result.logprobs) for result in results if isinstance(result, SampledToken)] == [1, 0]


def test_prompt_logprobs() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(6))
    expected = torch.log_softmax(logits.double(), dim=-1)
    positions = prompt_logprobs(logits, [7, 0, 39], 2)
    assert [position[0].token_id for position in positions] == [7, 0, 39]
    for row, position in enumerate(positions):
        assert [entry.logprob for entry in position] == pytest.approx(
            [float(expected[row, entry.token_id]) for entry in position], abs=1e-5
        )
        assert [entry.token_id for entry in position[1:]] == expected[row].argsort(descending=True)[:2].tolist()
    logits[1, 3] = math.nan
    with pytest.raises(AttemptFailed):
        prompt_logprobs(logits, [7, 0, 39], 2)
    assert prompt_logprobs(logits[:0], [], 2) == []


def test_top_p_looks_beyond_its_first_candidates() -> None:
    """A flat distribution needs thousands of tokens; the shortcut must not cut them off."""
    logits = torch.linspace(0.0, 0.001, 5000)
    drawn = {draw(logits, make_row(seed=seed, top_p=0.9)) for seed in range(150)}
    assert len(drawn) > 130
    assert min(drawn) >= 495  # the tenth at the bottom is never drawn
