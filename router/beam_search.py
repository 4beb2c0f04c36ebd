"""What a request for beam search is, and what else it may ask for. The search itself runs on a decode node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from router.request_builder import GenerateParams

MAX_LENGTH_PENALTY = 10.0
USUAL_LENGTH_PENALTY = 1.0

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "temperature": (None, 0, 1),
    "top_p": (None, 1),
    "top_k": (None, 0),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": ({},),
    "min_tokens": (None, 0),
    "stop": ((),),
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
    length_penalty: float = USUAL_LENGTH_PENALTY


def requested_search(use_beam_search: bool, width: int, length_penalty: float | None) -> BeamSearch | None:
    """What these fields of a request ask for. Raises InvalidRequest naming `length_penalty` where that is wrong."""
    penalty = USUAL_LENGTH_PENALTY if length_penalty is None else length_penalty
    if not use_beam_search:
        if penalty != USUAL_LENGTH_PENALTY:
            raise InvalidRequest("length_penalty is allowed only with use_beam_search", param="length_penalty")
        return None
    if not -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY:
        raise InvalidRequest(
            f"length_penalty must be between {-MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}", param="length_penalty"
        )
    return BeamSearch(width, penalty)


def check_fields(params: GenerateParams) -> None:
    """Raise InvalidRequest naming the first field of a request for beam search that the search would not heed."""
    for name, neutral in _NEUTRAL.items():
        if getattr(params, name) not in neutral:
            raise InvalidRequest(f"{name} is not supported with use_beam_search", param=name)
