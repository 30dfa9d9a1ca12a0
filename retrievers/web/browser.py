"""Pages whose text is written by scripts, read in a real browser: started once, bounded, and with one way out.

Playwright drives Chromium. Every page has a browser context of its own, and every request of it, whatever started it,
passes a `GuardedProxy`. Scripts that never end, crashes and leaks end with the page or, where that is not enough, with
the browser, which then is started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urldefrag, urlsplit

from stream2llm_sdk.errors import FetchError, RetrievalError
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard
from stream2llm_sdk.retrievers.web.browser_options import BrowserOptions
from stream2llm_sdk.retrievers.web.browser_process import BrowserLostError, BrowserProcess
from stream2llm_sdk.retrievers.web.fetched_page import FetchedPage
from stream2llm_sdk.retrievers.web.guarded_proxy import GuardedProxy, ProxyLease

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Page, ProxySettings, Request, Route

__all__ = ["Browser", "DownloadError"]

Result = TypeVar("Result")

_ATTEMPTS = 2
_CLOSE_TIMEOUT_S = 3.0
_ERROR_PAGE = "chrome-error:"  # what Chromium shows in place of a page that it cannot load
_NOT_LOADED = ("image", "media", "font", "websocket", "eventsource", "manifest", "texttrack", "ping")
_PAGE_TYPES = ("", "text/html", "application/xhtml+xml", "text/plain")
_HTML_OF_PAGE = """
maxCharacters => {
    const html = document.documentElement ? document.documentElement.outerHTML : "";
    return html.length > maxCharacters ? null : html;
}
"""


class DownloadError(FetchError):
    """What the URL leads to is a file, not a page: a browser would save it."""


class Browser:
    """Reads pages with Chromium. It starts with the first page and serves one event loop; close it with `aclose`.

    Args:
        options: which browser, and its bounds.
        guard: decides which hosts the browser reaches.
        user_agent: the User-Agent header.
    """

    def __init__(self, options: BrowserOptions, guard: AddressGuard, *, user_agent: str) -> None:
        self._options = options
        self._guard = guard
        self._user_agent = user_agent
        self._tabs = asyncio.Semaphore(options.max_tabs)
        self._proxy: GuardedProxy | None = None
        self._starting: asyncio.Task[None] | None = None
        self._process: BrowserProcess | None = None
        self._cleanups: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    @property
    def process(self) -> BrowserProcess | None:
        """The browser that runs now, if one does."""
        return self._process

    async def fetch(self, url: str, *, timeout_s: float, max_page_bytes: int) -> FetchedPage:
        """The page's HTML after its scripts have run. A browser that is lost meanwhile is tried once more.

        Args:
            url: http(s).
            timeout_s: longest time in seconds; waiting for a free tab and for the browser's start is not counted.
            max_page_bytes: bound on the HTML.

        Raises:
            TimeoutError: it took longer.
            AddressNotAllowedError: the URL, or what it redirects to, leads where the guard forbids.
            DownloadError: it is a file.
            FetchError: the page cannot be had.
            RetrievalError: no browser can be started.
        """
        self._guard.check_url(url)
        async with self._tabs:
            reason = ""
            for _ in range(_ATTEMPTS):
                process = await self._acquire()
                try:
                    async with asyncio.timeout(timeout_s):
                        return await self._read(process, url, max_page_bytes)
                except BrowserLostError as error:
                    process.is_worn = True
                    reason = str(error)
                finally:
                    process.release()
            raise FetchError(f"the browser was lost twice: {reason}")

    async def aclose(self) -> None:
        """Ends the browser; pages that are being read fail."""
        self._is_closed = True
        if self._process is not None:
            await self._process.aclose()
        while self._cleanups:
            await asyncio.gather(*self._cleanups, return_exceptions=True)
        if self._process is not None:  # it was just starting
            await self._process.aclose()
        if self._proxy is not None:
            await self._proxy.aclose()

    def kill(self) -> None:
        """Like `aclose`, for when the browser's event loop is gone."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()

    async def _acquire(self) -> BrowserProcess:
        """A browser that is fit for another page; `release` gives it back. A worn one is ended before its successor
        starts, so that there are never two."""
        while True:
            if self._is_closed:
                raise RetrievalError("the browser was closed")
            process = self._process
            if process is not None and not process.is_worn:
                process.acquire()
                return process
            if self._starting is None:
                self._starting = self._spawn(self._start(process))
            # A question that is given up lets the start go on: the next one needs it.
            await asyncio.shield(self._starting)

    async def _start(self, worn: BrowserProcess | None) -> None:
        try:
            if worn is not None:
                await worn.wait_idle()
                await worn.aclose()
                self._process = None
            if self._is_closed:
                raise RetrievalError("the browser was closed")
            if self._proxy is None:
                proxy = GuardedProxy(self._guard, self._options.proxy_host)
                try:
                    await proxy.start()
                except OSError as error:
                    raise RetrievalError(f"proxy_host={self._options.proxy_host!r} cannot be used: {error}") from error
                self._proxy = proxy
            self._process = await BrowserProcess.start(self._options, self._proxy.url)
        finally:
            self._starting = None

    async def _read(self, process: BrowserProcess, url: str, max_page_bytes: int) -> FetchedPage:
        from playwright.async_api import Error

        assert self._proxy is not None
        hosts = {urlsplit(url).hostname}
        async with self._proxy.lease(self._options.max_transfer_bytes) as lease:
            try:
                async with self._context(process, lease) as context:
                    page = await self._load(context, url, max_page_bytes, hosts)
                if lease.is_exceeded:  # it was cut off
                    _raise_refusal(lease, hosts)
                return page
            except FetchError:
                _raise_refusal(lease, hosts)
                raise
            except Error as error:
                if process.is_lost or "has been closed" in error.message or "crashed" in error.message:
                    raise BrowserLostError(process.reason or _one_line(error)) from error
                if "Download is starting" in error.message:
                    raise DownloadError("it is a file that a browser would save") from error
                _raise_refusal(lease, hosts)
                if "context was destroyed" in error.message:
                    raise FetchError("its scripts went on to another page while it was read") from error
                raise FetchError(_one_line(error)) from error

    async def _load(
        self, context: BrowserContext, url: str, max_page_bytes: int, hosts: set[str | None]
    ) -> FetchedPage:
        """The page at `url`. Adds the hosts to which it leads to `hosts`."""

        latest = url

        def note(request: Request) -> None:
            nonlocal latest
            if request.is_navigation_request():
                hosts.add(urlsplit(request.url).hostname)
                if request.frame is page.main_frame:
                    latest = request.url

        page = await context.new_page()
        page.on("request", note)
        context.on("page", lambda other: self._spawn(other.close()))  # a page may open no others
        response = await page.goto(url, wait_until="domcontentloaded", timeout=0)
        if response is not None and not 200 <= response.status < 300:
            raise FetchError(f"HTTP {response.status} {response.status_text}".rstrip())
        headers = dict(response.headers) if response is not None else {}
        kind = headers.get("content-type", "text/html").partition(";")[0].strip().lower()
        if kind not in _PAGE_TYPES:  # shown by a viewer of the browser's own
            raise DownloadError(f"content type {kind!r:.80} is not a page")
        await self._settle(page)
        if page.url.startswith(_ERROR_PAGE):
            self._guard.check_url(latest)  # says why, if it is not the proxy that has refused it
            raise FetchError(f"a script led to {latest!r:.200}, which cannot be loaded")
        self._guard.check_url(page.url)  # scripts may have gone elsewhere
        html = await page.evaluate(_HTML_OF_PAGE, max_page_bytes)
        if not isinstance(html, str) or len(html) > max_page_bytes:
            raise FetchError(f"larger than max_page_bytes={max_page_bytes}")
        return FetchedPage(urldefrag(page.url).url, response.status if response else 200, headers, "text/html", html)

    async def _settle(self, page: Page) -> None:
        from playwright.async_api import TimeoutError as NotQuiet

        with contextlib.suppress(NotQuiet):  # a page that never rests is taken as it is
            await page.wait_for_load_state("networkidle", timeout=self._options.settle_s * 1000)

    @contextlib.asynccontextmanager
    async def _context(self, process: BrowserProcess, lease: ProxyLease) -> AsyncIterator[BrowserContext]:
        assert self._proxy is not None
        way_out: ProxySettings = {
            "server": self._proxy.url,
            "username": lease.username,
            "password": lease.password,
            "bypass": "<-loopback>",  # also to this machine's own addresses
        }
        opening = self._spawn(
            process.browser.new_context(
                proxy=way_out, user_agent=self._user_agent, service_workers="block", accept_downloads=False
            )
        )
        try:
            context = await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._spawn(_close_when_open(process, opening))
            raise
        try:
            await context.route("**/*", _skip_what_has_no_text)
            yield context
        finally:
            await self._finish(_close(process, context))

    def _spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """A task of the browser's own, which `aclose` waits for."""
        task = asyncio.create_task(work)
        self._cleanups.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._cleanups.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits has it; nobody else is interested

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Waits for `work`, which goes on if the waiting is cancelled."""
        await asyncio.shield(self._spawn(work))


def _raise_refusal(lease: ProxyLease, hosts: set[str | None]) -> None:
    """Raises the proxy's reason, if it is the page itself (and not just a part of it) that it did not let through."""
    if lease.is_exceeded:
        raise FetchError(f"it transfers more than max_transfer_bytes={lease.max_bytes}")
    for host, refusal in lease.refusals.items():
        if host in hosts:
            raise refusal


async def _skip_what_has_no_text(route: Route) -> None:
    if route.request.resource_type in _NOT_LOADED:
        await route.abort()
    else:
        await route.continue_()


async def _close(process: BrowserProcess, context: BrowserContext) -> None:
    """Closes a page for good: where the browser does not, the browser is ended."""
    from playwright.async_api import Error

    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await context.close()
    except TimeoutError:
        process.lose("a page could not be closed")
    except Error:
        pass  # it is gone with the browser


async def _close_when_open(process: BrowserProcess, opening: asyncio.Task[BrowserContext]) -> None:
    await asyncio.wait({opening})
    if not opening.cancelled() and opening.exception() is None:
        await _close(process, opening.result())


def _one_line(error: Exception) -> str:
    """Playwright's message without the call's name and its log."""
    first = str(error).partition("\n")[0]
    return first.partition(": ")[2] or first
