"""Pages kept on disk, used again as RFC 9111 allows.

The rules are those of hishel's state machine, which does no I/O of its own; its SQLite storage holds the pages. SQLite
in WAL mode lets several processes share one cache. Bodies are kept decompressed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from stream2llm_sdk.errors import ConfigurationError, MissingExtraError
from stream2llm_sdk.retrievers.web.option_checks import check_instance
from stream2llm_sdk.value_checks import is_whole

if TYPE_CHECKING:
    import hishel

__all__ = ["HTTPAnswer", "HTTPCache", "SendRequest"]

_MIN_BYTES = 1_000_000
_FILE_NAME = "pages-v1.sqlite3"
_STORED_STATUSES = (200, 301, 308)
# Entries in use are never evicted. A page is read from the cache in one go, so that is soon over.
_IN_USE_S = 10.0
# What does not describe the kept body, or belongs to one connection or person.
_DROPPED_HEADERS = ("content-encoding", "content-length", "transfer-encoding", "connection", "keep-alive", "set-cookie")

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class HTTPAnswer:
    """An HTTP response whose body was read.

    Attributes:
        status: the HTTP status.
        headers: names in lower case.
        body: decompressed.
        from_cache: whether the body came out of the cache.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = field(default=b"", repr=False)
    from_cache: bool = False


SendRequest = Callable[[Mapping[str, str]], Awaitable[HTTPAnswer]]
"""Sends a GET request with these headers, names in lower case."""


