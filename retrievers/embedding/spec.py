"""Embedders by name, as the command line and an index's manifest give them."""

from __future__ import annotations

from pathlib import Path

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.embedding.protocol import Embedder

__all__ = ["EMBEDDER_FORMS", "embedder_of"]

EMBEDDER_FORMS = "wordllama, sentence-transformers:MODEL, endpoint:MODEL@URL, or sparse[:DIMENSIONS]"
"""What `embedder_of` takes, in words."""


def embedder_of(spec: str, directory: Path | None = None) -> Embedder:
    """The embedder that `spec` names.

    Args:
        spec: `wordllama`; `sentence-transformers:` with a name on the hub or a folder; `endpoint:MODEL@URL`, whose key
            comes from `OPENAI_API_KEY`; or `sparse`, which is read from `directory`.
        directory: of the index.

    Raises:
        ConfigurationError: the spec is none of these.
        IndexFormatError: the directory holds no sparse embedder.
    """
    kind, _, rest = spec.partition(":")
    if kind == "wordllama" and not rest:
        from stream2llm_sdk.retrievers.embedding.wordllama_embedder import WordLlamaEmbedder

        return WordLlamaEmbedder()
    if kind == "sentence-transformers" and rest:
        from stream2llm_sdk.retrievers.embedding.sentence_transformers_embedder import SentenceTransformerEmbedder

        return SentenceTransformerEmbedder(rest)
    if kind == "endpoint" and "@" in rest:
        from stream2llm_sdk.retrievers.embedding.endpoint_embedder import EndpointEmbedder

        model, _, url = rest.rpartition("@")
        return EndpointEmbedder(model, url)
    if kind == "sparse" and directory is not None:
        from stream2llm_sdk.retrievers.embedding.sparse_embedder import SparseEmbedder

        return SparseEmbedder.load(directory)
    raise ConfigurationError(f"embedder {spec!r}: give {EMBEDDER_FORMS}")
