"""Which parts of a page are its main text.

trafilatura decides, and its decision is carried over to the page's own elements, because trafilatura's rendering loses
what technical pages live from: code blocks inside lists and tables become running text, and many definition lists and
tables are left out. Each run of text (what stands directly in one block element) is looked up in trafilatura's
text. Runs that are found are kept. Code, cells, definitions and headings that are not found, and runs too short to
tell, are kept where they stand between kept ones. So is long prose without links: trafilatura goes by class names and
leaves out a section whose name is "Sharing configuration files".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from stream2llm_sdk.retrievers.web.html_tree import parse_html

__all__ = ["linked_chars", "main_text"]

_SILENT_TAGS = (
    *("style", "script", "template", "link", "meta", "select", "input", "textarea", "datalist"),
    *("img", "picture", "svg", "video", "audio", "canvas", "iframe", "object", "embed"),
)
_BOILERPLATE_TAGS = ("nav", "footer", "aside", "button", "noscript", "dialog")
_BOILERPLATE_ROLES = frozenset({"navigation", "banner", "contentinfo", "complementary", "search", "menu", "dialog"})
_PERMALINKS = frozenset({"headerlink", "permalink", "anchor-link", "anchorjs-link", "header-anchor"})
_INLINE = frozenset(
    re.findall(
        r"\S+",
        "a abbr acronym b bdi bdo big cite code data del dfn em font i ins kbd label mark meter output q rp rt ruby s "
        "samp small span strike strong sub sup time tt u var wbr br",
    )
)
_EASILY_LOST = frozenset(
    re.findall(
        r"\S+",
        "pre code td th dt dd caption figcaption h1 h2 h3 h4 h5 h6 summary",
    )
)
_HEADINGS = frozenset(["h1", "h2", "h3", "h4", "h5", "h6"])
_CODE = frozenset({"pre", "code", "dd"})
_HIDING = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|(?:(?![\u3040-\u30ff\u3400-\u9fff])\w)+")
_SHINGLE = 3
_MIN_FOUND = 0.5
_MIN_REFERENCE_WORDS = 25
_MIN_PROSE_WORDS = 40
_MAX_LINKED = 0.1


@dataclass(slots=True)
class _Run:
    """Text that stands directly in one block element. `is_main` is None where nothing has decided yet."""

    block: Any
    texts: list[str] = field(default_factory=list)
    places: list[tuple[Any, bool]] = field(default_factory=list)
    """Where the texts hang: an element, and whether it is its tail."""
    words: list[str] = field(default_factory=list)
    num_linked: int = 0
    is_main: bool | None = None

    @property
    def is_easily_lost(self) -> bool:
        return self.block.tag in _EASILY_LOST


def main_text(html: str, root: Any) -> Any:
    """The page as a tree that holds nothing but its main text. A page all of whose text looks like decoration stays
    whole.

    Args:
        html: the page.
        root: the same, as `parse_html` gives it; it is changed.
    """
    reference = _WORD.findall(_reference_text(root).lower())
    for drops_decoration in (True, False):
        body = root.body if root.body is not None else root
        _drop(body, _SILENT_TAGS)
        if drops_decoration:
            _drop(body, _BOILERPLATE_TAGS)
            _drop_decoration(body)
        num_kept = _keep_main_runs(body, reference)
        if num_kept > _MIN_FOUND * len(reference) or not drops_decoration:
            break
        root = parse_html(html)
    _drop_empty(body)
    return root


def linked_chars(root: Any) -> int:
    """How many characters of a tree are inside links."""
    return sum(len("".join(link.itertext())) for link in root.iter("a"))


def _keep_main_runs(body: Any, reference: list[str]) -> int:
    """Clears what is not main text. Returns how many words stay."""
    runs = list(_runs(body))
    if len(reference) >= _MIN_REFERENCE_WORDS:
        _decide(runs, reference)
        _fill_gaps(runs)
        for run in runs:
            if not run.is_main:
                _clear(run)
        runs = [run for run in runs if run.is_main]
    return sum(len(run.words) for run in runs)


def _drop(body: Any, tags: Iterable[str]) -> None:
    for element in list(body.iter(*tags)):
        if element is not body:
            _drop_tree(element)


def _drop_decoration(body: Any) -> None:
    """Drops what says by role, visibility or class that it is no content. (Class names alone are not enough: many
    a `sidebar` is the article.)"""
    for element in list(body.iter("*")):
        if element is body:
            continue
        attributes = element.attrib
        role = attributes.get("role", "").lower()
        is_permalink = element.tag == "a" and not _PERMALINKS.isdisjoint(attributes.get("class", "").lower().split())
        is_hidden = "hidden" in attributes or _HIDING.search(attributes.get("style", ""))
        if role in _BOILERPLATE_ROLES or is_hidden or is_permalink:
            _drop_tree(element)


def _runs(body: Any) -> Iterator[_Run]:
    """The page's runs of text in document order. Nothing here recurses, so nesting has no bound."""
    from lxml import etree

    run = _Run(body)
    blocks = [body]
    num_links = 0
    for event, element in etree.iterwalk(body, events=("start", "end")):
        is_block = element.tag not in _INLINE
        if event == "start":
            if is_block and element is not body:
                if run.texts:
                    yield run
                blocks.append(element)
                run = _Run(element)
            num_links += element.tag == "a"
            _add(run, element.text, (element, False), num_links > 0)
        else:
            num_links -= element.tag == "a"
            if is_block and element is not body:
                if run.texts:
                    yield run
                blocks.pop()
                run = _Run(blocks[-1])
            if element is not body:
                _add(run, element.tail, (element, True), num_links > 0)
    if run.texts:
        yield run