class HTTPCache:
    """A cache of GET requests in one folder, which any number of processes may use at the same time.

    It is a shared cache in RFC 9111's sense: nothing is kept that `Cache-Control` forbids to keep or calls private.
    What is no longer fresh is asked for with If-None-Match or If-Modified-Since, and taken from the disk on a 304.
    A cache that cannot be read or written costs requests and never a page.

    Args:
        directory: where to keep pages; a folder in the user's cache if left out. It is made if needed, for this
            user alone, since pages tell what was asked.
        max_bytes: bound on the database's size. At the bound, what was not used for longest goes first.
        max_entry_bytes: larger pages are not kept.

    Raises:
        ConfigurationError: a bound is too small, or the folder cannot be used.
        MissingExtraError: hishel is not installed.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int = 500_000_000,
        max_entry_bytes: int = 20_000_000,
    ) -> None:
        check_instance("directory", directory, (str, os.PathLike), "the path of a folder")
        for name, value in (("max_bytes", max_bytes), ("max_entry_bytes", max_entry_bytes)):
            if not is_whole(value, _MIN_BYTES):
                raise ConfigurationError(f"{name}={value!r}: give a whole number of bytes of at least {_MIN_BYTES:,}")
        try:
            import hishel
        except ImportError:
            raise MissingExtraError("hishel", "crawler") from None
        self.directory = Path(directory) if directory is not None else _default_directory()
        self._max_entry_bytes = max_entry_bytes
        self._options: hishel.CacheOptions = {"shared": True, "supported_methods": ["GET"], "allow_stale": False}
        self._storage = hishel.SqliteStorage(
            database_path=_usable_database(self.directory),
            max_stream_size=max_entry_bytes,
            max_size=max_bytes,
            soft_delete_ttl=_IN_USE_S,
        )
        # One thread: the storage takes one caller at a time, and a wait for the disk must not take up the loop's own.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="http-cache")

    async def answer(
        self, url: str, headers: Mapping[str, str], send: SendRequest, *, partition: str = ""
    ) -> HTTPAnswer:
        """The answer for `url` from the cache, or from `send` where RFC 9111 asks for that.

        Args:
            headers: the request's headers, names in lower case.
            send: is given these headers, with a condition added where a kept page is asked about. Its errors pass
                through, and nothing is kept then.
            partition: who may see what: an answer that was kept in one partition is not given out in another.
        """
        import hishel as core

        request = core.Request("GET", url, core.Headers(dict(headers)))
        key = hashlib.sha256(f"{partition}\n{url}".encode(errors="surrogatepass")).hexdigest()
        state: core.AnyState = core.IdleClient(options=self._options)
        answer = HTTPAnswer(0, {})
        while True:
            if isinstance(state, core.IdleClient):
                state = state.next(request, await self._run(self._entries, key, fallback=[]))
            elif isinstance(state, (core.CacheMiss, core.NeedRevalidation)):
                answer = await send(dict(state.request.headers.items()))
                state = state.next(core.Response(answer.status, core.Headers(dict(answer.headers))))
            elif isinstance(state, core.StoreAndUse):
                if answer.status in _STORED_STATUSES and len(answer.body) <= self._max_entry_bytes:
                    await self._run(self._store, key, request, answer, fallback=None)
                return answer
            elif isinstance(state, core.CouldNotBeStored):
                return answer
            elif isinstance(state, core.FromCache):
                return _kept(state.entry.response)
            elif isinstance(state, core.NeedToBeUpdated):
                updates = [(entry.id, entry.response.headers) for entry in state.updating_entries]
                await self._run(self._update, updates, fallback=None)
                state = state.next()
            else:
                await self._run(self._remove, state.entry_ids, fallback=None)
                state = state.next()

    async def aclose(self) -> None:
        """Closes the database once what is being written is written."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """As `aclose`, for code outside an event loop. Whoever still uses the cache goes on without it."""
        self._thread.shutdown(wait=True)
        self._storage.close()

    async def __aenter__(self) -> HTTPCache:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _run(self, function: Callable[..., _Result], *arguments: Any, fallback: _Result) -> _Result:
        """`function` in the cache's thread, or `fallback` if the disk, the database or a closed cache is in the way."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        except (sqlite3.Error, OSError, RuntimeError, ValueError) as error:
            _logger.warning("The HTTP cache in %s cannot be used: %s", self.directory, error)
            return fallback

    def _entries(self, key: str) -> list[hishel.Entry]:
        """The kept answers with their bodies read: their streams need the database."""
        return [
            replace(entry, response=replace(entry.response, stream=iter([_read(entry.response)])))
            for entry in self._storage.get_entries(key)
        ]

    def _store(self, key: str, request: hishel.Request, answer: HTTPAnswer) -> None:
        import hishel

        headers = {name: value for name, value in answer.headers.items() if name not in _DROPPED_HEADERS}
        pieces = iter([answer.body] if answer.body else [])
        response = hishel.Response(answer.status, hishel.Headers(headers), pieces)
        for old in self._storage.get_entries(key):
            self._storage.remove_entry(old.id)
        _read(self._storage.create_entry(request, response, key).response)  # what is read is written

    def _update(self, entries: list[tuple[Any, hishel.Headers]]) -> None:
        for identity, headers in entries:
            for name in _DROPPED_HEADERS:
                if name in headers:
                    del headers[name]
            self._storage.update_headers(identity, headers)

    def _remove(self, identities: list[Any]) -> None:
        for identity in identities:
            self._storage.remove_entry(identity)


def _kept(response: hishel.Response) -> HTTPAnswer:
    return HTTPAnswer(response.status_code, dict(response.headers.items()), _read(response), from_cache=True)


def _read(response: hishel.Response) -> bytes:
    return b"".join(cast("Iterator[bytes]", response.stream or ()))


def _default_directory() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "stream2llm-sdk" / "http"


def _usable_database(directory: Path) -> Path:
    """The path of the database in `directory`; one that is damaged is thrown away."""
    path = directory / _FILE_NAME
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} cannot be written")
        if path.exists() and _is_damaged(path):
            _logger.warning("The HTTP cache %s is damaged and starts anew", path)
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"HTTPCache: {directory} cannot be used ({error}); give another directory") from error
    return path


def _is_damaged(path: Path) -> bool:
    connection = sqlite3.connect(path, timeout=5.0)
    try:
        connection.execute("PRAGMA schema_version").fetchone()
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:  # locked by another process, so it is alive
        return False
    except sqlite3.DatabaseError:
        return True
    finally:
        connection.close()
    return False
