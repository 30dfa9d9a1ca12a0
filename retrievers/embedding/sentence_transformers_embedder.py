"""Any model of sentence-transformers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError, MissingExtraError

__all__ = ["SentenceTransformerEmbedder"]


class SentenceTransformerEmbedder:
    """Embeds with a sentence-transformers model: questions by its `encode_query`, documents by its `encode_document`,
    so that the prompts which the model was trained with are used.

    The model is loaded at the first use or by `load()`, and used by one thread at a time: its tokenizer allows no more.

    Args:
        model: a name on the hub, or the folder of a saved model.
        device: "cpu", "cuda", …; None leaves it to the library.
        batch_size: texts computed at once.
        trust_remote_code: runs code that comes with the model.

    Raises:
        ConfigurationError: a value is out of range, or the model cannot be loaded (at the first use).
        MissingExtraError: sentence-transformers is not installed (at the first use).
    """

    def __init__(
        self, model: str, *, device: str | None = None, batch_size: int = 32, trust_remote_code: bool = False
    ) -> None:
        if not isinstance(model, str) or not model.strip():
            raise ConfigurationError(
                f"model={model!r:.80}: give the name or the folder of a sentence-transformers model"
            )
        if not 1 <= batch_size <= 65_536:
            raise ConfigurationError(f"batch_size={batch_size!r}: give 1 to 65,536")
        self._model_name = model
        self._device = device
        self._batch_size = batch_size
        self._trust_remote_code = trust_remote_code
        self._lock = threading.Lock()
        self._model: Any = None

    def __repr__(self) -> str:
        return f"SentenceTransformerEmbedder({self._model_name!r})"

    @property
    def name(self) -> str:
        """The model's name on the hub, or its folder's last part: a folder may move."""
        folder = Path(self._model_name)
        name = folder.resolve().name if folder.is_dir() else self._model_name
        return f"sentence-transformers:{name}"

    @property
    def spec(self) -> str:
        """The text that `embedder_of` makes it from again."""
        folder = Path(self._model_name)
        return f"sentence-transformers:{folder.resolve() if folder.is_dir() else self._model_name}"

    @property
    def dim(self) -> int:
        """Loads the model."""
        self.load()
        return int(self._model.get_embedding_dimension())

    def load(self) -> None:
        """Loads the model if it is not loaded yet; blocks for seconds. Raises as the class says."""
        with self._lock:
            if self._model is None:
                self._model = self._load()

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Documents, shape `(len(texts), dim)`. Longer texts are cut to what the model reads."""
        return self._encode("encode_document", texts)

    def embed_queries(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Questions, shape `(len(texts), dim)`."""
        return self._encode("encode_query", texts)

    def _encode(self, method: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        self.load()
        # Tokenizers refuse lone surrogates, which crawled text does contain.
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        if not clean:
            return np.zeros((0, self.dim), np.float32)
        with self._lock:
            vectors = getattr(self._model, method)(clean, batch_size=self._batch_size, show_progress_bar=False)
        return np.asarray(vectors, np.float32)

    def _load(self) -> Any:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingExtraError("sentence-transformers", "embeddings") from error
        try:
            return SentenceTransformer(self._model_name, device=self._device, trust_remote_code=self._trust_remote_code)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ConfigurationError(
                f"model={self._model_name!r}: sentence-transformers cannot load it ({error}); give a folder that holds "
                "a saved model, or a name on the hub that this machine can reach"
            ) from error
