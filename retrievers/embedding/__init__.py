"""Text embeddings: the protocol, WordLlama's static embeddings as the default, and others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stream2llm_sdk.lazy import lazy_names
from stream2llm_sdk.retrievers.embedding.protocol import Embedder, embed_unit_vectors, embed_vectors
from stream2llm_sdk.retrievers.embedding.spec import EMBEDDER_FORMS, embedder_of
from stream2llm_sdk.retrievers.embedding.wordllama_embedder import WordLlamaEmbedder, wordllama_folder

if TYPE_CHECKING:
    from stream2llm_sdk.retrievers.embedding.endpoint_embedder import EndpointEmbedder
    from stream2llm_sdk.retrievers.embedding.sentence_transformers_embedder import SentenceTransformerEmbedder
    from stream2llm_sdk.retrievers.embedding.sparse_embedder import SparseEmbedder

__all__ = [
    "EMBEDDER_FORMS",
    "Embedder",
    "EndpointEmbedder",
    "SentenceTransformerEmbedder",
    "SparseEmbedder",
    "WordLlamaEmbedder",
    "embed_unit_vectors",
    "embed_vectors",
    "embedder_of",
    "wordllama_folder",
]

_MODULES = {
    "EndpointEmbedder": "endpoint_embedder",
    "SentenceTransformerEmbedder": "sentence_transformers_embedder",
    "SparseEmbedder": "sparse_embedder",
}

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
