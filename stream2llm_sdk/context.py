"""Context as text: chunks, the updates that carry them, and the retriever protocol."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, cast, runtime_checkable

from stream2llm_sdk.errors import ConfigurationError

__all__ = [
    "Append",
    "Chunk",
    "ContextMode",
    "ContextUpdate",
    "Replace",
    "Retriever",
    "RetrieverLike",
    "SourceFailure",
    "as_retriever",
    "named_retrievers",
]


_SHOWN_CHARACTERS = 80


class ContextMode(StrEnum):
    """How a retriever's context grows.

    Attributes:
        APPEND: pieces arrive one after another and stay (a crawler).
        UPDATE: the whole current context is refined and replaced (a vector search's top-k).
    """

    APPEND = "append"
    UPDATE = "update"


@dataclass(frozen=True, slots=True, repr=False)
class Chunk:
    """One piece of context. Its repr shows the beginning of the text.

    Attributes:
        text: what the model reads.
        source: where it comes from, a URL or a document id; shown with the answer.
        title: a short name for people.
        score: the retriever's own relevance, larger is better; None when it has none.
        metadata: anything else; never reaches the prompt.
    """

    text: str
    source: str = ""
    title: str = ""
    score: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("text", "source", "title"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ConfigurationError(f"Chunk.{name} must be a str, not {type(value).__name__}: {value!r:.80}")

    def __repr__(self) -> str:
        parts = [shortened(self.text)]
        parts += [f"{name}={value!r}" for name in ("source", "title") if (value := getattr(self, name))]
        parts += [f"score={self.score!r}"] if self.score is not None else []
        parts += [f"metadata={dict(self.metadata)!r:.200}"] if self.metadata else []
        return f"Chunk({', '.join(parts)})"


def shortened(text: str) -> str:
    """The repr of a text for one line: of a long one its first words, and how long it is."""
    if len(text) <= _SHOWN_CHARACTERS:
        return repr(text)
    start = text[:_SHOWN_CHARACTERS].rpartition(" ")[0] or text[:_SHOWN_CHARACTERS]
    return f"{start + '…'!r} ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class _ChunkList:
    chunks: tuple[Chunk, ...]

    def __init__(self, chunks: Iterable[Chunk] | Chunk) -> None:
        items = (chunks,) if isinstance(chunks, Chunk) else tuple(chunks)
        for item in items:
            if not isinstance(item, Chunk):
                raise ConfigurationError(
                    f"{type(self).__name__} takes Chunk objects, not {type(item).__name__}: {item!r:.80}"
                )
        object.__setattr__(self, "chunks", items)


class Append(_ChunkList):
    """New chunks behind those that are already there.

    Attributes:
        chunks: the new ones: one, or any number of them. None of them is an update too.
    """

    __slots__ = ()


class Replace(_ChunkList):
    """The whole current context in place of what was there.

    Attributes:
        chunks: all of it, best first.
    """

    __slots__ = ()


ContextUpdate = Append | Replace
"""What a retriever yields."""


@dataclass(frozen=True, slots=True)
class SourceFailure:
    """One source that could not be used. A retriever may yield it between updates; it is never fatal by
    itself and is listed in the answer's `failures`.

    Attributes:
        source: the URL or document id.
        reason: one line for people.
    """

    source: str
    reason: str


@runtime_checkable
class Retriever(Protocol):
    """Anything that streams context: an object with a `mode` and a `stream(query)`.

    `stream` is called once a question and may be called again while earlier iterators are still running.
    Closing the iterator (`aclose`) must release everything that it holds. An exception out of it ends the
    retrieval; what was yielded before stays in the prompt.

    In UPDATE mode a `Replace` holds the best chunk first, and the prompt arranges the chunks by its `ChunkOrder`. A
    retriever that has its own reasons for an order has an attribute `chunk_order = "rank"`.
    """

    @property
    def mode(self) -> ContextMode:
        """APPEND or UPDATE, the same for all questions."""
        ...

    def stream(self, query: str) -> AsyncIterator[ContextUpdate | SourceFailure]:
        """The context for a question, update by update, and what could not be used."""
        ...


RetrieverLike = Retriever | Callable[[str], AsyncIterable[Any]]
"""A retriever, or what `as_retriever` makes one of."""


class _FunctionRetriever:
    """A plain async generator function of text pieces as a retriever."""

    def __init__(self, function: Callable[[str], AsyncIterable[Any]], mode: ContextMode, source: str) -> None:
        self._function = function
        self.mode = mode
        self.__name__ = source
        self._source = source

    def __repr__(self) -> str:
        return f"as_retriever({self._source}, mode={self.mode.value!r})"

    async def stream(self, query: str) -> AsyncIterator[ContextUpdate | SourceFailure]:
        pieces = self._function(query)
        if not isinstance(pieces, AsyncIterable):
            raise ConfigurationError(
                f"{self._source} returned {type(pieces).__name__}, which is no async iterable: write it as "
                "`async def` with `yield`"
            )
        try:
            async for piece in pieces:
                yield self._update(piece)
        finally:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    def _update(self, piece: Any) -> ContextUpdate | SourceFailure:
        if isinstance(piece, (Append, Replace, SourceFailure)):
            return piece
        items = (piece,) if isinstance(piece, (str, Chunk)) else piece
        if not isinstance(items, Iterable) or isinstance(items, (bytes, Mapping)):
            raise ConfigurationError(
                f"{self._source} yielded {type(piece).__name__}; yield text, Chunk, a list of these, Append or Replace"
            )
        chunks = [Chunk(item, source=self._source) if isinstance(item, str) else item for item in items]
        return Append(chunks) if self.mode is ContextMode.APPEND else Replace(chunks)


def as_retriever(
    source: Retriever | Callable[[str], AsyncIterable[Any]],
    *,
    mode: ContextMode | str = ContextMode.APPEND,
    name: str | None = None,
) -> Retriever:
    """Makes a retriever of `source`.

    A retriever is returned as it is. A function of the query that returns an async iterable (an async generator
    function) is wrapped: each piece it yields may be text, a `Chunk`, a list of these, or an `Append`/`Replace`.
    In UPDATE mode each piece is the whole current context.

    Args:
        source: the retriever or the function.
        mode: of a function's pieces.
        name: what a function's retriever is called; left out, the function's name.

    Raises:
        ConfigurationError: `source` is neither, or `mode` is not one of 'append' and 'update'.
    """
    if isinstance(source, Retriever):
        return source
    if any(map(inspect.isgeneratorfunction, (source, getattr(source, "__call__", None)))):  # noqa: B004
        raise ConfigurationError(
            f"{source!r:.80} is a plain generator function: it must be `async def`, so that others run while it waits"
        )
    if not callable(source) or inspect.iscoroutinefunction(source):
        raise ConfigurationError(
            f"{source!r:.80} is not a retriever: give an object with `mode` and `stream(query)`, "
            "or an async generator function of the query"
        )
    try:
        context_mode = ContextMode(mode)
    except ValueError:
        raise ConfigurationError(f"mode={mode!r}: choose 'append' or 'update'") from None
    return _FunctionRetriever(source, context_mode, name or str(getattr(source, "__name__", type(source).__name__)))


def named_retrievers(
    retrievers: RetrieverLike | Sequence[RetrieverLike] | Mapping[str, RetrieverLike],
) -> dict[str, Retriever]:
    """Retrievers by name. Names made up here are those of their classes or functions, numbered where they repeat.

    Raises:
        ConfigurationError: there is none, or one is no retriever.
    """
    if isinstance(retrievers, Mapping):
        named = {str(name): as_retriever(retriever) for name, retriever in retrievers.items()}
    else:
        several = retrievers if isinstance(retrievers, (list, tuple)) else [cast(RetrieverLike, retrievers)]
        named = {}
        for retriever in several:
            base = getattr(retriever, "__name__", type(retriever).__name__)
            name, number = base, 1
            while name in named:
                number += 1
                name = f"{base}-{number}"
            named[name] = as_retriever(retriever)
    if not named:
        raise ConfigurationError("no retriever: give one, or a list or a mapping of them")
    return named
