"""Vectors as texts, for tests of indexes: the text "17" is row 17, "q3" is query 3."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]


def clustered(num_vectors: int, dim: int, *, num_clusters: int = 60, noise: float = 0.8, seed: int = 0) -> Vectors:
    """Vectors around random centres, not normalised."""
    random = np.random.default_rng(seed)
    centres = random.standard_normal((num_clusters, dim), dtype=np.float32)
    points = centres[random.integers(0, num_clusters, num_vectors)]
    return np.asarray(points + np.float32(noise) * random.standard_normal(points.shape, dtype=np.float32))


def unit(vectors: Vectors) -> Vectors:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


class TextAsRow:
    """Embeds "17" as row 17 of the vectors, "q3" as query 3, and all else as query 0."""

    name = "text-as-row"

    def __init__(self, vectors: Vectors, queries: Vectors) -> None:
        self.vectors, self.queries = vectors, queries
        self.dim = int(vectors.shape[1])

    def embed(self, texts: Sequence[str]) -> Vectors:
        return np.array([self._vector(text) for text in texts], np.float32)

    def _vector(self, text: str) -> Vectors:
        if text.isdigit():
            return self.vectors[int(text)]
        number = text.removeprefix("q")
        return self.queries[int(number) if number.isdigit() else 0]


def closest(metric: str, vectors: Vectors, query: Vectors, k: int, rows: Sequence[int] | None = None) -> list[int]:
    """The exact k best rows, best first, of all or of those given."""
    chosen = np.arange(len(vectors)) if rows is None else np.array(sorted(rows), np.int64)
    some = vectors[chosen]
    if metric == "ip":
        scores = some @ query
    elif metric == "cosine":
        scores = unit(some) @ query
    else:
        scores = -((some - query) ** 2).sum(axis=1)
    return [int(row) for row in chosen[np.argsort(-scores, kind="stable")[:k]]]
