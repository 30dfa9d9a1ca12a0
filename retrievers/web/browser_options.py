"""Which browser reads pages, and how much it may use."""

from __future__ import annotations

import os
from dataclasses import dataclass

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.web.option_checks import check_instance, check_seconds
from stream2llm_sdk.value_checks import is_whole

__all__ = ["BrowserOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserOptions:
    """Which Chromium to use, and its bounds. Without a path, a channel or a CDP URL, Playwright's own Chromium is
    used if it is installed, else the first Chromium or Chrome on the PATH.

    Args:
        executable_path: a Chromium or Chrome, such as `/usr/bin/chromium`.
        channel: an installed browser by Playwright's name for it, such as `"chrome"` or `"msedge"`.
        cdp_url: a browser that runs already and is somebody else's to end, by its DevTools address such as
            `http://127.0.0.1:9222`. It must reach this process at `proxy_host`.
        max_tabs: pages open at the same time. Each takes some 100 MB.
        settle_s: longest wait in seconds, once a page's HTML is there, for its scripts' requests to come to an end.
        max_pages_per_start: pages after which the browser is started anew, against leaks.
        max_memory_mib: bound on the memory of all of the browser's processes. Past three quarters of it the browser is
            started anew before the next page; past it, it is killed. Of a browser over CDP it is not known.
        max_transfer_bytes: bound on what one page may load, with its scripts and all other parts.
        sandbox: whether Chromium's sandbox is on; if left out, it is, save for the root user, where it cannot be.
        proxy_host: address of this machine at which the browser reaches the guarded proxy.
        start_timeout_s: longest time for the browser's start in seconds.

    Raises:
        ConfigurationError: more than one browser is named, or an option has a value that cannot work.
    """

    executable_path: str | os.PathLike[str] | None = None
    channel: str | None = None
    cdp_url: str | None = None
    max_tabs: int = 4
    settle_s: float = 2.0
    max_pages_per_start: int = 200
    max_memory_mib: int = 2_048
    max_transfer_bytes: int = 32_000_000
    sandbox: bool | None = None
    proxy_host: str = "127.0.0.1"
    start_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        named = [name for name in ("executable_path", "channel", "cdp_url") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ConfigurationError(f"{' and '.join(named)} each name a browser: give one of them")
        for name in ("max_tabs", "max_pages_per_start", "max_memory_mib", "max_transfer_bytes"):
            value = getattr(self, name)
            if not is_whole(value, 1):
                raise ConfigurationError(f"{name}={value!r}: give a whole number of at least 1")
        for name in ("settle_s", "start_timeout_s"):
            check_seconds(name, getattr(self, name))
        check_instance("executable_path", self.executable_path, (str, os.PathLike), "the path of a program")
        check_instance("channel", self.channel, str, "a browser's name, such as 'chrome'")
        check_instance("cdp_url", self.cdp_url, str, "an address such as http://127.0.0.1:9222")
        check_instance("sandbox", self.sandbox, bool, "True, False or None")
        if not isinstance(self.proxy_host, str) or not self.proxy_host:
            raise ConfigurationError(f"proxy_host={self.proxy_host!r:.80}: give an address such as '127.0.0.1'")
        if self.executable_path is not None and not os.access(self.executable_path, os.X_OK):
            raise ConfigurationError(
                f"executable_path={os.fspath(self.executable_path)!r} is no program that can be run"
            )
        if self.cdp_url is not None and not self.cdp_url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigurationError(f"cdp_url={self.cdp_url!r}: give an address such as http://127.0.0.1:9222")
