"""How a token is to be chosen, and what is told about one: the words that all samplers share. Knows no requests."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernels.reference import noise_key


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """How one token is chosen from one row of logits.

    Attributes:
        temperature: 0 takes the largest logit.
        top_k: most likely tokens kept; 0 keeps all.
        top_p: smallest set of tokens with at least this probability, above 0; 1 keeps all.
        min_p: least probability kept, relative to the most likely token; 0 keeps all.
        seed: with the two below it decides all noise.
        sequence_index: which sequence of the request.
        position: tokens before the chosen one.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sequence_index: int = 0
    position: int = 0

    @property
    def scale(self) -> float:
        """Scores are logits below the largest times this; 0 for the largest itself."""
        return 1.0 / self.temperature if self.temperature else 0.0

    @property
    def least_score(self) -> float:
        """What min_p leaves: scores of at least this much, the largest being 0."""
        return natural_log(self.min_p) if self.min_p else -math.inf

    @property
    def key(self) -> tuple[int, int]:
        """Of the noise."""
        return noise_key(self.seed, self.sequence_index, self.position)


@dataclass(frozen=True, slots=True)
class RankedTokens:
    """How likely some tokens of one row of logits are.

    Attributes:
        logprob: of the token that was asked about.
        rank: of that token: 1 and the number of tokens that are more likely.
        top: the most likely tokens with their log probabilities, in descending order; of equals the lowest id first.
    """

    logprob: float
    rank: int
    top: list[tuple[int, float]]


_LN_2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_ARTANH_COEFFICIENTS = tuple(1.0 / divisor for divisor in range(25, 0, -2))


def natural_log(value: float) -> float:
    """ln of a positive number: 2 artanh((m - 1) / (m + 1)) + e ln 2, with m in [sqrt(1/2), sqrt(2)).

    Built from IEEE additions, products and quotients only, so that every machine computes the same bits; the logarithms
    of libraries and devices differ in their last place.
    """
    mantissa, exponent = math.frexp(value)
    if mantissa < _SQRT_HALF:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = 0.0
    for coefficient in _ARTANH_COEFFICIENTS:
        series = series * square + coefficient
    return exponent * _LN_2 + (ratio * 2.0) * series
