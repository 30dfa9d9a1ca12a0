"""Which pages are worth prompt tokens: their language, and how much of them is text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from stream2llm_sdk.errors import MissingExtraError
from stream2llm_sdk.retrievers.web.page import QualityLimits

__all__ = ["identify_language", "quality_fault", "warm_up_languages"]

_SYMBOL = re.compile(r"#(?!#*\s)|\.\.\.|…")
_WRITTEN_WITHOUT_SPACES = re.compile("[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]")
_FENCED = re.compile(r"^\s*(`{3,}).*?^\s*\1`*\s*$", re.MULTILINE | re.DOTALL)
_MIN_LETTERS = 40
_SAMPLE_CHARS = 4_000
_SAMPLES = 3


def identify_language(text: str) -> str:
    """ISO 639-1 code of the language that most of `text` is in, code blocks aside, by py3langid; '' if it has fewer
    than 40 letters. Of a long text three samples are looked at.

    Raises:
        MissingExtraError: py3langid is not installed.
    """
    prose = _FENCED.sub(" ", text)
    if sum(map(str.isalpha, prose[:_SAMPLE_CHARS])) < _MIN_LETTERS:
        return ""
    step = max(len(prose) // _SAMPLES, _SAMPLE_CHARS)
    sample = " ".join(
        prose[start : start + _SAMPLE_CHARS] for start in range(0, min(len(prose), _SAMPLES * step), step)
    )
    return str(_identifier().classify(sample)[0])


def warm_up_languages() -> None:
    """Loads the language model, which takes a second and 70 MB."""
    identify_language("the model is loaded when it is used for the first time")


def quality_fault(markdown: str, num_linked_chars: int, limits: QualityLimits) -> str:
    """What is wrong with a page's text by `limits`, in one line; '' if nothing is.

    Args:
        markdown: its main text.
        num_linked_chars: how many characters of the main text are inside links.
    """
    words = markdown.split()
    checks = (
        ("has too few words", len(words), limits.min_words, None),
        ("", *_word_length(words, markdown, limits)),
        (
            "has too many symbols for its words",
            len(_SYMBOL.findall(markdown)) / _some(words),
            None,
            limits.max_symbol_ratio,
        ),
        ("has too few words with letters", _num_with_letters(words) / _some(words), limits.min_alphabetic_words, None),
        ("repeats itself", _duplicate_share(markdown), None, limits.max_duplicate_lines),
        ("is mostly links", num_linked_chars / _some(markdown), None, limits.max_link_density),
    )
    for fault, value, least, most in checks:
        if least is not None and value < least:
            return f"the page {fault or 'has words too short for text'}: {value:.3g}, at least {least:g} is wanted"
        if most is not None and value > most:
            return f"the page {fault or 'has words too long for text'}: {value:.3g}, at most {most:g} is wanted"
    return ""


def _word_length(words: list[str], text: str, limits: QualityLimits) -> tuple[float, float | None, float | None]:
    if len(_WRITTEN_WITHOUT_SPACES.findall(text)) > 0.1 * len(text):
        return 0.0, None, None
    return sum(map(len, words)) / _some(words), limits.min_mean_word_length, limits.max_mean_word_length


def _num_with_letters(words: Iterable[str]) -> int:
    return sum(any(map(str.isalpha, word)) for word in words)


def _duplicate_share(markdown: str) -> float:
    """Share of characters in lines that stood there before."""
    seen: set[str] = set()
    total = repeated = 0
    for line in map(str.strip, _FENCED.sub("", markdown).split("\n")):
        total += len(line)
        repeated += len(line) if line in seen else 0
        seen.add(line)
    return repeated / max(total, 1)


def _some(items: Any) -> int:
    return max(len(items), 1)


@lru_cache(maxsize=1)
def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise MissingExtraError("py3langid", "crawler") from error
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
