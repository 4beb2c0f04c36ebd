"""What a request for beam search is, and what else it may ask for. The search itself runs on a decode node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import InvalidRequest

MAX_LENGTH_PENALTY = 10.0

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "stream": (False,),
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (-1,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "stop": ("", []),
}
"""Fields that a search does not heed, and their values that ask for nothing."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Instead of sampling.

    Attributes:
        width: beams, from which as many choices as are wanted are returned.
        length_penalty: the sum of a hypothesis' log probabilities is divided by its length, prompt included, to this
            power.
    """

    width: int
    length_penalty: float = 1.0


def check_fields(given: Mapping[str, object]) -> None:
    """Raise InvalidRequest naming the first field of a request for beam search that the search would not heed."""
    for name, neutral in _NEUTRAL.items():
        value = given.get(name)
        if value is not None and value not in neutral:
            raise InvalidRequest(f"{name} is not supported with use_beam_search", param=name)


def check_length_penalty(value: float) -> None:
    """Raise InvalidRequest where it is out of range."""
    if not -MAX_LENGTH_PENALTY <= value <= MAX_LENGTH_PENALTY:
        raise InvalidRequest(
            f"length_penalty must be between {-MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}", param="length_penalty"
        )
