"""What scores a passage against a question: a cross-encoder, an endpoint, or any function."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import httpx

from stream2llm_sdk.errors import ConfigurationError, MissingExtraError, RetrievalError

__all__ = ["CrossEncoderReranker", "EndpointReranker", "FunctionReranker", "Reranker", "reranker_of"]

_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_MOST_WAIT_S = 5.0


@runtime_checkable
class Reranker(Protocol):
    """Scores passages."""

    @property
    def name(self) -> str:
        """What it is called where it fails."""
        ...

    async def score(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """How well each of the `texts` answers the `query`, larger is better, in their order."""
        ...

    async def aclose(self) -> None:
        """Gives back what it holds. May be called more than once."""
        ...


def reranker_of(reranker: Any) -> Reranker:
    """The reranker that `reranker` stands for.

    Args:
        reranker: a `Reranker`; a sentence-transformers cross-encoder, its name on the hub or its folder; or a function
            of the query and the texts that returns their scores, which may be `async def` and otherwise runs in a
            thread.

    Raises:
        ConfigurationError: it is none of these.
    """
    if isinstance(reranker, Reranker):
        return reranker
    if isinstance(reranker, (str, Path)) or hasattr(reranker, "predict"):
        return CrossEncoderReranker(reranker)
    if callable(reranker):
        return FunctionReranker(reranker)
    raise ConfigurationError(
        f"reranker={reranker!r:.80}: give a cross-encoder's name, folder or object, an EndpointReranker, or a function "
        "of the query and the texts"
    )


class _InThread:
    """One thread, so that a model is used by one question at a time and the event loop by all."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Waits for the thread also when cancelled, unless the call has not begun."""
        call = self._executor.submit(_without_stop, function, *args)
        result = asyncio.wrap_future(call)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            if not call.cancel():
                await asyncio.wait([result])
                result.exception()
            raise

    async def aclose(self) -> None:
        await asyncio.to_thread(self._executor.shutdown)


def _without_stop(function: Callable[..., Any], *args: Any) -> Any:
    """Calls the function; asyncio's futures cannot carry a StopIteration."""
    try:
        return function(*args)
    except StopIteration as error:
        raise RetrievalError("it raised StopIteration") from error


class FunctionReranker:
    """A function as a reranker.

    Args:
        function: of the query and the texts; returns their scores. One that is not `async def` runs in a thread, one
            call at a time.
    """

    def __init__(self, function: Callable[[str, Sequence[str]], Sequence[float] | Awaitable[Sequence[float]]]) -> None:
        self._function = function
        self._thread = _InThread("rerank")
        self.name = str(getattr(function, "__name__", type(function).__name__))

    def __repr__(self) -> str:
        return f"FunctionReranker({self.name})"

    async def score(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """What the function returns for `query` and `texts`."""
        call: Any = self._function
        if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None)):  # noqa: B004
            scores: Sequence[float] = await call(query, texts)
        else:
            scores = await self._thread.call(call, query, texts)
        return scores

    async def aclose(self) -> None:
        """Ends the thread."""
        await self._thread.aclose()


