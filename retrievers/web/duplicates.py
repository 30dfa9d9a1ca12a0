"""Pages that say what another page has said already."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from stream2llm_sdk.errors import ConfigurationError

__all__ = ["SeenTexts", "Shingles"]

_WORD = re.compile(r"\w+")
_SHINGLE_WORDS = 4
_MAX_SHINGLES = 512
_PIECE_CHARACTERS = 30_000
_MAX_COMPARED = 3
_WORTH_COMPARING = 0.75
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying loses nothing


@dataclass(frozen=True, slots=True)
class Shingles:
    """A text as the set of its word 4-grams, hashed, for comparing; of a long text the 512 smallest hashes.

    Case, punctuation and white space do not count. A text that is shorter than four words is one shingle.
    """

    hashes: frozenset[int]

    @classmethod
    def of(cls, text: str) -> Shingles:
        """The shingles of `text`, in about 10 ms for 100 kB."""
        hashes: list[int] = []
        for start in range(
            0, len(text), _PIECE_CHARACTERS
        ):  # the search holds the interpreter's lock for a whole piece
            piece = text[start : start + _PIECE_CHARACTERS].casefold()
            hashes += [hash(word) for word in _WORD.findall(piece)]
        hashed = np.array(hashes or [0], dtype=np.int64).view(np.uint64)
        width = min(_SHINGLE_WORDS, len(hashed))
        mixed = np.zeros(len(hashed) - width + 1, dtype=np.uint64)
        for offset in range(width):
            mixed = (mixed ^ hashed[offset : offset + len(mixed)]) * _MULTIPLIER
            mixed ^= mixed >> np.uint64(29)
        mixed.sort()
        is_new = np.ones(len(mixed), dtype=bool)
        is_new[1:] = mixed[1:] != mixed[:-1]
        return cls(frozenset(mixed[is_new][:_MAX_SHINGLES].tolist()))

    def resemblance(self, other: Shingles) -> float:
        """The share of shingles that both have among those that either has (Jaccard), from 0 to 1; of long texts an
        estimate, off by 0.02 at 0.8 (Broder, "On the resemblance and containment of documents", 1997)."""
        either = sorted(self.hashes | other.hashes)[:_MAX_SHINGLES]
        return len(self.hashes.intersection(other.hashes, either)) / len(either)


class SeenTexts:
    """The texts of one crawl, each unlike the others.

    Args:
        threshold: resemblance from which two texts count as one. At 0.8, one word in 35 may be another one: a text
            that was copied with small changes, but not two pages that were written into one form. At 1.0, all words
            have to be the same.

    Raises:
        ConfigurationError: `threshold` is not above 0 and at most 1.
    """

    def __init__(self, threshold: float = 0.8) -> None:
        is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
        if not is_number or not 0 < threshold <= 1:
            raise ConfigurationError(f"duplicate_threshold={threshold!r}: give a number above 0 and at most 1")
        self.threshold = threshold
        self._seen: list[tuple[Shingles, str]] = []
        self._holders: dict[int, list[int]] = {}  # of each hash the texts that have it

    def add(self, shingles: Shingles, source: str) -> str | None:
        """The source of an earlier text that says the same, or None, and then the text is kept."""
        hashes = shingles.hashes
        shared = Counter(holder for value in hashes for holder in self._holders.get(value, ()))
        for index, num_shared in shared.most_common(_MAX_COMPARED):
            earlier, earlier_source = self._seen[index]
            if num_shared < _WORTH_COMPARING * self.threshold * len(hashes):
                break
            if shingles.resemblance(earlier) >= self.threshold:
                return earlier_source
        for value in hashes:
            self._holders.setdefault(value, []).append(len(self._seen))
        self._seen.append((shingles, source))
        return None
