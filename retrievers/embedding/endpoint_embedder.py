"""Embeddings from a server that speaks OpenAI's `/v1/embeddings`: OpenAI, vLLM, TEI, Ollama and others."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError, RetrievalError

__all__ = ["EndpointEmbedder"]

_DEFAULT_KEY = "OPENAI_API_KEY"
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_MOST_WAIT_S = 60.0


class EndpointEmbedder:
    """Embeds over HTTP, several requests at a time, each tried again after a failure that may pass.

    A request is repeated after a broken connection, a timeout, or one of the statuses 408, 409, 425, 429, 5xx; after
    the server's `Retry-After`, or else after 0.5 s, 1 s, 2 s … with jitter, at most a minute.

    Args:
        model: the model's name, as the server knows it.
        url: the API's root, such as `https://api.openai.com/v1`; `/embeddings` is added to it.
        dim: the vectors' length. None asks the server with one short text; give it where that costs.
        dimensions: asks the server for shorter vectors, where the model can do that.
        api_key_env: the environment variable that holds the key. None uses `OPENAI_API_KEY` where it is set. The key
            is never stored, shown, or part of an error.
        batch_size: texts in a request.
        concurrency: requests at a time.
        timeout_s: of a request.
        max_retries: further tries after the first.

    Raises:
        ConfigurationError: a value is out of range, or the variable is not set (at the first use).
    """

    def __init__(
        self,
        model: str,
        url: str,
        *,
        dim: int | None = None,
        dimensions: int | None = None,
        api_key_env: str | None = None,
        batch_size: int = 64,
        concurrency: int = 4,
        timeout_s: float = 60.0,
        max_retries: int = 6,
    ) -> None:
        address = httpx.URL(url)
        if address.scheme not in ("http", "https") or not address.host or address.userinfo:
            raise ConfigurationError(
                f"url: give http:// or https:// with a host and without a password, not {_bare(address)!r}"
            )
        if not model:
            raise ConfigurationError("model='': give the model's name, as the server knows it")
        for name, value, most in (("batch_size", batch_size, 2048), ("concurrency", concurrency, 256)):
            if not 1 <= value <= most:
                raise ConfigurationError(f"{name}={value!r}: give 1 to {most}")
        if not 0 < timeout_s <= 3600 or not 0 <= max_retries <= 100:
            raise ConfigurationError(
                f"timeout_s={timeout_s!r}, max_retries={max_retries!r}: give 0 to 3600 and 0 to 100"
            )
        self._model = model
        self._url = url.rstrip("/")
        self._dim = dimensions if dim is None else dim
        self._dimensions = dimensions
        self._api_key_env = api_key_env
        self._batch_size = batch_size
        self._concurrency = concurrency
        self._max_retries = max_retries
        self._client = httpx.Client(timeout=timeout_s, limits=httpx.Limits(max_connections=concurrency))
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"EndpointEmbedder({self._model!r}, {self._url!r})"

    @property
    def name(self) -> str:
        """The model's name: the same model on another server is the same space."""
        return f"endpoint:{self._model}" + (f":{self._dimensions}" if self._dimensions else "")

    @property
    def spec(self) -> str:
        """The text that `embedder_of` makes it from again."""
        return f"endpoint:{self._model}@{self._url}"

    @property
    def dim(self) -> int:
        """Asks the server the first time, if it was not given.

        Raises:
            RetrievalError: the server did not answer with a vector.
        """
        with self._lock:
            if self._dim is None:
                self._dim = len(self._request(["dimensions"])[0])
            return self._dim

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Shape `(len(texts), dim)`.

        Raises:
            RetrievalError: the server refused, or did not answer in all its tries.
        """
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        batches = [clean[at : at + self._batch_size] for at in range(0, len(clean), self._batch_size)]
        if not batches:
            return np.zeros((0, self.dim), np.float32)
        if len(batches) == 1:
            return np.array(self._request(batches[0]), np.float32)
        with ThreadPoolExecutor(min(self._concurrency, len(batches)), "embeddings") as threads:
            try:
                rows = list(threads.map(self._request, batches))
            except BaseException:
                threads.shutdown(wait=True, cancel_futures=True)
                raise
        return np.array([row for batch in rows for row in batch], np.float32)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def __enter__(self) -> EndpointEmbedder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, texts: Sequence[str]) -> list[list[float]]:
        body: dict[str, Any] = {"model": self._model, "input": list(texts), "encoding_format": "float"}
        if self._dimensions is not None:
            body["dimensions"] = self._dimensions
        key = self._key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        for attempt in range(self._max_retries + 1):
            wait_s = min(_MOST_WAIT_S, 0.5 * 2**attempt) * random.uniform(0.75, 1.25)
            try:
                response = self._client.post(f"{self._url}/embeddings", json=body, headers=headers)
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if response.is_success:
                    return self._vectors(response, len(texts))
                reason = f"status {response.status_code}: {response.text[:200]}"
                if response.status_code not in _RETRIED:
                    break
                wait_s = _retry_after_s(response) or wait_s
            if attempt < self._max_retries:
                time.sleep(wait_s)
        tries = "1 try" if attempt == 0 else f"{attempt + 1} tries"
        raise RetrievalError(f"{self._url}/embeddings, after {tries}: {_without(key, reason)}")

    def _vectors(self, response: httpx.Response, num_texts: int) -> list[list[float]]:
        try:
            rows = sorted(response.json()["data"], key=lambda row: row["index"])
            vectors = [list(map(float, row["embedding"])) for row in rows]
            if [row["index"] for row in rows] != list(range(num_texts)) or len(set(map(len, vectors))) != 1:
                raise ValueError(f"{len(rows)} vectors for {num_texts} texts, or of different lengths")
        except (ValueError, KeyError, TypeError) as error:
            raise RetrievalError(
                f"{self._url}/embeddings: its answer is not of OpenAI's form ({type(error).__name__}: {error})"
            ) from error
        return vectors

    def _key(self) -> str:
        key = os.environ.get(self._api_key_env or _DEFAULT_KEY, "").strip()
        if self._api_key_env is not None and not key:
            raise ConfigurationError(f"the environment variable {self._api_key_env} is not set; put the API key there")
        return key


def _retry_after_s(response: httpx.Response) -> float | None:
    """Seconds of a `Retry-After` that is a number; a date is rare here and the usual wait serves."""
    try:
        wait_s = float(response.headers["Retry-After"])
    except (KeyError, ValueError):
        return None
    return min(max(wait_s, 0.0), _MOST_WAIT_S) if wait_s == wait_s else None


def _without(key: str, text: str) -> str:
    return text.replace(key, "***") if key else text


def _bare(url: httpx.URL) -> str:
    return str(url.copy_with(userinfo=b""))
