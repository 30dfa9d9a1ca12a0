"""Python's own documentation as a web site on the loopback, with pages that arrive like those of a real crawl."""

from __future__ import annotations

import asyncio
import html
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from types import MappingProxyType, TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

from stream2llm_sdk.demo.arrivals import ArrivalSchedule
from stream2llm_sdk.demo.page_text import page_text
from stream2llm_sdk.demo.pages import render_pages
from stream2llm_sdk.demo.relevance import PageRanking
from stream2llm_sdk.errors import ConfigurationError

__all__ = ["DEFAULT_MODULES", "PydocSite"]

DEFAULT_MODULES = (
    "asyncio.taskgroups",
    "asyncio.timeouts",
    "asyncio.tasks",
    "asyncio.queues",
    "asyncio.locks",
    "asyncio.runners",
    "asyncio.streams",
    "contextlib",
    "contextvars",
    "concurrent.futures",
    "threading",
    "queue",
    "subprocess",
    "multiprocessing.pool",
    "json",
    "sqlite3",
    "pathlib",
    "logging",
    "dataclasses",
    "functools",
    "itertools",
    "collections",
    "heapq",
    "argparse",
)
"""The modules whose documentation is served if nothing else is said, the most important first."""

_HOST = "127.0.0.1"
_MAX_HEAD_BYTES = 16_384
_HEAD_TIMEOUT_S = 10.0


class PydocSite:
    """Serves the HTML documentation of standard library modules while its `async with` block runs.

    Each page is answered at its arrival time in the current crawl's `ArrivalSchedule`, counted from the crawl's
    first request for a page: page by page with the gaps of the published crawls, however many are fetched at once.
    A page that has arrived once is answered at once from then on. The index page, HEAD and errors do not wait and
    do not start the crawl.

    Entering renders the pages (in a child process, under a second) and binds a free port of 127.0.0.1; leaving
    closes the port and every connection.

    Args:
        modules: what to document. One that this Python does not have is left out.
        seed: of the first crawl's arrival times; `reset` starts another.
        time_scale: multiplies all delays, 0 for none.

    Raises:
        ConfigurationError: `time_scale` is negative; on entering, no module of `modules` can be imported.
    """

    def __init__(self, modules: Sequence[str] = DEFAULT_MODULES, *, seed: int = 0, time_scale: float = 1.0) -> None:
        self._modules = tuple(modules)
        self._time_scale = time_scale
        self._server: asyncio.Server | None = None
        self._pages: dict[str, str] = {}
        self._bodies: dict[str, bytes] = {}
        self._ranking = PageRanking({})
        self._connections: set[asyncio.Task[None]] = set()
        self.reset(seed)

    async def __aenter__(self) -> Self:
        rendered = await render_pages(self._modules)
        if not rendered:
            raise ConfigurationError(
                f"none of the modules {', '.join(self._modules) or '(none given)'} can be imported"
            )
        self._ranking = await asyncio.to_thread(_ranking, rendered)
        self._bodies = {f"/{module}.html": page.encode() for module, page in rendered.items()}
        self._bodies["/"] = _index(rendered)
        self._server = await asyncio.start_server(self._accept, _HOST, 0, limit=_MAX_HEAD_BYTES)
        self._pages = {self.url(module): page for module, page in rendered.items()}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            await server.wait_closed()

    @property
    def base_url(self) -> str:
        """The index page's URL, with a free port of the loopback.

        Raises:
            RuntimeError: the site is not running.
        """
        if self._server is None:
            raise RuntimeError("the site runs only inside its `async with` block")
        return f"http://{_HOST}:{self._server.sockets[0].getsockname()[1]}/"

    @property
    def pages(self) -> Mapping[str, str]:
        """URL to HTML of every page, as served."""
        return MappingProxyType(self._pages)

    def url(self, module: str) -> str:
        """The URL of a module's page."""
        return f"{self.base_url}{module}.html"

    def urls(self, question: str = "", n: int = 8) -> list[str]:
        """Returns the `n` pages (or all there are) that suit `question` best, best first; by keyword overlap with
        the module's name and documentation. Without a question, the first of `modules`.

        Raises:
            ConfigurationError: `n` is below 1.
        """
        if n < 1:
            raise ConfigurationError(f"n={n!r}: ask for at least 1 page")
        base_url = self.base_url
        return [f"{base_url}{module}.html" for module in self._ranking.rank(question)[:n]]

    def reset(self, seed: int, urls: Sequence[str] = ()) -> None:
        """Begins another crawl: its clock starts with the next request for a page.

        The same `seed` and `urls` give the same arrival times. `urls` are the pages that will be crawled, in the
        order in which they will be asked for; pages that are not named get their place in the order of their
        first requests.
        """
        self._schedule = ArrivalSchedule(map(_path, urls), seed=seed, time_scale=self._time_scale)
        self._began_s: float | None = None

    def arrival_s(self, url: str) -> float:
        """When the page arrives, in seconds from the crawl's first request."""
        return self._schedule.arrival_s(_path(url))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # accepted in the last moment, while the site was closing
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        # After a clean close this does nothing. A cancelled connection, one that never ran included, is dropped
        # with what is still unsent.
        task.add_done_callback(lambda _task: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request and its answer; the connection is closed after it."""
        # What a client does wrong or breaks off is its own affair: no answer, no trace.
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            writer.write(await self._answer(head))
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    async def _answer(self, head: bytes) -> bytes:
        try:
            method, target, _version = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
            path = _path(target)
        except ValueError:
            return _response(HTTPStatus.BAD_REQUEST)
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, headers="Allow: GET, HEAD\r\n")
        body = self._bodies.get(path)
        if body is None:
            return _response(HTTPStatus.NOT_FOUND, with_body=method == "GET")
        if method == "GET" and path != "/":
            await self._arrival(path)
        return _response(HTTPStatus.OK, body, with_body=method == "GET")

    async def _arrival(self, path: str) -> None:
        """Waits until the page has arrived."""
        loop = asyncio.get_running_loop()
        if self._began_s is None:
            self._began_s = loop.time()
        await asyncio.sleep(self._began_s + self._schedule.arrival_s(path) - loop.time())


def _path(target: str) -> str:
    return unquote(urlsplit(target).path) or "/"


def _response(status: HTTPStatus, body: bytes | None = None, *, with_body: bool = True, headers: str = "") -> bytes:
    if body is None:
        body = f"<!DOCTYPE html><title>{status.phrase}</title><p>{status.value} {status.phrase}".encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n{headers}Content-Type: text/html; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")


def _ranking(pages: Mapping[str, str]) -> PageRanking:
    texts = {module: "\n".join(part.text for part in page_text(page).paragraphs) for module, page in pages.items()}
    return PageRanking(texts)


def _index(modules: Iterable[str]) -> bytes:
    entries = "\n".join(f'<li><a href="{html.escape(name)}.html">{html.escape(name)}</a></li>' for name in modules)
    return f"<!DOCTYPE html>\n<title>Python library</title>\n<h1>Python library</h1>\n<ul>\n{entries}\n</ul>\n".encode()
