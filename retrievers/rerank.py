"""Reranking as a stage: a retriever's pools, put in a better order without delaying the first."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from stream2llm_sdk.context import Append, Chunk, ContextMode, ContextUpdate, Replace, Retriever, SourceFailure
from stream2llm_sdk.errors import ConfigurationError, RetrievalError
from stream2llm_sdk.retrievers.rerankers import Reranker, reranker_of

__all__ = ["Rerank"]


class Rerank:
    """Yields a retriever's best `k` chunks at once in its own order, then in the reranker's as soon as that is known.

    Scores are kept by question and text, so that a pool which shares chunks with one before only costs the new ones.
    While chunks are scored the retriever goes on, and only its newest pool is scored next. When the reranker fails or
    takes too long, a `SourceFailure` says so and the question goes on with the retriever's own order.

    ::

        async with DiskANNRetriever("my-index", k=30) as search, Rerank(search, "cross-encoder/…", k=8) as retriever:
            ...

    Args:
        retriever: in either mode; chunks that are appended are gathered into a pool. It stays its owner's to close.
        reranker: what `reranker_of` takes: a cross-encoder's name, folder or object, an `EndpointReranker`, or a
            function of the query and the texts. Closed by `aclose()` unless it was given as a `Reranker`.
        k: chunks in the context; None means as many as the retriever gives.
        max_candidates: chunks of a pool that are scored, by the retriever's order; the others stay behind them.
        timeout_s: for scoring one pool.
        max_kept_scores: scores that are remembered, over all questions.

    Raises:
        ConfigurationError: a value is out of range, or `reranker` is nothing that scores.
    """

    mode: ContextMode = ContextMode.UPDATE

    def __init__(
        self,
        retriever: Retriever,
        reranker: Any,
        *,
        k: int | None = None,
        max_candidates: int = 100,
        timeout_s: float = 30.0,
        max_kept_scores: int = 100_000,
    ) -> None:
        if not isinstance(retriever, Retriever):
            raise ConfigurationError(f"retriever={retriever!r:.80}: give an object with `mode` and `stream(query)`")
        for name, value in (("k", k), ("max_candidates", max_candidates), ("max_kept_scores", max_kept_scores)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"{name}={value!r}: give a positive integer")
        if k is not None and max_candidates < k:
            raise ConfigurationError(f"max_candidates={max_candidates} is below k={k}: give at least k")
        if not 0 < timeout_s <= 3600:
            raise ConfigurationError(f"timeout_s={timeout_s!r}: give seconds up to 3600")
        self._retriever = retriever
        self._owns_reranker = not isinstance(reranker, Reranker)
        self._reranker = reranker_of(reranker)
        self._k = k
        self._max_candidates = max_candidates
        self._timeout_s = timeout_s
        self._scores = _ScoreCache(max_kept_scores)

    def __repr__(self) -> str:
        return f"Rerank({self._retriever!r}, {self._reranker!r}, k={self._k})"

    async def stream(self, query: str) -> AsyncGenerator[Replace | SourceFailure, None]:
        """Yields the current context, each time in place of the one before.

        Raises what the retriever raises; what was yielded before stays.
        """
        inner = self._retriever.stream(query)
        run = _Run(inner)
        try:
            while not run.is_over:
                run.begin_next()
                if run.wants_scores:
                    run.begin_scoring(self._scored(query, run.pool))
                await run.wait()
                for item in self._arrived(run):
                    yield item
        finally:
            await run.aclose()

    async def aclose(self) -> None:
        """Closes the reranker, unless it was given as a `Reranker`."""
        if self._owns_reranker:
            await self._reranker.aclose()

    async def __aenter__(self) -> Rerank:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _arrived(self, run: _Run) -> list[Replace | SourceFailure]:
        """What is to be yielded now that the retriever or the reranker has answered."""
        failure = run.take_update()
        items: list[Replace | SourceFailure] = [] if failure is None else [failure]
        ranking = run.take_scores()
        if isinstance(ranking, BaseException):
            items.append(SourceFailure(self._reranker.name, f"reranking failed: {_one_line(ranking)}"))
        best = ranking if isinstance(ranking, list) else None
        if not run.pool or (best is None and (run.shown is None or run.failed)):
            best = run.pool
        if best is not None and run.has_pool:
            best = best[: self._k]
            if run.shown is None or _identities(best) != _identities(run.shown):
                run.shown = best
                items.append(Replace(best))
        return items

    async def _scored(self, query: str, pool: list[Chunk]) -> list[Chunk]:
        """The pool in the reranker's order, with its scores."""
        candidates, others = pool[: self._max_candidates], pool[self._max_candidates :]
        missing = list(dict.fromkeys(c.text for c in candidates if self._scores.get(query, c.text) is None))
        known = {c.text: score for c in candidates if (score := self._scores.get(query, c.text)) is not None}
        if missing:
            async with asyncio.timeout(self._timeout_s):
                scores = [float(score) for score in await self._reranker.score(query, missing)]
            if len(scores) != len(missing) or not all(map(math.isfinite, scores)):
                raise RetrievalError(f"it gave {len(scores)} scores for {len(missing)} texts, or some not finite")
            for text, score in zip(missing, scores, strict=True):
                known[text] = score
                self._scores.put(query, text, score)
        ranked = [replace(chunk, score=known[chunk.text]) for chunk in candidates]
        return sorted(ranked, key=lambda chunk: -(chunk.score or 0.0)) + others


