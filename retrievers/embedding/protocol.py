"""What an embedder is, and its vectors checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import RetrievalError

__all__ = ["Embedder", "embed_unit_vectors", "embed_vectors", "scaled_to_unit", "unusable_rows", "unusable_vector"]


@runtime_checkable
class Embedder(Protocol):
    """Turns text into vectors. Called from worker threads, possibly from several at a time.

    An embedder may also have `embed_queries`, of the same form as `embed`, where a question is embedded unlike a
    document; and `spec`, the text that `embedder_of` makes it from again.
    """

    @property
    def name(self) -> str:
        """Identifies the embedding space: it is stored with an index, and an index is only searched with an embedder
        of the same name."""
        ...

    @property
    def dim(self) -> int:
        """The length of every vector."""
        ...

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """One row a text, shape `(len(texts), dim)`. The rows need not be normalised."""
        ...


def embed_vectors(embedder: Embedder, texts: Sequence[str], *, queries: bool = False) -> npt.NDArray[np.float32]:
    """The embedder's vectors as they are, shape `(len(texts), dim)`.

    Args:
        embedder: makes them.
        texts: what is embedded.
        queries: `texts` are questions, not documents.

    Raises:
        RetrievalError: the embedder returned another shape.
    """
    embed = getattr(embedder, "embed_queries", embedder.embed) if queries else embedder.embed
    with np.errstate(over="ignore"):
        vectors = np.asarray(embed(texts), np.float32)
    if vectors.shape != (len(texts), embedder.dim):
        raise RetrievalError(
            f"embedder {embedder.name!r} returned an array of shape {vectors.shape} for {len(texts)} texts; "
            f"it must be {(len(texts), embedder.dim)}"
        )
    return vectors


def unusable_rows(vectors: npt.NDArray[np.float32], *, unit: bool) -> dict[int, str]:
    """The rows that cannot be ranked, and what they are: not finite, or zero where only directions count."""
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    bad = ~np.isfinite(lengths) | ((lengths == 0) & unit)
    return {int(row): "zero" if lengths[row] == 0 else "not finite" for row in np.flatnonzero(bad)}


def embed_unit_vectors(
    embedder: Embedder,
    texts: Sequence[str],
    label: Callable[[int], str],
    *,
    unit: bool = True,
    queries: bool = False,
) -> npt.NDArray[np.float32]:
    """Embeds `texts` and scales every row to length 1, so that squared L2 distance ranks like cosine.

    Args:
        embedder: makes the vectors.
        texts: what is embedded.
        label: names the text of a row in an error message.
        unit: False leaves the lengths as they are, for metrics that use them; zero is then no error.
        queries: `texts` are questions, not documents.

    Raises:
        RetrievalError: the embedder returned another shape, or a row that is zero or not finite.
    """
    vectors = embed_vectors(embedder, texts, queries=queries)
    for row, kind in unusable_rows(vectors, unit=unit).items():
        raise unusable_vector(embedder, label(row), kind, texts[row])
    return scaled_to_unit(vectors) if unit else vectors


def unusable_vector(embedder: Embedder, label: str, kind: str, text: str) -> RetrievalError:
    """The error for a vector that cannot be ranked."""
    return RetrievalError(
        f"embedder {embedder.name!r} gave {label} a vector that is {kind}, which cannot be ranked "
        f"by similarity; its text begins {text[:60]!r}"
    )


def scaled_to_unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Rows of length 1."""
    exact = vectors.astype(np.float64)
    return np.asarray(exact / np.linalg.norm(exact, axis=1, keepdims=True), np.float32)
