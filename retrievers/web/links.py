"""The links of a page, with what tells whether they are worth following."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from stream2llm_sdk.retrievers.web.html_tree import absolute_url
from stream2llm_sdk.retrievers.web.page import PageLink

__all__ = ["page_links"]

_NAVIGATION_TAGS = frozenset({"nav", "footer", "aside", "header"})
_NAVIGATION_ROLES = frozenset({"navigation", "banner", "contentinfo", "complementary", "search", "menu"})
_NAVIGATION_NAME = re.compile(r"(?:^|[-_ ])(?:nav\w*|menu\w*|foot\w*|sidebar\w*|breadcrumb\w*|related|toc)(?:$|[-_ ])")
_INLINE = frozenset(
    re.findall(
        r"\S+",
        "a abbr b br cite code em font i img kbd mark q s samp small span strong sub sup u var",
    )
)
_SILENT = frozenset({"script", "style", "template"})
_REFRESH = re.compile(r"^\s*[\d.]*\s*[;,]?\s*(?:url\s*=)?\s*['\"]?([^'\"]+)", re.IGNORECASE)
_MAX_TEXT_CHARS = 200
_MAX_URL_CHARS = 2_000
_MAX_PLACES = 10_000


def page_links(root: Any, base_url: str, max_links: int) -> tuple[PageLink, ...]:
    """The page's links in document order, each URL once, at most `max_links`; those in the main text before those of
    the navigation where not all fit. Frames and a redirect in the page's head count as links."""
    found: dict[str, PageLink] = {}
    walk = _Walk()
    walk.run(root)
    for place in walk.places[:_MAX_PLACES]:
        url = absolute_url(base_url, place.reference)
        if not url or len(url) > _MAX_URL_CHARS:
            continue
        link = PageLink(url, walk.text_of(place), walk.context_of(place), place.in_main)
        known = found.get(url)
        if known is None or (link.in_main, bool(link.text)) > (known.in_main, bool(known.text)):
            found[url] = link
    links = list(found.values())
    if len(links) > max_links:
        first = sorted(range(len(links)), key=lambda i: not links[i].in_main)[:max_links]
        links = [links[i] for i in sorted(first)]
    return tuple(links)


@dataclass(slots=True)
class _Place:
    """Where a link stands in the page's text: offsets of its own text and of the block around it."""

    reference: str
    in_main: bool
    block: int
    start: int
    end: int = 0
    alternative: str = ""


class _Walk:
    """One walk over the page, in time linear in its size however its links are nested."""

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self._texts: list[str] = []
        self._length = 0
        self._block_ends = [0]
        self._whole = ""

    def run(self, root: Any) -> None:
        from lxml import etree

        navigation = 0
        open_places: list[_Place] = []
        for event, element in etree.iterwalk(root, events=("start", "end")):
            is_start = event == "start"
            if element.tag not in _INLINE:
                self._end_block()
            if _is_navigation(element):
                navigation += 1 if is_start else -1
            reference = _reference(element)
            if reference and is_start:
                place = _Place(reference, not navigation, len(self._block_ends), self._length)
                self.places.append(place)
                open_places.append(place)
                place.alternative = element.get("title") or element.get("alt") or ""
            elif element.tag == "img" and is_start and open_places:
                open_places[-1].alternative = open_places[-1].alternative or element.get("alt") or ""
            elif reference and open_places:
                open_places.pop().end = self._length
            if element.tag not in _SILENT or not is_start:
                self._add(element.text if is_start else element.tail)
        self._end_block()
        self._whole = "".join(self._texts)

    def text_of(self, place: _Place) -> str:
        """The link's own text."""
        text = self._whole[place.start : max(min(place.end, place.start + 2 * _MAX_TEXT_CHARS), place.start)]
        return (_line(text) or _line(place.alternative[:_MAX_TEXT_CHARS]))[:_MAX_TEXT_CHARS]

    def context_of(self, place: _Place) -> str:
        """The text around the link, within its block."""
        ends = self._block_ends
        first, last = ends[place.block - 1], ends[min(place.block, len(ends) - 1)]
        middle = (place.start + max(place.end, place.start)) // 2
        start, end = max(first, middle - _MAX_TEXT_CHARS // 2), min(last, middle + _MAX_TEXT_CHARS // 2)
        return _line(self._whole[start:end])

    def _add(self, text: str | None) -> None:
        if text:
            self._texts.append(text)
            self._length += len(text)

    def _end_block(self) -> None:
        if self._length != self._block_ends[-1]:
            self._block_ends.append(self._length)
            self._add(" ")


def _reference(element: Any) -> str:
    """What an element links to, if it is a link."""
    if element.tag in ("a", "area"):
        return element.get("href") or ""
    if element.tag in ("frame", "iframe"):
        return element.get("src") or ""
    if element.tag == "meta" and _is_refresh(element):
        match = _REFRESH.match(element.get("content") or "")
        return match[1] if match else ""
    return ""


def _is_refresh(element: Any) -> bool:
    return (element.get("http-equiv") or "").lower() == "refresh"


def _is_navigation(element: Any) -> bool:
    attributes = element.attrib
    if element.tag in _NAVIGATION_TAGS or attributes.get("role", "").lower() in _NAVIGATION_ROLES:
        return True
    if element.tag not in ("div", "ul", "ol", "table", "section", "p", "td"):
        return False
    names = f"{attributes.get('class', '')} {attributes.get('id', '')}".strip().lower()
    return bool(names) and _NAVIGATION_NAME.search(names) is not None


def _line(text: str) -> str:
    return " ".join(text.split())
