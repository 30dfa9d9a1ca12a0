"""WordLlama's static embeddings, the default."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError, MissingExtraError

__all__ = ["WordLlamaEmbedder", "wordllama_folder"]


class WordLlamaEmbedder:
    """WordLlama's 256-d static embeddings (the mean of token vectors), from the weights inside its package.

    The weights are loaded at the first use or by `load()`; nothing is downloaded.

    Args:
        max_characters: longer texts are embedded by their first so many characters. Memory grows with the
            longest text of a batch, at about 0.5 KB a character.

    Raises:
        ConfigurationError: `max_characters` is not positive.
        MissingExtraError: on loading, when `wordllama` is not installed.
    """

    name = "wordllama-l2_supercat-256"
    spec = "wordllama"
    dim = 256

    _MAX_BATCH_TEXTS = 64
    _MAX_BATCH_CHARACTERS = 131_072

    def __init__(self, *, max_characters: int = 32_768) -> None:
        if max_characters < 1:
            raise ConfigurationError(f"max_characters={max_characters!r}: give a positive number")
        self._max_characters = max_characters
        self._lock = threading.Lock()
        self._model: Any = None

    def load(self) -> None:
        """Loads the weights if they are not loaded yet; blocks for a second or two."""
        with self._lock:
            if self._model is None:
                self._model = _load_wordllama()

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Shape `(len(texts), 256)`. The empty text gives a row of zeros."""
        self.load()
        vectors = np.zeros((len(texts), self.dim), np.float32)
        # The tokenizer refuses lone surrogates, which crawled text does contain.
        clean = [text[: self._max_characters].encode("utf-8", "replace").decode() for text in texts]
        for rows in self._batches(clean):
            vectors[rows] = self._model.embed([clean[row] for row in rows])
        return vectors

    def _batches(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Rows grouped by length: the model pads each batch to its longest text."""
        batch: list[int] = []
        for row in sorted(range(len(texts)), key=lambda row: len(texts[row])):
            padded = (len(batch) + 1) * len(texts[row])
            if batch and (len(batch) == self._MAX_BATCH_TEXTS or padded > self._MAX_BATCH_CHARACTERS):
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch


def wordllama_folder() -> Path:
    """The package's folder, which holds its weights and its tokenizer.

    Raises:
        MissingExtraError: wordllama is not installed.
    """
    try:
        found = find_spec("wordllama")
    except ValueError:  # what Python says of a module that a test or an application has blocked
        found = None
    if found is None or found.origin is None:
        raise MissingExtraError("wordllama", "diskann")
    return Path(found.origin).parent


def _load_wordllama() -> Any:
    try:
        with _root_logger_kept():
            import wordllama
    except ImportError as error:
        raise MissingExtraError("wordllama", "diskann") from error
    return wordllama.WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)


@contextmanager
def _root_logger_kept() -> Iterator[None]:
    """wordllama calls `logging.basicConfig(level=INFO)` when it is imported; an application's logging is its own."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
