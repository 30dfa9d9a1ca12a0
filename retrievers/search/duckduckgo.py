"""DuckDuckGo and other engines, through the library ddgs."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any

from stream2llm_sdk.errors import MissingExtraError, RetrievalError
from stream2llm_sdk.retrievers.search.provider import SearchHit
from stream2llm_sdk.retrievers.search.service import hits_of
from stream2llm_sdk.retrievers.web.option_checks import check_seconds

__all__ = ["DuckDuckGoSearch"]


class DuckDuckGoSearch:
    """Searches without a key, by reading the result pages of search engines with ddgs. They are no API: engines
    refuse many questions from one address, and ddgs presents itself as a browser. For anything but trying out, use a
    service that is meant for programs.

    ddgs waits in threads. A search that is cancelled, or takes longer than `timeout_s`, returns at once; its thread
    ends by itself when its request does, at the latest after about `timeout_s`.

    Args:
        engine: one of ddgs's text engines, such as `duckduckgo`, `brave`, `mojeek`, several separated by commas, or
            `auto`.
        region: such as `us-en`, `de-de`, or `wt-wt` for any.
        timeout_s: longest wait, in seconds.
        proxy: an HTTP or SOCKS5 proxy.

    Raises:
        ConfigurationError: `timeout_s` is not positive.
        MissingExtraError: ddgs is not installed.
    """

    def __init__(
        self,
        *,
        engine: str = "duckduckgo",
        region: str = "us-en",
        timeout_s: float = 10.0,
        proxy: str | None = None,
    ) -> None:
        check_seconds("timeout_s", timeout_s)
        try:
            import ddgs
        except ImportError as error:
            raise MissingExtraError("ddgs", "search") from error
        make_client: Any = ddgs.DDGS
        self._make_client: Callable[[], Any] = lambda: make_client(proxy=proxy, timeout=math.ceil(timeout_s))
        self._options = {"backend": engine, "region": region}
        self._timeout_s = timeout_s

    async def search(self, query: str, k: int) -> list[SearchHit]:
        """At most `k` hits for `query`, best first, one a URL. An engine that refuses looks as if it had found
        nothing.

        Raises:
            RetrievalError: the search failed or took longer than `timeout_s`.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                results = await _in_own_thread(lambda: self._ask(query, k))
        except TimeoutError:
            raise RetrievalError(f"DuckDuckGo did not answer within timeout_s={self._timeout_s:g}") from None
        except Exception as error:
            if str(error) == "No results found.":
                return []
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise RetrievalError(f"DuckDuckGo cannot be asked: {reason:.300}") from error
        renamed = ({**result, "url": result.get("href")} for result in results if isinstance(result, dict))
        return hits_of(renamed, "body")[:k]

    def _ask(self, query: str, k: int) -> list[dict[str, Any]]:
        client: Any = self._make_client()
        return list(client.text(query, max_results=k, **self._options))


async def _in_own_thread(work: Any) -> Any:
    """Like `asyncio.to_thread`, but nobody waits for the thread at the end: neither the event loop nor the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(deliver, result, failure)
            except RuntimeError:  # the loop was closed meanwhile
                return

    threading.Thread(target=run, name="ddgs", daemon=True).start()
    return await done