class CrossEncoderReranker:
    """A cross-encoder of sentence-transformers, in a thread of its own.

    It is loaded at the first use or by `load()`. Between batches a cancelled question stops.

    Args:
        model: a name on the hub, the folder of a saved model, or a loaded `CrossEncoder`.
        device: "cpu", "cuda", …; None leaves it to the library.
        batch_size: passages computed at once.
        max_length: tokens of question and passage together; None leaves it to the model.
        trust_remote_code: runs code that comes with the model.

    Raises:
        ConfigurationError: a value is out of range; or, at the first use, the model cannot be loaded or does not give
            one score a passage.
        MissingExtraError: sentence-transformers is not installed (at the first use).
    """

    def __init__(
        self,
        model: Any,
        *,
        device: str | None = None,
        batch_size: int = 16,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if not 1 <= batch_size <= 65_536:
            raise ConfigurationError(f"batch_size={batch_size!r}: give 1 to 65,536")
        if max_length is not None and not 8 <= max_length <= 1_000_000:
            raise ConfigurationError(f"max_length={max_length!r}: give 8 or more, or None")
        is_name = isinstance(model, (str, Path))
        if is_name and not str(model).strip():
            raise ConfigurationError("model='': give the name or the folder of a cross-encoder")
        self.name = str(model) if is_name else type(model).__name__
        self._device = device
        self._batch_size = batch_size
        self._max_length = max_length
        self._trust_remote_code = trust_remote_code
        self._model: Any = None if is_name else model
        self._thread = _InThread("cross-encoder")

    def __repr__(self) -> str:
        return f"CrossEncoderReranker({self.name!r})"

    async def load(self) -> None:
        """Loads the model if it is not loaded yet. Raises as the class says."""
        await self._thread.call(self._loaded)

    async def score(self, query: str, texts: Sequence[str]) -> list[float]:
        """The model's score of each of the `texts` for the `query`, after its own activation. Raises as the class
        says."""
        stop = threading.Event()
        try:
            scores: list[float] = await self._thread.call(self._predict, query, texts, stop)
        except asyncio.CancelledError:
            stop.set()
            raise
        return scores

    async def aclose(self) -> None:
        """Ends the thread."""
        await self._thread.aclose()

    def _predict(self, query: str, texts: Sequence[str], stop: threading.Event) -> list[float]:
        model = self._loaded()
        # Tokenizers refuse lone surrogates, which crawled text does contain.
        pairs = [tuple(part.encode("utf-8", "replace").decode() for part in (query, text)) for text in texts]
        scores: list[float] = []
        for at in range(0, len(pairs), self._batch_size):
            if stop.is_set():
                break
            batch = pairs[at : at + self._batch_size]
            scores += [float(s) for s in model.predict(batch, batch_size=self._batch_size, show_progress_bar=False)]
        return scores

    def _loaded(self) -> Any:
        if self._model is None:
            self._model = self._load()
        labels = getattr(getattr(self._model, "config", None), "num_labels", 1)
        if labels != 1:
            raise ConfigurationError(
                f"cross-encoder {self.name!r} gives {labels} numbers a passage; a reranker needs a model with one label"
            )
        return self._model

    def _load(self) -> Any:
        try:
            from sentence_transformers import CrossEncoder
        except ImportError as error:
            raise MissingExtraError("sentence-transformers", "embeddings") from error
        options: dict[str, Any] = {} if self._max_length is None else {"max_length": self._max_length}
        try:
            return CrossEncoder(self.name, device=self._device, trust_remote_code=self._trust_remote_code, **options)
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigurationError(
                f"cross-encoder {self.name!r} cannot be loaded: {first_line:.200}; give a name on the hub or a folder"
            ) from error


class EndpointReranker:
    """A server that speaks the rerank API of Cohere, which Jina, vLLM, Infinity and others speak too.

    It is sent `{"model", "query", "documents"}` and answers with `{"results": [{"index", "relevance_score"}]}`. A
    request is repeated after a broken connection, 408, 425, 429 and 5xx, after the server's `Retry-After` (at most
    5 s) or 0.5 s, 1 s, …

    Args:
        model: the model's name, as the server knows it.
        url: the whole address, such as `https://api.cohere.com/v2/rerank` or `http://localhost:8000/v1/rerank`.
        api_key: None takes it from the environment: `RERANK_API_KEY`, `COHERE_API_KEY` for cohere.com,
            `JINA_API_KEY` for jina.ai. It is never shown, nor part of an error.
        timeout_s: of a request.
        max_retries: further tries after the first.

    Raises:
        ConfigurationError: a value is out of range.
    """

    def __init__(
        self,
        model: str,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 10.0,
        max_retries: int = 2,
    ) -> None:
        address = httpx.URL(url)
        if address.scheme not in ("http", "https") or not address.host or address.userinfo:
            raise ConfigurationError("url: give http:// or https:// with a host and without a password")
        if not model:
            raise ConfigurationError("model='': give the model's name, as the server knows it")
        if not 0 < timeout_s <= 3600 or not 0 <= max_retries <= 100:
            raise ConfigurationError(
                f"timeout_s={timeout_s!r}, max_retries={max_retries!r}: give up to 3600 and 0 to 100"
            )
        self.name = f"{model} at {address.host}"
        self._model = model
        self._url = url
        self._key = api_key if api_key is not None else _key_for(address.host)
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._client: httpx.AsyncClient | None = None

    def __repr__(self) -> str:
        return f"EndpointReranker({self.name!r})"

    async def score(self, query: str, texts: Sequence[str]) -> list[float]:
        """The server's score of each of the `texts` for the `query`.

        Raises:
            RetrievalError: the server refuses, answers otherwise, or not in all its tries.
        """
        if not texts:
            return []
        body = {"model": self._model, "query": _clean(query), "documents": [_clean(text) for text in texts]}
        for attempt in range(self._max_retries + 1):
            last = attempt == self._max_retries
            try:
                response = await self._opened().post(self._url, json=body)
            except httpx.HTTPError as error:
                if last:
                    raise RetrievalError(f"reranker {self.name} cannot be reached: {type(error).__name__}") from None
                await asyncio.sleep(0.5 * 2**attempt)
                continue
            if response.status_code == 200:
                return self._parsed(response, len(texts))
            if last or response.status_code not in _RETRIED:
                raise RetrievalError(f"reranker {self.name} answered with status {response.status_code}")
            await asyncio.sleep(_wait_s(response.headers.get("retry-after"), 0.5 * 2**attempt))
        raise AssertionError("unreachable")

    async def aclose(self) -> None:
        """Closes the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _opened(self) -> httpx.AsyncClient:
        if self._client is None:
            headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
            self._client = httpx.AsyncClient(timeout=self._timeout_s, headers=headers, follow_redirects=False)
        return self._client

    def _parsed(self, response: httpx.Response, count: int) -> list[float]:
        scores = [math.nan] * count
        try:
            for result in response.json()["results"]:
                index = result["index"]
                if not isinstance(index, int) or not 0 <= index < count:
                    raise ValueError(f"index {index!r}")
                scores[index] = float(result["relevance_score"])
        except (ValueError, KeyError, TypeError) as error:
            raise RetrievalError(
                f"reranker {self.name} gave an answer that is no rerank result ({type(error).__name__}: {error!s:.80})"
            ) from None
        missing = sum(map(math.isnan, scores))
        if missing:
            raise RetrievalError(f"reranker {self.name} scored {count - missing} of {count} passages")
        return scores


def _key_for(host: str) -> str | None:
    """The key for this host: a service's key is sent to that service only."""
    names = ["RERANK_API_KEY"]
    names += ["COHERE_API_KEY"] if f".{host}".endswith(".cohere.com") else []
    names += ["JINA_API_KEY"] if f".{host}".endswith(".jina.ai") else []
    return next((value for name in names if (value := os.environ.get(name))), None)


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _wait_s(retry_after: str | None, otherwise_s: float) -> float:
    try:
        return min(max(float(retry_after or ""), 0.0), _MOST_WAIT_S)
    except ValueError:
        return otherwise_s
