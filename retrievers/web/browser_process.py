"""One run of a browser: how it is found, started, watched and ended."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.errors import MissingExtraError, RetrievalError
from stream2llm_sdk.retrievers.web.browser_options import BrowserOptions

if TYPE_CHECKING:
    from playwright.async_api import Browser, Playwright

__all__ = ["BrowserLostError", "BrowserProcess", "find_chromium"]

_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "microsoft-edge-stable")
_WATCH_INTERVAL_S = 0.5
_CLOSE_TIMEOUT_S = 5.0
_WORN_SHARE = 0.75
_ARGUMENTS = (
    "--disable-quic",  # UDP does not pass a proxy
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--dns-prefetch-disable",
    "--disable-features=AsyncDns,DnsOverHttps,NetworkPrediction,MediaRouter,WebTransport",
    "--disable-domain-reliability",
    "--no-pings",
    "--mute-audio",
    "--blink-settings=imagesEnabled=false",
)


class BrowserLostError(Exception):
    """The browser, or the page in it, died under a page that was being read."""


def find_chromium(preferred: str = "") -> str | None:
    """`preferred`, Playwright's own, if it is there, else the first Chromium or Chrome on the PATH."""
    if os.access(preferred, os.X_OK):
        return preferred
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class BrowserProcess:
    """A browser that runs, with Playwright's driver between it and us.

    Attributes:
        browser: Playwright's object.
        num_open: pages being read.
        is_worn: whether no more pages should be read with it.
        reason: why it was lost, as far as we know.
    """

    def __init__(self, options: BrowserOptions, playwright: Playwright, browser: Browser, driver: int | None) -> None:
        self.browser = browser
        self.num_open = 0
        self.is_worn = False
        self.reason = ""
        self._options = options
        self._playwright = playwright
        self._driver = driver
        self._num_read = 0
        self._is_ended = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._watch = asyncio.create_task(self._watch_memory(), name="watch-browser")
        browser.on("disconnected", lambda _: self._note_end())

    @classmethod
    async def start(cls, options: BrowserOptions, proxy_url: str) -> BrowserProcess:
        """Starts a browser whose only way out is the proxy, or connects to one.

        Raises:
            RetrievalError: there is none, or it does not start.
            MissingExtraError: playwright is not installed.
        """
        try:
            from playwright.async_api import Error, async_playwright
        except ImportError:
            raise MissingExtraError("playwright", "crawler") from None

        playwright = await async_playwright().start()
        mark, driver = f"--started-by={secrets.token_hex(16)}", None
        try:
            async with asyncio.timeout(options.start_timeout_s):
                browser = await _launch(options, playwright, proxy_url, mark)
                if options.cdp_url is None:
                    driver = await asyncio.to_thread(_driver_of, mark)
        except BaseException as error:
            await _stop(playwright, driver)
            if isinstance(error, TimeoutError):
                message = f"the browser did not start within start_timeout_s={options.start_timeout_s}"
                raise RetrievalError(message) from error
            if isinstance(error, Error):
                raise RetrievalError(f"the browser cannot be started: {_why(error)}") from error
            raise
        return cls(options, playwright, browser, driver)

    @property
    def is_lost(self) -> bool:
        """Whether the connection to it is gone."""
        return not self.browser.is_connected()

    def acquire(self) -> None:
        """Counts a page that is being read; `release` ends it."""
        self.num_open += 1
        self._idle.clear()

    def release(self) -> None:
        """Counts a page that was read."""
        self.num_open -= 1
        self._num_read += 1
        if self._num_read >= self._options.max_pages_per_start or self.is_lost:
            self.is_worn = True
        if not self.num_open:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no page is being read."""
        await self._idle.wait()

    def lose(self, reason: str) -> None:
        """Kills a browser that does not behave; the pages in it fail."""
        self.reason = self.reason or reason
        self.is_worn = True
        _kill(_family(self._driver)[1:])  # the driver lives on, to tell everybody who waits

    def kill(self) -> None:
        """Ends all of its processes at once, when there is no event loop to do it well. One over CDP is only left."""
        _kill(_family(self._driver))

    async def aclose(self) -> None:
        """Ends the browser, or leaves one over CDP."""
        self.is_worn = True
        if self._is_ended:
            return
        self._is_ended = True
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self.browser.close()
        except Exception:  # it is gone, or hangs: both end here
            self.lose("it could not be closed")
        await _stop(self._playwright, self._driver)

    def _note_end(self) -> None:
        self.is_worn = True
        self.reason = self.reason or "it ended by itself"

    async def _watch_memory(self) -> None:
        if self._options.cdp_url is not None:
            return
        while not self.is_lost:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            if self._idle.is_set():
                continue
            used_mib = await asyncio.to_thread(_memory_mib, self._driver)
            if used_mib > self._options.max_memory_mib:
                self.lose(f"it used more than max_memory_mib={self._options.max_memory_mib}")
            elif used_mib > _WORN_SHARE * self._options.max_memory_mib:
                self.is_worn = True


async def _launch(options: BrowserOptions, playwright: Playwright, proxy_url: str, mark: str) -> Browser:
    chromium = playwright.chromium
    if options.cdp_url is not None:
        return await chromium.connect_over_cdp(options.cdp_url)
    path = options.executable_path
    if path is None and options.channel is None:
        path = find_chromium(chromium.executable_path)
        if path is None:
            raise RetrievalError(
                "no browser was found: install Chromium (on Debian: apt-get install chromium; elsewhere: playwright "
                "install chromium) or give BrowserOptions(executable_path=…), or read pages with fetch='http'"
            )
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    return await chromium.launch(
        executable_path=None if path is None else Path(path),
        channel=options.channel,
        headless=True,
        args=[*_ARGUMENTS, mark],
        # Contexts have credentials; what the browser asks for outside of one finds a closed door.
        proxy={"server": proxy_url, "bypass": "<-loopback>"},
        chromium_sandbox=not is_root if options.sandbox is None else options.sandbox,
        handle_sigint=False,
        handle_sigterm=False,
        handle_sighup=False,
        timeout=0,
    )


async def _stop(playwright: Playwright, driver: int | None) -> None:
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await playwright.stop()
    except Exception:  # the driver was killed, or hangs
        pass
    _kill(_family(driver))


def _driver_of(mark: str) -> int | None:
    """The process id of Playwright's driver, parent of the browser that was started with `mark` among its arguments.
    (Playwright itself does not tell.)"""
    import psutil  # type: ignore[import-untyped]

    for process in psutil.Process().children(recursive=True):
        try:
            command = process.cmdline()
            if mark in command and not any(argument.startswith("--type=") for argument in command):
                return int(process.ppid())
        except psutil.Error:
            continue  # it ended meanwhile
    return None


def _family(driver: int | None) -> list[Any]:
    import psutil

    try:
        parent = psutil.Process(driver) if driver is not None else None
        return [] if parent is None else [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _memory_mib(driver: int | None) -> float:
    """What the driver and the browser use, what they share counted once where the system tells (Linux)."""
    import psutil

    num_bytes = 0
    for process in _family(driver):
        try:
            info = process.memory_full_info()
            num_bytes += getattr(info, "pss", info.rss)
        except psutil.Error:
            continue  # it ended meanwhile
    return num_bytes / 2**20


def _kill(family: list[Any]) -> None:
    import psutil

    for process in reversed(family):
        try:
            process.kill()
        except psutil.Error:
            continue  # it ended meanwhile


def _why(error: Exception) -> str:
    text = str(error)
    if "sandbox" in text.lower() and "No usable sandbox" in text:
        return "its sandbox does not work here; allow user namespaces, or give BrowserOptions(sandbox=False)"
    return text.partition("\n")[0].partition(": ")[2] or text.partition("\n")[0]