def _add(run: _Run, text: str | None, place: tuple[Any, bool], is_linked: bool) -> None:
    if text and not text.isspace():
        run.texts.append(text)
        run.places.append(place)
        words = _WORD.findall(text.lower())
        run.words += words
        run.num_linked += len(words) if is_linked else 0


def _reference_text(root: Any) -> str:
    """The main text as trafilatura sees it."""
    import trafilatura

    return trafilatura.extract(root, output_format="txt", favor_recall=True, include_comments=False) or ""


def _decide(runs: list[_Run], reference: list[str]) -> None:
    """Marks runs as main text or not where trafilatura's words tell."""
    known = {tuple(reference[i : i + _SHINGLE]) for i in range(len(reference) - _SHINGLE + 1)}
    for run in runs:
        words = run.words
        num_shingles = len(words) - _SHINGLE + 1
        if num_shingles < 1:
            continue
        num_found = sum(tuple(words[i : i + _SHINGLE]) in known for i in range(num_shingles))
        if num_found >= _MIN_FOUND * num_shingles:
            run.is_main = True
        elif not run.is_easily_lost:
            run.is_main = False


def _fill_gaps(runs: list[_Run]) -> None:
    """Decides by their neighbours about runs that are undecided, and about long prose that trafilatura left out."""
    main = [i for i, run in enumerate(runs) if run.is_main]
    for run in runs[main[0] : main[-1]] if main else []:
        is_prose = len(run.words) >= _MIN_PROSE_WORDS and run.num_linked <= _MAX_LINKED * len(run.words)
        run.is_main = run.is_main or (True if is_prose else run.is_main)
    after: list[bool | None] = [None] * len(runs)
    following: bool | None = None
    for i in range(len(runs) - 1, -1, -1):
        after[i] = following
        if runs[i].is_main is not None:
            following = runs[i].is_main
    before: bool | None = None
    for run, behind in zip(runs, after, strict=True):
        if run.is_main is not None:
            before = run.is_main
            continue
        is_between = bool(before and behind)
        is_title = behind and run.block.tag in _HEADINGS
        is_last_code = before and behind is None and run.block.tag in _CODE
        run.is_main = bool(is_between or is_title or is_last_code)


def _clear(run: _Run) -> None:
    for element, is_tail in run.places:
        if is_tail:
            element.tail = " "
        else:
            element.text = None


def _drop_empty(body: Any) -> None:
    """Drops elements without text, except cells (which hold their column's place) and line breaks."""
    for element in reversed(list(body.iter("*"))):
        if element is body:
            continue
        is_empty = not len(element) and not (element.text and element.text.strip())
        if element.tag in ("tr", "table"):
            is_empty = not "".join(element.itertext()).strip()
        if is_empty and element.tag not in ("td", "th", "br"):
            _drop_tree(element)


def _drop_tree(element: Any) -> None:
    """Removes an element and keeps the text behind it."""
    parent = element.getparent()
    if parent is not None:
        element.drop_tree() if hasattr(element, "drop_tree") else parent.remove(element)
