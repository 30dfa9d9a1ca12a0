"""Several retrievers as one: one stream of updates for one prompt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from stream2llm_sdk.context import (
    Append,
    ContextMode,
    ContextUpdate,
    Replace,
    Retriever,
    RetrieverLike,
    SourceFailure,
    as_retriever,
    named_retrievers,
)
from stream2llm_sdk.errors import ConfigurationError, MissingExtraError, RetrievalError
from stream2llm_sdk.placement import ChunkOrder
from stream2llm_sdk.retrievers.merged_context import MergedContext, SourceRules
from stream2llm_sdk.tasks import ended

__all__ = ["Merge", "Weighted", "about_tokens"]

_PROMPT_S = 0.1
_CLEANUP_S = 10.0  # as long may a source take to release what it holds; then its cleanup is cancelled too


def about_tokens(text: str) -> int:
    """A text's tokens by rule of thumb, four characters each. For exact budgets, count with the model's tokenizer."""
    return -(-len(text) // 4)


@dataclass(frozen=True, slots=True)
class Weighted:
    """A retriever, and how much of a merged context it may fill.

    Attributes:
        retriever: a retriever, or an async generator function of the query.
        weight: its part of the budgets of `Merge`, relative to the other sources'.
        max_chunks: most chunks of it, whatever is left of the budget.
        max_tokens: most tokens of it.
        timeout_s: seconds after which it is ended, not counting those in which it waits for the reader. What it has
            brought by then stays.
        name: what it is called in failures; left out, by its class or function.

    Raises:
        ConfigurationError: a value is out of range.
    """

    retriever: RetrieverLike
    weight: float = 1.0
    max_chunks: int | None = None
    max_tokens: int | None = None
    timeout_s: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if not _is_positive(self.weight):
            raise ConfigurationError(
                f"weight={self.weight!r}: give a number above 0; to leave a source out, leave it out"
            )
        _check_count("max_chunks", self.max_chunks)
        _check_count("max_tokens", self.max_tokens)
        if self.timeout_s is not None and not _is_positive(self.timeout_s):
            raise ConfigurationError(f"timeout_s={self.timeout_s!r}: give a number of seconds above 0")


@dataclass(frozen=True, slots=True)
class _Ended:
    """The last that comes from a source."""

    error: BaseException | None = None


_FromSource = tuple[int, ContextUpdate | SourceFailure | _Ended]


class Merge:
    """Streams what several retrievers bring as one context, in an order in which they disturb each other little.

        Merge(CrawlerRetriever(search=...), Weighted(DiskANNRetriever("index"), weight=2, timeout_s=2), max_tokens=6000)

    Where all sources append, this appends. Otherwise each update is the whole context, in the order that it should
    have in the prompt: what is there stays where it is, new text goes behind it, and what is certain to stay goes
    before what may still change (`MergedContext` has the rules). It so costs fewer prefilled tokens than the same
    retrievers side by side in one prompt, where each appended chunk goes before the pools and makes all of them be
    prefilled again.

    A source that fails is reported as a `SourceFailure` with its name, and stops nothing; so is one that exceeds its
    `timeout_s`, or of whose chunks none fits. A text that two sources bring, or a page (by its URL) of which
    one has brought a part, goes in once. Closing this closes its sources.

    Args:
        sources: retrievers, async generator functions of the query, or `Weighted` ones.
        max_chunks, max_tokens: most of all sources together. Each source may fill its share, by weight; what a source
            that has ended does not need goes to the others. Chunks go in whole or not at all.
        count_tokens: tokens of a text; left out, a quarter of its characters. Called on the event loop.
        hold_s: longest time that a chunk is held back because it would stand behind a pool that may still change,
            in seconds. 0 holds nothing back; infinity lets no change of a pool touch another source's text.
        drop_duplicates: False keeps what several sources bring.

    Raises:
        ConfigurationError: no source, or a value is out of range.
    """

    chunk_order = ChunkOrder.RANK
    """The prompt has the chunks in the order in which they come: it was chosen with the prompt in mind."""

    def __init__(
        self,
        *sources: RetrieverLike | Weighted,
        max_chunks: int | None = None,
        max_tokens: int | None = None,
        count_tokens: Callable[[str], int] = about_tokens,
        hold_s: float = 0.25,
        drop_duplicates: bool = True,
    ) -> None:
        if not sources:
            raise ConfigurationError("no source: Merge(crawler, index) takes the retrievers to merge")
        _check_count("max_chunks", max_chunks)
        _check_count("max_tokens", max_tokens)
        if isinstance(hold_s, bool) or not isinstance(hold_s, (int, float)) or not hold_s >= 0:
            raise ConfigurationError(f"hold_s={hold_s!r}: give a number of seconds, 0 or more")
        if not callable(count_tokens):
            raise ConfigurationError(
                f"count_tokens={count_tokens!r:.80}: give a function from text to a number of tokens"
            )
        self._rules = [source if isinstance(source, Weighted) else Weighted(source) for source in sources]
        self.sources = _named_sources(self._rules)
        self._max_chunks = max_chunks
        self._max_tokens = max_tokens
        self._count_tokens = count_tokens
        self._hold_s = hold_s
        self._drop_duplicates = drop_duplicates
        self._cleanups: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"Merge({', '.join(self.sources)})"

    @property
    def mode(self) -> ContextMode:
        """APPEND if all sources append."""
        appends = all(retriever.mode == ContextMode.APPEND for retriever in self.sources.values())
        return ContextMode.APPEND if appends else ContextMode.UPDATE

    async def stream(self, query: str) -> AsyncIterator[ContextUpdate | SourceFailure]:
        """The merged context as it grows, and failures.

        Raises:
            RetrievalError: every source failed, and none brought anything.
        """
        items: asyncio.Queue[_FromSource] = asyncio.Queue(2 * len(self.sources))
        pumps = [
            asyncio.create_task(self._pump(i, query, items), name=f"stream2llm-merge-{name}")
            for i, name in enumerate(self.sources)
        ]
        try:
            async with aclosing(self._merged(items)) as merged:
                async for item in merged:
                    yield item
        finally:
            for pump in pumps:
                pump.cancel()
            await ended(*pumps, cancel_every_s=_CLEANUP_S)

    async def warm_up(self) -> None:
        """Warms all sources up at once. One that cannot be is left to fail when it is asked, unless none can be.

        Raises:
            ConfigurationError, MissingExtraError: a source says that it can never work as it is.
            Exception: the first error, if no source could be warmed up.
        """
        results = await asyncio.gather(*map(_warm_up, self.sources.values()), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if len(errors) == len(results) or isinstance(error, (ConfigurationError, MissingExtraError)):
                raise error

    async def aclose(self) -> None:
        """Closes the sources that can be closed, and waits for those that were late."""
        loop = asyncio.get_running_loop()
        cleanups = [cleanup for cleanup in self._cleanups if cleanup.get_loop() is loop]
        async with AsyncExitStack() as stack:
            stack.push_async_callback(ended, *cleanups, cancel_every_s=_CLEANUP_S)
            for retriever in self.sources.values():
                if (close := getattr(retriever, "aclose", None)) is not None:
                    stack.push_async_callback(close)

    async def __aenter__(self) -> Merge:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    # ---- one question -------------------------------------------------------------------------------------------

    async def _merged(self, items: asyncio.Queue[_FromSource]) -> AsyncGenerator[ContextUpdate | SourceFailure, None]:
        context = self._context()
        names = list(self.sources)
        errors: dict[str, BaseException] = {}
        num_running, mode = len(names), self.mode
        while num_running:
            for source, item in await _next_batch(items, context.due_s):
                if isinstance(item, SourceFailure):
                    yield item
                elif isinstance(item, _Ended):
                    num_running -= 1
                    context.end(source)
                    if item.error is not None:
                        errors[names[source]] = item.error
                        yield SourceFailure(names[source], _reason(item.error))
                else:
                    context.take(source, item, asyncio.get_running_loop().time())
            before = context.chunks
            if context.arrange(asyncio.get_running_loop().time()):
                chunks = context.chunks
                yield Append(chunks[len(before) :]) if mode is ContextMode.APPEND else Replace(chunks)
        for failure in self._without_room(context):
            yield failure
        if len(errors) == len(names) and not context.chunks:
            reasons = "; ".join(f"{name}: {_reason(error)}" for name, error in errors.items())
            raise RetrievalError(f"no source gave any context: {reasons}") from next(iter(errors.values()))

    def _context(self) -> MergedContext:
        rules = [
            SourceRules(retriever.mode == ContextMode.APPEND, rule.weight, rule.max_chunks, rule.max_tokens)
            for rule, retriever in zip(self._rules, self.sources.values(), strict=True)
        ]
        return MergedContext(
            rules,
            max_chunks=self._max_chunks,
            max_tokens=self._max_tokens,
            count_tokens=self._count_tokens,
            hold_s=self._hold_s,
            drop_duplicates=self._drop_duplicates,
        )

    def _without_room(self, context: MergedContext) -> list[SourceFailure]:
        reason = "none of its {} chunks fits its share of the budget: raise the budget or the source's weight"
        return [
            SourceFailure(name, reason.format(num_refused))
            for i, name in enumerate(self.sources)
            if (num_refused := context.num_refused(i)) and not context.num_placed(i)
        ]

    async def _pump(self, source: int, query: str, items: asyncio.Queue[_FromSource]) -> None:
        """Passes one source's updates on. Whatever goes wrong is that source's own end."""
        retriever = list(self.sources.values())[source]
        end = _Ended()
        try:
            await self._read(source, retriever.stream(query), retriever.mode, items)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            end = _Ended(error)  # not ours: something that the source waited for was cancelled
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics of native libraries among them
            end = _Ended(error)
        await items.put((source, end))

    async def _read(
        self, source: int, updates: AsyncIterator[Any], mode: ContextMode, items: asyncio.Queue[_FromSource]
    ) -> None:
        left_s = self._rules[source].timeout_s
        loop = asyncio.get_running_loop()
        step: asyncio.Task[Any] | None = None
        try:
            while True:
                started_s = loop.time()
                step = asyncio.create_task(_step(updates))
                await asyncio.wait({step}, timeout=left_s)
                if not step.done():
                    late, step = step, None
                    await self._clean_beside(late, updates)
                    raise RetrievalError(
                        f"ended after timeout_s={self._rules[source].timeout_s}: what it had brought by then is used"
                    )
                if (item := step.result()) is _NO_MORE:
                    return
                if left_s is not None:
                    left_s = max(0.0, left_s - (loop.time() - started_s))
                _check_item(item, mode)
                await items.put((source, item))
        finally:
            if step is not None:
                await _clean(step, updates)

    async def _clean_beside(self, step: asyncio.Task[Any], updates: AsyncIterator[Any]) -> None:
        """Ends a late source while the others go on. One that takes its time holds nobody: `aclose` waits for it."""
        cleanup = asyncio.create_task(_clean(step, updates), name="stream2llm-merge-cleanup")
        self._cleanups.add(cleanup)
        cleanup.add_done_callback(self._cleanups.discard)
        await asyncio.wait({cleanup}, timeout=_PROMPT_S)


_NO_MORE = object()


async def _step(updates: AsyncIterator[Any]) -> Any:
    return await anext(updates, _NO_MORE)


async def _clean(step: asyncio.Task[Any], updates: AsyncIterator[Any]) -> None:
    step.cancel()
    await ended(step, cancel_every_s=_CLEANUP_S)
    if (close := getattr(updates, "aclose", None)) is not None:
        await close()


async def _next_batch(items: asyncio.Queue[_FromSource], due_s: float | None) -> list[_FromSource]:
    """All that is there, after waiting for something, until `due_s` on the loop's clock at most."""
    batch: list[_FromSource] = []
    try:
        async with asyncio.timeout_at(None if due_s == math.inf else due_s):
            batch.append(await items.get())
    except TimeoutError:
        return batch
    while not items.empty():
        batch.append(items.get_nowait())
    return batch


