"""Pages in a real Chromium: what scripts write is read, and nothing that a page does gets out or stays."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from processes import is_running, until
from web_server import WebServer, head, page

from stream2llm_sdk.context import Append, Chunk, SourceFailure
from stream2llm_sdk.errors import AddressNotAllowedError, ConfigurationError, FetchError, RetrievalError
from stream2llm_sdk.retrievers.web import browser_process
from stream2llm_sdk.retrievers.web.address_guard import AddressGuard
from stream2llm_sdk.retrievers.web.browser import Browser, DownloadError
from stream2llm_sdk.retrievers.web.browser_options import BrowserOptions
from stream2llm_sdk.retrievers.web.browser_process import find_chromium
from stream2llm_sdk.retrievers.web.crawler import CrawlerRetriever
from stream2llm_sdk.retrievers.web.fetched_page import FetchedPage

pytestmark = pytest.mark.slow

needs_chromium = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium on the PATH: apt-get install -y --no-install-recommends chromium"
)
ABOUT = "A task group cancels the remaining tasks when one of them fails, and then waits for each of them to end."
WRITTEN = "Written by a script after a request of its own. " + ABOUT


def scripted(script: str, body: str = "<div id=x></div>") -> str:
    return f"<html><head><title>Scripted</title></head><body>{body}<script>{script}</script></body></html>"


WRITES = "fetch('/data').then(r => r.text()).then(t => { document.getElementById('x').innerHTML = '<p>' + t + '</p>' })"


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One for all tests, because its start takes a second."""
    browser = Browser(BrowserOptions(settle_s=1.0), AddressGuard(["127.0.0.0/8"]), user_agent="test-agent/1.0")
    yield browser
    await browser.aclose()


async def fetch(browser: Browser, url: str, timeout_s: float = 20.0, max_page_bytes: int = 1_000_000) -> FetchedPage:
    return await browser.fetch(url, timeout_s=timeout_s, max_page_bytes=max_page_bytes)


def family(browser: Browser) -> list[Any]:
    assert browser.process is not None
    return browser_process._family(browser.process._driver)


# --- reading ----------------------------------------------------------------------------------------------------


@needs_chromium
async def test_scripts_text_is_read_under_our_name_with_one_browser(web: WebServer, browser: Browser) -> None:
    web.add("/data", WRITTEN, content_type="text/plain")
    web.add("/end", scripted(WRITES))
    urls = [web.add_redirect("/moved", "/end"), web.base + "/end"]
    pages = await asyncio.gather(*(fetch(browser, url) for url in urls))
    assert all(WRITTEN in (page.text or "") and page.url == web.base + "/end" for page in pages)
    assert {headers["user-agent"] for headers in web.headers} == {"test-agent/1.0"}
    first = browser.process
    await fetch(browser, urls[1])
    assert browser.process is first


@needs_chromium
@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (lambda web: web.add("/x", "no", status=404), FetchError, "HTTP 404"),
        (lambda web: web.add("/x", b"%PDF-1.4", content_type="application/pdf"), DownloadError, "application/pdf"),
        (
            lambda web: web.add("/x", b"\x00" * 99, content_type="application/octet-stream"),
            DownloadError,
            "a file|octet-stream",
        ),
        (lambda web: web.add("/x", page("y" * 2_000_000)), FetchError, "max_page_bytes=1000000"),
        (lambda web: web.add_redirect("/x", "http://10.0.0.1/"), AddressNotAllowedError, "not public"),
        (lambda web: web.add_redirect("/x", "https://10.0.0.1/"), AddressNotAllowedError, "not public"),
        (lambda web: web.add_redirect("/x", "file:///etc/passwd"), FetchError, "ERR_"),
        (lambda web: "http://no-such-host.invalid/", FetchError, "cannot be resolved"),
        (lambda web: "http://127.0.0.1:55555/", FetchError, "cannot connect"),
        (lambda web: "file:///etc/passwd", AddressNotAllowedError, "scheme 'file'"),
        (lambda web: "http://10.0.0.1/", AddressNotAllowedError, "not public"),
    ],
)
async def test_bad_page_has_a_clear_reason(
    web: WebServer, browser: Browser, answer: Callable[[WebServer], str], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason) as raised:
        await fetch(browser, answer(web))
    assert "\n" not in str(raised.value)


