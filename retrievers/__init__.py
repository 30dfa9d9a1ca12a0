"""Sources of context that stream: a web crawler, DiskANN indexes, and what joins, orders and adapts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stream2llm_sdk.lazy import lazy_names

if TYPE_CHECKING:
    from stream2llm_sdk.retrievers.adapters import (
        DocumentSource,
        HaystackSource,
        LangChainRetriever,
        LangChainSource,
        LlamaIndexRetriever,
        LlamaIndexSource,
        StreamingRAGChat,
    )
    from stream2llm_sdk.retrievers.diskann.build import build_index
    from stream2llm_sdk.retrievers.diskann.corpus import CorpusColumns, open_corpus
    from stream2llm_sdk.retrievers.diskann.dynamic import DynamicDiskANN
    from stream2llm_sdk.retrievers.diskann.evaluation import evaluate
    from stream2llm_sdk.retrievers.diskann.filters import MetadataFilter
    from stream2llm_sdk.retrievers.diskann.graph_build import BuildOptions
    from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
    from stream2llm_sdk.retrievers.diskann.retriever import DiskANNRetriever
    from stream2llm_sdk.retrievers.diskann.search_options import EarlyStop, EmissionGate, SearchOptions
    from stream2llm_sdk.retrievers.diskann.splitter import PassageSplitter
    from stream2llm_sdk.retrievers.diskann.streaming_policy import StreamingPolicy
    from stream2llm_sdk.retrievers.embedding import (
        Embedder,
        EndpointEmbedder,
        SentenceTransformerEmbedder,
        SparseEmbedder,
        WordLlamaEmbedder,
    )
    from stream2llm_sdk.retrievers.merge import Merge, Weighted
    from stream2llm_sdk.retrievers.rerank import Rerank
    from stream2llm_sdk.retrievers.rerankers import CrossEncoderReranker, EndpointReranker, FunctionReranker, Reranker
    from stream2llm_sdk.retrievers.search.dataset import DatasetURLs
    from stream2llm_sdk.retrievers.search.duckduckgo import DuckDuckGoSearch
    from stream2llm_sdk.retrievers.search.known_pages import KnownPage, pages_in_folder
    from stream2llm_sdk.retrievers.search.local import LocalIndexSearch
    from stream2llm_sdk.retrievers.search.merged import SearchAll
    from stream2llm_sdk.retrievers.search.provider import FixedSeeds, SearchHit, SearchProvider, StreamingSearchProvider
    from stream2llm_sdk.retrievers.search.searxng import SearxNGSearch
    from stream2llm_sdk.retrievers.search.tavily import TavilySearch
    from stream2llm_sdk.retrievers.web.address_guard import AddressGuard
    from stream2llm_sdk.retrievers.web.browser_options import BrowserOptions
    from stream2llm_sdk.retrievers.web.convert_pool import ConverterPool
    from stream2llm_sdk.retrievers.web.crawl4ai_fetch import Crawl4AIFetch
    from stream2llm_sdk.retrievers.web.crawl4ai_strategy import GuardedHTTPStrategy
    from stream2llm_sdk.retrievers.web.crawl_options import FetchMode, PolitenessOptions
    from stream2llm_sdk.retrievers.web.crawler import CrawlerRetriever
    from stream2llm_sdk.retrievers.web.fetch import PageFetcher
    from stream2llm_sdk.retrievers.web.fetched_page import FetchedPage
    from stream2llm_sdk.retrievers.web.frontier import LinkOptions
    from stream2llm_sdk.retrievers.web.http_cache import HTTPCache
    from stream2llm_sdk.retrievers.web.page import ExtractionOptions, QualityLimits
    from stream2llm_sdk.retrievers.web.politeness import Politeness

__all__ = [
    "AddressGuard",
    "BrowserOptions",
    "BuildOptions",
    "ConverterPool",
    "CorpusColumns",
    "Crawl4AIFetch",
    "CrawlerRetriever",
    "CrossEncoderReranker",
    "DatasetURLs",
    "DiskANNIndex",
    "DiskANNRetriever",
    "DocumentSource",
    "DuckDuckGoSearch",
    "DynamicDiskANN",
    "EarlyStop",
    "Embedder",
    "EmissionGate",
    "EndpointEmbedder",
    "EndpointReranker",
    "ExtractionOptions",
    "FetchMode",
    "FetchedPage",
    "FixedSeeds",
    "FunctionReranker",
    "GuardedHTTPStrategy",
    "HTTPCache",
    "HaystackSource",
    "KnownPage",
    "LangChainRetriever",
    "LangChainSource",
    "LinkOptions",
    "LlamaIndexRetriever",
    "LlamaIndexSource",
    "LocalIndexSearch",
    "Merge",
    "MetadataFilter",
    "PageFetcher",
    "PassageSplitter",
    "Politeness",
    "PolitenessOptions",
    "QualityLimits",
    "Rerank",
    "Reranker",
    "SearchAll",
    "SearchHit",
    "SearchOptions",
    "SearchProvider",
    "SearxNGSearch",
    "SentenceTransformerEmbedder",
    "SparseEmbedder",
    "StreamingPolicy",
    "StreamingRAGChat",
    "StreamingSearchProvider",
    "TavilySearch",
    "Weighted",
    "WordLlamaEmbedder",
    "build_index",
    "evaluate",
    "open_corpus",
    "pages_in_folder",
]

_MODULES = {
    "AddressGuard": "web.address_guard",
    "BrowserOptions": "web.browser_options",
    "BuildOptions": "diskann.graph_build",
    "ConverterPool": "web.convert_pool",
    "CorpusColumns": "diskann.corpus",
    "Crawl4AIFetch": "web.crawl4ai_fetch",
    "CrawlerRetriever": "web.crawler",
    "CrossEncoderReranker": "rerankers",
    "DatasetURLs": "search.dataset",
    "DiskANNIndex": "diskann.index",
    "DiskANNRetriever": "diskann.retriever",
    "DocumentSource": "adapters",
    "DuckDuckGoSearch": "search.duckduckgo",
    "DynamicDiskANN": "diskann.dynamic",
    "EarlyStop": "diskann.search_options",
    "Embedder": "embedding",
    "EmissionGate": "diskann.search_options",
    "EndpointEmbedder": "embedding",
    "EndpointReranker": "rerankers",
    "ExtractionOptions": "web.page",
    "FetchMode": "web.crawl_options",
    "FetchedPage": "web.fetched_page",
    "FixedSeeds": "search.provider",
    "FunctionReranker": "rerankers",
    "GuardedHTTPStrategy": "web.crawl4ai_strategy",
    "HTTPCache": "web.http_cache",
    "HaystackSource": "adapters",
    "KnownPage": "search.known_pages",
    "LangChainRetriever": "adapters",
    "LangChainSource": "adapters",
    "LinkOptions": "web.frontier",
    "LlamaIndexRetriever": "adapters",
    "LlamaIndexSource": "adapters",
    "LocalIndexSearch": "search.local",
    "Merge": "merge",
    "MetadataFilter": "diskann.filters",
    "PageFetcher": "web.fetch",
    "PassageSplitter": "diskann.splitter",
    "Politeness": "web.politeness",
    "PolitenessOptions": "web.crawl_options",
    "QualityLimits": "web.page",
    "Rerank": "rerank",
    "Reranker": "rerankers",
    "SearchAll": "search.merged",
    "SearchHit": "search.provider",
    "SearchOptions": "diskann.search_options",
    "SearchProvider": "search.provider",
    "SearxNGSearch": "search.searxng",
    "SentenceTransformerEmbedder": "embedding",
    "SparseEmbedder": "embedding",
    "StreamingPolicy": "diskann.streaming_policy",
    "StreamingRAGChat": "adapters",
    "StreamingSearchProvider": "search.provider",
    "TavilySearch": "search.tavily",
    "Weighted": "merge",
    "WordLlamaEmbedder": "embedding",
    "build_index": "diskann.build",
    "evaluate": "diskann.evaluation",
    "open_corpus": "diskann.corpus",
    "pages_in_folder": "search.known_pages",
}

# The parts need different extras, and each takes its time to import.
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
