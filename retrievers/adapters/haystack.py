"""Haystack's retrievers and pipelines as a source of context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.retrievers.adapters.document_source import Call, DocumentSource, chunk_of

__all__ = ["HaystackSource"]

# What components call the question that they take.
_QUERY_INPUTS = ("query", "text", "question")


class HaystackSource(DocumentSource):
    """Haystack retrievers and pipelines as one retriever that streams: each one's documents are appended when it has
    them.

        StreamingRAG(model, HaystackSource(InMemoryBM25Retriever(store), embedding_pipeline))

    A component that takes a `query` can be given as it is. One that takes an embedding needs a pipeline, in which the
    query goes to every input that is called query, text or question, is needed and is not connected. Documents are
    taken from every output called `documents` that the pipeline ends in. Asynchronous runs are used where there are
    any, and threads otherwise.

    Args:
        retrievers: components, or pipelines.
        inputs: what to run with for a query, if not that alone: the arguments of a component, the data of a pipeline.
        max_documents: most documents of each.
        timeout_s: seconds after which a retriever is given up.
        in_thread: True uses `run` in a thread for all, such as for one whose `run_async` blocks.
        max_threads: most such calls at a time.

    Raises:
        ConfigurationError: one is no component and no pipeline, none of its inputs takes the query, or a value is out
            of range.
    """

    def __init__(
        self,
        *retrievers: Any,
        inputs: Callable[[str], Mapping[str, Any]] | None = None,
        max_documents: int | None = None,
        timeout_s: float | None = None,
        in_thread: bool | None = None,
        max_threads: int = 8,
    ) -> None:
        super().__init__(
            [_call(retriever, inputs, bool(in_thread)) for retriever in retrievers],
            _chunk,
            max_documents=max_documents,
            timeout_s=timeout_s,
            max_threads=max_threads,
        )


def _call(retriever: Any, inputs: Callable[[str], Mapping[str, Any]] | None, in_thread: bool) -> Call:
    is_pipeline = hasattr(retriever, "add_component") and hasattr(retriever, "inputs")
    if isinstance(retriever, type) or not hasattr(retriever, "run"):
        raise ConfigurationError(f"{retriever!r:.80} is no Haystack component or pipeline: it has no run()")
    if inputs is None:
        inputs = _pipeline_inputs(retriever) if is_pipeline else _component_inputs(retriever)
    has_async = hasattr(retriever, "run_async") and getattr(retriever, "__haystack_supports_async__", is_pipeline)
    is_blocking = in_thread or not has_async
    run = retriever.run if is_blocking else retriever.run_async
    documents = _blocking if is_blocking else _asynchronous
    return Call(
        type(retriever).__name__,
        partial(documents, run, inputs, is_pipeline),
        is_blocking,
        prepare=getattr(retriever, "warm_up", None),
    )


def _blocking(run: Any, inputs: Callable[[str], Mapping[str, Any]], is_pipeline: bool, query: str) -> list[Any]:
    data = inputs(query)
    return _documents(run(data) if is_pipeline else run(**data), is_pipeline)


async def _asynchronous(
    run: Any, inputs: Callable[[str], Mapping[str, Any]], is_pipeline: bool, query: str
) -> list[Any]:
    data = inputs(query)
    return _documents(await (run(data) if is_pipeline else run(**data)), is_pipeline)


def _documents(outputs: Any, is_pipeline: bool) -> list[Any]:
    parts: Iterable[Any] = outputs.values() if is_pipeline else [outputs]
    found = [part["documents"] for part in parts if isinstance(part, Mapping) and "documents" in part]
    if not found:
        names = ", ".join(map(str, outputs)) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise RetrievalError(f"no output called 'documents', only: {names}")
    return [document for documents in found for document in documents]


def _component_inputs(component: Any) -> Callable[[str], Mapping[str, Any]]:
    sockets = getattr(component, "__haystack_input__", None)
    if sockets is None:
        raise ConfigurationError(f"{component!r:.80} is no Haystack component: make it one with @component")
    names = list(sockets._sockets_dict)
    takes = next((name for name in _QUERY_INPUTS if name in names), None)
    if takes is None:
        raise ConfigurationError(
            f"{type(component).__name__} takes {', '.join(names)} and no query: give a pipeline that makes these of "
            "it, or inputs="
        )
    return lambda query: {takes: query}


def _pipeline_inputs(pipeline: Any) -> Callable[[str], Mapping[str, Any]]:
    takes = {
        component: [name for name, socket in sockets.items() if name in _QUERY_INPUTS and socket["is_mandatory"]]
        for component, sockets in pipeline.inputs().items()
    }
    takes = {component: names for component, names in takes.items() if names}
    if not takes:
        raise ConfigurationError(
            f"the pipeline has no free input called {', '.join(_QUERY_INPUTS)}: say with inputs= what to run it with"
        )
    return lambda query: {component: dict.fromkeys(names, query) for component, names in takes.items()}


def _chunk(document: Any) -> Chunk | None:
    if not hasattr(document, "content"):
        raise ConfigurationError(f"{type(document).__name__} has no content: a retriever returns Documents")
    return chunk_of(document.content, document.meta, source=document.id, score=document.score)
