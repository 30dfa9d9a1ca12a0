"""Text that looks like prose and has about as many tokens as one asks for."""

from __future__ import annotations

import hashlib

import numpy as np

__all__ = ["filler_question", "filler_text"]

# Short common words: with the space before it each is one token of most tokenizers, and so are a comma and a full stop.
_PROSE = """the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so up said what its about
than into them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many before must through years where much your way well down should because each just those
people how too little state good very make world still see own men work long here get both between life being under
never day same another know while last might us great old year off come since against go came right used take three
small large part place water house high found school country point group line number early late"""
_WORDS = _PROSE.split()
_LOWER = np.array([f" {word}" for word in _WORDS], dtype=object)
_UPPER = np.array([f" {word.capitalize()}" for word in _WORDS], dtype=object)
_SENTENCE_TOKENS = 14
_COMMA_AT = 7


def filler_text(name: str, num_tokens: int, seed: int) -> str:
    """Prose of about `num_tokens` tokens, the same for the same name and seed. Empty for none."""
    if num_tokens < 1:
        return ""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    words = np.random.default_rng(int.from_bytes(digest)).integers(len(_WORDS), size=num_tokens)
    parts = _LOWER[words]
    parts[::_SENTENCE_TOKENS] = _UPPER[words[::_SENTENCE_TOKENS]]
    parts[_COMMA_AT::_SENTENCE_TOKENS] = ","
    parts[_SENTENCE_TOKENS - 1 :: _SENTENCE_TOKENS] = "."
    return "".join(parts).lstrip()


def filler_question(name: str, num_tokens: int, seed: int) -> str:
    """A question in the same manner."""
    words = filler_text(name, max(1, num_tokens - 3), seed).rstrip(",.").replace(".", ",").lower()
    return f"What is {words}?"