def _check_item(item: Any, mode: ContextMode) -> None:
    allowed = (Append, SourceFailure) if mode == ContextMode.APPEND else (Append, Replace, SourceFailure)
    if not isinstance(item, allowed):
        raise RetrievalError(
            f"its mode is {mode!s} and it yielded {type(item).__name__}: append mode yields Append, update mode "
            "Replace (or Append); SourceFailure goes in both"
        )


def _named_sources(rules: list[Weighted]) -> dict[str, Retriever]:
    given = [rule.name for rule in rules if rule.name is not None]
    if len(set(given)) < len(given):
        raise ConfigurationError(f"two sources have the same name: {', '.join(given)}")
    retrievers = [as_retriever(rule.retriever) for rule in rules]
    made_up = named_retrievers(retrievers)
    sources: dict[str, Retriever] = {}
    for rule, (name, retriever) in zip(rules, made_up.items(), strict=True):
        while rule.name is None and (name in given or name in sources):
            name += "'"
        sources[rule.name or name] = retriever
    return sources


async def _warm_up(retriever: Retriever) -> None:
    if (warm_up := getattr(retriever, "warm_up", None)) is not None:
        await warm_up()


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _check_count(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigurationError(f"{name}={value!r}: give a whole number, 1 or more, or leave it out")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
