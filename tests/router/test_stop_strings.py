"""Stop strings: held back as little as possible, cut exactly, the same however the text is cut into pieces."""

from __future__ import annotations

import random
import time

import pytest

from router.stop_strings import Checked, StopChecker, StopStrings


def checker(*stop: str, include: bool = False) -> StopChecker:
    return StopChecker(StopStrings(stop), include_stop_str=include)


def reference(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The first stop string to be complete, the longest of those: slowly."""
    for end in range(1, len(text) + 1):
        found = [candidate for candidate in stop if text[:end].endswith(candidate)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def longest_beginning(text: str, stop: list[str]) -> int:
    """Length of the longest end of `text` that properly begins a stop string."""
    return max((n for word in stop for n in range(1, len(word)) if text.endswith(word[:n])), default=0)


def test_no_stop_strings_hold_nothing() -> None:
    assert checker().push("abc") == Checked("abc")


def test_only_a_beginning_of_a_stop_string_is_held() -> None:
    check = checker("END")
    assert check.push("the E") == Checked("the ")
    assert check.push("N") == Checked("")
    assert check.push("Ex") == Checked("ENEx")
    assert check.release() == ""


def test_a_match_over_several_pieces_is_cut_before_it() -> None:
    check = checker("END")
    assert [check.push(piece) for piece in ("a E", "N", "D b")] == [Checked("a "), Checked(""), Checked("", "END")]


def test_a_match_within_one_piece() -> None:
    assert checker("\n\n").push("one\n\ntwo") == Checked("one", "\n\n")


def test_the_stop_string_can_be_kept() -> None:
    check = checker("END", include=True)
    assert check.push("a EN") == Checked("a ")
    assert check.push("D b") == Checked("END", "END")


def test_the_first_complete_one_wins_then_the_longest() -> None:
    assert checker("abcd", "bc").push("abcd") == Checked("a", "bc")
    assert checker("bc", "abc").push("xabcd") == Checked("x", "abc")
    assert checker("two", "one").push("one two") == Checked("", "one")


def test_a_beginning_within_a_failed_beginning_is_found() -> None:
    check = checker("aab")
    assert [check.push(piece).text for piece in "aaaa"] == ["", "", "a", "a"]
    assert check.push("b") == Checked("", "aab")


def test_held_text_is_released_at_the_end() -> None:
    check = checker("lo!!")
    assert check.push("hello") == Checked("hel")
    assert check.release() == "lo"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_any_pieces_of_any_text_agree_with_the_slow_way() -> None:
    chance = random.Random(3)
    for _ in range(3000):
        stop = ["".join(chance.choices("abé", k=chance.randint(1, 4))) for _ in range(chance.randint(1, 4))]
        text = "".join(chance.choices("abéc", k=chance.randrange(14)))
        check, given, found, seen = checker(*stop), "", None, ""
        while seen != text and found is None:
            piece = text[len(seen) : len(seen) + chance.randint(1, 4)]
            seen += piece
            checked = check.push(piece)
            given, found = given + checked.text, checked.stop_string
            if found is None:
                assert len(given) == len(seen) - longest_beginning(seen, stop)
        if found is None:
            given += check.release()
        assert (given, found) == reference(text, stop)


def test_long_stop_strings_and_near_misses_cost_the_same_per_character() -> None:
    def seconds(length: int) -> float:
        check = checker(*("a" * (100 + index) + "b" for index in range(16)))
        start = time.process_time()
        for _ in range(length):
            check.push("a")
        return time.process_time() - start

    short = min(seconds(2_000) for _ in range(3))
    assert seconds(32_000) < 80 * short + 0.05
