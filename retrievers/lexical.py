"""Lexical matching of a question with short texts: passages of a page, links.

For the few hundred texts of one page an index would cost more than it saves, and bm25s, which `LocalIndexSearch` uses,
starts a thread when it is imported, which a process that forks cannot have.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from stream2llm_sdk.errors import MissingExtraError

__all__ = ["bm25_scores", "terms"]

_CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # written without spaces: each character is a word here
_WORD = re.compile(rf"[{_CJK}]|(?:(?![{_CJK}])[^\W_])+")
_MAX_WORD_CHARS = 60
_STOP_WORDS = frozenset(
    re.findall(
        r"\S+",
        "a about an and are as at be been but by can could did do does for from had has have how i if in into is it "
        "its me my no not of on or our so such that the their them then there these they this to was we were what "
        "when where which who whom why will with would you your",
    )
)


def terms(text: str) -> list[str]:
    """The stemmed words of `text` in small letters, without English function words.

    Words are stemmed with Snowball's English rules (PyStemmer), which leave words of most other languages alone; what
    counts is that question and text are treated alike. A text of function words only keeps them.
    """
    words = [word[:_MAX_WORD_CHARS] for word in _WORD.findall(text.lower())]
    telling = [word for word in words if word not in _STOP_WORDS]
    return list(_stemmer().stemWords(telling or words))


def bm25_scores(
    texts: Sequence[Sequence[str]], query: Sequence[str], *, k1: float = 1.5, b: float = 0.75
) -> list[float]:
    """BM25 of each text for the query, both as `terms` gives them; 0 where no term occurs.

    Robertson and Zaragoza (2009), "The Probabilistic Relevance Framework", with Lucene's inverse document frequency
    `log(1 + (n - df + 0.5) / (df + 0.5))`, which is never negative. A term counts once however often the query has it.
    """
    counts = [Counter(text) for text in texts]
    mean_length = sum(map(len, texts)) / max(len(texts), 1) or 1.0
    scores = [0.0] * len(texts)
    for term in dict.fromkeys(query):
        holders = [i for i, count in enumerate(counts) if term in count]
        idf = math.log(1 + (len(texts) - len(holders) + 0.5) / (len(holders) + 0.5))
        for i in holders:
            frequency = counts[i][term]
            norm = k1 * (1 - b + b * len(texts[i]) / mean_length)
            scores[i] += idf * frequency / (frequency + norm)
    return scores


@lru_cache(maxsize=1)
def _stemmer() -> Any:
    try:
        from Stemmer import Stemmer
    except ImportError as error:
        raise MissingExtraError("PyStemmer", "crawler", "search") from error
    return Stemmer("english")