class _Run:
    """One question: the retriever's iterator, at most one step ahead, and at most one pool being scored.

    Attributes:
        pool: the retriever's newest.
        shown: what was yielded last.
        failed: whether the reranker failed; it is not asked again.
    """

    def __init__(self, inner: AsyncIterator[ContextUpdate | SourceFailure]) -> None:
        self._inner = inner
        self._next: asyncio.Task[ContextUpdate | SourceFailure] | None = None
        self._scoring: asyncio.Task[list[Chunk]] | None = None
        self._is_done = False
        self._unscored = False
        self.has_pool = False
        self.pool: list[Chunk] = []
        self.shown: list[Chunk] | None = None
        self.failed = False

    @property
    def is_over(self) -> bool:
        return self._is_done and self._scoring is None and not self.wants_scores

    @property
    def wants_scores(self) -> bool:
        return self._unscored and self._scoring is None and not self.failed

    def begin_next(self) -> None:
        if self._next is None and not self._is_done:
            self._next = asyncio.ensure_future(_step(self._inner))

    def begin_scoring(self, scored: Any) -> None:
        self._unscored = False
        self._scoring = asyncio.ensure_future(scored)

    async def wait(self) -> None:
        await asyncio.wait(
            [task for task in (self._next, self._scoring) if task is not None], return_when=asyncio.FIRST_COMPLETED
        )

    def take_update(self) -> SourceFailure | None:
        """Takes the retriever's next update in, if it has come; a failure is for the caller to yield."""
        if self._next is None or not self._next.done():
            return None
        task, self._next = self._next, None
        try:
            update = task.result()
        except _EndedError:
            self._is_done = True
            return None
        if isinstance(update, SourceFailure):
            return update
        self.pool = [*self.pool, *update.chunks] if isinstance(update, Append) else list(update.chunks)
        self.has_pool = True
        self._unscored = bool(self.pool)
        return None

    def take_scores(self) -> list[Chunk] | BaseException | None:
        """The ranking, or why there is none, if the reranker has answered."""
        if self._scoring is None or not self._scoring.done():
            return None
        task, self._scoring = self._scoring, None
        try:
            return task.result()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a cancellation that is not ours, or a panic of a native library
            self.failed = True
            return error

    async def aclose(self) -> None:
        tasks = [task for task in (self._next, self._scoring) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()
        close = getattr(self._inner, "aclose", None)
        if close is not None:
            await close()


class _EndedError(Exception):
    """The iterator is at its end: a task cannot raise StopAsyncIteration."""


async def _step(iterator: AsyncIterator[ContextUpdate | SourceFailure]) -> ContextUpdate | SourceFailure:
    try:
        return await anext(iterator)
    except StopAsyncIteration:
        raise _EndedError from None


class _ScoreCache:
    """Scores by question and text, the least recently used go first; keys are digests, so long texts are not held."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._scores: OrderedDict[bytes, float] = OrderedDict()

    def get(self, query: str, text: str) -> float | None:
        key = _digest(query, text)
        score = self._scores.get(key)
        if score is not None:
            self._scores.move_to_end(key)
        return score

    def put(self, query: str, text: str, score: float) -> None:
        self._scores[_digest(query, text)] = score
        if len(self._scores) > self._max_size:
            self._scores.popitem(last=False)


def _digest(query: str, text: str) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for part in (query, text):
        raw = part.encode("utf-8", "surrogatepass")
        hashed.update(len(raw).to_bytes(8, "little") + raw)
    return hashed.digest()


def _identities(chunks: Sequence[Chunk]) -> list[tuple[str, str, str]]:
    return [(chunk.text, chunk.source, chunk.title) for chunk in chunks]


def _one_line(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "it took too long"
    return " ".join(str(error).split())[:200] or type(error).__name__
