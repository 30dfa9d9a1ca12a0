"""The text of an HTML page as paragraphs, each with the anchor it stands under."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser

__all__ = ["PageText", "Paragraph", "page_text"]

_BLOCK_TAGS = frozenset(
    """
    address article blockquote body dd div dl dt footer h1 h2 h3 h4 h5 h6 header hr li main ol p pre section table td
    th tr ul
    """.split()  # noqa: SIM905
)
_SILENT_TAGS = frozenset({"nav", "script", "style"})
_BLANK_LINES = re.compile(r"\n\s*\n")
# What pydoc prints for every class and module alike, and what it repeats from other classes.
_GENERIC = re.compile(
    r"Initialize self\. See help\(type\(self\)\) for accurate signature\."
    r"|__dict__|__weakref__|__abstractmethods__ = frozenset\(.*\)"
    r"|(dictionary for instance variables|list of weak references to the object)( \(if defined\))?"
    r"|(Modules|Package Contents|Classes|Functions|Data)"
    r"|[A-Z][a-z ]+ defined here:"
)
_REPEATED_MEMBERS = re.compile(r"Method resolution order:|[A-Z][a-z ]+ inherited from [\w.]+:")


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph of a page.

    Attributes:
        text: lines separated by newlines; indentation is kept, other runs of white space are one space.
        anchor: the name of the nearest anchor at or above it, "" before the first.
    """

    text: str
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class PageText:
    """What a page says.

    Attributes:
        title: of the page; a module's name for a page of pydoc.
        paragraphs: in page order, none empty.
    """

    title: str
    paragraphs: tuple[Paragraph, ...]


@dataclass(slots=True)
class _Block:
    tag: str
    anchor: str
    text: str


class _BlockParser(HTMLParser):
    """Cuts a page into the texts between block tags."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title = ""
        self.blocks: list[_Block] = []
        self._tag = ""
        self._anchor = ""
        self._text: list[str] = []
        self._silenced_by: list[str] = []
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._silenced_by:
            self._silenced_by += [tag] * (tag == self._silenced_by[0])
            return
        if tag in _BLOCK_TAGS:
            self._flush(tag)
        if tag in _SILENT_TAGS:
            self._silenced_by.append(tag)
        elif tag == "title":
            self._in_title = not self.title
        elif tag == "br":
            self._text.append("\n")
        anchor = dict(attrs).get("name" if tag == "a" else "id")
        if anchor:
            self._anchor = anchor

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        if self._silenced_by:
            if tag == self._silenced_by[0]:
                self._silenced_by.pop()
        elif tag in _BLOCK_TAGS:
            self._flush("")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
        elif not self._silenced_by:
            # Line ends in the source are white space; those that show are <br>. Indentation is non-breaking.
            self._text.append(re.sub(r"[ \t\r\n]+", " ", data))

    def close(self) -> None:
        super().close()
        self._flush("")

    def _flush(self, next_tag: str) -> None:
        lines = [_tidy(line) for line in "".join(self._text).split("\n")]
        text = "\n".join(lines).strip("\n").rstrip()
        if text:
            self.blocks.append(_Block(self._tag, self._anchor, text))
        self._text.clear()
        self._tag = next_tag


def _tidy(line: str) -> str:
    line = line.removeprefix(" ").rstrip()
    words = line.lstrip()
    return line[: len(line) - len(words)].replace("\xa0", " ") + " ".join(words.split())


def page_text(html: str) -> PageText:
    """Reads a page: pydoc's in full detail, any other by its block elements."""
    parser = _BlockParser()
    parser.feed(html)
    parser.close()
    title = " ".join(parser.title.split()).removeprefix("Python: ").removeprefix("module ").removeprefix("package ")
    heading = parser.blocks[:1]
    body = parser.blocks[1:] if heading and heading[0].text == title else parser.blocks
    return PageText(title, tuple(_paragraphs(body)))


def _paragraphs(blocks: list[_Block]) -> list[Paragraph]:
    """Splits blocks at blank lines and keeps a signature with the first paragraph of its description."""
    found: list[Paragraph] = []
    signature: _Block | None = None
    for block in _informative(blocks):
        if signature is not None and block.tag != "dd":
            found.append(Paragraph(signature.text, signature.anchor))
            signature = None
        if block.tag == "dt":
            signature = block
            continue
        first, *others = _BLANK_LINES.split(block.text)
        if signature is not None:
            first, signature = f"{signature.text}\n{first}", None
        found += (Paragraph(text, block.anchor) for text in (first, *others) if text.strip())
    if signature is not None:
        found.append(Paragraph(signature.text, signature.anchor))
    return found


def _informative(blocks: list[_Block]) -> Iterator[_Block]:
    """Leaves out what pydoc prints for every class, and members that it repeats from a class's bases."""
    in_repeated = False
    for block in blocks:
        if _REPEATED_MEMBERS.fullmatch(block.text):
            in_repeated = True
            continue
        in_repeated = in_repeated and block.tag in ("dt", "dd")
        if not in_repeated and not _GENERIC.fullmatch(" ".join(block.text.split())):
            yield block
