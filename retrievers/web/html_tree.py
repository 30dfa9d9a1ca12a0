"""A page's HTML as a tree, whatever state it is in, and what its head says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

__all__ = ["PageHead", "absolute_url", "parse_html", "read_head"]

_UNPARSABLE = re.compile(r"\A[\s\ufeff]*(?:<\?xml[^>]*\?>)?|\x00")
_TAG = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9]*)\b[^<>]*>")
_MANY_BREAKS = re.compile(r"<br>(?:\s*<br>)+")
_KEPT_WHEN_TOO_DEEP = frozenset({"html", "head", "title", "body", "script", "style", "p", "br"})
_INLINE = frozenset({"a", "abbr", "b", "code", "em", "font", "i", "kbd", "mark", "q", "s", "samp", "small", "span"})
_MAX_DESCRIPTION_CHARS = 300


@dataclass(frozen=True, slots=True)
class PageHead:
    """What a page says about itself; every field may be empty.

    Attributes:
        title: one line.
        description: one line of at most 300 characters.
        canonical_url: absolute.
        base_url: what relative links are relative to.
        language: what the page says its language is, as an ISO 639-1 code.
        follows_links: False if the page asks that its links be left alone (robots `nofollow`).
    """

    title: str
    description: str
    canonical_url: str
    base_url: str
    language: str
    follows_links: bool


def parse_html(html: str) -> Any | None:
    """The root element; None if the page has no element and no text at all.

    The parser stops at 255 levels and loses what is deeper. Such a page is read once more without its structure, as
    lines of text.
    """
    from lxml import etree

    html = _UNPARSABLE.sub("", html)
    root, is_whole = _parse(html)
    if not is_whole:
        root, _ = _parse(_MANY_BREAKS.sub("<br><br>", _TAG.sub(_flat, html)))
    if root is not None:
        etree.strip_tags(root, etree.Comment, etree.ProcessingInstruction)
    return root


def read_head(root: Any, url: str) -> PageHead:
    """What the page at `url` says about itself."""
    base_url = url
    for element in root.iter("base"):
        base_url = absolute_url(url, element.get("href")) or url
        break
    meta = {(m.get("name") or m.get("property") or "").lower(): m.get("content") or "" for m in root.iter("meta")}
    title = next((text for e in root.iter("title") if (text := _line(e.text_content()))), "")
    links = (e.get("href") for e in root.iter("link") if "canonical" in (e.get("rel") or "").lower().split())
    robots = {word.strip() for word in meta.get("robots", "").lower().split(",")}
    return PageHead(
        title=title or _line(meta.get("og:title", "")),
        description=_line(meta.get("description") or meta.get("og:description", ""))[:_MAX_DESCRIPTION_CHARS],
        canonical_url=next((found for href in links if (found := absolute_url(base_url, href))), ""),
        base_url=base_url,
        language=declared if len(declared := (root.get("lang") or "").partition("-")[0].strip().lower()) == 2 else "",
        follows_links=robots.isdisjoint({"nofollow", "none"}),
    )


def absolute_url(base_url: str, reference: str | None) -> str:
    """`reference` as an http(s) URL without its fragment; '' if it is none."""
    reference = (reference or "").strip()
    if not reference or reference.startswith("#"):
        return ""
    try:
        url = urljoin(base_url, reference)
        parts = urlsplit(url)
    except ValueError:
        return ""
    is_web = parts.scheme in ("http", "https") and parts.hostname
    return parts._replace(fragment="").geturl() if is_web else ""


def _parse(html: str) -> tuple[Any | None, bool]:
    """The tree, and whether it holds the whole page."""
    from lxml import etree
    from lxml import html as lxml_html

    parser = lxml_html.HTMLParser(encoding="utf-8")
    try:
        # As bytes: text with an encoding declaration inside is refused.
        root = lxml_html.document_fromstring(html.encode(errors="replace"), parser=parser)
    except etree.ParserError:
        return None, True
    return root, not any(entry.type_name == "ERR_RESOURCE_LIMIT" for entry in parser.error_log)


def _flat(match: re.Match[str]) -> str:
    name = match[2].lower()
    if name in _KEPT_WHEN_TOO_DEEP:
        return match[0]
    return "" if name in _INLINE else "<br>"


def _line(text: str) -> str:
    return " ".join(text.split())
