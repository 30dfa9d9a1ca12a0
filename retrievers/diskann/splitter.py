"""Documents into passages: cut between paragraphs, sentences and words, and counted in tokens."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError, MissingExtraError

__all__ = ["PassageSplitter"]

# The splitter encodes a text again at every cut it considers: a whole book at once, or a megabyte without a space,
# would take time that grows with its square. Blocks of this many characters, some ten passages, keep it linear.
_BLOCK_CHARACTERS = 16_384
_BREAKS = ("\n\n", "\n", ". ", " ")


class PassageSplitter:
    """Cuts documents into passages of at most `max_tokens` tokens, at the best boundary that fits: paragraph, line,
    sentence, word (semantic-text-splitter's levels). The text between two cuts is kept as it is, without the white
    space at its ends.

    A document that fits stays whole. The passages of one have its source and title; their metadata is the
    document's with `passage` (0, 1, …) and `start`, the passage's first character in the document.

    Args:
        max_tokens: most tokens of a passage, without the tokens that a model adds at both ends.
        overlap_tokens: tokens that a passage may repeat of the one before it; none do at the ends of the blocks of
            16,384 characters in which long documents are taken.
        tokenizer: None for WordLlama's (Llama 2's 32k vocabulary); the path of a `tokenizer.json`; a folder that holds
            one; or a name on the hub. Take the tokenizer of the model that reads or embeds the passages where the
            exact number matters.

    Attributes:
        max_tokens: as given.

    Raises:
        ConfigurationError: a number is out of range, or the tokenizer cannot be loaded (at the first use).
        MissingExtraError: semantic-text-splitter is not installed (at the first use).
    """

    def __init__(self, max_tokens: int = 256, *, overlap_tokens: int = 0, tokenizer: str | None = None) -> None:
        if not isinstance(max_tokens, int) or not 8 <= max_tokens <= 1_000_000:
            raise ConfigurationError(f"max_tokens={max_tokens!r}: give an integer from 8 to 1,000,000")
        if not isinstance(overlap_tokens, int) or not 0 <= overlap_tokens <= max_tokens // 2:
            raise ConfigurationError(f"overlap_tokens={overlap_tokens!r}: give 0 to half of max_tokens={max_tokens}")
        self.max_tokens = max_tokens
        self._overlap_tokens = overlap_tokens
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._splitter: Any = None

    @property
    def settings(self) -> dict[str, Any]:
        """What decides where the cuts are; an index keeps it in its manifest."""
        return {
            "max_tokens": self.max_tokens,
            "overlap_tokens": self._overlap_tokens,
            "tokenizer": self._tokenizer or "wordllama",
        }

    def load(self) -> None:
        """Loads the tokenizer if it is not loaded yet. Raises as the class says."""
        with self._lock:
            if self._splitter is None:
                self._splitter = self._load()

    def split(self, documents: Sequence[Chunk]) -> list[list[Chunk]]:
        """The passages of each document, in order; none of a document without text. Several documents at once are
        split in parallel, without the interpreter lock."""
        self.load()
        # The splitter refuses lone surrogates, which crawled text does contain.
        texts = [document.text.encode("utf-8", "replace").decode() for document in documents]
        blocks = [list(_blocks(text)) for text in texts]
        found = iter(self._splitter.chunk_all_indices([text for cut in blocks for _, text in cut]))
        passages = []
        for document, cut in zip(documents, blocks, strict=True):
            pieces = [(at + start, piece) for at, _ in cut for start, piece in next(found) if piece.strip()]
            passages.append([_passage(document, row, *piece) for row, piece in enumerate(pieces)])
        return passages

    def _load(self) -> Any:
        try:
            from semantic_text_splitter import TextSplitter
        except ImportError as error:
            raise MissingExtraError("semantic-text-splitter", "diskann") from error
        tokenizer = _load_tokenizer(self._tokenizer)
        return TextSplitter.from_huggingface_tokenizer(tokenizer, self.max_tokens, self._overlap_tokens)


def _passage(document: Chunk, row: int, start: int, text: str) -> Chunk:
    metadata = {**document.metadata, "passage": row, "start": start}
    return Chunk(text, source=document.source, title=document.title, metadata=metadata)


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """The text in blocks with their first characters' places, each ended at the best break in its second half."""
    starts = [0]
    while len(text) - starts[-1] > _BLOCK_CHARACTERS:
        start, end = starts[-1], starts[-1] + _BLOCK_CHARACTERS
        middle = start + _BLOCK_CHARACTERS // 2
        found = ((text.rfind(mark, middle, end), mark) for mark in _BREAKS)
        starts.append(next((at + len(mark) for at, mark in found if at >= 0), end))
    return ((start, text[start:end]) for start, end in pairwise([*starts, len(text)]))


def _load_tokenizer(name: str | None) -> Any:
    from tokenizers import Tokenizer

    if name is None:
        return Tokenizer.from_file(str(_wordllama_tokenizer()))
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(os.fspath(file)) if file.is_file() else Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises plain Exception
        raise ConfigurationError(
            f"tokenizer={name!r}: it cannot be loaded ({error}); give a tokenizer.json, a folder that holds one, or "
            "a name on the hub"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _wordllama_tokenizer() -> Path:
    from stream2llm_sdk.retrievers.embedding import wordllama_folder

    return wordllama_folder() / "tokenizers" / "l2_supercat_tokenizer_config.json"