@needs_chromium
async def test_subrequests_frames_and_sockets_pass_the_guard(web: WebServer, browser: Browser) -> None:
    """Everything but the page's own host is on an address that was not named, and the same server listens there."""
    guard = browser._guard
    other = f"http://127.1.2.3:{web.port}"
    script = f"""
        fetch('{other}/fetch').catch(() => 0); new Image().src = '{other}/image';
        navigator.sendBeacon('{other}/beacon');
        new WebSocket('ws://127.1.2.3:{web.port}/socket'); open('{other}/window');
        new Worker(URL.createObjectURL(new Blob(["importScripts('{other}/worker')"])));
        navigator.serviceWorker && navigator.serviceWorker.register('/worker.js').catch(() => 0);
        new RTCPeerConnection({{iceServers: [{{urls: 'stun:127.1.2.3:{web.port}'}}]}}).createDataChannel('x');
    """
    body = f"<p>{ABOUT}</p><iframe src='{other}/frame'></iframe><script src='{other}/script'></script>"
    body += f"<link rel=stylesheet href='{other}/style'><iframe src='file:///etc/passwd'></iframe>"
    url = web.add("/page", scripted(script, body))
    browser._guard = AddressGuard(["127.0.0.1/32"])
    assert browser._proxy is not None
    browser._proxy._guard = browser._guard
    try:
        assert ABOUT in ((await fetch(browser, url)).text or "")
    finally:
        browser._guard = browser._proxy._guard = guard
    assert set(web.requests) == {"/page"}


@needs_chromium
async def test_page_opens_no_windows_and_leaves_no_contexts(web: WebServer, browser: Browser) -> None:
    web.add("/other", page("other"))
    url = web.add("/page", scripted("for (let n = 0; n < 5; n++) open('/other'); alert('hello')", f"<p>{ABOUT}</p>"))
    await fetch(browser, url)
    assert browser.process is not None
    await until(lambda: browser.process is not None and not browser.process.browser.contexts)


# --- misbehaviour -----------------------------------------------------------------------------------------------


@needs_chromium
@pytest.mark.parametrize(
    "script", ["for (;;);", "addEventListener('DOMContentLoaded', () => setTimeout(() => { for (;;); }, 50))"]
)
async def test_script_that_never_ends_hangs_nothing(web: WebServer, browser: Browser, script: str) -> None:
    busy, good = web.add("/busy", scripted(script)), web.add("/good", page(ABOUT))
    hanging = asyncio.create_task(fetch(browser, busy, timeout_s=1.5))
    assert ABOUT in ((await fetch(browser, good)).text or "")
    with pytest.raises(TimeoutError):
        await hanging
    assert ABOUT in ((await fetch(browser, good)).text or "")
    await web.wait_until(lambda: web.num_connections == 0)


@needs_chromium
async def test_endless_transfer_is_bounded(web: WebServer) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(head())
        while True:
            writer.write(b"<p>x</p>" * 8_192)
            await writer.drain()

    guard = AddressGuard(["127.0.0.0/8"])
    browser = Browser(BrowserOptions(max_transfer_bytes=500_000), guard, user_agent="test")
    try:
        with pytest.raises(FetchError, match="max_transfer_bytes=500000"):
            await fetch(browser, web.add_handler("/endless", endless))
    finally:
        await browser.aclose()


@needs_chromium
async def test_lost_browser_is_started_anew_once(web: WebServer, browser: Browser) -> None:
    gate = asyncio.Event()
    slow = web.add("/slow", page(ABOUT), gate=gate)
    reading = asyncio.create_task(fetch(browser, slow))
    await web.wait_until(lambda: web.num_active == 1)
    lost = family(browser)
    browser_process._kill(lost[1:])
    await web.wait_until(lambda: web.requests.count("/slow") == 2)
    web.open(gate)
    assert ABOUT in ((await reading).text or "")
    await until(lambda: not any(is_running(process.pid) for process in lost))


