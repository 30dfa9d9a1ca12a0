"""Which URLs and addresses may be fetched.

URLs come from search results and redirects, so whoever writes a page chooses them. Without a check, a page can make
the crawler read the machine's own services, the private network or a cloud's metadata service. The rule is short:
http(s) only, and every address that is connected to is globally routable unless its network was named.
"""

from __future__ import annotations

import asyncio
import socket
import unicodedata
from collections.abc import Awaitable, Callable, Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from stream2llm_sdk.errors import AddressNotAllowedError, ConfigurationError, FetchError

__all__ = ["AddressGuard", "HostLookup", "system_lookup"]

HostLookup = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host name and a port to addresses in text form; raises OSError for a name that does not exist."""

_IPV4_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = IPv6Network("2000::/3")

# Networks that `ipaddress` takes for global on some supported versions of Python, or that are routable but
# lead to the inside: transition mechanisms (6to4 and its relays, Teredo) and a cloud's host agent.
_NEVER_PUBLIC: tuple[IPv4Network | IPv6Network, ...] = (
    IPv4Network("192.0.0.0/24"),
    IPv4Network("192.88.99.0/24"),
    IPv4Network("168.63.129.16/32"),
    IPv6Network("2001::/23"),
    IPv6Network("2001:db8::/32"),
    IPv6Network("2002::/16"),
    IPv6Network("3fff::/20"),
)


async def system_lookup(host: str, port: int) -> Sequence[str]:
    """The operating system's answer for `host`. The lookup runs in a thread, which a cancellation cannot stop;
    it ends by itself and its answer is dropped."""
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in answers]


class AddressGuard:
    """Checks URLs by their form and addresses by where they lead.

    Args:
        allow_networks: networks to allow although they are not public, in CIDR form: `["127.0.0.0/8"]`.
        lookup: how host names are resolved.

    Raises:
        ConfigurationError: an entry of `allow_networks` is not a network.
    """

    def __init__(self, allow_networks: Iterable[str] = (), *, lookup: HostLookup = system_lookup) -> None:
        if isinstance(allow_networks, str):
            raise ConfigurationError(f"allow_networks={allow_networks!r}: give a list, such as ['127.0.0.0/8']")
        self._allowed = tuple(_parse_network(entry) for entry in allow_networks)
        self._lookup = lookup

    def check_url(self, url: str) -> None:
        """Checks everything about a URL that needs no name resolution.

        Raises:
            AddressNotAllowedError: the scheme is not http(s), the URL carries a user name, or its host is missing,
                malformed, a number in another form than dotted decimal, or an address that is not allowed.
        """
        if any(unicodedata.category(char) == "Cc" or char == "\\" for char in url):
            raise AddressNotAllowedError("the URL holds a control character or a backslash")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise AddressNotAllowedError(f"the URL is malformed: {error}") from None
        if parts.scheme not in ("http", "https"):
            raise AddressNotAllowedError(f"scheme {parts.scheme!r} is not fetched, only http and https")
        if "@" in parts.netloc:
            raise AddressNotAllowedError("URLs with a user name or password are not fetched")
        if not host or port == 0:
            raise AddressNotAllowedError("the URL names no host" if not host else "port 0 cannot be fetched")
        self._check_host(host, is_bracketed="[" in parts.netloc)

    def check_address(self, address: str) -> None:
        """Raises AddressNotAllowedError unless `address`, in text form, may be connected to."""
        reason = self._refusal(address)
        if reason is not None:
            raise AddressNotAllowedError(reason)

    async def resolve(self, host: str, port: int) -> list[str]:
        """The addresses of `host` that may be connected to, in the resolver's order, at least one.

        Connect to one of these and do not resolve again: a second answer may differ.

        Raises:
            FetchError: the name does not exist.
            AddressNotAllowedError: none of its addresses is allowed.
        """
        try:
            answers = list(dict.fromkeys(await self._lookup(host, port)))
        except (OSError, UnicodeError) as error:
            raise FetchError(f"host name {host!r} cannot be resolved: {error}") from error
        if not answers:
            raise FetchError(f"host name {host!r} has no address")
        refusals = {answer: self._refusal(answer) for answer in answers}
        allowed = [answer for answer, reason in refusals.items() if reason is None]
        if not allowed:
            raise AddressNotAllowedError(f"host name {host!r}: {refusals[answers[0]]}")
        return allowed

    def _check_host(self, host: str, *, is_bracketed: bool) -> None:
        if "%" in host:
            raise AddressNotAllowedError(f"host {host!r} holds an escape or a zone id")
        if is_bracketed:
            self.check_address(host)
            return
        # Clients map full-width digits and dots onto ASCII before they read a host as a number.
        name = unicodedata.normalize("NFKC", host).replace("。", ".").rstrip(".").casefold()
        if not name or not all(char.isalnum() or char in "-._" for char in name):
            raise AddressNotAllowedError(f"host {host!r} is malformed")
        last = name.rpartition(".")[2]
        if last.isdigit() or last.startswith("0x"):
            if _parse_address(name) is None:
                raise AddressNotAllowedError(f"host {host!r} is a number but not a dotted decimal address")
            self.check_address(name)

    def _refusal(self, text: str) -> str | None:
        address = _parse_address(text)
        if address is None:
            return f"{text!r} is not an address"
        if getattr(address, "scope_id", None):
            return f"address {text} holds a zone id"
        judged = _embedded_ipv4(address) or address
        if any(candidate in network for network in self._allowed for candidate in (address, judged)):
            return None
        if _is_public(judged):
            return None
        return f"address {text} is not public; name its network in allow_networks if it is meant to be read"


def _parse_network(entry: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(entry)
    except ValueError as error:
        raise ConfigurationError(
            f"allow_networks: {entry!r} is not a network ({error}); write it as 127.0.0.0/8 or fd00::/8"
        ) from None


def _parse_address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _embedded_ipv4(address: IPv4Address | IPv6Address) -> IPv4Address | None:
    """The IPv4 address that packets to `address` reach, for the two forms in which one is reached today."""
    if address in _IPV4_MAPPED or address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if any(address in network for network in _NEVER_PUBLIC):
        return False
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved
