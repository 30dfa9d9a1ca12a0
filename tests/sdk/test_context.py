"""Chunks, updates, and what can be made a retriever."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import pytest

from stream2llm_sdk.context import (
    Append,
    Chunk,
    ContextMode,
    ContextUpdate,
    Replace,
    Retriever,
    SourceFailure,
    as_retriever,
)
from stream2llm_sdk.errors import ConfigurationError


@pytest.mark.parametrize("field", ["text", "source", "title"])
def test_a_chunk_takes_text_only(field: str) -> None:
    values: dict[str, Any] = {"text": "x", field: b"bytes"}
    with pytest.raises(ConfigurationError, match=rf"Chunk\.{field} must be a str, not bytes"):
        Chunk(**values)


def test_a_chunk_is_frozen_and_hashable_with_its_metadata() -> None:
    chunk: Any = Chunk("x", metadata={"page": [1]})
    assert chunk in {chunk}
    with pytest.raises(FrozenInstanceError):
        chunk.text = "y"


@pytest.mark.parametrize("update", [Append, Replace])
def test_an_update_takes_a_chunk_or_any_iterable_of_chunks(update: Any) -> None:
    one, two = Chunk("1"), Chunk("2")
    assert update(one).chunks == (one,)
    assert update(chunk for chunk in (one, two)).chunks == (one, two)
    assert update([one]) == update(one) != update([two])
    with pytest.raises(ConfigurationError, match=rf"{update.__name__} takes Chunk objects, not str"):
        update([one, "two"])


def test_the_two_updates_are_never_equal() -> None:
    assert Append([Chunk("x")]) != Replace([Chunk("x")])


async def collect(retriever: Retriever) -> list[ContextUpdate | SourceFailure]:
    async with aclosing(retriever.stream("query")) as updates:  # type: ignore[type-var]
        return [update async for update in updates]


async def test_text_chunks_lists_and_updates_are_all_context() -> None:
    failure = SourceFailure("http://b.example/", "timed out")
    chunk = Chunk("c", source="somewhere")

    async def notes(query: str) -> AsyncIterator[Any]:
        yield query
        yield chunk
        yield ["one", chunk]
        yield Replace([chunk])
        yield failure

    retriever = as_retriever(notes)
    assert retriever.mode is ContextMode.APPEND
    assert await collect(retriever) == [
        Append(Chunk("query", source="notes")),
        Append(chunk),
        Append([Chunk("one", source="notes"), chunk]),
        Replace([chunk]),
        failure,
    ]


async def test_in_update_mode_each_piece_is_the_whole_context() -> None:
    async def top_k(query: str) -> AsyncIterator[list[str]]:
        yield ["a"]
        yield ["b", "a"]

    retriever = as_retriever(top_k, mode="update", name="index")
    assert retriever.mode is ContextMode.UPDATE
    a, b = Chunk("a", source="index"), Chunk("b", source="index")
    assert await collect(retriever) == [Replace([a]), Replace([b, a])]


async def test_closing_the_stream_closes_the_function() -> None:
    closed = []

    async def endless(query: str) -> AsyncIterator[str]:
        try:
            while True:
                yield query
        finally:
            closed.append(query)

    updates: Any = as_retriever(endless).stream("query")
    assert await anext(updates) == Append(Chunk("query", source="endless"))
    await updates.aclose()
    assert closed == ["query"]


async def test_streams_of_one_retriever_run_side_by_side() -> None:
    async def twice(query: str) -> AsyncIterator[str]:
        yield query
        yield query

    retriever = as_retriever(twice)
    first, second = retriever.stream("1"), retriever.stream("2")
    pieces = [await anext(stream) for stream in (first, second, first, second)]
    assert [piece.chunks[0].text for piece in pieces if isinstance(piece, Append)] == ["1", "2", "1", "2"]


async def test_the_functions_own_error_comes_out() -> None:
    async def broken(query: str) -> AsyncIterator[str]:
        yield query
        raise OSError("gone")

    updates = as_retriever(broken).stream("query")
    await anext(updates)
    with pytest.raises(OSError, match="gone"):
        await anext(updates)


async def test_a_piece_that_is_no_context_names_the_function() -> None:
    async def numbers(query: str) -> AsyncIterator[int]:
        yield 7

    with pytest.raises(ConfigurationError, match="numbers yielded int"):
        await collect(as_retriever(numbers))


def test_a_retriever_stays_what_it_is() -> None:
    class Own:
        mode = ContextMode.UPDATE

        async def stream(self, query: str) -> AsyncIterator[ContextUpdate | SourceFailure]:
            yield Replace([Chunk(query)])

    own = Own()
    assert as_retriever(own) is own


async def _coroutine(query: str) -> list[str]:
    return [query]


@pytest.mark.parametrize("source", [None, "text", 7, _coroutine])
def test_what_cannot_stream_is_refused(source: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not a retriever"):
        as_retriever(source)


def _generator(query: str) -> Iterator[str]:
    yield query


class _GeneratorObject:
    def __call__(self, query: str) -> Iterator[str]:
        yield query


@pytest.mark.parametrize("source", [_generator, partial(_generator), _GeneratorObject(), _GeneratorObject().__call__])
def test_a_plain_generator_function_is_told_to_be_async(source: Any) -> None:
    with pytest.raises(ConfigurationError, match="plain generator function: it must be `async def`"):
        as_retriever(source)


async def test_a_function_that_returns_no_async_iterable_is_told_to_be_async() -> None:
    def notes(query: str) -> Any:
        return [query]

    with pytest.raises(ConfigurationError, match=r"notes returned list, .* `async def` with `yield`"):
        await collect(as_retriever(notes))


def test_the_repr_of_a_chunk_shows_the_beginning_of_its_text() -> None:
    assert repr(Chunk("short", source="s", score=0.5)) == "Chunk('short', source='s', score=0.5)"
    shown = repr(Chunk("word " * 10_000, title="t"))
    assert shown.startswith("Chunk('word word")
    assert shown.endswith("word…' (50000 characters), title='t')")
    assert len(shown) < 150


def test_an_unknown_mode_is_refused() -> None:
    async def notes(query: str) -> AsyncIterator[str]:
        yield query

    with pytest.raises(ConfigurationError, match="mode='replace': choose 'append' or 'update'"):
        as_retriever(notes, mode="replace")


@pytest.mark.parametrize("piece", [{"text": "x"}, b"x", 5])
async def test_a_piece_of_another_kind_is_refused(piece: Any) -> None:
    async def source(query: str) -> AsyncIterator[Any]:
        yield piece

    with pytest.raises(ConfigurationError, match=type(piece).__name__):
        [update async for update in as_retriever(source).stream("q")]
