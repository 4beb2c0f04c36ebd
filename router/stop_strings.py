"""Finds the first stop string in text that arrives in pieces, holding back no more than it must. Knows no tokens.

The first match is the one that is complete first; of several complete at the same character, the longest. So the answer
does not depend on where the pieces are cut. Each character costs the same, however many and long the stop strings are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _State:
    """The longest beginning of any stop string that the text ends in."""

    depth: int = 0
    found: str | None = None
    fallback: int = 0
    next: dict[str, int] = field(default_factory=dict)


class StopStrings:
    """The stop strings of a request, prepared once (Aho and Corasick's automaton); any number of checkers share it."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._states = [_State()]
        for text in stop:
            if not text:
                raise ValueError("a stop string must not be empty")
            self._insert(text)
        self._link()

    def __bool__(self) -> bool:
        return len(self._states) > 1

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        states = self._states
        while state and character not in states[state].next:
            state = states[state].fallback
        return states[state].next.get(character, 0)

    def depth(self, state: int) -> int:
        """Characters at the end of the text that may belong to a stop string."""
        return self._states[state].depth

    def found(self, state: int) -> str | None:
        """The longest stop string that the text ends in."""
        return self._states[state].found

    def _insert(self, text: str) -> None:
        state = 0
        for depth, character in enumerate(text, 1):
            known = self._states[state].next.get(character)
            if known is None:
                known = self._states[state].next[character] = len(self._states)
                self._states.append(_State(depth))
            state = known
        self._states[state].found = text

    def _link(self) -> None:
        waiting = deque(self._states[0].next.values())
        while waiting:
            index = waiting.popleft()
            state = self._states[index]
            if state.found is None:
                state.found = self._states[state.fallback].found
            for character, child in state.next.items():
                self._states[child].fallback = self.step(state.fallback, character)
                waiting.append(child)


@dataclass(frozen=True, slots=True)
class Checked:
    """Text that is safe to give out, and the stop string that ends it, if one was found."""

    text: str
    stop_string: str | None = None


class StopChecker:
    """Watches one text. After a match nothing more may be pushed.

    Args:
        stop: what ends the text.
        include_stop_str: give out the stop string too.
    """

    def __init__(self, stop: StopStrings, *, include_stop_str: bool = False) -> None:
        self._stop = stop
        self._include_stop_str = include_stop_str
        self._state = 0
        self._held = ""

    def push(self, text: str) -> Checked:
        """Take more text; give out all but the end of it that may turn out to begin a stop string."""
        if not self._stop or not text:
            return Checked(text)
        for index, character in enumerate(text, 1):
            self._state = self._stop.step(self._state, character)
            found = self._stop.found(self._state)
            if found is not None:
                seen = self._held + text[:index]
                self._held = ""
                return Checked(seen if self._include_stop_str else seen[: len(seen) - len(found)], found)
        seen = self._held + text
        cut = len(seen) - self._stop.depth(self._state)
        self._held = seen[cut:]
        return Checked(seen[:cut])

    def release(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held, self._state = self._held, "", 0
        return held
