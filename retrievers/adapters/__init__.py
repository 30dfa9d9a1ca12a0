"""Retrievers of LangChain, LlamaIndex and Haystack as sources of context; ours, and the engine, as parts of theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stream2llm_sdk.lazy import lazy_names

if TYPE_CHECKING:
    from stream2llm_sdk.retrievers.adapters.document_source import DocumentSource
    from stream2llm_sdk.retrievers.adapters.haystack import HaystackSource
    from stream2llm_sdk.retrievers.adapters.langchain import LangChainSource
    from stream2llm_sdk.retrievers.adapters.langchain_chat import StreamingRAGChat
    from stream2llm_sdk.retrievers.adapters.langchain_retriever import LangChainRetriever
    from stream2llm_sdk.retrievers.adapters.llamaindex import LlamaIndexSource
    from stream2llm_sdk.retrievers.adapters.llamaindex_retriever import LlamaIndexRetriever

__all__ = [
    "DocumentSource",
    "HaystackSource",
    "LangChainRetriever",
    "LangChainSource",
    "LlamaIndexRetriever",
    "LlamaIndexSource",
    "StreamingRAGChat",
]

_MODULES = {
    "DocumentSource": "document_source",
    "HaystackSource": "haystack",
    "LangChainRetriever": "langchain_retriever",
    "LangChainSource": "langchain",
    "LlamaIndexRetriever": "llamaindex_retriever",
    "LlamaIndexSource": "llamaindex",
    "StreamingRAGChat": "langchain_chat",
}

# Each needs another framework, and each of those takes seconds to import.
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
