"""Chunks as token ids: each chunk is formatted and tokenised alone, and once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.plain_text import PlainTextEncoder

__all__ = ["ChunkEncoder", "EncodedChunk", "format_chunk"]

_MAX_LABEL_CHARS = 200


def format_chunk(chunk: Chunk) -> str:
    """`title (source)` on one line where there is any, and the text below it.

    It depends on nothing but the chunk (so there are no numbers): what a kept chunk reads like never
    changes, wherever it stands.
    """
    title, source = _label(chunk.title), _label(chunk.source)
    label = f"{title} ({source})" if title and source else title or source
    return f"{label}\n{chunk.text.strip()}" if label else chunk.text.strip()


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk's token ids, separator included, and how many tokens the limit left out of them.

    `ids` is empty for a chunk without any readable text.
    """

    ids: tuple[int, ...]
    num_left_out: int


class ChunkEncoder:
    """Formats and tokenises chunks, remembering those seen lately.

    Args:
        encoder: what turns untrusted text into ids.
        format_chunk: the text of a chunk; must depend on the chunk alone.
        separator: text behind every chunk.
        max_tokens: most tokens of one chunk, separator included.
        cache_tokens: most tokens remembered, over all chunks; texts count as a quarter token a character.
    """

    def __init__(
        self,
        encoder: PlainTextEncoder,
        *,
        format_chunk: Callable[[Chunk], str],
        separator: str,
        max_tokens: int,
        cache_tokens: int,
    ) -> None:
        self._encoder = encoder
        self._format = format_chunk
        self.separator_ids = tuple(encoder.encode(separator))
        self._max_tokens = max_tokens
        self._cache: OrderedDict[str, EncodedChunk] = OrderedDict()
        self._cache_room = self._cache_tokens = cache_tokens
        self._lock = threading.Lock()

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """The chunk within `max_tokens`.

        Raises:
            ConfigurationError: the format function returned something other than text.
        """
        text = self._text(chunk)
        with self._lock:
            known = self._cache.get(text)
            if known is not None:
                self._cache.move_to_end(text)
                return known
        encoded = self._encode(text, self._max_tokens)
        self._remember(text, encoded)
        return encoded

    def cut(self, chunk: Chunk, max_tokens: int) -> EncodedChunk:
        """The chunk within `max_tokens`, which may be less than this encoder's own limit."""
        return self._encode(self._text(chunk), min(max_tokens, self._max_tokens))

    def _text(self, chunk: Chunk) -> str:
        if not chunk.text.replace("\x00", "").strip():
            return ""
        text = self._format(chunk)
        if not isinstance(text, str):
            raise ConfigurationError(f"format_chunk must return a str, not {type(text).__name__}: {text!r:.80}")
        return text

    def _encode(self, text: str, max_tokens: int) -> EncodedChunk:
        room = max(max_tokens - len(self.separator_ids), 0)
        ids, total = self._encoder.encode_start(text, room)
        if not ids:
            return EncodedChunk((), total)
        return EncodedChunk((*ids, *self.separator_ids), total - len(ids))

    def _remember(self, text: str, encoded: EncodedChunk) -> None:
        with self._lock:
            if text not in self._cache:
                self._cache[text] = encoded
                self._cache_room -= _weight(text, encoded)
            while self._cache_room < 0:
                self._cache_room += _weight(*self._cache.popitem(last=False))


def _label(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_LABEL_CHARS else line[: _MAX_LABEL_CHARS - 1] + "…"


def _weight(text: str, encoded: EncodedChunk) -> int:
    return 1 + len(encoded.ids) + len(text) // 4
