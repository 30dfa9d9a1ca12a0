"""Sources of context that stream: a web crawler and a DiskANN index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stream2llm_sdk.lazy import lazy_names

if TYPE_CHECKING:
    from stream2llm_sdk.retrievers.diskann.build import BuildOptions
    from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex, build_index
    from stream2llm_sdk.retrievers.diskann.retriever import DiskANNRetriever
    from stream2llm_sdk.retrievers.diskann.search import EmissionGate
    from stream2llm_sdk.retrievers.embedding import Embedder, WordLlamaEmbedder
    from stream2llm_sdk.retrievers.search_provider import FixedSeeds, SearchHit, SearchProvider, SearxNGSearch
    from stream2llm_sdk.retrievers.web.address_guard import AddressGuard
    from stream2llm_sdk.retrievers.web.convert_pool import ConverterPool
    from stream2llm_sdk.retrievers.web.crawler import CrawlerRetriever

__all__ = [
    "AddressGuard",
    "BuildOptions",
    "ConverterPool",
    "CrawlerRetriever",
    "DiskANNIndex",
    "DiskANNRetriever",
    "Embedder",
    "EmissionGate",
    "FixedSeeds",
    "SearchHit",
    "SearchProvider",
    "SearxNGSearch",
    "WordLlamaEmbedder",
    "build_index",
]

_MODULES = {
    "AddressGuard": "web.address_guard",
    "BuildOptions": "diskann.build",
    "ConverterPool": "web.convert_pool",
    "CrawlerRetriever": "web.crawler",
    "DiskANNIndex": "diskann.index",
    "DiskANNRetriever": "diskann.retriever",
    "Embedder": "embedding",
    "EmissionGate": "diskann.search",
    "FixedSeeds": "search_provider",
    "SearchHit": "search_provider",
    "SearchProvider": "search_provider",
    "SearxNGSearch": "search_provider",
    "WordLlamaEmbedder": "embedding",
    "build_index": "diskann.index",
}

# The parts need different extras, and each takes its time to import.
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
