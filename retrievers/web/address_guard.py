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

# Ports on which other protocols listen that an HTTP request could be mistaken for: the "bad ports" of the Fetch
# standard (https://fetch.spec.whatwg.org/#port-blocking), which no browser connects to.
# fmt: off
_BLOCKED_PORTS = frozenset((
    0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101, 102, 103, 104, 109,
    110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427, 465, 512, 513, 514, 515, 526, 530,
    531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990, 993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190,
    5060, 5061, 6000, 6566, 6665, 6666, 6667, 6668, 6669, 6679, 6697, 10080,
))
# fmt: on

_IPV4_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = IPv6Network("2000::/3")
# The interface identifiers of ISATAP (RFC 5214, section 6.1), which end in an IPv4 address of the site.
_ISATAP_IDENTIFIERS = (0x00005EFE, 0x02005EFE)

# Networks that `ipaddress` takes for global on some supported versions of Python, or that are routable but
# lead to the inside: transition mechanisms (6to4 and its relays, Teredo) and a cloud's host agent.
_NEVER_PUBLIC: tuple[IPv4Network | IPv6Network, ...] = (
    IPv4Network("192.0.0.0/24"),
    IPv4Network("192.88.99.0/24"),
    IPv4Network("168.63.129.16/32"),
    IPv6Network("64:ff9b:1::/48"),
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

    An IPv6 address that carries an IPv4 address is judged by what it reaches: the mapped form and NAT64's well-known
    prefix by the IPv4 address; 6to4, Teredo, ISATAP, IPv4-compatible and NAT64's local prefix are always refused. A
    NAT64 prefix that a network chose for itself (RFC 6052) looks like any other address and cannot be told.

    Args:
        allow_networks: networks to allow although they are not public, in CIDR form: `["127.0.0.0/8"]`.
        lookup: how host names are resolved.

    Raises:
        ConfigurationError: an entry of `allow_networks` is not a network.
    """

    def __init__(self, allow_networks: Iterable[str] = (), *, lookup: HostLookup = system_lookup) -> None:
        if isinstance(allow_networks, (str, bytes)) or not isinstance(allow_networks, Iterable):
            raise ConfigurationError(f"allow_networks={allow_networks!r:.80}: give a list, such as ['127.0.0.0/8']")
        self._allowed = tuple(_parse_network(entry) for entry in allow_networks)
        self._lookup = lookup

    @property
    def allowed_networks(self) -> tuple[str, ...]:
        """The networks that are allowed although they are not public, sorted."""
        return tuple(sorted(str(network) for network in self._allowed))

    def check_url(self, url: str) -> None:
        """Checks everything about a URL that needs no name resolution.

        Raises:
            AddressNotAllowedError: the scheme is not http(s), the URL carries a user name, its port is one of another
                protocol, or its host is missing, malformed, a number in another form than dotted decimal, or an
                address that is not allowed.
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
        if not host:
            raise AddressNotAllowedError("the URL names no host")
        if port in _BLOCKED_PORTS:
            raise AddressNotAllowedError(f"port {port} is not one for web pages")
        self._check_host(host, is_bracketed="[" in parts.netloc)

    def check_address(self, address: str) -> None:
        """Raises AddressNotAllowedError unless `address`, in text form, may be connected to."""
        reason = self._refusal(address)
        if reason is not None:
            raise AddressNotAllowedError(reason)

    async def resolve(self, host: str, port: int) -> list[str]:
        """The addresses of `host` that may be connected to at `port`, in the resolver's order, at least one.

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
        if not isinstance(entry, (str, IPv4Network, IPv6Network)):  # a number would be taken for an address
            raise ValueError("not given as text")
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
    if isinstance(address, IPv6Address) and int(address) >> 32 & 0xFFFFFFFF in _ISATAP_IDENTIFIERS:
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved
