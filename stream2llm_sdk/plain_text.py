"""Untrusted text to token ids: whatever the text says, it stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from stream2llm_sdk.tokenizer import Tokenizer, special_tokens

__all__ = ["PlainTextEncoder", "clean_text"]

# What a chat template writes around its turns when these are no special tokens: <|user|>, <<SYS>>, [INST].
_MARKER = re.compile(r"<{1,2}[^<>\s]{1,40}>{1,2}|\[/?[A-Z][A-Z_]{1,30}\]")
_NOT_UTF8 = re.compile(r"[\x00\ud800-\udfff]")
_UNFINISHED = "\ufffd"


def clean_text(text: str) -> str:
    """`text` without NULs; surrogate pairs become their character, lone surrogates U+FFFD."""
    if not _NOT_UTF8.search(text):
        return text
    whole = text.replace("\x00", "").encode("utf-16-le", "surrogatepass")
    return whole.decode("utf-16-le", "replace")


class PlainTextEncoder:
    """Encodes text so that no token of it is one of the tokenizer's special tokens.

    Special tokens and every added token that looks like markup (`<|im_start|>`, `<tool_call>`) are split
    into ordinary tokens. Turn markers that a template writes in ordinary characters (`[INST]`, `<|user|>`)
    are broken by a space. Role names in ordinary words (`USER:`) cannot be told from text and are left.

    Args:
        tokenizer: a transformers tokenizer; it is read once and never changed.
        structure: the text that a chat template puts around its turns.
        secrets: texts that nobody but the prompt itself may write; they are broken by a space, too.
    """

    def __init__(self, tokenizer: Tokenizer, structure: str = "", secrets: Iterable[str] = ()) -> None:
        forbidden = special_tokens(tokenizer)
        for token, entry in tokenizer.added_tokens_decoder.items():
            if not _is_ordinary(str(entry), structure):
                forbidden.setdefault(token, str(entry))
        self.forbidden_ids = frozenset(forbidden)
        self._literals = _any_of(forbidden.values())
        self._markers = _any_of({*_MARKER.findall(structure), *secrets} - set(forbidden.values()))
        self._tokenizer = tokenizer
        self._encode = anchored(_raw_encoder(tokenizer, self.forbidden_ids))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it reads in the middle of a prompt; never one of `forbidden_ids`."""
        text = _break(self._markers, clean_text(text))
        ids = self._encode(text)
        if self.forbidden_ids.isdisjoint(ids):
            return ids
        # The model's own vocabulary holds a special token's text (Unigram, WordLevel): break it up,
        # and remove what even then reads as one (the unknown token among them).
        ids = self._encode(_break(self._literals, text))
        return [token for token in ids if token not in self.forbidden_ids]

    def encode_start(self, text: str, max_tokens: int) -> tuple[list[int], int]:
        """Token ids of the start of `text`, at most `max_tokens`, and how many tokens the whole text has.

        The cut never falls inside a character. Of a text far longer than the limit only a start is encoded
        (at most 64 characters for each token allowed), so that the time is bounded; its whole length in
        tokens is then extrapolated.
        """
        for chars_per_token in (8, 64):
            num_chars = chars_per_token * (max_tokens + 8)
            ids = self.encode(text[:num_chars])
            if num_chars >= len(text):
                total = len(ids)
                break
            total = max(len(ids) + 1, round(len(ids) * len(text) / num_chars))
            if len(ids) > max_tokens:
                break
        return (ids, total) if len(ids) <= max_tokens else (self._cut(ids, max_tokens), total)

    def _cut(self, ids: list[int], max_tokens: int) -> list[int]:
        # A character has at most four bytes, so at most three tokens separate a cut from a whole character.
        for end in range(max_tokens, max(max_tokens - 4, 0), -1):
            last = self._tokenizer.decode(
                ids[max(end - 8, 0) : end], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            if not last.endswith(_UNFINISHED):
                return ids[:end]
        return ids[:max_tokens]


def anchored(encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    """`encode` for text in the middle of a prompt.

    Tokenizers after SentencePiece put a space before whatever they encode. Encoding behind a newline, whose
    tokens are then taken away, gives the tokens without it.
    """
    anchor = encode("\n")
    probe = encode("\nx")
    if probe[: len(anchor)] != anchor or probe[len(anchor) :] == encode("x"):
        return encode

    def encode_behind_anchor(text: str) -> list[int]:
        ids = encode("\n" + text)
        return ids[len(anchor) :] if ids[: len(anchor)] == anchor else encode(text)

    return encode_behind_anchor


def _is_ordinary(text: str, structure: str) -> bool:
    """Whether an added token is a word or white space, as against markup."""
    if not all(character.isalnum() or character.isspace() or character == "\u2581" for character in text):
        return False
    return not text.strip() or text not in structure


def _any_of(literals: Iterable[str]) -> re.Pattern[str] | None:
    ordered = sorted(filter(None, literals), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _break(literals: re.Pattern[str] | None, text: str) -> str:
    if literals is None:
        return text
    return literals.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)


def _raw_encoder(tokenizer: Tokenizer, forbidden_ids: frozenset[int]) -> Callable[[str], list[int]]:
    """Encoding without special tokens, on a copy of the tokenizer's own where it has one."""
    plain = _plain_copy(getattr(tokenizer, "backend_tokenizer", None), forbidden_ids)
    if plain is not None:
        return lambda text: list(plain.encode(text, add_special_tokens=False).ids)
    return lambda text: list(
        tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    )


def _plain_copy(backend: Any, forbidden_ids: frozenset[int]) -> Any:
    """A copy of a `tokenizers.Tokenizer` that splits the forbidden tokens; None where it cannot be copied.

    transformers' own `split_special_tokens` sets a flag on the tokenizer that every user of it shares, and
    leaves added tokens alone that are not flagged special.
    """
    from tokenizers import Tokenizer as Backend

    if not isinstance(backend, Backend):
        return None
    try:
        state = json.loads(backend.to_str())
        for entry in state["added_tokens"]:
            entry["special"] = entry["id"] in forbidden_ids
        copy = Backend.from_str(json.dumps(state))
    except Exception:  # a component written in Python cannot be serialised; tokenizers raises bare Exception
        return None
    copy.encode_special_tokens = True
    copy.no_truncation()
    copy.no_padding()
    return copy
