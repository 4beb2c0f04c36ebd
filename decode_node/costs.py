"""What steps, recomputation and copies cost here, learned from what they took. Knows no clock and no requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.rate import KEPT, Rate


@dataclass(slots=True)
class Costs:
    """The scheduler asks, the node records.

    Attributes:
        decode_step_s: of a step that only decodes; 0 until known.
        prompt: tokens per second of prompts in steps, beyond what decoding takes of these.
        handed_off: tokens per second of hand-offs, from their opening to their commit.
        copied: bytes per second to or from host memory.
    """

    decode_step_s: float = 0.0
    prompt: Rate = field(default_factory=Rate)
    handed_off: Rate = field(default_factory=Rate)
    copied: Rate = field(default_factory=Rate)

    def record_step(self, *, seconds: float, decode_tokens: int, prompt_tokens: int) -> None:
        """A step is done."""
        if prompt_tokens:
            beyond = seconds - (self.decode_step_s if decode_tokens else 0.0)
            # A step that was quicker than decoding alone still says that prompts are cheap.
            self.prompt.record(prompt_tokens, max(beyond, seconds * 0.05))
        elif decode_tokens:
            known = self.decode_step_s or seconds
            self.decode_step_s = known * KEPT + seconds * (1 - KEPT)

    def prompt_tokens_within(self, bound_s: float, *, least: int) -> int:
        """Prompt tokens that a step which also decodes may compute in `bound_s`; `least` while nothing is known."""
        return max(least, self._within(bound_s, self.prompt))

    def copied_bytes_within(self, bound_s: float, *, least: int) -> int:
        """The same of bytes that it may copy to or from host memory."""
        return max(least, self._within(bound_s, self.copied))

    def copy_is_quicker(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether copying bytes out and in again takes less time than computing the tokens again, wherever that is.

        A copy where one of the two is unknown: it nearly always wins, and only doing it teaches what it costs.
        """
        recomputed = [rate.time_s(num_tokens) for rate in (self.prompt, self.handed_off) if rate.is_known]
        return not recomputed or self.copied.time_s(2 * num_bytes) <= min(recomputed)

    def hand_off_is_quicker(self, num_tokens: int) -> bool:
        """Whether a prefill node has tokens ready sooner than this node; where nothing is known it does."""
        return not self.prompt.is_known or self.handed_off.time_s(num_tokens) <= self.prompt.time_s(num_tokens)

    def _within(self, bound_s: float, rate: Rate) -> int:
        # Where decoding alone takes most of the bound, the rest still gets half as much time: it must get on.
        time_s = max(bound_s - self.decode_step_s, self.decode_step_s / 2)
        return int(time_s * rate.units / rate.seconds) if rate.is_known else 0
