"""Latent semantic analysis: hashed TF-IDF vectors, projected to dense ones that a vector index can hold."""

from __future__ import annotations

import io
import itertools
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError, IndexFormatError, MissingExtraError

__all__ = ["SPARSE_FILE", "SparseEmbedder"]

SPARSE_FILE = "sparse.npz"
_NUM_FEATURES = 2**18


class SparseEmbedder:
    """Word statistics in place of a trained model: words hashed to 262,144 features, weighted by `(1 + ln tf) · idf`
    (Salton & Buckley 1988), and projected by a truncated singular value decomposition to `dim` dimensions (Deerwester
    et al. 1990). It is fitted to a sample of the documents themselves, and needs no weights and no GPU.

    It finds rare words and names that a small embedding model has no direction for, in any language that writes spaces;
    the projection loses some of that: words that no sampled document has are ignored. It is made by `fit`, or read by
    `load`.
    """

    def __init__(self, features: npt.NDArray[np.int64], projection: npt.NDArray[np.float32]) -> None:
        """Use `fit` or `load`.

        Args:
            features: the hashed features that the sample has, ascending.
            projection: shape `(len(features), dim)`, the features' idf times their singular vectors.
        """
        self._features = features
        self._projection = projection
        self._vectorizer = _vectorizer()
        self._checksum = zlib.crc32(projection.tobytes(), zlib.crc32(features.tobytes()))

    def __repr__(self) -> str:
        return f"SparseEmbedder({self.name!r})"

    @property
    def name(self) -> str:
        """Names the fit too: vectors of two fits cannot be compared."""
        return f"sparse-{self.dim}-{self._checksum:08x}"

    @property
    def spec(self) -> str:
        """The text that `embedder_of` makes it from again."""
        return f"sparse:{self.dim}"

    @property
    def dim(self) -> int:
        """The length of every vector."""
        return int(self._projection.shape[1])

    @classmethod
    def fit(cls, texts: Iterable[str], *, dim: int = 512, max_texts: int = 50_000, seed: int = 0) -> SparseEmbedder:
        """Fits it to the first `max_texts` of `texts`. The same texts and `seed` give the same embedder.

        Raises:
            ConfigurationError: a number is out of range, or there are too few texts or words for `dim` dimensions.
            MissingExtraError: scikit-learn is not installed.
        """
        if not 8 <= dim <= 4096:
            raise ConfigurationError(f"dim={dim!r}: give 8 to 4096")
        sample = list(itertools.islice(texts, max_texts))
        vectorizer = _vectorizer()
        from sklearn.utils.extmath import randomized_svd

        counts = vectorizer.transform(sample) if sample else None
        features = np.unique(counts.indices).astype(np.int64) if counts is not None else np.zeros(0, np.int64)
        if counts is None or min(len(sample), len(features)) <= dim:
            raise ConfigurationError(
                f"{len(sample)} texts of {len(features)} different words are too few for {dim} dimensions; give more "
                "texts, or a smaller dim"
            )
        weights = _log_counts(counts[:, features])
        in_texts = np.bincount(weights.indices, minlength=len(features))
        idf = (np.log((1 + len(sample)) / (1 + in_texts)) + 1).astype(np.float32)
        _, _, components = randomized_svd(_unit_rows(weights.multiply(idf).tocsr()), dim, random_state=seed)
        return cls(features, np.ascontiguousarray((components * idf).T, np.float32))

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Shape `(len(texts), dim)`. A text without a known word gives a row of zeros."""
        if not len(texts):
            return np.zeros((0, self.dim), np.float32)
        counts = self._vectorizer.transform(texts)
        return np.asarray(_log_counts(counts[:, self._features]) @ self._projection, np.float32)

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes it to `sparse.npz` in `directory`, some 2 KB a word; returns the path."""
        path = Path(directory) / SPARSE_FILE
        np.savez(path, features=self._features, projection=self._projection)
        return path

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> SparseEmbedder:
        """Reads what `save` wrote.

        Raises:
            IndexFormatError: the file is missing or damaged.
        """
        path = Path(directory) / SPARSE_FILE
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
                features, projection = arrays["features"], arrays["projection"]
            if features.dtype != np.int64 or projection.dtype != np.float32 or len(features) != len(projection):
                raise ValueError("its arrays do not fit each other")
        except (OSError, ValueError, KeyError, EOFError, zlib.error) as error:
            raise IndexFormatError(f"{path}: holds no sparse embedder that can be read: {error}") from error
        return cls(features, projection)


def _vectorizer() -> Any:
    try:
        from sklearn.feature_extraction.text import HashingVectorizer
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "predict") from error
    return HashingVectorizer(
        n_features=_NUM_FEATURES, alternate_sign=False, norm=None, dtype=np.float32, preprocessor=_folded
    )


def _folded(text: str) -> str:
    return text.encode("utf-8", "replace").decode().lower()


def _log_counts(counts: Any) -> Any:
    counts = counts.tocsr()
    counts.data = 1 + np.log(counts.data)
    return counts


def _unit_rows(matrix: Any) -> Any:
    from sklearn.preprocessing import normalize

    return normalize(matrix)
