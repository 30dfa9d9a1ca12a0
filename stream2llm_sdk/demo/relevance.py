"""Which pages of a small site suit a question: keyword overlap, nothing learned."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping

__all__ = ["PageRanking"]

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_IDENTIFIER = re.compile(r"\w+")
_STOP_WORDS = frozenset(
    """
    a an and are as at be by can do does for from has how i if in into is it its me my not of on or so that the their
    them then there this to use using was what when where which who why will with you your
    """.split()  # noqa: SIM905
)
_NAME_WEIGHT = 4.0


def _stem(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _keywords(text: str) -> Counter[str]:
    """The words of `text` in lower case; an identifier counts whole and by its parts (TaskGroup, task, group)."""
    counts: Counter[str] = Counter()
    for identifier in _IDENTIFIER.findall(text):
        parts = {part.lower() for part in _WORD.findall(identifier)}
        words = parts | {identifier.lower()}
        counts.update(_stem(word) for word in words if len(word) > 1 and word not in _STOP_WORDS)
    return counts


class PageRanking:
    """Ranks pages for questions; reads the pages once.

    Args:
        texts: the text of each page by its name.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._names = {page: set(_keywords(page)) for page in texts}
        self._counts = {page: _keywords(text) for page, text in texts.items()}

    def rank(self, question: str) -> list[str]:
        """Returns the names of all pages, most relevant to `question` first.

        A page gains from each of the question's words by how rare the word is among the pages, and how often it
        is there; a word of the page's name counts most. Pages without any keep their order, behind the others.
        """
        rarities = {word: rarity for word in _keywords(question) if (rarity := self._rarity(word))}

        def score(page: str) -> float:
            counts, name = self._counts[page], self._names[page]
            return sum(
                rarity * (_NAME_WEIGHT * (word in name) + counts[word] / (counts[word] + 2))
                for word, rarity in rarities.items()
            )

        return sorted(self._counts, key=score, reverse=True)

    def _rarity(self, word: str) -> float:
        """The logarithm of one page in how many has the word; 0 when none has it."""
        having = sum(word in counts or word in self._names[page] for page, counts in self._counts.items())
        return math.log(1 + len(self._counts) / having) if having else 0.0
