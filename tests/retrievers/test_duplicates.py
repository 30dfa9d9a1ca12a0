"""Copies are known as such, and texts of one form are not taken for copies."""

from __future__ import annotations

import random

import pytest

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.web.duplicates import SeenTexts, Shingles

WORDS = [f"word{number}" for number in range(2_000)]


def text_of(seed: int, num_words: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=num_words)


def changed(words: list[str], share: float, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [f"new{draw.getrandbits(40)}" if draw.random() < share else word for word in words]


def resemblance(one: str, other: str) -> float:
    return Shingles.of(one).resemblance(Shingles.of(other))


def test_form_does_not_count() -> None:
    assert resemblance("The cat, on the mat, sat.", "the CAT on\n\nthe **mat** sat") == 1
    assert resemblance("one", "One!") == 1
    assert resemblance("", "...") == 1
    assert resemblance("one two three", "one two four") == 0


@pytest.mark.parametrize("num_words", [100, 500, 20_000])
def test_resemblance_is_that_of_the_four_word_sets(num_words: int) -> None:
    words = text_of(1, num_words)
    other = changed(words, 0.05)

    def sets(text: list[str]) -> set[tuple[str, ...]]:
        return set(zip(*(text[offset:] for offset in range(4)), strict=False))

    exact = len(sets(words) & sets(other)) / len(sets(words) | sets(other))
    allowed = 0.0 if num_words < 250 else 0.06  # more than 512 shingles: an estimate
    assert resemblance(" ".join(words), " ".join(other)) == pytest.approx(exact, abs=allowed + 1e-9)


def test_copies_with_small_changes_are_found_among_many() -> None:
    seen = SeenTexts()
    texts = [text_of(seed, 800) for seed in range(60)]
    for number, text in enumerate(texts):
        assert seen.add(Shingles.of(" ".join(text)), str(number)) is None
    for number, text in enumerate(texts):
        assert seen.add(Shingles.of(" ".join(changed(text, 0.01, number))), "copy") == str(number)
        assert seen.add(Shingles.of(" ".join(changed(text, 0.15, number))), "other") is None


def test_threshold_of_one_leaves_out_exact_copies_only() -> None:
    seen = SeenTexts(1.0)
    assert seen.add(Shingles.of("a b c d e f"), "1") is None
    assert seen.add(Shingles.of("a b c d e g"), "2") is None
    assert seen.add(Shingles.of("A b, c d e f"), "3") == "1"


@pytest.mark.parametrize("threshold", [0, -1, 1.1, True, "0.8", float("nan")])
def test_threshold_is_checked(threshold: float) -> None:
    with pytest.raises(ConfigurationError, match="duplicate_threshold="):
        SeenTexts(threshold)
