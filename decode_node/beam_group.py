"""Which beams of a search go on, and what comes out in the end. Knows no scheduler, no blocks and no logits.

The search is vLLM's (its OpenAI server's `use_beam_search`):

    every beam gets one token more: the 2 * width most likely tokens of each are looked at; one that ends a sequence
    makes a hypothesis, and of all the others together the `width` with the largest summed log probability go on. The
    result are the `width` best of the hypotheses and of the beams left at the length limit, by

        sum of log probabilities / (tokens of prompt and output, an end token at the end not counted) ** length_penalty

Where vLLM always goes on to the length limit, this one stops as soon as no beam can reach the result any more, which
changes nothing of it: a sum of log probabilities only falls. Of equals the one found first wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.errors import AttemptFailed
from engine.sampling_params import SamplingParams
from engine.tokens import FinishReason, PositionLogprobs, SampledToken, TokenLogprob
from kernels import ops


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One result; `logprobs` has an entry for each token when they were asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    score: float
    finish_reason: FinishReason
    stop_token_id: int | None


@dataclass(frozen=True, slots=True)
class Continuation:
    """The beam in place `slot` is from now on the one of `parent` and one token more; often both are the same."""

    slot: int
    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class _Beam:
    """A chain of tokens, shared by all that go on from it."""

    parent: _Beam | None
    token_id: int
    logprobs: PositionLogprobs
    sum_logprobs: float


@dataclass(frozen=True, slots=True)
class _End:
    """A beam that is complete; its tokens are only looked up when it is in the result."""

    beam: _Beam
    score: float
    finish_reason: FinishReason


_ROOT = _Beam(None, -1, (), 0.0)


class BeamGroup:
    """One search, from the first token to the hypotheses.

    It begins with one beam, in slot 0. Each time every beam has reported, `advance`.

    Args:
        sampling: when a sequence ends, and how many log probabilities are shown.
        width: beams, and hypotheses in the result.
        length_penalty: above 0 favours long hypotheses, below 0 short ones.
        prompt_length: tokens.
        max_model_len: longest prompt plus output.

    Attributes:
        num_candidates: tokens that a report must name, fewer only where the vocabulary is smaller.
        hypotheses: the result, best first; None until the search is over.
    """

    def __init__(
        self, sampling: SamplingParams, *, width: int, length_penalty: float, prompt_length: int, max_model_len: int
    ) -> None:
        self._sampling = sampling
        self._width = width
        self._length_penalty = length_penalty
        self._prompt_length = prompt_length
        self._max_output = min(sampling.max_tokens, max_model_len - prompt_length)
        self._named_ends = frozenset((*sampling.eos_token_ids, *sampling.stop_token_ids))
        self._ends = frozenset(sampling.stop_token_ids if sampling.ignore_eos else self._named_ends)
        # However many end tokens there are among them, `width` that go on are left.
        self.num_candidates = max(2 * width, width + len(self._ends), sampling.logprobs or 0)
        self.hypotheses: tuple[Hypothesis, ...] | None = None
        self._beams: dict[int, _Beam] = {0: _ROOT}  # by slot, the best first
        self._reports: dict[int, PositionLogprobs] = {}
        self._num_output = 0
        self._complete: list[_End] = []  # the best ones, best first

    def report(self, slot: int, candidates: PositionLogprobs) -> None:
        """The most likely next tokens of a beam, in descending order. Only the first report of a step counts."""
        if slot in self._beams:
            self._reports.setdefault(slot, candidates)

    @property
    def is_ready(self) -> bool:
        """Whether every beam has reported."""
        return len(self._reports) == len(self._beams)

    def advance(self) -> tuple[Continuation, ...]:
        """Choose the beams that go on; none when that was the last step. Slots not named are free.

        Raises:
            AttemptFailed: too few tokens have a finite probability.
        """
        reports, self._reports = self._reports, {}
        self._num_output += 1
        found: list[tuple[float, int, TokenLogprob]] = []
        for slot, beam in self._beams.items():
            for entry in reports[slot][: max(2 * self._width, self._width + len(self._ends))]:
                total = beam.sum_logprobs + entry.logprob
                if entry.token_id in self._ends:
                    self._keep(self._grown(slot, entry, reports[slot]), FinishReason.STOP)
                elif total > -float("inf"):
                    found.append((total, slot, entry))
        # Stable: of equals the better beam's, and of these the likelier token.
        found.sort(key=lambda candidate: -candidate[0])
        best = [(slot, self._grown(slot, entry, reports[slot])) for _, slot, entry in found[: self._width]]
        if self._num_output == self._max_output or not best or self._is_decided(best[0][1].sum_logprobs):
            if self._num_output == self._max_output:
                for _, beam in best:
                    self._keep(beam, FinishReason.LENGTH)
            if len(self._complete) < self._width:
                raise AttemptFailed("too few tokens have a finite probability", reason="nonfinite_logits")
            self.hypotheses = tuple(self._hypothesis(end) for end in self._complete)
            self._beams = {}
            return ()
        return self._settle(best)

    # -- inside ---------------------------------------------------------------------------------------------

    def _settle(self, best: Sequence[tuple[int, _Beam]]) -> tuple[Continuation, ...]:
        """Give every beam a slot: its parent's to the first child, free ones to the others."""
        parents = {slot for slot, _ in best}
        free = iter([slot for slot in range(self._width) if slot not in parents])
        beams: dict[int, _Beam] = {}
        chosen = []
        for parent, beam in best:
            slot = next(free) if parent in beams else parent
            beams[slot] = beam
            chosen.append(Continuation(slot, parent, beam.token_id))
        self._beams = beams
        return tuple(chosen)

    def _grown(self, slot: int, entry: TokenLogprob, candidates: PositionLogprobs) -> _Beam:
        beam, top = self._beams[slot], self._sampling.logprobs
        logprobs = () if top is None else (entry, *candidates[:top])
        return _Beam(beam, entry.token_id, logprobs, beam.sum_logprobs + entry.logprob)

    def _hypothesis(self, end: _End) -> Hypothesis:
        chain: list[_Beam] = []
        last: _Beam | None = end.beam
        while last is not None and last is not _ROOT:
            chain.append(last)
            last = last.parent
        chain.reverse()
        token_id = end.beam.token_id
        is_named = end.finish_reason is FinishReason.STOP and (
            self._sampling.ignore_eos or token_id not in self._sampling.eos_token_ids
        )
        return Hypothesis(
            token_ids=tuple(each.token_id for each in chain),
            logprobs=tuple(each.logprobs for each in chain) if self._sampling.logprobs is not None else (),
            score=end.score,
            finish_reason=end.finish_reason,
            stop_token_id=token_id if is_named else None,
        )

    def _score(self, sum_logprobs: float, num_output: int) -> float:
        return float(sum_logprobs / max(self._prompt_length + num_output, 1) ** self._length_penalty)

    def _keep(self, beam: _Beam, reason: FinishReason) -> None:
        score = self._score(beam.sum_logprobs, self._num_output - (beam.token_id in self._named_ends))
        if len(self._complete) == self._width and score <= self._complete[-1].score:
            return
        self._complete.append(_End(beam, score, reason))
        self._complete.sort(key=lambda each: -each.score)
        del self._complete[self._width :]

    def _is_decided(self, best_sum: float) -> bool:
        """Whether no beam can get into the result: sums only fall, and lengths are between now and the limit."""
        if len(self._complete) < self._width:
            return False
        lengths = (self._num_output, self._max_output)
        return self._complete[-1].score >= max(self._score(best_sum, length) for length in lengths)


def candidates(logits: torch.Tensor, count: int) -> SampledToken | AttemptFailed:
    """The most likely token of a row of logits [vocab] float32, and as its log probabilities the `count` likeliest."""
    (ranked,) = ops.rank_tokens([logits], [0], [count])  # Of token 0 nothing is wanted.
    if ranked is None:
        return AttemptFailed("the model gave logits that are not finite", reason="nonfinite_logits")
    entries = tuple(TokenLogprob(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(ranked.top, 1))
    return SampledToken(entries[0].token_id, entries)