@needs_chromium
async def test_memory_is_bounded_and_worn_browsers_are_replaced(web: WebServer) -> None:
    eats = "const all = []; setInterval(() => all.push(new Uint8Array(5e7).fill(1)), 20)"
    hungry, good = web.add("/hungry", scripted(eats)), web.add("/good", page(ABOUT))
    options = BrowserOptions(max_memory_mib=900, max_pages_per_start=2, settle_s=20.0)
    browser = Browser(options, AddressGuard(["127.0.0.0/8"]), user_agent="test")
    endless = web.add_handler("/endless", _hang)
    web.add("/hungry", scripted(f"{eats}; fetch('{endless}')"))
    try:
        with pytest.raises(FetchError, match="max_memory_mib=900"):
            await fetch(browser, hungry, timeout_s=60.0)
        processes = set()
        for _ in range(3):
            assert ABOUT in ((await fetch(browser, good)).text or "")
            assert browser.process is not None
            processes.add(id(browser.process))
        assert len(processes) == 2
    finally:
        await browser.aclose()


async def _hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@needs_chromium
async def test_cancelling_at_any_moment_leaves_nothing(web: WebServer, browser: Browser) -> None:
    web.add("/data", WRITTEN, content_type="text/plain")
    url = web.add("/", scripted(WRITES))
    await fetch(browser, url)
    before = asyncio.all_tasks()
    for step in range(12):
        reading = asyncio.create_task(fetch(browser, url))
        await asyncio.sleep(step * 0.04)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: browser.process is not None and not browser.process.browser.contexts)
    await until(lambda: not asyncio.all_tasks() - before)
    await web.wait_until(lambda: web.num_connections == 0)
    assert WRITTEN in ((await fetch(browser, url)).text or "")


@needs_chromium
async def test_closing_ends_every_process(web: WebServer) -> None:
    before = asyncio.all_tasks()
    browser = Browser(BrowserOptions(), AddressGuard(["127.0.0.0/8"]), user_agent="test")
    reading = asyncio.create_task(fetch(browser, web.add_handler("/", _hang)))
    await web.wait_until(lambda: web.num_active == 1)
    processes = family(browser)
    assert len(processes) > 3
    await browser.aclose()
    with pytest.raises(RetrievalError):
        await reading
    await until(lambda: not any(is_running(process.pid) for process in processes))
    await until(lambda: not asyncio.all_tasks() - before)
    with pytest.raises(RetrievalError, match="closed"):
        await fetch(browser, web.base)


