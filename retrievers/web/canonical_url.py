"""One form for all the URLs of one page, so that no page is fetched or read twice."""

from __future__ import annotations

import posixpath
import re
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from stream2llm_sdk.errors import MissingExtraError

__all__ = ["canonical_url", "host_of", "is_same_site", "names_same_page"]

# What advertisers, mailing services and web shops add to a link without changing the page behind it.
_TRACKING = re.compile(
    r"utm_\w+|_?ga|_gl|_hs(enc|mi)|hsctatracking|[dgy]clid|gclsrc|[gw]braid|fbclid|msclkid|twclid|ttclid|li_fat_id"
    r"|mc_[ce]id|mkt_tok|vero_(id|conv)|oly_(enc|anon)_id|igshid|igsh|ref_src|ref_url|s_cid|cmpid|_openstat|wt\.mc_id"
    r"|phpsessid|jsessionid|aspsessionid\w*|sessionid",
    re.IGNORECASE,
)
_SESSION_IN_PATH = re.compile(r";jsessionid=[^/?]*", re.IGNORECASE)
_INDEX_PAGE = re.compile(r"/(index\.(x?html?|php)|default\.(html?|aspx?))\Z", re.IGNORECASE)
_DEFAULT_PORTS = {"http": 80, "https": 443}


def canonical_url(url: str) -> str:
    """The form under which two URLs of one page are equal. It is for comparing, not for fetching: of http and https
    on their usual ports, which lead to the same page nearly everywhere, it makes https.

    Escapes, host, port, dot segments and the order of parameters are normalised (by w3lib, after RFC 3986); fragments,
    tracking parameters, session ids and the names of index pages are taken away.

    Raises:
        ValueError: the URL is malformed.
        MissingExtraError: w3lib is not installed.
    """
    try:
        from w3lib.url import canonicalize_url
    except ImportError:
        raise MissingExtraError("w3lib", "crawler") from None

    parts = urlsplit(url.strip())
    scheme, host, port = parts.scheme.lower(), (parts.hostname or "").rstrip("."), parts.port
    if port in (None, _DEFAULT_PORTS.get(scheme)):
        port, scheme = None, "https" if scheme == "http" else scheme
    host = f"[{host}]" if ":" in host else host
    netloc = host if port is None else f"{host}:{port}"
    path = _INDEX_PAGE.sub("/", _without_dot_segments(_SESSION_IN_PATH.sub("", parts.path)))
    parameters = parse_qsl(parts.query, keep_blank_values=True, errors="surrogateescape")
    kept = [(name, value) for name, value in parameters if not _TRACKING.fullmatch(name)]
    query = parts.query if len(kept) == len(parameters) else urlencode(kept, errors="surrogateescape")
    return str(canonicalize_url(urlunsplit((scheme, netloc, path or "/", query, ""))))


def host_of(url: str) -> str:
    """The host and port of a URL, in small letters; '' for a URL that has none."""
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


def is_same_site(url: str, other: str) -> bool:
    """Whether two URLs are of one host, `www.` aside."""
    return _site(url) == _site(other) != ""


def names_same_page(url: str, named: str) -> bool:
    """Whether to believe a page at `url` that calls itself `named` (`<link rel=canonical>`): only about its own site,
    and not if it calls itself the front page, which is what badly configured sites say of every page."""
    if not named or not is_same_site(url, named):
        return False
    is_front = urlsplit(named).path in ("", "/") and not urlsplit(named).query
    return not is_front or urlsplit(canonical_url(url)).path == "/"


def _site(url: str) -> str:
    return host_of(url).removeprefix("www.")


def _without_dot_segments(path: str) -> str:
    if "/." not in path:
        return path
    ends_in_folder = path.endswith(("/", "/.", "/.."))
    plain = posixpath.normpath(path)
    return plain.rstrip("/") + "/" if ends_in_folder else plain