@needs_chromium
async def test_browser_over_cdp_is_used_and_left_alone(web: WebServer, tmp_path: Path) -> None:
    chromium = find_chromium()
    assert chromium is not None
    arguments = ["--headless", "--no-sandbox", "--remote-debugging-port=0", f"--user-data-dir={tmp_path}"]
    running = subprocess.Popen([chromium, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file = tmp_path / "DevToolsActivePort"
        await until(lambda: port_file.exists() and "\n" in port_file.read_text())
        port = port_file.read_text().split("\n")[0]
        options = BrowserOptions(cdp_url=f"http://127.0.0.1:{port}", settle_s=0.5)
        browser = Browser(options, AddressGuard(["127.0.0.0/8"]), user_agent="test")
        try:
            web.add("/data", WRITTEN, content_type="text/plain")
            assert WRITTEN in ((await fetch(browser, web.add("/", scripted(WRITES)))).text or "")
            with pytest.raises(AddressNotAllowedError):
                await fetch(browser, web.add_redirect("/out", "http://10.0.0.1/"))
        finally:
            await browser.aclose()
        assert running.poll() is None
    finally:
        running.kill()
        running.wait()


# --- the crawler's modes ----------------------------------------------------------------------------------------


async def read(retriever: CrawlerRetriever) -> tuple[list[Chunk], list[SourceFailure]]:
    chunks: list[Chunk] = []
    failures: list[SourceFailure] = []
    async with retriever:
        async for item in retriever.stream("How does a task group cancel its tasks?"):
            if isinstance(item, SourceFailure):
                failures.append(item)
            else:
                assert isinstance(item, Append)
                chunks += item.chunks
    return chunks, failures


@needs_chromium
async def test_auto_opens_the_browser_for_what_only_scripts_fill(
    web: WebServer, crawler: Callable[..., CrawlerRetriever]
) -> None:
    web.add("/data", WRITTEN, content_type="text/plain")
    scripted_url = web.add("/scripted", scripted(WRITES))
    plain = web.add("/plain", scripted("1", f"<p>{ABOUT * 2}</p>"))
    chunks, failures = await read(crawler(scripted_url, plain, fetch="auto"))
    assert failures == []
    texts = {chunk.source: chunk.text for chunk in chunks}
    assert WRITTEN in texts[scripted_url]
    assert web.requests.count("/plain") == 1
    assert web.requests.count("/scripted") == 2


@needs_chromium
async def test_browser_mode_reads_files_by_http(web: WebServer, crawler: Callable[..., CrawlerRetriever]) -> None:
    web.add("/data", WRITTEN, content_type="text/plain")
    urls = web.add("/scripted", scripted(WRITES)), web.add("/text", b"%PDX", content_type="application/pdf")
    chunks, failures = await read(crawler(*urls, fetch="browser"))
    assert [chunk.source for chunk in chunks] == [urls[0]]
    assert "is no PDF" in failures[0].reason


async def test_auto_without_a_browser_says_so(
    web: WebServer, crawler: Callable[..., CrawlerRetriever], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browser_process, "find_chromium", lambda preferred="": None)
    empty, short = web.add("/empty", scripted("1")), web.add("/short", scripted("1", "<p>Only a few words.</p>"))
    chunks, failures = await read(crawler(empty, short, fetch="auto"))
    assert [chunk.text for chunk in chunks] == ["Only a few words."]
    for note in (chunks[0].metadata["note"], failures[0].reason):
        assert "no browser was found" in note
    with pytest.raises(RetrievalError, match="no browser was found: install Chromium"):
        await read(crawler(empty, fetch="browser"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executable_path": "/no/such/browser"}, "executable_path='/no/such/browser'"),
        ({"executable_path": sys.executable, "channel": "chrome"}, "executable_path and channel"),
        ({"cdp_url": "localhost:9222"}, "cdp_url='localhost:9222'"),
        ({"max_tabs": 0}, "max_tabs=0"),
        ({"settle_s": -1}, "settle_s=-1"),
        ({"max_memory_mib": 1.5}, r"max_memory_mib=1\.5"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BrowserOptions(**options)


def test_browser_options_without_a_browser_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="fetch='http' uses none"):
        CrawlerRetriever(["http://example.com/"], browser=BrowserOptions())


@needs_chromium
@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("http://169.254.169.254/latest/", r"169\.254\.169\.254 is not public"),
        ("http://10.0.0.1/", r"10\.0\.0\.1 is not public"),
        ("http://127.0.0.1:22/", "port 22 is not one"),
    ],
)
async def test_script_that_leads_to_a_forbidden_address_is_reported_as_that(
    web: WebServer, browser: Browser, target: str, reason: str
) -> None:
    with pytest.raises(AddressNotAllowedError, match=reason):
        await fetch(browser, web.add("/redir", scripted(f"location = {target!r}")))


@needs_chromium
async def test_cancelled_aclose_of_a_retriever_ends_the_browser(web: WebServer) -> None:
    url = web.add("/page", scripted("", f"<p>{ABOUT}</p>"))
    retriever = CrawlerRetriever([url], fetch="browser", allow_networks=["127.0.0.0/8"])
    assert [item async for item in retriever.stream("task group")]
    processes = family(retriever._shared.browser)  # type: ignore[union-attr,arg-type]
    closing = asyncio.create_task(retriever.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    again = asyncio.create_task(retriever.aclose())  # waits for the same end
    await asyncio.wait({closing, again})
    assert closing.cancelled()
    assert again.exception() is None
    assert len(processes) > 1
    await until(lambda: not any(is_running(process.pid) for process in processes))


@needs_chromium
async def test_browser_that_does_not_start_is_a_clear_error(web: WebServer) -> None:
    browser = Browser(BrowserOptions(executable_path="/bin/false"), AddressGuard(), user_agent="test")
    with pytest.raises(RetrievalError, match="cannot be started"):
        await fetch(browser, "http://93.184.216.34/")
    await browser.aclose()
